"""Backups on their way: what rank workers are told, and what follows from answers that come, fail, come late, twice or never."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.wire.worker_messages import CopyPages, PagesCopied
from kvbridge.node.backups import Backups, CopyLimits
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.host_tier import CopyEnded
from tests.helpers.rooms import R0, R1, RecordedEvents
from tests.unit.node.test_workers import Bench as WorkerBench
from tests.unit.tier.test_controller import Bench as CacheBench

FULL, TWIN = IndexSpace.FULL, IndexSpace.FULL_TWIN
COPY_S = 30.0


class Bench(WorkerBench):
    """A node of two ranks, whose workers answer when a test says so."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.tier = CacheBench(**settings)
        self.workers: WorkerSet
        self.events: RecordedEvents
        for rank in (R0, R1):
            self.come(rank)
        self.backups = Backups(
            self.tier.controller,
            self.workers,
            self.tier.book,
            self.events,
            CopyLimits(copy_s=COPY_S, link_share=0.5),
            clock=self.tier.clock,
        )

    def come(self, rank: Rank) -> None:
        self.hello(rank, f"link {rank} {len(self.messages)}")
        self.ready(rank)

    @property
    def orders(self) -> list[CopyPages]:
        """Those that were sent, one a rank."""
        return [message for _, message in self.messages if isinstance(message, CopyPages)]

    def tick(self, seconds: float = 0.05) -> None:
        self.tier.clock.advance(seconds)
        self.backups.tick()

    def begin(self, name: str = "a", pages: int = 4) -> CopyPages:
        """Keep pages of a conversation, and have them copied."""
        before = len(self.orders)
        self.tier.room(name, pages)
        self.tick()
        first, second = self.orders[before:]
        assert first == second
        return first

    def answer(self, order: CopyPages, rank: Rank, **fields: object) -> None:
        self.backups.copied(PagesCopied.model_validate({"rank": rank, "order": order.order, **fields}))

    def twins(self) -> dict[PageState, int]:
        return {state: count for state, count in self.tier.book.counts()[TWIN].items() if count}

    @property
    def ended(self) -> list[CopyEnded]:
        return self.events.of(CopyEnded)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(host=32)
    yield bench
    bench.tier.cache.check_integrity()


def test_what_a_rank_may_still_write_is_quarantined_until_its_process_has_ended(bench):
    order = bench.begin()
    bench.answer(order, R0, error_code="transport_failed", error="the GPU has failed", quiet=False)
    bench.answer(order, R1)
    assert bench.twins() == {PageState.FREE: 28, PageState.QUARANTINED: 4}
    [why] = bench.tier.book.quarantine_reasons()
    assert f"rank workers {R0} may still write" in why
    assert "the GPU has failed" in why
    bench.tick(60)
    assert len(bench.orders) == 2, "nothing begins while a rank may still write"
    bench.workers.gone(R0, "killed")
    bench.backups.gone(R0, "killed")
    assert bench.twins() == {PageState.FREE: 32}
    bench.come(R0)
    bench.tick()
    assert len(bench.orders) == 4


def test_a_rank_that_says_nothing_in_time_is_waited_for_no_longer(bench):
    order = bench.begin()
    bench.answer(order, R0)
    bench.tick(COPY_S)
    assert bench.twins() == {PageState.FREE: 28, PageState.QUARANTINED: 4}
    [fact] = bench.ended
    assert fact.code == "deadline"
    assert f"{R1}" in fact.reason
    assert "timeouts.copy_s" in fact.reason
    assert bench.backups.pages_in_flight == 0
    bench.tick(60)
    assert len(bench.orders) == 2


@pytest.mark.parametrize("others_owe", [True, False])
def test_a_rank_that_says_later_that_it_is_quiet_ends_its_quarantine(bench, others_owe):
    """Whether the other ranks have answered by then or not; backups go on."""
    order = bench.begin()
    failed = {"error_code": "transport_failed", "error": "no memory"}
    bench.answer(order, R0, **failed, quiet=False)
    if not others_owe:
        bench.answer(order, R1)
        assert bench.twins() == {PageState.FREE: 28, PageState.QUARANTINED: 4}
    bench.answer(order, R0, **failed)
    if others_owe:
        bench.answer(order, R1)
    assert bench.twins() == {PageState.FREE: 32}
    bench.tick(1.0)
    assert len(bench.orders) == 4


def test_a_late_answer_that_is_not_quiet_ends_nothing(bench):
    order = bench.begin()
    bench.tick(COPY_S)
    bench.answer(order, R0)
    bench.answer(order, R1, error_code="transport_failed", error="gone wrong", quiet=False)
    assert bench.twins() == {PageState.FREE: 28, PageState.QUARANTINED: 4}
    bench.backups.gone(R1, "killed")
    assert bench.twins() == {PageState.FREE: 32}


def test_a_worker_that_dies_in_the_middle_fails_the_order_when_the_others_have_answered(bench):
    order = bench.begin()
    bench.workers.gone(R1, "killed")
    bench.backups.gone(R1, "killed")
    assert bench.twins() == {PageState.FREE: 28, PageState.LEASED: 4}
    bench.answer(order, R0)
    assert bench.twins() == {PageState.FREE: 32}
    [fact] = bench.ended
    assert (fact.code, fact.reason) == ("worker_gone", f"rank worker {R1} died: killed")
    bench.tick(60)
    assert len(bench.orders) == 2, "nothing begins while a rank is not there"
    bench.come(R1)
    bench.tick()
    assert len(bench.orders) == 4


def test_the_end_of_a_worker_that_had_answered_changes_nothing(bench):
    order = bench.begin()
    bench.answer(order, R1)
    bench.backups.gone(R1, "killed")
    bench.answer(order, R0)
    assert bench.tier.on_host("a", 4) == 4


def test_nothing_begins_before_every_rank_is_there():
    bench = Bench(host=32)
    bench.workers.gone(R0, "a test")
    bench.tier.room("a", 4)
    bench.tick()
    assert bench.orders == []
    assert bench.tier.twins_held() == 0
