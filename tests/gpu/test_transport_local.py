"""The local transport on real devices, where the contract suite does not look: whole pools of pages, and who else is there."""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import LocalSettings, TransportSettings
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import gpu_memory
from kvbridge.transport.base import Endpoint, Peer, TransferState, Transport
from kvbridge.transport.local.transport import LocalTransport
from kvbridge.worker.rank import Pauses
from tests.contract.harness import Backend, PeerProcess, wait
from tests.helpers.gpu import SMALL
from tests.helpers.gpu_children import child
from tests.helpers.shared_buffer import DeviceBuffer, SharedBuffer, connect, operations

pytestmark = pytest.mark.gpu

MIB = 1 << 20
LIMIT_S = 30.0
WAITING = LocalSettings(registration_wait_s=LIMIT_S)


@pytest.fixture
def shm() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        yield Path(path)


@pytest.mark.parametrize(
    ("destination", "page_first", "way"),
    [
        (MemoryKind.DRAM, False, "engines only"),
        (MemoryKind.DRAM, True, "by default"),
        (MemoryKind.VRAM, False, "kernel only"),
        (MemoryKind.VRAM, True, "engines only"),
    ],
)
def test_scattered_c4_pages(device: int, shm: Path, destination: MemoryKind, page_first: bool, way: str) -> None:
    below = {"by default": 256 * 1024, "engines only": 0, "kernel only": 1 << 40}[way]
    settings = WAITING.model_copy(update={"copy_kernel_below_bytes": below})
    with local_transport_pair(
        shm, destination, pages=16 if SMALL else 256, page_first=page_first, settings=settings
    ) as bed:
        first_s = bed.move()
        bed.check()
        best_s = min(bed.move() for _ in range(3))
        bed.check()
    rate = bed.total_bytes / best_s / 1e9
    print(f"{destination} page_first={page_first} {way}: {rate:.1f} GB/s, first {first_s * 1e3:.1f} ms")


def test_one_submission_to_both_kinds_of_memory_and_of_any_length(device: int, shm: Path) -> None:
    """Lengths and alignments that no plan has; in one process, which CUDA does not let open its own memory."""
    total = 32 * MIB
    source, target = DeviceBuffer(0, total), DeviceBuffer(runtime.device_count() - 1, total)
    pool = SharedBuffer(shm / "pool", total)
    rng = np.random.default_rng(1)
    content = rng.integers(1, 256, total, dtype=np.uint8)
    source.write(content)
    writer, reader = LocalTransport(WAITING), LocalTransport(WAITING)
    writer.register([source.memory()])
    reader.register([pool.memory(), target.memory()])
    peer = connect(writer, reader.endpoint())
    rows, offset = [], 3
    expected = {goal: np.zeros(total, np.uint8) for goal in (pool.address, target.address)}
    for length in [1, 7, 16, 583, 584, 4096, 37_440, 262_143, 262_144, 786_240, 3 * MIB + 5] * 2:
        for goal in (pool, target):
            shift = int(rng.integers(0, 17))
            rows.append((source.address + offset, goal.address + offset + shift, length))
            expected[goal.address][offset + shift : offset + shift + length] = content[offset : offset + length]
            offset += length + 32
    assert wait(writer.submit(peer, operations(*rows), deadline_s=LIMIT_S)).state is TransferState.DONE
    for goal in (pool, target):
        np.testing.assert_array_equal(goal.read(), expected[goal.address])
    writer.close()
    reader.close()
    for buffer in (source, target):
        buffer.close()


def test_operations_up_to_the_border_of_two_registrations(device: int, shm: Path, monkeypatch: pytest.MonkeyPatch):
    """Host memory is registered by extents: the copy engines refuse what crosses from one registration into the next."""
    monkeypatch.setattr(gpu_memory, "PIECE_BYTES", 4 * MIB)
    pool, source = SharedBuffer(shm / "pool", 8 * MIB), DeviceBuffer(0, 4 * MIB)
    source.fill(9)
    writer, reader = LocalTransport(WAITING), LocalTransport(WAITING)
    writer.register([source.memory()])
    reader.register([pool.memory(0, 4 * MIB), pool.memory(4 * MIB)])
    peer = connect(writer, reader.endpoint())
    for offset in (3 * MIB, 4 * MIB):
        near = operations((source.address, pool.address + offset, MIB))
        assert wait(writer.submit(peer, near, deadline_s=LIMIT_S)).state is TransferState.DONE
    assert (pool.read(3 * MIB, 2 * MIB) == 9).all()
    assert not pool.read(0, 3 * MIB).any()
    assert not pool.read(5 * MIB).any()
    writer.close()
    reader.close()
    source.close()


def write_one_value(pipe: Connection, endpoint: Endpoint, device: int, value: int, targets: list[int], page_bytes: int):
    """The target of a spawned process: write one value to some pages of a peer, whenever it is told to."""
    source = DeviceBuffer(device, page_bytes * len(targets))
    source.fill(value)
    transport = LocalTransport(WAITING)
    transport.register([source.memory()])
    peer = connect(transport, endpoint)
    pages = np.arange(len(targets), dtype=np.uint64) * np.uint64(page_bytes)
    operations = Operations(
        pages + np.uint64(source.address),
        np.array(targets, dtype=np.uint64),
        np.full(len(pages), page_bytes, dtype=np.uint64),
    )
    pipe.send("ready")
    with suppress(EOFError):
        while pipe.recv():
            pipe.send(wait(transport.submit(peer, operations, deadline_s=LIMIT_S)).state.value)


@pytest.mark.parametrize("destination", [MemoryKind.DRAM, MemoryKind.VRAM])
def test_several_processes_write_their_stripes_into_one_pool(device: int, shm: Path, destination: MemoryKind) -> None:
    """As the ranks of a prefill instance do with one request: each writes its own pages of the same registered pool."""
    page_bytes, pages, writers = 37_440, 96, 3
    total = page_bytes * pages
    pool = SharedBuffer(shm / "pool", total) if destination is MemoryKind.DRAM else DeviceBuffer(0, total)
    reader = LocalTransport(WAITING)
    reader.register([pool.memory()])
    with ExitStack() as stack:
        stack.callback(pool.close)
        stack.callback(reader.close)
        started = []
        for number in range(writers):
            targets = [pool.address + page * page_bytes for page in range(number, pages, writers)]
            facts = (reader.endpoint(), number % runtime.device_count(), number + 1, targets, page_bytes)
            started.append(stack.enter_context(child(write_one_value, *facts)))
        assert [writer.hear() for writer in started] == ["ready"] * writers
        for writer in started:
            writer.pipe.send("go")
        assert [writer.hear() for writer in started] == ["done"] * writers
        found = pool.read().reshape(pages, page_bytes)
        expected = np.arange(pages, dtype=np.uint8) % writers + 1
        np.testing.assert_array_equal(found, np.broadcast_to(expected[:, None], found.shape))


@pytest.mark.parametrize("destination", [MemoryKind.DRAM, MemoryKind.VRAM])
def test_a_killed_writer_has_stopped_when_its_endpoint_counts_as_revoked(device, shm, destination):
    """It is killed with copies on their way; whatever is put into the pool after `revoked` stays there."""
    page_bytes, pages = 37_440, 4096
    total = page_bytes * pages
    pool = SharedBuffer(shm / "pool", total) if destination is MemoryKind.DRAM else DeviceBuffer(0, total)
    reader = LocalTransport(WAITING)
    reader.register([pool.memory()])
    targets = [pool.address + page * page_bytes for page in range(pages)]
    with ExitStack() as stack:
        stack.callback(pool.close)
        stack.callback(reader.close)
        writer = stack.enter_context(child(write_one_value, reader.endpoint(), 0, 7, targets, page_bytes))
        assert writer.hear() == "ready"
        assert not reader.revoked(1)
        for _ in range(20):
            writer.pipe.send("go")
        ends_at_s = time.monotonic() + LIMIT_S
        while not (pool.read(total - page_bytes) == 7).any() and time.monotonic() < ends_at_s:
            pass  # it is in the midst of its copies
        writer.kill()
        begun_s = time.monotonic()
        while not reader.revoked(1):
            assert time.monotonic() - begun_s < LIMIT_S
        print(f"revoked {time.monotonic() - begun_s:.3f} s after the end")
        pool.fill(1)
        watch_until_s = time.monotonic() + 1.0
        while time.monotonic() < watch_until_s:
            assert (pool.read() == 1).all(), "a byte came after the proof that none would"


def test_memory_of_a_peer_that_was_killed_can_still_be_written(device: int, shm: Path) -> None:
    """The driver keeps device memory while it is open here: no fault ends this process, and other peers are served."""
    pool = SharedBuffer(shm / "other", MIB)
    owner = LocalTransport(WAITING)
    owner.register([pool.memory()])
    with local_transport_pair(shm, MemoryKind.VRAM, pages=256) as bed:
        other = connect(bed.transport, owner.endpoint())
        transfer = bed.transport.submit(bed.peer, bed.operations(), deadline_s=LIMIT_S)
        bed.process.kill()
        assert wait(transfer).state is TransferState.DONE
        bed.source.fill(5)
        bed.move()
        bed.check()
        small = operations((bed.source.address, pool.address, MIB))
        assert wait(bed.transport.submit(other, small, deadline_s=LIMIT_S)).state is TransferState.DONE
        assert (pool.read() == 5).all()
        bed.transport.disconnect(bed.peer)
    owner.close()


def test_letting_go_of_a_peer_gives_everything_back(device: int, shm: Path) -> None:
    """Mappings, registrations and opened memory go with the last connection, so many connections cost nothing."""
    source, target = DeviceBuffer(0, MIB), DeviceBuffer(0, MIB)
    pool = SharedBuffer(shm / "pool", 64 * MIB)
    writer = LocalTransport(WAITING)
    writer.register([source.memory()])
    for epoch in range(8):
        reader = LocalTransport(WAITING, epoch=epoch)
        reader.register([pool.memory(), target.memory()])
        peer = connect(writer, reader.endpoint())
        assert wait(
            writer.submit(peer, operations((source.address, pool.address, MIB)), deadline_s=LIMIT_S)
        ).state.terminal
        assert not reader.revoked(epoch + 1)
        writer.disconnect(peer)
        reader.close()
    locked = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(pool.path) in line]
    ends_at_s = time.monotonic() + LIMIT_S
    while len(locked) > 1 and time.monotonic() < ends_at_s:  # unmapped in the background
        locked = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(pool.path) in line]
    assert len(locked) == 1, locked
    writer.close()
    source.close()
    target.close()


PAGE_BYTES = 37_440
LAYERS = 21
MOVE_LIMIT_S = 60.0


@dataclass
class LocalTransportPair:
    """`page_ids` of the source go to `target_ids` of the destination, in every layer; both pools have the same form."""

    transport: Transport
    peer: Peer
    source: DeviceBuffer
    process: PeerProcess
    page_bytes: int
    layers: int
    pool_pages: int
    page_ids: np.ndarray
    target_ids: np.ndarray

    @property
    def total_bytes(self) -> int:
        return len(self.page_ids) * self.layers * self.page_bytes

    def operations(self) -> Operations:
        layer_bytes = np.uint64(self.pool_pages * self.page_bytes)
        starts = np.arange(self.layers, dtype=np.uint64)[:, None] * layer_bytes
        page = np.uint64(self.page_bytes)
        sides = [(starts + ids.astype(np.uint64) * page).ravel() for ids in (self.page_ids, self.target_ids)]
        lengths = np.full(self.layers * len(self.page_ids), page, dtype=np.uint64)
        return Operations(
            sides[0] + np.uint64(self.source.address), sides[1] + np.uint64(self.process.address), lengths
        )

    def move(self) -> float:
        operations = self.operations()
        begun_s = time.perf_counter()
        transfer = self.transport.submit(self.peer, operations, deadline_s=MOVE_LIMIT_S)
        pauses = Pauses(time.monotonic, with_gpu=True)
        pauses.sleep_precisely()
        pauses.moved()
        while not (status := transfer.poll()).state.terminal:
            time.sleep(pauses.next_s())
        took_s = time.perf_counter() - begun_s
        assert status.state is TransferState.DONE, status
        return took_s

    def check(self) -> None:
        shape = self.layers, self.pool_pages, self.page_bytes
        source, target = self.source.read().reshape(shape), self.process.buffer.read().reshape(shape)
        assert np.array_equal(target[:, self.target_ids], source[:, self.page_ids]), "bytes differ"


@contextlib.contextmanager
def local_transport_pair(directory, destination, *, pages, moved=None, page_first=False, settings=None):
    """From device 0 to a process's host pool in `directory`, or to its device memory (on the last device).

    The host pool is registered with CUDA here before anything is moved. `moved`: so many pages of each layer, all unless told.
    `page_first`: the layers of a page lie together in both pools, and go as one operation.
    """
    given = settings or LocalSettings()
    layers, page_bytes = (1, LAYERS * PAGE_BYTES) if page_first else (LAYERS, PAGE_BYTES)
    kinds = {"source": MemoryKind.VRAM, "destination": destination}
    patient = given.model_copy(update={"registration_wait_s": MOVE_LIMIT_S})
    backend = Backend("local", "local", TransportSettings(local=patient), "", **kinds)
    total_bytes = pages * layers * page_bytes
    rng = np.random.default_rng(pages)
    with PeerProcess(backend, directory / "pool", total_bytes) as process:
        transport = backend.create()
        source = DeviceBuffer(0, total_bytes)
        try:
            source.write(rng.integers(0, 256, total_bytes, dtype=np.uint8))
            process.buffer.fill(1)  # every page exists before anything is measured
            transport.register([source.memory()])
            peer = connect(transport, process.endpoint)
            ids = (rng.permutation(pages)[:moved] for _ in range(2))
            yield LocalTransportPair(transport, peer, source, process, page_bytes, layers, pages, *ids)
        finally:
            transport.close()
            source.close()
