"""Digests that a rank worker computes over real memory, slice by slice, between its polls of transfers."""

from dataclasses import replace

import numpy as np
from crc32c import crc32c

from kvbridge.core.ids import IndexSpace, MemoryKind, PageTable
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import Digested, Sent, Verified, Verify
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Extent
from kvbridge.worker import digests as rank_digests
from kvbridge.worker.rank import RankIdentity
from tests.helpers.rooms import GEOMETRY, PAGE, manifest
from tests.helpers.worker_bench import DONE, QUIET, Bench as WorkerBench

[COMPONENT] = GEOMETRY.components
TOKENS = 2 * PAGE + 5
IDS = np.array([3, 9, 4], dtype=np.int32)
DEVICE = 3
TABLES = to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, IDS)})


class Bench(WorkerBench):
    """A worker of one rank whose pages hold random bytes."""

    tokens = TOKENS

    def __init__(self, memory: MemoryKind = MemoryKind.DRAM) -> None:
        self.form = form = manifest(base=0)
        size = sum(region.page_count * region.page_stride_bytes for region in form.regions)
        self.bytes = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        base = self.bytes.ctypes.data
        device = DEVICE if memory is MemoryKind.VRAM else 0
        regions = tuple(
            region.model_copy(
                update={"extent_addresses": (region.extent_addresses[0] + base,), "memory": memory, "device": device}
            )
            for region in form.regions
        )
        at_base = form.model_copy(update={"regions": regions})
        extents = (Extent(address=base, length_bytes=size),)
        super().__init__(identity=RankIdentity(GEOMETRY, at_base, extents, ("one",)))
        self.connect()
        self.open(source=TABLES, destination=TABLES, digest=DigestKind.CRC32C)

    def end_all(self, state=DONE) -> None:
        for transfer in self.transport().transfers:
            transfer.state = state
        self.say(steps=3)

    def expected(self) -> dict[tuple[int, int], int]:
        """By layer and logical page, the raw checksum of the page with zeros where no row is."""
        found = {}
        for region in self.form.regions:
            for logical, page in enumerate(IDS.tolist()):
                start = region.extent_addresses[0] + page * region.page_stride_bytes
                image = self.bytes[start : start + COMPONENT.lanes * COMPONENT.lane_block_bytes].copy()
                live = min(PAGE, TOKENS - logical * PAGE)
                lanes = image.reshape(COMPONENT.lanes, PAGE, -1)
                assert COMPONENT.row_parts_bytes == (lanes.shape[2],)
                lanes[:, live:] = 0
                found[region.layer, logical] = crc32c(image.tobytes(), 0xFFFFFFFF) ^ 0xFFFFFFFF
        return found


def values(messages: list[Digested]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for message in messages:
        for entry in message.digests:
            table = np.frombuffer(entry.values, dtype="<u4").reshape(len(entry.layers), -1)
            for layer, row in zip(entry.layers, table.tolist(), strict=True):
                for page, value in enumerate(row, entry.first_page):
                    found[layer, page] = found.get((layer, page), 0) ^ value
    return found


def verify(room: int = 1, tables=TABLES) -> Verify:
    return Verify(
        room=room, generation=1, prompt_tokens=TOKENS, prefix_tokens=0, tables=tables, host_index=0, host_count=1
    )


def test_an_order_is_reported_with_its_digests_once_both_are_there():
    bench = Bench()
    bench.order(steps=3)
    assert not bench.link.take(Sent), "reported before its bytes have arrived"
    bench.end_all()
    kinds = [type(message) for message in bench.link.said if isinstance(message, Digested | Sent)]
    assert kinds == [Digested, Sent]
    digests, [sent] = bench.link.take(Digested), bench.link.take(Sent)
    assert {message.order for message in digests} == {1}
    assert sent.seconds["digest"] >= 0
    assert values(digests) == bench.expected()


def test_long_work_is_cut_so_that_transfers_are_looked_after(monkeypatch):
    monkeypatch.setattr(rank_digests, "SLICE_BYTES", 1)
    bench = Bench()
    bench.order()
    bench.end_all()
    assert not bench.link.take(Sent)
    looked = len(bench.link.waits)
    pieces = len(GEOMETRY.components[0].layers) * (2 + COMPONENT.lanes)
    bench.say(steps=pieces)
    assert len(bench.link.take(Sent)) == 1
    assert len(bench.link.waits) - looked == pieces, "the node is listened to between two slices"
    assert set(bench.link.waits[looked : looked + pieces - 3]) == {0.0}, "and not waited for"
    assert values(bench.link.take(Digested)) == bench.expected()


def test_a_table_that_does_not_fit_fails_its_room_alone():
    bench = Bench()
    short = to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, IDS[:2])})
    wild = to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, IDS + 100)})
    bench.say(verify(1, short), verify(2, wild), verify(3), steps=4)
    codes = [(one.room, one.error_code) for one in bench.link.take(Verified)]
    assert codes == [(1, "page_out_of_bounds"), (2, "page_out_of_bounds"), (3, "")]


def test_memory_that_cannot_be_read_here_fails_the_order_and_the_verification(monkeypatch):
    monkeypatch.setattr(runtime, "reason_without_device", lambda: "the CUDA driver finds no device")
    bench = Bench(MemoryKind.VRAM)
    bench.order()
    bench.end_all(QUIET)
    [sent] = bench.link.take(Sent)
    assert sent.error_code == "unsupported"
    assert "integrity.digest" in sent.error
    bench.say(verify(), steps=2)
    assert bench.link.take(Verified)[0].error_code == "unsupported"


def test_the_share_of_the_host_pool_is_the_rank_s_own():
    whole, halves = Bench(), []
    host = tuple(region.model_copy(update={"space": IndexSpace.HOST}) for region in whole.form.regions)
    ids = to_wire({IndexSpace.HOST: PageTable(IndexSpace.HOST, np.arange(9, dtype=np.int32))})
    tokens = 9 * PAGE
    for index in (0, 1):
        bench = Bench()
        identity = bench.worker._identity
        own = identity.manifest.regions
        shared = tuple(
            part.model_copy(update={"extent_addresses": mine.extent_addresses})
            for part, mine in zip(host, own, strict=True)
        )
        moved = replace(identity, manifest=identity.manifest.model_copy(update={"regions": shared}))
        bench.worker._verifications._identity = moved
        order = verify().model_copy(
            update={"prompt_tokens": tokens, "tables": ids, "host_index": index, "host_count": 2}
        )
        bench.say(order, steps=2)
        halves.append(values(bench.link.take(Digested)))
    first, second = ({page for (_, page), value in half.items() if value} for half in halves)
    assert (first, second) == ({0, 1, 2, 3, 8}, {4, 5, 6, 7})
