"""Orders to copy pages, whose answers come, fail, come late, twice or never, from workers that end and come again, in any order.

Nothing is lost, since what is on the device stays. Nothing is leaked: when every rank is there and quiet, no twin is anybody's but
the cache's. And a page counts as on the host only if every rank has said that its copy is proved.
"""

from contextlib import suppress

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.errors import CapacityError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.wire.worker_messages import CopyPages, PagesCopied
from kvbridge.node.backups import Backups
from kvbridge.node.workers import WorkerSet, WorkerState
from kvbridge.pool.accounts.book import PageState
from kvbridge.telemetry.facts import CopyEnded
from tests.helpers.accounts import cached_pages
from tests.helpers.examples import fewer
from tests.helpers.node_bench import WorkerBench
from tests.helpers.prefix_bench import keys
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import R0, R1, RecordedEvents
from tests.unit.tier.test_controller import Bench as CacheBench

HOST_COPY = IndexSpace.FULL_COPY
COPY_S = 30.0
RANKS = st.sampled_from([R0, R1])
CONVERSATIONS = st.sampled_from("abc")


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
            copy_s=COPY_S,
            link_share=0.5,
            clock=self.tier.clock,
        )

    def come(self, rank: Rank) -> None:
        link = f"link {rank} {len(self.messages)}"
        self.hello(rank, link)
        self.ready(rank, link)

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
        self.tier.warm(name, pages)
        self.tick()
        first, second = self.orders[before:]
        assert first == second
        return first

    def answer(self, order: CopyPages, rank: Rank, **fields: object) -> None:
        self.backups.copied(PagesCopied.model_validate({"rank": rank, "order": order.order, **fields}))

    def twins(self) -> dict[PageState, int]:
        return {state: count for state, count in self.tier.book.counts()[HOST_COPY].items() if count}

    @property
    def ended(self) -> list[CopyEnded]:
        return self.events.of(CopyEnded)


class BackupsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(device=12, host=8, order_pages=5)
        self.proved: dict[int, set[Rank]] = {}
        """By order: the ranks that have said in time that their copy is done."""
        self.writing: dict[int, set[Rank]] = {}
        """By order: the ranks that may be writing its twins."""
        self.seen = 0

    def look(self) -> None:
        """Take down what was ordered since."""
        for order in self.bench.orders[self.seen :]:
            self.writing.setdefault(order.order, {R0, R1})
            self.proved.setdefault(order.order, set())
        self.seen = len(self.bench.orders)

    def order(self, number: int) -> CopyPages:
        return next(order for order in self.bench.orders if order.order == number)

    @rule(name=CONVERSATIONS, pages=st.integers(1, 5))
    def room(self, name: str, pages: int) -> None:
        with suppress(CapacityError):  # most pages of the device may be in use by copies that do not end
            self.bench.tier.warm(name, pages)
        self.look()

    @rule(seconds=st.sampled_from([0.05, 0.05, 2.0, COPY_S]))
    def tick(self, seconds: float) -> None:
        self.bench.tick(seconds)
        self.look()

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), rank=RANKS, how=st.sampled_from(["done", "done", "done", "failed", "not quiet", "twice"]))
    def answer(self, data: st.DataObject, rank: Rank, how: str) -> None:
        number = data.draw(st.sampled_from(sorted(self.writing)))
        if rank not in self.writing[number]:
            return
        if how != "not quiet":
            self.writing[number].discard(rank)
        if how in {"done", "twice"}:
            self.proved[number].add(rank)
        error = {"error_code": "transport_failed", "error": how, "quiet": how != "not quiet"}
        for _ in range(2 if how == "twice" else 1):
            self.bench.answer(self.order(number), rank, **(error if how in {"failed", "not quiet"} else {}))
        self.look()

    @rule(rank=RANKS)
    def worker_ends(self, rank: Rank) -> None:
        if self.bench.workers.states()[rank] is WorkerState.ABSENT:
            return
        self.bench.workers.gone(rank, "killed")
        for ranks in self.writing.values():
            ranks.discard(rank)
        self.bench.backups.gone(rank, "killed")
        self.look()

    @rule(rank=RANKS)
    def worker_comes(self, rank: Rank) -> None:
        if self.bench.workers.states()[rank] is WorkerState.ABSENT:
            self.bench.come(rank)

    @rule()
    def drop(self) -> None:
        self.bench.tier.cache.drop()

    @invariant()
    def adds_up(self) -> None:
        check_cache(self.bench.tier.cache)

    @invariant()
    def what_may_be_written_is_nobodys(self) -> None:
        """Neither free, where the next order would get it, nor cached, where a room would read it."""
        held = set(cached_pages(self.bench.tier.book)[HOST_COPY].tolist())
        free = self.bench.tier.book.counts()[HOST_COPY][PageState.FREE]
        written: set[int] = set()
        for number, ranks in self.writing.items():
            if ranks:
                [move] = self.order(number).moves
                written |= set(tables_from_wire((move.twins,))[HOST_COPY].ids.tolist())
        assert not written & held
        assert free + len(held) + len(written) <= 8

    @invariant()
    def what_is_on_the_host_was_proved(self) -> None:
        done = {number for number, ranks in self.proved.items() if ranks == {R0, R1}}
        copied: set[int] = set()
        for number in done:
            [move] = self.order(number).moves
            copied |= set(tables_from_wire((move.twins,))[HOST_COPY].ids.tolist())
        assert set(cached_pages(self.bench.tier.book)[HOST_COPY].tolist()) <= copied

    def teardown(self) -> None:
        """Every worker ends and comes again: whatever they did is over."""
        for rank in (R0, R1):
            self.worker_ends(rank)
        assert self.bench.tier.count(HOST_COPY, PageState.HELD, PageState.LEASED, PageState.QUARANTINED) == 0
        assert self.bench.tier.book.quarantine_reasons() == {}
        for rank in (R0, R1):
            self.worker_comes(rank)
        self.bench.tier.cache.drop()
        self.bench.tier.warm("z", 3)
        for _ in range(20):
            self.bench.tick(61.0 if not self.bench.backups.pages_in_flight else 0.05)
            fresh, self.seen = self.bench.orders[self.seen :: 2], len(self.bench.orders)
            for order in fresh:
                for rank in (R0, R1):
                    self.bench.answer(order, rank)
        assert self.bench.tier.on_host("z", 3) == 3, "backups go on"
        assert self.bench.tier.cache.known(keys("z", 3)) == 3


TestBackups = BackupsMachine.TestCase
TestBackups.settings = fewer(2, stateful_step_count=30)


@pytest.mark.parametrize("says_so", [True, False])
def test_what_a_rank_may_still_write_is_quarantined_until_its_process_has_ended(says_so):
    """It has failed without being quiet, or has said nothing in time."""
    bench = Bench(host=32)
    order = bench.begin()
    bench.answer(order, R1)
    if says_so:
        bench.answer(order, R0, error_code="transport_failed", error="the GPU has failed", quiet=False)
    else:
        bench.tick(COPY_S)
    assert bench.twins() == {PageState.FREE: 28, PageState.QUARANTINED: 4}
    [why] = bench.tier.book.quarantine_reasons()
    assert f"rank workers {R0} may still write" in why
    assert ("the GPU has failed" if says_so else "timeouts.copy_s") in why
    [fact] = bench.ended
    assert (fact.code, f"{R0}" in fact.reason) == ("transport_failed" if says_so else "deadline", True)
    assert bench.backups.pages_in_flight == 0
    bench.tick(60)
    assert len(bench.orders) == 2, "nothing begins while a rank may still write"
    bench.workers.gone(R0, "killed")
    bench.backups.gone(R0, "killed")
    assert bench.twins() == {PageState.FREE: 32}
    bench.come(R0)
    bench.tick()
    assert len(bench.orders) == 4


def test_a_worker_that_dies_in_the_middle_fails_the_order_when_the_others_have_answered():
    bench = Bench(host=32)
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
