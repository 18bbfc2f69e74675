"""Book, index and prefix cache against a naive model: nothing is lost, nothing that is read is given away, every pin ends once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.errors import BridgeError, ConflictError, IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.prefixes import Evicted
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.examples import fewer
from tests.helpers.manual_clock import ManualClock

FULL, HOST, SWA = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA
HELD, LEASED, QUARANTINED = PageState.HELD, PageState.LEASED, PageState.QUARANTINED
GROWING = (FULL, HOST)
TOTAL = {FULL: 14, HOST: 12, SWA: 6}
MOST_OWNERS = 4
PROMPTS = st.sampled_from(["aaaa", "aaaaab", "aaab", "aa", "aaaabb", "b", "bab", "a", ""])
"""A letter stands for the tokens of a page."""


@cache
def keys_of(prompt: str) -> Keys:
    return Keys.of([hashlib.blake2b(prompt[: end + 1].encode(), digest_size=16).digest() for end in range(len(prompt))])


@dataclass(eq=False)
class Entry:
    """One cached page of a prompt."""

    prompt: str
    pages: dict[IndexSpace, int]
    checkpoint: list[int] = field(default_factory=list)
    dropped: bool = False


@dataclass(eq=False)
class Has:
    """What the model thinks that an owner has."""

    prompt: str
    state: PageState = HELD
    path: list[Entry] = field(default_factory=list)
    restores: Entry | None = None
    table: dict[IndexSpace, list[int]] = field(default_factory=dict)
    """Pages of the growing spaces behind the path's."""
    loose: dict[IndexSpace, list[int]] = field(default_factory=dict)
    """Other pages of its own."""
    reads: bool = True
    owns: bool = True


def of_one(wanted):
    """A rule about one of the owners for whom `wanted(has)` holds; it is skipped while there is none."""

    def of_a_rule(function):
        def chosen(machine, data, **drawn):
            owner = data.draw(st.sampled_from([owner for owner, has in machine.has.items() if wanted(has)]))
            function(machine, owner, machine.has[owner], **drawn)

        chosen.__name__ = function.__name__
        return precondition(lambda machine: any(map(wanted, machine.has.values())))(chosen)

    return of_a_rule


class PrefixCacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.book = PageBook(TOTAL)
        self.index = PrefixIndex(GROWING, min(TOTAL[space] for space in GROWING))
        self.clock = ManualClock()
        self.cache = PrefixCache(self.book, self.index, clock=self.clock)
        self.book.watch(self)
        self.freed_pages = dict.fromkeys(TOTAL, 0)
        self.entries: list[Entry] = []
        self.has: dict[Owner, Has] = {}
        self.rooms = 0

    # ------------------------------------------------------------------ the book's watcher

    def freed(self, pages):
        assert all(count >= 0 for count in pages.values())
        for space, count in pages.items():
            self.freed_pages[space] += count

    def gone(self, owner):
        pass

    def quarantined(self, owner):
        pass

    # ------------------------------------------------------------------ the model

    def known(self, prompt):
        return next((entry for entry in self.entries if entry.prompt == prompt and not entry.dropped), None)

    def match(self, prompt):
        found = []
        while len(found) < len(prompt) and (entry := self.known(prompt[: len(found) + 1])):
            found.append(entry)
        return found

    def read(self):
        return {entry for has in self.has.values() if has.reads for entry in has.path}

    def restored(self):
        return {has.restores for has in self.has.values() if has.reads and has.restores}

    def owned(self, space):
        owners = [has for has in self.has.values() if has.owns]
        return [page for has in owners for page in has.table.get(space, []) + has.loose.get(space, [])]

    def available(self, space, *, also=(), restored=()):
        """Pages that are neither owned nor read, if `also` were read as well."""
        pinned = len(self.read() | set(also)) if space in GROWING else 0
        if space is SWA:
            pinned = sum(len(entry.checkpoint) for entry in self.restored() | set(restored))
        return TOTAL[space] - len(self.owned(space)) - pinned

    def fits(self, demand, path=(), restored=()):
        return all(count <= self.available(space, also=path, restored=restored) for space, count in demand.items())

    def call(self, allowed, function, *arguments, **named):
        try:
            result = function(*arguments, **named)
        except IntegrityError:
            raise
        except BridgeError:
            assert not allowed
            return None
        assert allowed
        return result

    def notice_evictions(self, free_before, taken):
        """What is not known any more was read by nobody, and was needed."""
        needed = any(count > free_before[space] for space, count in taken.items())
        read, restored, checkpoints = self.read(), self.restored(), self.book.cached_pages()[SWA].tolist()
        for entry in list(self.entries):
            if not entry.dropped and len(self.index.match(keys_of(entry.prompt))) < len(entry.prompt):
                assert needed
                assert entry not in read
                self.entries.remove(entry)
            elif not set(entry.checkpoint) <= set(checkpoints):
                assert needed
                assert entry not in restored
                entry.checkpoint = []
        for entry in self.entries:
            assert entry.dropped or len(entry.prompt) == 1 or self.known(entry.prompt[:-1]), "a page without its parent"

    def free_pages(self):
        return {space: counts[PageState.FREE] for space, counts in self.book.counts().items()}

    def forget(self, owner):
        has = self.has[owner]
        if not has.reads and not has.owns:
            del self.has[owner]

    # ------------------------------------------------------------------ owners come

    @precondition(lambda machine: len(machine.has) < MOST_OWNERS)
    @rule(prompt=PROMPTS, more=st.integers(0, 2), windows=st.integers(0, 3), at_most=st.none() | st.integers(0, 5))
    def admit(self, prompt, more, windows, at_most):
        self.rooms += 1
        self.admit_as(Owner(self.rooms, 1), prompt, more, windows, at_most, from_checkpoint=False)

    @precondition(lambda machine: len(machine.has) < MOST_OWNERS)
    @rule(prompt=PROMPTS, windows=st.integers(0, 3), from_checkpoint=st.booleans(), ends=st.booleans())
    def serve(self, prompt, windows, from_checkpoint, ends):
        """All of a request's life, as it mostly goes."""
        self.rooms += 1
        owner = Owner(self.rooms, 1)
        self.admit_as(owner, prompt, 0, windows, None, from_checkpoint)
        if has := self.has.get(owner):
            self.keep_pages(owner, has, len(prompt))
            if windows and has.path:
                self.keep_checkpoint_at(owner, has, len(has.path), 1)
            if ends:
                self.end_of(owner)

    @rule(data=st.data())
    @of_one(lambda has: True)
    def admit_again(self, owner, has):
        with pytest.raises(ConflictError):
            self.cache.admit(owner, keys_of(has.prompt), lambda prefix_pages: {FULL: 0})

    def admit_as(self, owner, prompt, more, windows, at_most, from_checkpoint):
        def demand(shared):
            return {space: len(prompt) + more - shared[space] for space in GROWING} | {SWA: windows}

        path = self.match(prompt)[:at_most]
        while from_checkpoint and path and not path[-1].checkpoint:
            path.pop()
        restores = path[-1] if from_checkpoint and path else None
        fits = self.fits(demand(dict.fromkeys(GROWING, len(path))), path, [restores] if restores else [])
        if not fits and restores and self.fits(demand(dict.fromkeys(GROWING, 0))):
            fits, path, restores = True, [], None
        assert fits or not self.fits(demand(dict.fromkeys(GROWING, 0))), (
            "without its prefix it would have been admitted"
        )
        before = self.free_pages()
        wanted = {"at_most": at_most, "from_checkpoint": from_checkpoint}
        got = self.call(fits, self.cache.admit, owner, keys_of(prompt), demand, **wanted)
        if got is None:
            assert self.free_pages() == before, "what was refused has evicted something"
            return
        assert got.prefix_pages == len(path)
        for space in GROWING:
            assert got.prefix[space].tolist() == [entry.pages[space] for entry in path]
        assert got.checkpoint.tolist() == (restores.checkpoint if restores else [])
        self.has[owner] = Has(prompt, path=path, restores=restores)
        self.notice_evictions(before, demand(dict.fromkeys(GROWING, len(path))))
        for space, ids in got.own.items():
            table = self.has[owner].table if space in GROWING else self.has[owner].loose
            table[space] = ids.tolist()

    @rule(data=st.data(), demand=st.dictionaries(st.sampled_from(sorted(TOTAL)), st.integers(0, 4)))
    @of_one(lambda has: has.owns)
    def grow(self, owner, has, demand):
        before = self.free_pages()
        more = self.call(has.state is not QUARANTINED and self.fits(demand), self.book.grow, owner, demand)
        if more is None:
            assert self.free_pages() == before, "what was refused has evicted something"
            return
        self.notice_evictions(before, demand)
        for space, ids in more.items():
            has.loose.setdefault(space, []).extend(ids.tolist())

    # ------------------------------------------------------------------ pages stay

    @rule(data=st.data(), pages=st.integers(0, 6))
    @of_one(lambda has: has.reads and len(has.path) < len(has.prompt))
    def keep(self, owner, has, pages):
        self.keep_pages(owner, has, pages)

    @rule(data=st.data())
    @of_one(lambda has: has.reads and has.state is HELD and len(has.path) < len(has.prompt))
    def keep_all(self, owner, has):
        self.keep_pages(owner, has, 6)

    def keep_pages(self, owner, has, pages):
        start = len(has.path)
        stop = max(start, min(len(has.prompt), start + pages))
        prompt = has.prompt[:stop]
        given = {space: np.array(has.table[space][: stop - start], dtype=np.int32) for space in GROWING}
        before = self.match(prompt)
        dropped = before[:start] != has.path
        legal = has.owns and has.state is HELD
        found = self.call(legal, self.cache.keep, owner, keys_of(prompt), start, given)
        if found is None or dropped:
            assert not found
            assert len(self.index.match(keys_of(prompt))) == len(before)
            return
        assert found == stop - max(len(before), start)
        for end in range(start, stop):
            pages_here = {space: has.table[space].pop(0) for space in GROWING}
            entry = self.known(prompt[: end + 1])
            if entry is None:
                entry = Entry(prompt[: end + 1], pages_here)
                self.entries.append(entry)
            else:  # the first arrival stays, and this owner goes on with its own
                for space, page in pages_here.items():
                    has.loose.setdefault(space, []).append(page)
            has.path.append(entry)

    @rule(data=st.data())
    @of_one(lambda has: has.reads)
    def keep_from_elsewhere(self, owner, has):
        with pytest.raises(ConflictError, match=f"it reads {len(has.path)} pages so far"):
            self.cache.keep(owner, keys_of("a" * 9), len(has.path) + 1, {})

    @rule(data=st.data())
    @of_one(lambda has: has.reads and has.owns and len(has.path) < len(has.prompt))
    def keep_what_is_not_its_own(self, owner, has):
        others = [page for one in self.has.values() if one is not has and one.owns for page in one.table[FULL]]
        prompt = has.prompt[: len(has.path) + 1]
        if not others or self.match(prompt) != has.path:
            return
        given = {FULL: np.array(others[:1], np.int32), HOST: np.array(has.table[HOST][:1], np.int32)}
        with pytest.raises(ConflictError):
            self.cache.keep(owner, keys_of(prompt), len(has.path), given)
        assert len(self.index.match(keys_of(prompt))) == len(has.path)

    @rule(data=st.data(), at=st.integers(0, 5), count=st.integers(1, 2))
    @of_one(lambda has: has.reads and has.path and has.loose.get(SWA))
    def keep_checkpoint(self, owner, has, at, count):
        self.keep_checkpoint_at(owner, has, at % len(has.path) + 1, count)

    def keep_checkpoint_at(self, owner, has, at, count):
        entry, pages = has.path[at - 1], has.loose[SWA][:count]
        needless = bool(entry.checkpoint) or entry.dropped
        legal = needless or (has.owns and has.state is HELD)
        kept = self.call(legal, self.cache.keep_checkpoint, owner, at, np.array(pages, dtype=np.int32))
        assert kept is (not needless if legal else None)
        if kept:
            entry.checkpoint, has.loose[SWA] = pages, has.loose[SWA][count:]

    # ------------------------------------------------------------------ pages go

    @rule(data=st.data())
    @of_one(lambda has: has.owns and has.state is not QUARANTINED)
    def lease_or_end_the_lease(self, owner, has):
        before = has.state
        has.state = LEASED if before is HELD else HELD
        self.book.move(owner, before, has.state)

    @rule(data=st.data())
    @of_one(lambda has: has.owns)
    def quarantine(self, owner, has):
        self.book.quarantine(owner, f"writer of {owner}")
        has.state = QUARANTINED

    @rule(data=st.data())
    @of_one(lambda has: has.owns and has.state is not LEASED)
    def give_back(self, owner, has):
        if has.state is QUARANTINED:
            self.book.release_quarantined(owner)
        else:
            self.book.free(owner)
        has.owns = False
        self.forget(owner)

    @rule(data=st.data())
    @of_one(lambda has: has.reads)
    def let_go(self, owner, has):
        before, self.freed_pages = self.book.available_pages(), dict.fromkeys(TOTAL, 0)
        self.cache.let_go(owner)
        now = self.book.available_pages()
        told = {space: now[space] - before[space] for space in TOTAL}
        assert self.freed_pages == told, "those who wait were not told"
        has.reads = False
        self.forget_unread()
        self.forget(owner)
        with pytest.raises(NotFoundError):
            self.cache.let_go(owner)

    @rule(data=st.data())
    @of_one(lambda has: has.reads and has.owns and has.state is HELD)
    def end(self, owner, has):
        self.end_of(owner)

    def end_of(self, owner):
        self.cache.let_go(owner)
        self.book.free(owner)
        del self.has[owner]
        self.forget_unread()

    @precondition(lambda machine: len(machine.entries) > 6)
    @rule()
    def drop(self):
        before = self.book.available_pages()
        self.cache.drop()
        for entry in self.entries:
            entry.dropped = True
        self.forget_unread()
        assert all(count >= before[space] for space, count in self.book.available_pages().items())

    @precondition(lambda machine: machine.entries)
    @rule(prompt=PROMPTS.filter(bool), page=st.integers(0, 5))
    def drop_page(self, prompt, page):
        page %= len(prompt)
        self.cache.drop(Evicted.INTEGRITY, self.cache.index.match(keys_of(prompt))[page : page + 1])
        for entry in self.entries:
            entry.dropped = entry.dropped or entry.prompt.startswith(prompt[: page + 1])
        self.forget_unread()

    def forget_unread(self):
        read = self.read()
        self.entries = [entry for entry in self.entries if not entry.dropped or entry in read]

    @rule(seconds=st.sampled_from([0.0, 1.0, 5.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    # ------------------------------------------------------------------ after every step

    @invariant()
    def adds_up(self):
        self.cache.check_integrity()
        assert self.book.available_pages() == {space: self.available(space) for space in TOTAL}
        for space, total in TOTAL.items():
            cached = [entry.pages[space] for entry in self.entries] if space in GROWING else []
            if space is SWA:
                cached = [page for entry in self.entries for page in entry.checkpoint]
            everything = cached + self.owned(space)
            assert len(set(everything)) == len(everything)
            counts = self.book.counts()[space]
            assert counts[PageState.CACHED] == len(cached)
            assert counts[PageState.FREE] == total - len(everything)

    @invariant()
    def every_reader_is_counted(self):
        pins, _ = self.index.device.pins()
        readers = [entry for has in self.has.values() if has.reads for entry in has.path]
        assert int(pins.sum()) == len(readers)
        for entry in self.entries:
            if not entry.dropped:
                assert pins[self.index.match(keys_of(entry.prompt))[-1]] == readers.count(entry)


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = fewer(2, stateful_step_count=50)
