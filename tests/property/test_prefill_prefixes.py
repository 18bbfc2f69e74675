"""Rooms of a prefill node that share prefixes, in any order, against a memory that is written as engines would.

A page holds the key of its last contents. The test compares the start of each room and everything in the index with the prompt's
own keys, and sees at once when a cached page or one with a reader is written.
"""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbridge.core.errors import CapacityError
from kvbridge.core.wire.engine_messages import Pages
from kvbridge.core.wire.messages import WireTable
from kvbridge.node.prefill.room import STOPPING, PrefillRoom
from tests.helpers.accounts import cached_pages
from tests.helpers.examples import fewer
from tests.helpers.node_bench import FULL, HISTORY, SWA, PrefixBench, ids, keys_of
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import PAGE, R0

BRANCHES = [
    HISTORY[: 9 * PAGE],
    [*HISTORY[: 2 * PAGE], *range(7 * PAGE)],
    [*HISTORY[: 2 * PAGE + 100], *range(7, 7 * PAGE)],
]
BEHIND = (0, 1, 2, 3, 4, 127, 128, 129, PAGE - 1)


def page_ids(table: WireTable) -> list[int]:
    return np.frombuffer(table.ids, "<i4").tolist()


class PrefillNode(RuleBasedStateMachine):
    """Rooms of one engine, one decode node and one rank."""

    @initialize(pages=st.integers(12, 30), windows=st.integers(3, 12), interval=st.sampled_from([0, 0, 2 * PAGE]))
    def start(self, pages: int, windows: int, interval: int) -> None:
        self.bench = PrefixBench(pages=pages, windows=windows, interval=interval)
        self.full: dict[int, bytes] = {}
        self.swa: dict[int, bytes] = {}
        self.rooms: dict[int, list[int]] = {}
        self.begun: dict[int, Pages] = {}
        self.last = 0

    def room(self, number: int) -> PrefillRoom | None:
        found = self.bench.service.book.find(number, 1)
        return None if found is None or found.concluded else found

    def pick(self, choice: int) -> int:
        return list(self.rooms)[choice % len(self.rooms)]

    @rule(branch=st.sampled_from(range(3)), pages=st.integers(0, 7), behind=st.sampled_from(BEHIND))
    def admit(self, branch: int, pages: int, behind: int) -> None:
        tokens = BRANCHES[branch][: max(1, pages * PAGE + behind)]
        self.last += 1
        try:
            room = self.bench.admit(self.last, tokens)
        except CapacityError:
            return
        assert room.computed_tokens < len(tokens)
        self.rooms[self.last] = tokens

    @precondition(lambda self: self.rooms)
    @rule(choice=st.integers(0, 99), held=st.integers(0, 8))
    def offer(self, choice: int, held: int) -> None:
        number = self.pick(choice)
        if (room := self.room(number)) is not None and not room.peer:
            self.bench.offer(number, self.rooms[number], min(held, len(self.rooms[number]) // PAGE) * PAGE)

    @precondition(lambda self: self.rooms)
    @rule(choice=st.integers(0, 99))
    def begin(self, choice: int) -> None:
        number = self.pick(choice)
        room = self.room(number)
        if room is None or room.begun or room.over or room.state in STOPPING:
            return
        self.begun[number] = self.bench.begin(number, self.rooms[number])
        self.look_at(number)

    def look_at(self, number: int) -> None:
        """A begun room's prefix is what it says, and has not been evicted."""
        pages, keys = self.begun[number], keys_of(self.rooms[number])
        whole, cached = pages.computed_tokens // PAGE, cached_pages(self.bench.book)
        assert set(ids(pages)[:whole]) <= set(cached[FULL].tolist())
        assert [self.full[page] for page in ids(pages)[:whole]] == [keys[at] for at in range(whole)]
        assert (pages.restore is None) is (not whole)
        if pages.restore is not None:
            assert set(page_ids(pages.restore.table)) <= set(cached[SWA].tolist())
            assert [self.swa[page] for page in page_ids(pages.restore.table)] == [keys[whole - 1]]

    @precondition(lambda self: self.begun)
    @rule(choice=st.integers(0, 99), leaves=st.booleans(), finishes=st.booleans())
    def compute(self, choice: int, leaves: bool, finishes: bool) -> None:
        """The engine writes what is its to write, perhaps without the checkpoints, and finishes, or leaves it half written."""
        number = list(self.begun)[choice % len(self.begun)]
        room, tokens = self.room(number), self.rooms[number]
        if room is None or room.over or room.state in STOPPING or any(work.finished for work in room.ranks.values()):
            return
        pages, keys = self.begun[number], keys_of(tokens)
        windows = next(page_ids(table) for table in pages.tables if table.space is SWA)
        own = ids(pages)[pages.computed_tokens // PAGE :]
        written = [page for one in pages.checkpoints for page in page_ids(one.table)] if leaves else []
        cached = cached_pages(self.bench.book)
        assert not set(own) & set(cached.get(FULL, np.empty(0)).tolist())
        assert not {*windows, *written} & set(cached.get(SWA, np.empty(0)).tolist())
        if not finishes:
            self.full |= dict.fromkeys(own, b"half")
            self.swa |= dict.fromkeys([*windows, *written], b"half")
            return
        for at, page in enumerate(own, pages.computed_tokens // PAGE):
            self.full[page] = keys[at] if at < len(keys) else b"end"
        self.swa |= dict.fromkeys(windows, keys[len(keys) - 1] if len(tokens) % PAGE == 0 else b"end")
        if leaves:
            for one in pages.checkpoints:
                self.swa |= dict.fromkeys(page_ids(one.table), keys[one.tokens // PAGE - 1])
        self.bench.publish(number, tokens)
        self.bench.finish(number, tuple(one.tokens for one in pages.checkpoints) if leaves else ())

    @rule(
        branch=st.sampled_from(range(3)), pages=st.integers(1, 7), behind=st.sampled_from(BEHIND), leaves=st.booleans()
    )
    def a_whole_room(self, branch: int, pages: int, behind: int, leaves: bool) -> None:
        """One that nobody disturbs, so that others find something."""
        before = self.last
        self.admit(branch, pages, behind)
        if self.last not in self.rooms or self.last == before:
            return
        self.offer(-1, 0)
        self.begin(-1)
        self.compute(-1, leaves, True)
        self.sent(-1)

    @precondition(lambda self: self.rooms)
    @rule(choice=st.integers(0, 99))
    def sent(self, choice: int) -> None:
        self.bench.all_sent(self.pick(choice))

    @precondition(lambda self: self.rooms)
    @rule(choice=st.integers(0, 99), by_engine=st.booleans())
    def abort(self, choice: int, by_engine: bool) -> None:
        number = self.pick(choice)
        if self.room(number) is None:
            return
        if by_engine:
            self.bench.verbs.abort(room=number)
        else:
            self.bench.abort(number)

    @precondition(lambda self: self.rooms)
    @rule(choice=st.integers(0, 99), quiet=st.booleans())
    def closed(self, choice: int, quiet: bool) -> None:
        number = self.pick(choice)
        if (room := self.room(number)) is not None and room.state in STOPPING:
            self.bench.closed(number, quiet=quiet)

    @rule()
    def worker_dies(self) -> None:
        self.bench.service.worker_gone(R0, "killed")
        self.bench.prefixes.drop()

    @rule(seconds=st.sampled_from([1, 70, 700]))
    def time_passes(self, seconds: int) -> None:
        self.bench.clock.advance(seconds)
        self.bench.service.tick()

    @invariant()
    def holds(self) -> None:
        """Accounts add up, whoever reads a prefix still has it, and every page in the index is what its key says."""
        if not hasattr(self, "bench"):
            return
        check_cache(self.bench.prefixes)
        for number in self.rooms:
            room = self.room(number)
            reads = room is None or not room.keys or room.owner in self.bench.prefixes
            assert reads, f"{room} is not over, and has let go of what it shares"
        for number in list(self.begun):
            if self.room(number) is None:
                del self.begun[number]
            else:
                self.look_at(number)
        index = self.bench.prefixes.index
        for tokens in BRANCHES:
            keys = keys_of(tokens)
            path = index.match(keys.in_namespace(""))
            assert [self.full[page] for page in index.pages(path)[FULL].tolist()] == [
                keys[at] for at in range(len(path))
            ]
            for at in np.flatnonzero(index.device.checkpointed(path)).tolist():
                assert [self.swa[page] for page in index.device.checkpoint_pages(int(path[at])).tolist()] == [keys[at]]

    def teardown(self) -> None:
        """When every room has been ended and everybody is quiet, nothing but the cache has pages."""
        if not hasattr(self, "bench"):
            return
        for number in self.rooms:
            if self.room(number) is not None:
                self.bench.verbs.abort(room=number)
                self.bench.closed(number)
        self.bench.all_is_back()


PrefillNode.TestCase.settings = fewer(2, stateful_step_count=40)
TestPrefillNode = PrefillNode.TestCase
