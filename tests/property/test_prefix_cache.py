"""Book, index and prefix cache against a naive model: nothing is lost, nothing that is read is given away, every pin ends once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock

FULL, HOST, SWA = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA
HELD, LEASED, QUARANTINED = PageState.HELD, PageState.LEASED, PageState.QUARANTINED
GROWING = (FULL, HOST)
TOTAL = {FULL: 14, HOST: 12, SWA: 6}
OWNERS = st.builds(Owner, st.integers(1, 4), st.just(1))
PROMPTS = st.lists(st.sampled_from("ab"), max_size=6).map("".join)
"""A letter stands for the tokens of a page."""


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
        read, restored = self.read(), self.restored()
        for entry in list(self.entries):
            if entry.dropped:
                continue
            records = self.index.match(keys_of(entry.prompt))
            if len(records) < len(entry.prompt):
                assert needed
                assert entry not in read
                self.entries.remove(entry)
            elif entry.checkpoint and not self.index.checkpointed(records)[-1]:
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

    @rule(
        owner=OWNERS,
        prompt=PROMPTS,
        more=st.integers(0, 4),
        windows=st.integers(0, 4),
        at_most=st.none() | st.integers(0, 5),
        from_checkpoint=st.booleans(),
    )
    def admit(self, owner, prompt, more, windows, at_most, from_checkpoint):
        def demand(prefix_pages):
            return dict.fromkeys(GROWING, len(prompt) + more - prefix_pages) | {SWA: windows}

        path = self.match(prompt)[:at_most]
        while from_checkpoint and path and not path[-1].checkpoint:
            path.pop()
        restores = path[-1] if from_checkpoint and path else None
        fits = self.fits(demand(len(path)), path, [restores] if restores else [])
        if not fits and restores and self.fits(demand(0)):
            fits, path, restores = True, [], None
        assert fits or not self.fits(demand(0)), "without its prefix it would have been admitted"
        before = self.free_pages()
        got = self.call(
            fits and owner not in self.has,
            self.cache.admit,
            owner,
            keys_of(prompt),
            demand,
            at_most=at_most,
            from_checkpoint=from_checkpoint,
        )
        if got is None:
            assert self.free_pages() == before, "what was refused has evicted something"
            return
        assert got.prefix_pages == len(path)
        for space in GROWING:
            assert got.prefix[space].tolist() == [entry.pages[space] for entry in path]
        assert got.checkpoint.tolist() == (restores.checkpoint if restores else [])
        self.has[owner] = Has(prompt, path=path, restores=restores)
        self.notice_evictions(before, demand(len(path)))
        for space, ids in got.own.items():
            table = self.has[owner].table if space in GROWING else self.has[owner].loose
            table[space] = ids.tolist()

    @rule(owner=OWNERS, demand=st.dictionaries(st.sampled_from(sorted(TOTAL)), st.integers(0, 4)))
    def grow(self, owner, demand):
        has = self.has.get(owner)
        legal = has is not None and has.owns and has.state is not QUARANTINED
        before = self.free_pages()
        more = self.call(legal and self.fits(demand), self.book.grow, owner, demand)
        if more is not None:
            self.notice_evictions(before, demand)
            for space, ids in more.items():
                has.loose.setdefault(space, []).extend(ids.tolist())

    # ------------------------------------------------------------------ pages stay

    @rule(owner=OWNERS, pages=st.integers(0, 6), wrong_start=st.sampled_from([0, 0, 0, 1]))
    def keep(self, owner, pages, wrong_start):
        has = self.has.get(owner)
        if has is None or not has.reads:
            with pytest.raises(NotFoundError):
                self.cache.keep(owner, Keys(), 0, dict.fromkeys(GROWING, np.empty(0, np.int32)))
            return
        start = len(has.path)
        stop = max(start, min(len(has.prompt), start + pages))
        prompt = has.prompt[:stop]
        given = {space: np.array(has.table[space][: stop - start], dtype=np.int32) for space in GROWING}
        if wrong_start:
            with pytest.raises(ConflictError, match=f"it reads {start} pages so far"):
                self.cache.keep(owner, keys_of(prompt), start + 1, given)
            return
        before = self.match(prompt)
        dropped = before[:start] != has.path
        legal = dropped or (has.owns and has.state is HELD)
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

    @rule(owner=OWNERS)
    def keep_what_is_not_its_own(self, owner):
        has = self.has.get(owner)
        others = [page for other in self.has.values() if other is not has and other.owns for page in other.table[FULL]]
        if has is None or not has.reads or len(has.prompt) == len(has.path) or not others:
            return
        prompt = has.prompt[: len(has.path) + 1]
        if self.match(prompt)[: len(has.path)] != has.path or self.known(prompt):
            return
        given = {FULL: np.array(others[:1], np.int32), HOST: np.array(has.table[HOST][:1], np.int32)}
        with pytest.raises((ConflictError, NotFoundError)):
            self.cache.keep(owner, keys_of(prompt), len(has.path), given)
        assert len(self.index.match(keys_of(prompt))) == len(has.path)

    @rule(owner=OWNERS, at=st.integers(1, 6), count=st.integers(1, 2))
    def keep_checkpoint(self, owner, at, count):
        has = self.has.get(owner)
        if has is None or not has.reads or at > len(has.path) or len(has.loose.get(SWA, [])) < count:
            return
        entry, pages = has.path[at - 1], has.loose[SWA][:count]
        needless = bool(entry.checkpoint) or entry.dropped
        legal = needless or (has.owns and has.state is HELD)
        kept = self.call(legal, self.cache.keep_checkpoint, owner, at, np.array(pages, dtype=np.int32))
        assert kept in ((not needless,) if legal else (None,))
        if kept:
            entry.checkpoint, has.loose[SWA] = pages, has.loose[SWA][count:]

    # ------------------------------------------------------------------ pages go

    @rule(owner=OWNERS, lease=st.booleans())
    def move(self, owner, lease):
        has = self.has.get(owner)
        before, after = (HELD, LEASED) if lease else (LEASED, HELD)
        if has is not None and has.owns and has.state is before:
            self.book.move(owner, before, after)
            has.state = after

    @rule(owner=OWNERS)
    def quarantine(self, owner):
        has = self.has.get(owner)
        if has is not None and has.owns:
            self.book.quarantine(owner, f"writer of {owner}")
            has.state = QUARANTINED

    @rule(owner=OWNERS)
    def give_back(self, owner):
        has = self.has.get(owner)
        if has is None or not has.owns or has.state is LEASED:
            return
        if has.state is QUARANTINED:
            self.book.release_quarantined(f"writer of {owner}")
        else:
            self.book.free(owner)
        has.owns = False
        self.forget(owner)

    @rule(owner=OWNERS)
    def let_go(self, owner):
        has = self.has.get(owner)
        if has is None or not has.reads:
            with pytest.raises(NotFoundError):
                self.cache.let_go(owner)
            return
        before, self.freed_pages = self.book.available_pages(), dict.fromkeys(TOTAL, 0)
        self.cache.let_go(owner)
        now = self.book.available_pages()
        assert self.freed_pages == {space: now[space] - before[space] for space in TOTAL}, "those who wait were not told"
        has.reads = False
        self.forget_unread()
        self.forget(owner)

    @rule(owner=OWNERS)
    def end(self, owner):
        self.let_go(owner)
        if owner in self.has and self.has[owner].state is LEASED:
            self.move(owner, lease=False)
        self.give_back(owner)

    @rule()
    def drop(self):
        before = self.book.available_pages()
        self.cache.drop()
        for entry in self.entries:
            entry.dropped = True
        self.forget_unread()
        assert all(count >= before[space] for space, count in self.book.available_pages().items())

    @rule(prompt=PROMPTS.filter(bool), page=st.integers(0, 5))
    def drop_page(self, prompt, page):
        page %= len(prompt)
        self.cache.drop_page(keys_of(prompt), page)
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
        for space in TOTAL:
            cached = [entry.pages[space] for entry in self.entries] if space in GROWING else []
            if space is SWA:
                cached = [page for entry in self.entries for page in entry.checkpoint]
            everything = cached + self.owned(space)
            assert len(set(everything)) == len(everything)
            counts = self.book.counts()[space]
            assert counts[PageState.CACHED] == len(cached)
            assert counts[PageState.FREE] == TOTAL[space] - len(everything)

    @invariant()
    def every_reader_is_counted(self):
        pins, _ = self.index.pins()
        readers = [entry for has in self.has.values() if has.reads for entry in has.path]
        assert int(pins.sum()) == len(readers)
        for entry in self.entries:
            if not entry.dropped:
                assert pins[self.index.match(keys_of(entry.prompt))[-1]] == readers.count(entry)


TestPrefixCache = PrefixCacheMachine.TestCase
TestPrefixCache.settings = settings(stateful_step_count=50)
