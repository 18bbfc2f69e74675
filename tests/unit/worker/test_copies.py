"""Orders to copy pages, as one rank carries them out: in slices, with pauses, and one answer to each, whatever happens."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvbridge.core.errors import TransportError
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageMoves, PageTable
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.worker_messages import CopyPages, PageMove, PagesCopied
from kvbridge.tier.copies import Direction
from kvbridge.worker import copies
from kvbridge.worker.copies import PageCopies
from kvbridge.worker.rank import RankIdentity
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import GEOMETRY, R1, manifest
from tests.helpers.twin_pools import TwinPools, pages

FULL, TWIN = IndexSpace.FULL, IndexSpace.FULL_COPY
IDENTITY = RankIdentity(GEOMETRY, manifest(rank=R1, tp_size=2), (), ())
PAGE_BYTES = 1_000


class FakeCopier:
    """Copies nothing; a test sets when a copy is done."""

    def __init__(self) -> None:
        self.page_bytes: Mapping[IndexSpace, int] = {FULL: PAGE_BYTES, IndexSpace.SWA: 4 * PAGE_BYTES}
        self.slice_pages: Mapping[IndexSpace, int] = {FULL: 4, IndexSpace.SWA: 1}
        self.begun: list[dict[IndexSpace, list[int]]] = []
        self.is_done = True
        self.is_idle = True
        self.refuse: Exception | None = None
        self.breaks: Exception | None = None
        self.closed = False

    def copy(self, moves: PageMoves) -> int:
        if self.refuse is not None:
            raise self.refuse
        self.begun.append({space: device.tolist() for space, (device, _) in moves.items()})
        return len(self.begun)

    def done(self, ticket: int) -> bool:
        assert ticket == len(self.begun)
        if self.breaks is not None:
            raise self.breaks
        return self.is_done

    def idle(self) -> bool:
        if isinstance(self.is_idle, Exception):
            raise self.is_idle
        return self.is_idle

    def close(self) -> None:
        self.closed = True


class Bench:
    """A rank with four pages a slice, and its answers."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.copier = FakeCopier()
        self.said: list[PagesCopied] = []
        self.copies = self.make(lambda _: self.copier)

    def make(self, create: Callable[[RankIdentity], FakeCopier]) -> PageCopies:
        return PageCopies(IDENTITY, self, clock=self.clock, create=create)

    def send(self, message: PagesCopied) -> None:
        self.said.append(message)

    def run(self) -> PagesCopied:
        for _ in range(100):
            self.clock.now_s += 0.001
            self.copies.step()
            if not self.copies:
                return self.said[-1]
        raise AssertionError("it does not end")


@pytest.fixture
def bench() -> Bench:
    return Bench()


def table(space: IndexSpace, first: int, count: int) -> PageTable:
    return PageTable(space, np.arange(first, first + count, dtype=np.int32))


def move(device: PageTable, twins: PageTable) -> PageMove:
    return PageMove(device=to_wire({device.space: device})[0], twins=to_wire({twins.space: twins})[0])


def order(number: int, pages: int, **more: float) -> CopyPages:
    return CopyPages(order=number, moves=(move(table(FULL, 0, pages), table(TWIN, 50, pages)),), **more)


def test_nothing_is_said_before_the_copy_is_proved(bench: Bench) -> None:
    bench.copier.is_done = False
    bench.copies.take(order(1, 4))
    assert bench.copies.step(), "the slice has begun"
    for _ in range(5):
        assert not bench.copies.step()
    assert (len(bench.copier.begun), bench.said) == (1, [])
    bench.copier.is_done = True
    assert bench.copies.step()
    assert [answer.order for answer in bench.said] == [1]


def test_slices_leave_the_rest_of_the_time_to_others(bench: Bench) -> None:
    bench.copier.is_done = False
    bench.copies.take(order(1, 8, link_share=0.25))
    bench.copies.step()
    bench.clock.now_s += 0.010
    bench.copier.is_done = True
    assert bench.copies.step(), "10 ms for the first slice, so the second one begins 30 ms later"
    for pause_s in (0.0, 0.029):
        bench.clock.now_s += pause_s
        assert not bench.copies.step()
        assert len(bench.copier.begun) == 1
    bench.clock.now_s += 0.002
    assert bench.copies.step()
    assert len(bench.copier.begun) == 2
    assert bench.said[0].seconds == pytest.approx(0.010), "pauses are not counted"


def malformed() -> PageMove:
    good = order(1, 1).moves[0]
    return good.model_copy(update={"device": good.device.model_copy(update={"ids": b"abc"})})


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(move(table(FULL, 0, 3), table(TWIN, 0, 2)), id="numbers"),
        pytest.param(move(table(FULL, 0, 2), table(IndexSpace.SWA_COPY, 0, 2)), id="spaces"),
        pytest.param(move(table(IndexSpace.HOST, 0, 2), table(TWIN, 0, 2)), id="no-twins"),
        pytest.param(malformed(), id="malformed"),
    ],
)
def test_tables_that_do_not_belong_together_fail_their_order_alone(bench: Bench, wrong: PageMove) -> None:
    bench.copies.take(CopyPages(order=1, moves=(wrong,)))
    bench.copies.take(order(2, 1))
    bench.run()
    assert [(answer.error_code, answer.quiet, answer.bytes) for answer in bench.said] == [
        ("invalid_input", True, 0),
        ("", True, 1_000),
    ]


@pytest.mark.parametrize("when", ["refuse", "breaks"])
def test_what_fails_under_way_may_still_be_written_and_is_said_when_it_is_not(bench: Bench, when: str) -> None:
    """Until the second answer the node begins no backup. Orders that come meanwhile are carried out."""
    setattr(bench.copier, when, TransportError("the GPU has failed"))
    bench.copier.is_idle = False
    bench.copies.take(order(1, 1))
    answer = bench.run()
    assert (answer.error_code, answer.quiet) == ("transport_failed", False)
    setattr(bench.copier, when, None)
    bench.copies.take(order(2, 1))
    assert (bench.run().order, bench.said[-1].error_code) == (2, "")
    bench.copier.is_idle = True
    assert bench.copies.step()
    assert bench.said[-1] == answer.model_copy(update={"quiet": True})
    assert not bench.copies.step(), "said once"


@pytest.mark.parametrize("error", [TransportError("no memory can be page-locked"), ZeroDivisionError()])
def test_a_slice_that_cannot_begin_is_quiet_when_the_device_has_nothing_to_do(bench: Bench, error: Exception) -> None:
    """Nothing was launched, so the host copies can be used again, and backups go on."""
    bench.copier.refuse = error
    bench.copies.take(order(1, 1))
    assert bench.run().quiet


def test_a_device_that_cannot_be_asked_proves_nothing_and_is_told_of_once(bench: Bench) -> None:
    bench.copier.breaks, bench.copier.is_idle = TransportError("gone"), TransportError("an illegal address")
    bench.copies.take(order(1, 1))
    with capture_logs() as lines:
        assert not bench.run().quiet
        assert [bench.copies.step() for _ in range(3)] == [False] * 3
    assert [line["reason"] for line in lines if line["event"] == "copies_not_quiet"] == ["an illegal address"]


def test_closing_does_not_wait_for_a_device(bench: Bench) -> None:
    """The caller waits as long as there is time. The memory stays where the device may still write to it."""
    bench.copier.is_idle = bench.copier.is_done = False
    bench.copies.take(order(1, 1))
    bench.copies.step()
    with pytest.raises(TransportError, match="may still write to host memory"):
        bench.copies.close()
    assert not bench.copier.closed
    bench.copier.is_idle = True
    bench.copies.close()
    assert bench.copier.closed


@pytest.mark.parametrize("slice_bytes", [1, 20_000, 1 << 30])
@pytest.mark.parametrize(("model", "tp_size"), [("tiny-v4", 3), ("tiny-gqa", 2), ("tiny-v4", 1)])
def test_the_ranks_of_a_stage_copy_every_byte_between_them(monkeypatch, model, tp_size, slice_bytes) -> None:
    """Each rank copies a share of the pages that they hold alike, however their orders are cut."""
    monkeypatch.setattr(copies, "SLICE_BYTES", dict.fromkeys(copies.SLICE_BYTES, slice_bytes))
    geometry = preset(model)
    with TwinPools(geometry, tp_size=tp_size) as pools:
        pools.replicate()
        moves: PageMoves = {FULL: (pages(3, 1, 4, 11, 5, 9, 2), pages(9, 8, 7, 0, 1, 2, 3))}
        if any(component.space is IndexSpace.SWA for component in pools.components):
            moves[IndexSpace.SWA] = pages(5, 0, 1), pages(4, 2, 0)
        expected = pools.expected(moves, Direction.BACKUP)
        wired = tuple(
            move(PageTable(space, device), PageTable(HOST_COPIES[space], twins))
            for space, (device, twins) in moves.items()
        )
        said = []
        for part, regions in zip(pools.parts, pools.regions, strict=False):
            of_rank = manifest(geometry, part.rank, tp_size=tp_size).model_copy(update={"regions": regions})
            identity = RankIdentity(
                geometry,
                of_rank,
                (),
                (),
                twins=pools.twins,
                stage_tp_ranks=tuple(range(tp_size)),
                copy_backend="kernel",
            )
            bench = Bench()
            bench.copies = PageCopies(identity, bench, clock=bench.clock)
            bench.copies.take(CopyPages(order=1, moves=wired, link_share=1.0))
            said.append(bench.run())
            bench.copies.close()
        assert [answer.error for answer in said] == [""] * tp_size
        of_page = {
            space: sum(twin.page_bytes for twin in pools.twins if twin.space is HOST_COPIES[space]) for space in moves
        }
        whole = sum(len(device) * of_page[space] for space, (device, _) in moves.items())
        assert sum(answer.bytes for answer in said) == pytest.approx(whole, abs=tp_size), "each byte is counted once"
        pools.compare(expected)
