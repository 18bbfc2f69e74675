"""Orders to copy pages, whose answers come, fail, come late, twice or never, from workers that end and come again, in any order.

Nothing is lost, since what is on the device stays. Nothing is leaked: when every rank is there and quiet, no twin is anybody's but
the cache's. And a page counts as on the host only if every rank has said that its copy is proved.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import Rank
from kvbridge.core.wire.worker_messages import CopyPages
from kvbridge.node.workers import WorkerState
from kvbridge.pool.accounts.page_states import PageState
from tests.helpers.examples import fewer
from tests.helpers.rooms import R0, R1
from tests.unit.node.test_backups import COPY_S, TWIN, Bench
from tests.unit.tier.test_controller import keys

RANKS = st.sampled_from([R0, R1])
CONVERSATIONS = st.sampled_from("abc")


class Backups(RuleBasedStateMachine):
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
        self.bench.tier.room(name, pages)
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
        self.bench.tier.cache.check_integrity()

    @invariant()
    def what_may_be_written_is_nobodys(self) -> None:
        """Neither free, where the next order would get it, nor cached, where a room would read it."""
        held = set(self.bench.tier.book.cached_pages()[TWIN].tolist())
        free = self.bench.tier.book.counts()[TWIN][PageState.FREE]
        written: set[int] = set()
        for number, ranks in self.writing.items():
            if ranks:
                [move] = self.order(number).moves
                written |= set(tables_from_wire((move.twins,))[TWIN].ids.tolist())
        assert not written & held
        assert free + len(held) + len(written) <= 8

    @invariant()
    def what_is_on_the_host_was_proved(self) -> None:
        done = {number for number, ranks in self.proved.items() if ranks == {R0, R1}}
        copied: set[int] = set()
        for number in done:
            [move] = self.order(number).moves
            copied |= set(tables_from_wire((move.twins,))[TWIN].ids.tolist())
        assert set(self.bench.tier.book.cached_pages()[TWIN].tolist()) <= copied

    def teardown(self) -> None:
        """Every worker ends and comes again: whatever they did is over."""
        for rank in (R0, R1):
            self.worker_ends(rank)
        assert self.bench.tier.twins_held() == 0
        assert self.bench.tier.book.quarantine_reasons() == {}
        for rank in (R0, R1):
            self.worker_comes(rank)
        self.bench.tier.cache.drop()
        self.bench.tier.room("z", 3)
        for _ in range(20):
            self.bench.tick(61.0 if not self.bench.backups.pages_in_flight else 0.05)
            fresh, self.seen = self.bench.orders[self.seen :: 2], len(self.bench.orders)
            for order in fresh:
                for rank in (R0, R1):
                    self.bench.answer(order, rank)
        assert self.bench.tier.on_host("z", 3) == 3, "backups go on"
        assert self.bench.tier.cache.known(keys("z", 3)) == 3


TestBackups = Backups.TestCase
TestBackups.settings = fewer(2, stateful_step_count=30)
