"""The page book against a naive model: pages are conserved and none has two owners, whatever is called."""

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.errors import BridgeError, CapacityError, IntegrityError, InvalidInputError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.pool.accounts.spaces import RunAllocator
from tests.helpers.accounts import check_allocator, check_book
from tests.helpers.examples import fewer

OWNED = {IndexSpace.FULL: 12, IndexSpace.HOST: 9}
ADOPTED = {IndexSpace.SWA: 10}
TOTAL = OWNED | ADOPTED
OWNERS = st.builds(Owner, st.integers(1, 3), st.integers(1, 2))
STATES = st.sampled_from(PageState)
REASONS = st.sampled_from(["worker 0", "worker 1"])
DEMAND = st.dictionaries(st.sampled_from(sorted(OWNED)), st.integers(0, 6))


class Cache:
    """Cached pages of each space, those that somebody reads marked; gives up more than it is asked for."""

    def __init__(self) -> None:
        self.pages: dict[IndexSpace, dict[int, bool]] = {space: {} for space in OWNED}
        self.evictions = 0

    def evictable(self):
        return {space: sum(not read for read in pages.values()) for space, pages in self.pages.items()}

    def evict(self, lacking):
        assert all(0 < count <= self.evictable()[space] for space, count in lacking.items())
        self.evictions += 1
        gone = {}
        for space, pages in self.pages.items():
            unread = [page for page, read in pages.items() if not read][: lacking.get(space, 0) + 1]
            gone[space] = np.array(unread, dtype=np.int32)
            for page in unread:
                del pages[page]
        return gone


class BookMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = PageBook(OWNED, adopted=ADOPTED)
        self.cache = Cache()
        self.book.page_cache = self.cache
        self.shared: dict[Owner, set[int]] = {}
        self.pages: dict[Owner, dict[IndexSpace, list[int]]] = {}
        self.state: dict[Owner, PageState] = {}
        self.reasons: dict[Owner, set[str]] = {}

    def call(self, allowed: bool, function, *arguments, **named):
        """Call; a refusal must be a deliberate error, and only where the model allows one."""
        try:
            result = function(*arguments, **named)
        except IntegrityError:
            raise
        except BridgeError:
            assert not allowed
            return None
        assert allowed
        return result

    def add(self, owner, pages):
        mine = self.pages.setdefault(owner, {})
        for space, ids in pages.items():
            mine.setdefault(space, []).extend(ids.tolist())

    def forget(self, owner):
        for model in (self.pages, self.state, self.reasons, self.shared):
            model.pop(owner, None)

    def available(self, space):
        owned = sum(len(pages.get(space, ())) for pages in self.pages.values())
        return TOTAL[space] - owned - sum(self.cache.pages[space].values())

    def refused(self, evictions):
        """A reservation that was refused has evicted nothing."""
        assert self.cache.evictions == evictions

    def read_and_not_written(self):
        written = {page for pages in self.pages.values() for page in pages.get(IndexSpace.SWA, ())}
        return {page for pages in self.shared.values() for page in pages} - written

    @rule(owner=OWNERS, demand=DEMAND, state=STATES)
    def reserve(self, owner, demand, state):
        fits = all(count <= self.available(space) for space, count in demand.items())
        legal = owner not in self.state and state in {PageState.HELD, PageState.LEASED}
        evictions = self.cache.evictions
        pages = self.call(fits and legal, self.book.reserve, owner, demand, state=state)
        if pages is None:
            self.refused(evictions)
        else:
            self.state[owner] = state
            self.add(owner, pages)

    @rule(owner=OWNERS, demand=DEMAND)
    def grow(self, owner, demand):
        fits = all(count <= self.available(space) for space, count in demand.items())
        legal = self.state.get(owner) in {PageState.HELD, PageState.LEASED}
        evictions = self.cache.evictions
        pages = self.call(fits and legal, self.book.grow, owner, demand)
        if pages is None:
            self.refused(evictions)
        else:
            self.add(owner, pages)

    @rule(owner=OWNERS, ids=st.lists(st.integers(-1, 10), max_size=4), shared=st.lists(st.integers(0, 9), max_size=3))
    def adopt(self, owner, ids, shared):
        taken = {page for pages in self.pages.values() for page in pages.get(IndexSpace.SWA, ())}
        taken |= self.read_and_not_written()
        named = ids + shared
        good = len(set(named)) == len(named) and all(0 <= page < 10 and page not in taken for page in ids)
        legal = self.state.get(owner) is not PageState.QUARANTINED
        pages = self.call(
            good and legal, self.book.adopt, owner, {IndexSpace.SWA: ids}, shared={IndexSpace.SWA: shared}
        )
        if pages is not None:
            self.state.setdefault(owner, PageState.HELD)
            self.shared.setdefault(owner, set()).update(shared)
            self.add(owner, pages)

    @rule(
        owner=OWNERS,
        space=st.sampled_from(sorted(OWNED)),
        ids=st.lists(st.integers(0, 11), max_size=5),
        read=st.booleans(),
    )
    def cache_pages(self, owner, space, ids, read):
        own = self.pages.get(owner, {}).get(space, [])
        legal = self.state.get(owner) is PageState.HELD and len(set(ids)) == len(ids) and set(ids) <= set(own)
        self.call(legal, self.book.cache, owner, {space: np.array(ids, dtype=np.int32)})
        if legal:
            self.pages.get(owner, {})[space] = [page for page in own if page not in ids]
            self.cache.pages[space] |= dict.fromkeys(ids, read)

    @rule(owner=OWNERS, space=st.sampled_from(sorted(OWNED)), read=st.booleans())
    def cache_all(self, owner, space, read):
        self.cache_pages(owner, space, list(self.pages.get(owner, {}).get(space, [])), read)

    @rule(space=st.sampled_from(sorted(OWNED)))
    def end_all_readers(self, space):
        self.cache.pages[space] = dict.fromkeys(self.cache.pages[space], False)

    @rule(space=st.sampled_from(sorted(OWNED)), ids=st.lists(st.integers(-1, 12), max_size=4))
    def uncache(self, space, ids):
        cached = self.cache.pages[space]
        if len(set(ids)) == len(ids) and set(ids) <= set(cached):
            self.book.uncache({space: np.array(ids, dtype=np.int32)})
            for page in ids:
                del cached[page]
        else:
            with pytest.raises(IntegrityError):
                self.book.uncache({space: np.array(ids, dtype=np.int32)})

    @rule(owner=OWNERS, before=STATES, after=STATES)
    def move(self, owner, before, after):
        legal = self.state.get(owner) is before and {before, after} == {PageState.HELD, PageState.LEASED}
        self.call(legal, self.book.move, owner, before, after)
        if legal:
            self.state[owner] = after

    @rule(owner=OWNERS)
    def give_up(self, owner):
        legal = self.state.get(owner) is PageState.HELD
        self.call(legal, self.book.free, owner)
        if legal:
            self.forget(owner)

    @rule(owner=OWNERS, reason=REASONS)
    def quarantine(self, owner, reason):
        legal = owner in self.state
        self.call(legal, self.book.quarantine, owner, reason)
        if legal:
            self.state[owner] = PageState.QUARANTINED
            self.reasons.setdefault(owner, set()).add(reason)

    @rule(owner=OWNERS)
    def release(self, owner):
        self.book.release_quarantined(owner)
        if self.state.get(owner) is PageState.QUARANTINED:
            self.forget(owner)

    @invariant()
    def conserved(self):
        check_book(self.book)
        for space, counts in self.book.counts().items():
            cached = self.cache.pages[space] if space in OWNED else self.read_and_not_written()
            assert counts[PageState.CACHED] == len(cached)
            if space in OWNED:
                assert self.book.available_pages()[space] == self.available(space)
            for state in (PageState.HELD, PageState.LEASED, PageState.QUARANTINED):
                expected = sum(
                    len(pages.get(space, ())) for owner, pages in self.pages.items() if self.state[owner] is state
                )
                assert counts[state] == expected

    @invariant()
    def agrees_with_the_model(self):
        assert set(self.book._holdings) == set(self.state)
        for owner, state in self.state.items():
            assert self.book.state(owner) is state
            found = {space: ids.tolist() for space, ids in self.book.pages(owner).items() if len(ids)}
            assert found == {space: ids for space, ids in self.pages[owner].items() if ids}


TestBook = BookMachine.TestCase
TestBook.settings = fewer(2, stateful_step_count=40)


PAGES = 48


def run_lengths(pages: set[int]) -> list[int]:
    lengths: list[int] = []
    for page in sorted(pages):
        if page - 1 in pages:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def fewest_runs(free: set[int], count: int) -> int:
    used = 0
    for length in sorted(run_lengths(free), reverse=True):
        if count <= 0:
            break
        count -= length
        used += 1
    return used


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = RunAllocator(PAGES)
        self.free = set(range(PAGES))
        self.out: list[int] = []

    @rule(count=st.integers(0, 20))
    def take(self, count):
        if count > len(self.free):
            with pytest.raises(CapacityError):
                self.allocator.take(count)
            return
        ids = self.allocator.take(count)
        pages = set(ids.tolist())
        assert len(pages) == count
        assert pages <= self.free
        assert (np.diff(ids) > 0).all()
        # Taken pages may lie side by side although they came from one free run only, never from more runs than needed.
        assert len(run_lengths(pages)) <= fewest_runs(self.free, count)
        self.free -= pages
        self.out += ids.tolist()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def take_after(self, data):
        page = data.draw(st.sampled_from(self.out))
        if not self.free:
            return
        ids = self.allocator.take(1, after=page)
        assert ids[0] == page + 1 or page + 1 not in self.free
        self.free -= set(ids.tolist())
        self.out += ids.tolist()

    @rule(count=st.integers(0, PAGES), scattered=st.integers(0, PAGES))
    def take_some_that_need_not_lie_together(self, count, scattered):
        if count > len(self.free) or scattered > count:
            with pytest.raises((CapacityError, InvalidInputError)):
                self.allocator.take(count, scattered=scattered)
            return
        fewest = fewest_runs(self.free, count - scattered)
        ids = self.allocator.take(count, scattered=scattered).tolist()
        together, apart = set(ids[: count - scattered]), set(ids[count - scattered :])
        assert together | apart <= self.free
        assert ids == sorted(together) + sorted(apart)
        assert len(run_lengths(together)) <= fewest
        self.free -= together
        left = sorted(run_lengths(self.free))
        while left and left[0] <= scattered:
            scattered -= left.pop(0)
        if scattered:
            left[0] -= scattered
        self.free -= apart
        assert sorted(run_lengths(self.free)) == sorted(left)
        self.out += ids

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        self.allocator.give(np.array(ids, dtype=np.int32))
        self.free |= set(ids)
        self.out = [page for page in self.out if page not in ids]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_what_is_free(self, data):
        page = data.draw(st.sampled_from(sorted(self.free)))
        for wrong in ([*self.out[:3], page], self.out[:1] * 2 or [page]):
            with pytest.raises(IntegrityError):
                self.allocator.give(wrong)

    @invariant()
    def agrees_with_the_set(self):
        check_allocator(self.allocator)
        assert self.allocator.free == len(self.free)
        assert len(self.allocator._length_at_start) == len(run_lengths(self.free))
        assert max(self.allocator._lengths, default=0) == max(run_lengths(self.free), default=0)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = fewer(2, stateful_step_count=40)
