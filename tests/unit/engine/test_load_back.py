"""Prefixes that come back from host memory, as the engine library has them copied: what is enqueued, what waits, what is said when.

The node, the GPU and the copies are this test's.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvbridge.core.errors import TransportError
from kvbridge.core.ids import IndexSpace, PageTable, Rank
from kvbridge.core.wire.engine_messages import AbortRoom, Begin, Checkpoint, Claim, Finish, Loaded, Publish, Release
from kvbridge.core.wire.messages import StreamPoint, to_wire
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from kvbridge.engine.streams import LoadBacks, RankCopier
from tests.unit.engine.test_engine_order import Gpu, Link, Memory

R0, R1 = Rank(pp=0, tp=0), Rank(pp=1, tp=0)
LOAD_STREAM, COMPUTE = 77, 5
LOAD_POINT = StreamPoint(ring="load", handle=bytes(64), device_uuid="0" * 32)


def table(space: IndexSpace, *ids: int, first: int = 0) -> PageTable:
    return PageTable(space, np.array(ids, dtype=np.int32), first)


def wire(*tables: PageTable):
    return to_wire({each.space: each for each in tables})


FULL, SWA = table(IndexSpace.FULL, 10, 11, 12, 13, 14), table(IndexSpace.SWA, 3, 4)
LOAD = wire(table(IndexSpace.FULL_COPY, 40, 42, first=1), table(IndexSpace.SWA_COPY, 9, first=2))
RESTORE = Checkpoint(tokens=768, table=wire(table(IndexSpace.SWA, 7, first=2))[0])


HELD = {"computed_tokens": 768, "host_tokens": 512, "tables": wire(FULL, SWA), "restore": RESTORE, "load": LOAD}
"""Two pages of the prompt, from the second on, are in host memory, with a checkpoint."""


class LoadingGpu(Gpu):
    """Its load stream comes as far as the test says (`is_loaded`), and then everything else (`is_past`)."""

    is_loaded = False

    def points_of(self, streams):
        assert streams == {0: LOAD_STREAM}
        return {"pp0.tp0": LOAD_POINT}

    def handle(self, device, stream):
        return COMPUTE if stream is None else stream

    def reached(self, stream, also=frozenset()):
        self.streams.append(stream)
        return lambda: self.passed({*also, *super(LoadingGpu, self).points(stream).values()})

    def passed(self, points):
        return all(self.is_loaded if point == LOAD_POINT else self.is_past for point in points)


class Copier:
    def __init__(self, *, fails: bool = False) -> None:
        self.copied: list[tuple] = []
        self.waits: list[tuple] = []
        self.fails, self.closed = fails, False

    def copy(self, moves, *, stream=0):
        assert GpuInUse.now == 0, "the engine's choice of a GPU is put back afterwards"
        if self.fails:
            raise TransportError("CUDA: out of everything")
        self.copied.append(({space: tuple(map(list, ids)) for space, ids in moves.items()}, stream))
        return len(self.copied)

    def wait(self, ticket, *, stream):
        self.waits.append((ticket, stream))

    def wait_layer(self, layer, ticket, *, stream):
        self.waits.append((layer, ticket, stream))

    def close(self):
        self.closed = True


class GpuInUse:
    """The thread's current GPU, as a context."""

    now: int | None = None

    def __init__(self, device: int) -> None:
        self.device = device

    def __enter__(self) -> None:
        assert GpuInUse.now is None
        GpuInUse.now = self.device

    def __exit__(self, *_: object) -> None:
        GpuInUse.now = None


class Event:
    """Reached a millisecond after the one before it."""

    numbers = itertools.count()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.number = next(self.numbers)

    def record(self, stream) -> None:
        assert stream.cuda_stream == LOAD_STREAM

    def elapsed_time(self, other) -> float:
        return other.number - self.number


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=LOAD_STREAM))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", GpuInUse)


def loading(kind, *copiers: Copier, ranks=((R0, (0, 1)), (R1, (2, 3)))):
    gpu, link = LoadingGpu(), Link(**HELD)
    made = kind(link, None, Memory(), gpu)
    by_rank = {
        rank: RankCopier(copier, 0, frozenset(layers), {IndexSpace.FULL: 1000, IndexSpace.SWA: 10})
        for (rank, layers), copier in zip(ranks, copiers, strict=False)
    }
    made._loads = LoadBacks(by_rank, gpu)
    return made, link, gpu


def kinds(link):
    return [type(message) for message in link.said]


def test_all_layers_are_enqueued_at_once_and_the_engine_waits_for_them_on_its_stream():
    first, second = Copier(), Copier()
    prefill, _, _ = loading(PrefillEngine, first, second)
    begun = prefill.begin(1, prompt_tokens=1200)
    moves = {IndexSpace.FULL: ([11, 12], [40, 42]), IndexSpace.SWA: ([7], [9])}
    assert first.copied == second.copied == [(moves, LOAD_STREAM)]
    assert first.waits == second.waits == [(1, COMPUTE)]
    assert (begun.held_by_prefill, begun.host_tokens) == (768, 512)


def test_loaded_rows_are_published_behind_the_load_and_nothing_waits_for_it():
    prefill, link, gpu = loading(PrefillEngine, Copier())
    begun = prefill.begin(1, prompt_tokens=1200)
    assert kinds(link) == [Begin, Publish]
    assert (link.said[1].upto_token, link.said[1].layers, link.said[1].after) == (768, None, {"pp0.tp0": LOAD_POINT})
    begun.publish(1200)
    begun.finish()
    gpu.is_past = True
    prefill.events()
    assert kinds(link) == [Begin, Publish, Publish, Finish], "its pages are still being loaded"
    gpu.is_loaded = True
    prefill.events()
    assert kinds(link)[-1] is Release


def test_by_layer_the_engine_waits_where_it_says_and_for_its_rank_alone():
    first, second = Copier(), Copier()
    prefill, _, _ = loading(PrefillEngine, first, second)
    begun = prefill.begin(1, prompt_tokens=1200, by_layer=True)
    assert first.waits == second.waits == []
    begun.wait_layer(1)
    begun.wait_layer(2, stream=8)
    assert (first.waits, second.waits) == ([(1, 1, COMPUTE)], [(2, 1, 8)])
    PrefillRoom(prefill, 2, 1, 1200, {}).wait_layer(1)  # of a room that loads nothing
    assert len(first.waits) == 1


def test_decode_says_that_it_is_loaded_when_it_is():
    decode, link, gpu = loading(DecodeEngine, Copier())
    claimed = decode.claim(1)
    assert claimed.host_tokens == 512
    decode.events()
    assert kinds(link) == [Claim]
    gpu.is_loaded = True
    decode.events()
    assert kinds(link) == [Claim, Loaded]
    said = link.said[-1]
    assert (said.room, said.generation, said.bytes, said.seconds) == (1, 3, 2 * 1000 + 10, 0.001)


@pytest.mark.parametrize("let_go", ["release", "abort"])
def test_pages_are_not_let_go_of_before_the_load_is_over(let_go):
    decode, link, gpu = loading(DecodeEngine, Copier())
    claimed = decode.claim(1, by_layer=True)
    getattr(claimed, let_go)(*(["enough"] if let_go == "abort" else []))
    gpu.is_past = True
    decode.events()
    assert kinds(link) == [Claim]
    gpu.is_loaded = True
    decode.events()
    assert kinds(link) == [Claim, Loaded, Release if let_go == "release" else AbortRoom]


@pytest.mark.parametrize(("kind", "verb"), [(PrefillEngine, "begin"), (DecodeEngine, "claim")])
def test_a_load_that_cannot_be_enqueued_gives_the_room_up_behind_what_was(kind, verb):
    made, link, gpu = loading(kind, Copier(), Copier(fails=True))
    with pytest.raises(TransportError, match="out of everything"):
        made.begin(1, prompt_tokens=1200) if verb == "begin" else made.claim(1)
    gpu.is_past = True
    made.events()
    assert AbortRoom not in kinds(link), "the first rank's copies are on their way"
    gpu.is_loaded = True
    made.events()
    assert kinds(link)[-1] is AbortRoom
    assert "cannot be loaded from host memory" in link.said[-1].reason
    assert link.said[-1].load_failed
    assert not {Publish, Loaded} & {*kinds(link)}


def test_closing_waits_for_loads():
    prefill, _, gpu = loading(PrefillEngine, Copier())
    prefill.begin(1, prompt_tokens=1200, by_layer=True)
    gpu.is_past = True
    with pytest.raises(Exception, match="has not come to the end of its work"):
        prefill.close()
