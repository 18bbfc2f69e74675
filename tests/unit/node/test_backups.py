"""Backups on their way: what rank workers are told, and what follows from answers that come, fail, come late, twice or never."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvbridge.core.errors import CapacityError
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.wire.worker_messages import CopyPages, PagesCopied
from kvbridge.node.backups import Backups, CopyLimits
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.host_tier import CopyEnded
from tests.helpers.rooms import R0, R1, RecordedEvents
from tests.unit.node.test_workers import Bench as WorkerBench
from tests.unit.tier.test_controller import Bench as CacheBench
from tests.unit.tier.test_controller import keys

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


def test_every_rank_gets_one_order_and_the_pages_are_there_when_all_have_answered(bench):
    order = bench.begin()
    [move] = order.moves
    device, twins = tables_from_wire((move.device,))[FULL].ids, tables_from_wire((move.twins,))[TWIN].ids
    assert (len(device), len(twins), order.link_share) == (4, 4, 0.5)
    assert set(device.tolist()) == set(bench.tier.book.cached_pages()[FULL].tolist())
    assert bench.backups.pages_in_flight == 4
    bench.answer(order, R0, bytes=100, seconds=0.2)
    assert bench.tier.on_host("a", 4) == 0, "one of them has yet to answer"
    bench.answer(order, R1, bytes=150, seconds=0.1)
    assert bench.tier.on_host("a", 4) == 4
    assert set(twins.tolist()) == set(bench.tier.book.cached_pages()[TWIN].tolist())
    assert bench.backups.pages_in_flight == 0
    [fact] = bench.ended
    assert (fact.direction, fact.pages, fact.bytes, fact.busy_s, fact.code) == ("backup", 4, 250, 0.2, "")


def test_one_order_is_under_way_at_a_time_and_the_next_follows_at_once(bench):
    first = bench.begin("a")
    bench.tier.room("b", 3)
    bench.tick()
    assert len(bench.orders) == 2
    bench.answer(first, R0)
    bench.answer(first, R1)
    assert len(bench.orders) == 4, "without waiting for a tick"
    assert bench.orders[-1].order != first.order
    assert len(tables_from_wire((bench.orders[-1].moves[0].device,))[FULL]) == 3


def test_what_is_evicted_before_the_next_tick_has_been_copied():
    bench = Bench(device=8, host=32)
    for name in "abc":
        bench.tier.room(name, 6)  # evicts the one before
        [order, _] = bench.orders[-2:]
        for rank in (R0, R1):
            bench.answer(order, rank)
    assert [bench.tier.on_host(name, 6) for name in "abc"] == [6, 6, 6]
    assert len(bench.orders) == 6


def test_what_a_room_reads_waits_until_it_lets_go_or_for_the_next_tick(bench):
    owner, got = bench.tier.admit("a", 6)
    bench.tier.cache.keep(owner, keys("a", 6), 0, {FULL: got.own[FULL]})
    assert bench.orders == [], "nothing can be evicted that it reads"
    bench.tick()
    [order, _] = bench.orders
    for rank in (R0, R1):
        bench.answer(order, rank)
    bench.tier.end(owner)
    assert len(bench.orders) == 2, "all of it is on the host"
    assert bench.tier.on_host("a", 6) == 6


@pytest.mark.parametrize("ends", ["copied", "failed", "late"])
def test_a_request_that_needs_the_very_pages_that_are_copied_waits_for_the_end_of_that_order(ends):
    bench = Bench(device=8, host=32, order_pages=4)
    freed: list[int] = []

    class Watcher:
        freed = staticmethod(lambda pages: freed.append(pages.get(FULL, 0)))
        gone = ending = quarantined = staticmethod(lambda owner: None)

    bench.tier.book.watch(Watcher())
    order = bench.begin("a", 4)
    other, _ = bench.tier.admit("b", 4)
    bench.tier.end(other)
    freed.clear()
    with pytest.raises(CapacityError, match="lacks 1 pages"):
        bench.tier.admit("c", 5)
    if ends == "late":
        while not bench.ended:  # no rank says anything
            bench.tick(0.05)
    else:
        failed = {"error_code": "transport_failed", "error": "a test"} if ends == "failed" else {}
        for rank in (R0, R1):
            bench.answer(order, rank, **failed)
    assert sum(freed) == 4, "whoever waits for pages is told"
    bench.tier.admit("c", 5)
    [fact] = bench.ended
    assert fact.pages == 4
    assert fact.seconds <= COPY_S + 0.06, "and a tick"


def test_what_several_prompts_need_is_one_order(bench):
    first = bench.begin("c", 1)
    bench.tier.room("a", 4)
    bench.tier.room("b", 3)
    bench.answer(first, R0)
    bench.answer(first, R1)
    [order, _] = bench.orders[2:]
    [move] = order.moves
    assert len(np.unique(tables_from_wire((move.twins,))[TWIN].ids)) == 7


def test_a_rank_that_fails_fails_the_order_once_the_others_have_answered(bench):
    order = bench.begin()
    bench.answer(order, R0, error_code="invalid_input", error="page 99 does not exist")
    assert bench.twins() == {PageState.FREE: 28, PageState.LEASED: 4}, "the other rank is still writing"
    bench.answer(order, R1)
    assert bench.twins() == {PageState.FREE: 32}
    [fact] = bench.ended
    assert (fact.code, fact.reason) == ("invalid_input", f"rank worker {R0}: page 99 does not exist")
    assert bench.tier.cache.known(keys("a", 4)) == 4, "the pages are on the device as before"
    bench.tick(1.0)
    assert len(bench.orders) == 4, "and tried again"


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


def test_a_late_answer_ends_the_quarantine_and_nothing_else(bench):
    order = bench.begin()
    bench.answer(order, R0)
    bench.tick(COPY_S)
    bench.answer(order, R1)
    assert bench.twins() == {PageState.FREE: 32}, "the twins hold the pages, but the order has failed"
    assert len(bench.ended) == 1
    bench.tick(1.0)
    again = bench.orders[-1]
    assert again.order != order.order
    bench.answer(again, R0)
    bench.answer(again, R1)
    assert bench.tier.on_host("a", 4) == 4


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


def test_answers_that_come_twice_or_to_nothing_change_nothing(bench):
    order = bench.begin()
    bench.answer(order, R0, bytes=10)
    bench.answer(order, R0, bytes=10)
    bench.backups.copied(PagesCopied(rank=R1, order=order.order + 17))
    assert bench.tier.on_host("a", 4) == 0
    bench.answer(order, R1, bytes=10)
    bench.answer(order, R1, bytes=10)
    assert bench.tier.on_host("a", 4) == 4
    assert [fact.bytes for fact in bench.ended] == [20]


def test_nothing_begins_before_every_rank_is_there():
    bench = Bench(host=32)
    bench.workers.gone(R0, "a test")
    bench.tier.room("a", 4)
    bench.tick()
    assert bench.orders == []
    assert bench.tier.twins_held() == 0


def test_a_host_that_is_full_of_what_is_read_refuses_and_requests_go_on():
    bench = Bench(device=16, host=4)
    order = bench.begin("a", 4)
    for rank in (R0, R1):
        bench.answer(order, rank)
    bench.tier.room("b", 6)
    for _ in range(10):
        bench.tick()
        for sent in bench.orders[2:]:
            for rank in (R0, R1):
                bench.answer(sent, rank)
    assert bench.tier.controller.refused == 1
    assert bench.tier.twins_held() == 0
    bench.tier.room("c", 8)
    bench.tier.cache.check_integrity()
