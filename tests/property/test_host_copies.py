"""Prefixes on the device, on the host or on both against a naive model, with copies that finish, fail and finish late in any order.

The model knows where each page of each prompt is, who reads it there, and what every page holds: a copy moves what its source holds
at its very end, so a page that was given away too early is seen by what is in it.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbridge.core.errors import CapacityError, ConflictError
from kvbridge.core.ids import HOST_COPIES, IndexSpace
from kvbridge.core.prefixes import Evicted
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook, PageState
from kvbridge.tier.events import CacheFeed
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.accounts import cached_pages, check_book
from tests.helpers.examples import fewer
from tests.helpers.kv_subscriber import CHECKPOINTS, PAGES as PAGES_OF_PROMPTS, Subscriber, hashes
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_recount import check_cache

FULL, SWA, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.HOST
FULL_COPY, SWA_COPY = IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
HELD, LEASED, QUARANTINED = PageState.HELD, PageState.LEASED, PageState.QUARANTINED
DEVICE, ON_HOST = "device", "host"
PAGES = {FULL: 9, SWA: 5, FULL_COPY: 9, SWA_COPY: 2}
HOME_PAGES = 12
PROMPTS = st.sampled_from(["aaaa", "aaaaab", "aaab", "aa", "aaaabb", "b", "bab", "a"])


@cache
def keys_of(prompt: str) -> Keys:
    return Keys.of([hashlib.blake2b(prompt[: end + 1].encode(), digest_size=16).digest() for end in range(len(prompt))])


def array(ids) -> np.ndarray:
    return np.array(list(ids), dtype=np.int32)


@dataclass(eq=False)
class Entry:
    """One cached page of a prompt: its page in each space where it is."""

    prompt: str
    pages: dict[IndexSpace, int] = field(default_factory=dict)
    checkpoints: dict[IndexSpace, list[int]] = field(default_factory=dict)
    """Pages of `SWA` and `SWA_COPY`."""
    dropped: bool = False
    lost: bool = False
    """Its page on the device is, whose memory is gone, until nobody reads that any more."""


@dataclass(eq=False)
class Reads:
    """The entries that an owner pins."""

    path: list[Entry] = field(default_factory=list)
    device: int = 0
    host: int = 0
    checkpoints: list[tuple[Entry, IndexSpace]] = field(default_factory=list)


@dataclass(eq=False)
class Room:
    prompt: str
    reads: Reads
    own: dict[IndexSpace, dict[int, int]]
    """Its pages by space and place in the prompt; of `SWA` by their order."""
    start: int
    """Pages of its prompt that it did not have to load or compute."""
    found: int
    """Pages of its prompt that it did not have to compute."""
    to_load: int = 0
    """Its first pages of `SWA`: a checkpoint is loaded into them."""
    state: PageState = HELD
    restored: bool = False

    @property
    def is_as_admitted(self):
        return not self.restored and len(self.reads.path) == self.found and self.reads.device == self.start


@dataclass(eq=False)
class Copy:
    """A backup, or pages that come from elsewhere."""

    prompt: str
    start: int
    own: dict[IndexSpace, list[int]]
    reads: Reads | None = None
    backup: object = None


def of_one(wanted):
    """A rule about one of the rooms for which `wanted(room)` holds; it is skipped while there is none."""

    def of_a_rule(function):
        def chosen(machine, data, **drawn):
            owner = data.draw(st.sampled_from([owner for owner, room in machine.rooms.items() if wanted(room)]))
            function(machine, owner, **drawn)

        chosen.__name__ = function.__name__
        return precondition(lambda machine: any(map(wanted, machine.rooms.values())))(chosen)

    return of_a_rule


class CopyMachine(RuleBasedStateMachine):
    @initialize(home=st.booleans(), restores=st.booleans())
    def begin(self, home, restores):
        self.spaces = (FULL, HOST) if home else (FULL,)
        self.homes = self.spaces[1:]
        self.total = PAGES | dict.fromkeys(self.homes, HOME_PAGES)
        self.restores = restores
        self.book = PageBook(self.total)
        self.index = PrefixIndex(self.spaces, PAGES[FULL] + PAGES[FULL_COPY], has_copies=True)
        self.clock = ManualClock()
        self.cache = PrefixCache(self.book, self.index, clock=self.clock, restores=restores)
        self.feed, self.router = CacheFeed(self.index, 256), Subscriber()
        self.cache.copies.watchers.append(self)
        self.book.watchers.append(self)
        self.told: Counter[IndexSpace] = Counter()
        self.entries: list[Entry] = []
        self.rooms: dict[Owner, Room] = {}
        self.copies: dict[Owner, Copy] = {}
        self.late: dict[Owner, Copy] = {}
        """Copies that have failed, and may still write."""
        self.holds: dict[tuple[IndexSpace, int], str] = {}
        """The contents of pages."""
        self.journal: dict[tuple[IndexSpace, int], str] = {}
        """The contents of host copies, as a watcher knows them."""
        self.number = 0

    def freed(self, pages):
        assert all(count >= 0 for count in pages.values())
        self.told.update(pages)

    def gone(self, owner):
        pass

    def quarantined(self, owner):
        pass

    def added(self, keys, start, pages):
        for at in range(start, len(keys)):
            self.journal[FULL_COPY, int(pages[FULL_COPY][at - start])] = keys[at]

    def checkpoint_added(self, key, pages):
        for page in pages.tolist():
            self.journal[SWA_COPY, page] = key

    def removed(self, pages):
        for space, ids in pages.items():
            for page in ids.tolist():
                self.journal.pop((space, page), None)

    def owner(self, room=True):
        self.number += 1
        return Owner(self.number if room else NO_ROOM, self.number)

    def known(self, prompt):
        return next((entry for entry in self.entries if entry.prompt == prompt and not entry.dropped), None)

    def match(self, prompt):
        found = []
        while len(found) < len(prompt) and (entry := self.known(prompt[: len(found) + 1])):
            found.append(entry)
        return found

    def depth(self, path, space):
        if space is FULL and path and path[0].lost:
            return 0
        return sum(space in entry.pages for entry in path)

    def readers(self):
        return [one.reads for one in (*self.rooms.values(), *self.copies.values()) if one.reads]

    def pinned(self, readers, space):
        """Pages of a space that somebody reads."""
        if space in {SWA, SWA_COPY}:
            return {p for r in readers for one, at in r.checkpoints if at is space for p in one.checkpoints[space]}
        stops = {FULL: lambda r: r.device, FULL_COPY: lambda r: r.host, HOST: lambda r: len(r.path)}
        return {entry.pages[space] for reads in readers for entry in reads.path[: stops[space](reads)]}

    def owned(self, space):
        found = [page for room in self.rooms.values() for page in room.own.get(space, {}).values()]
        return found + [page for one in (*self.copies.values(), *self.late.values()) for page in one.own.get(space, [])]

    def available(self, space, *more):
        return self.total[space] - len(self.owned(space)) - len(self.pinned([*self.readers(), *more], space))

    def fits(self, demand, *more):
        return all(count <= self.available(space, *more) for space, count in demand.items())

    def free(self):
        return {space: counts[PageState.FREE] for space, counts in self.book.counts().items()}

    def given(self, pages):
        """Pages are somebody's own now: what was in them is overwritten."""
        for space, ids in pages.items():
            for page in ids:
                self.holds[space, int(page)] = "junk"

    def notice_evictions(self, free_before, demand):
        """A page that is not where it was had no reader there, and was needed."""
        short = {space for space, count in demand.items() if count > free_before[space]}
        cached = cached_pages(self.book)
        for entry in list(self.entries):
            for space, ends in ((FULL, SWA), (FULL_COPY, SWA_COPY)):
                if space in entry.pages and entry.pages[space] not in cached[space]:
                    assert short & {space, HOST}
                    assert not entry.dropped
                    assert entry.pages[space] not in self.pinned(self.readers(), space)
                    del entry.pages[space]
                    entry.checkpoints.pop(ends, None)
                    entry.dropped = entry.lost  # nothing of it is anywhere for others to find
                elif not set(entry.checkpoints.get(ends, [])) <= set(cached[ends].tolist()):
                    assert ends in short
                    assert not set(entry.checkpoints[ends]) & self.pinned(self.readers(), ends)
                    del entry.checkpoints[ends]
            if not entry.pages.keys() - {HOST}:
                self.entries.remove(entry)
        for entry in self.entries:
            parent = self.known(entry.prompt[:-1])
            assert entry.dropped or len(entry.prompt) == 1 or parent.pages.keys() >= entry.pages.keys()

    def forget_unread(self):
        """A dropped entry stays only where it is read."""
        for entry in [entry for entry in self.entries if entry.dropped or entry.lost]:
            for space in (FULL, FULL_COPY) if entry.dropped else (FULL,):
                if space in entry.pages and entry.pages[space] not in self.pinned(self.readers(), space):
                    del entry.pages[space]
                    entry.checkpoints.pop(IndexSpace(str(space).replace("full", "swa")), None)
            entry.lost = entry.lost and FULL in entry.pages
            if not entry.pages.keys() - {HOST}:
                self.entries.remove(entry)

    @precondition(lambda self: len(self.rooms) < 3)
    @rule(prompt=PROMPTS, windows=st.integers(0, 2), from_checkpoint=st.booleans(), ends=st.booleans())
    def serve(self, prompt, windows, from_checkpoint, ends):
        """All of a request's life, as it mostly goes."""
        owner = self.admit_as(prompt, windows, from_checkpoint)
        if owner is not None:
            self.load_of(owner)
            self.keep_of(owner, len(prompt), windows)
            if ends:
                self.end_of(owner)

    @precondition(lambda self: len(self.rooms) < 3)
    @rule(prompt=PROMPTS, windows=st.integers(0, 2), from_checkpoint=st.booleans())
    def admit(self, prompt, windows, from_checkpoint):
        self.admit_as(prompt, windows, from_checkpoint)

    def ends(self, entry):
        """Where a checkpoint of a page is from which a request can go on."""
        found = [SWA] if SWA in entry.checkpoints and not entry.lost else []
        return found + ([SWA_COPY] if SWA_COPY in entry.checkpoints and self.restores else [])

    def plan(self, prompt, from_checkpoint):
        """The entries that a request would read, and how many pages it has to load windows into."""
        path = self.match(prompt)
        if not self.restores:
            path = path[: self.depth(path, FULL)]
        while from_checkpoint and path and not self.ends(path[-1]):
            path.pop()
        device = self.depth(path, FULL)
        reads = Reads(path, device, len(path) if device < len(path) else 0)
        if from_checkpoint and path:
            where = self.ends(path[-1])[0]
            reads.checkpoints = [(path[-1], where)]
            if where is SWA_COPY:
                reads.host = len(path)
                return reads, len(path[-1].checkpoints[where])
        return reads, 0

    def admit_as(self, prompt, windows, from_checkpoint):
        def demand(shared):
            return {space: len(prompt) - shared[space] for space in self.spaces} | {SWA: windows}

        def needed(reads, to_load):
            found = demand(dict.fromkeys(self.homes, len(reads.path)) | {FULL: reads.device})
            return found | {SWA: windows + to_load}

        owner = self.owner()
        reads, to_load = self.plan(prompt, from_checkpoint)
        if reads.checkpoints and not self.fits(needed(reads, to_load), reads):
            reads, to_load = Reads(), 0
        before, fits = self.free(), self.fits(needed(reads, to_load), reads)
        try:
            got = self.cache.admit(owner, keys_of(prompt), demand, from_checkpoint=from_checkpoint)
        except CapacityError:
            assert not fits
            assert self.free() == before, "what was refused has evicted something"
            return None
        assert fits
        path = reads.path
        assert (got.prefix_pages, got.device_pages) == (len(path), reads.device)
        assert got.prefix[FULL].tolist() == [entry.pages[FULL] for entry in path[: reads.device]]
        for space in self.homes:
            assert got.prefix[space].tolist() == [entry.pages[space] for entry in path]
        copies_there = got.copies.get(FULL_COPY, array([])).tolist()
        assert copies_there == [entry.pages[FULL_COPY] for entry in path[reads.device :]]
        ends = {where: one.checkpoints[where] for one, where in reads.checkpoints}
        assert (got.checkpoint.tolist(), got.checkpoint_copy.tolist()) == (ends.get(SWA, []), ends.get(SWA_COPY, []))
        assert len(got.checkpoint_own) == to_load
        own = {FULL: dict(enumerate(got.own[FULL].tolist(), reads.device))}
        own |= {space: dict(enumerate(got.own[space].tolist(), len(path))) for space in self.homes}
        own[SWA] = dict(enumerate(got.checkpoint_own.tolist() + got.own[SWA].tolist()))
        self.rooms[owner] = Room(prompt, reads, own, reads.device, len(path), to_load)
        self.notice_evictions(before, needed(reads, to_load))
        self.given({space: pages.values() for space, pages in own.items()})
        return owner

    @rule(data=st.data())
    @of_one(lambda room: True)
    def what_makes_no_sense_is_refused(self, owner):
        with pytest.raises(ConflictError):
            self.cache.admit(owner, keys_of("a"), lambda shared: {FULL: 0})
        reads = len(self.rooms[owner].reads.path)
        with pytest.raises(ConflictError, match=f"reads {reads} pages so far"):
            self.cache.keep(owner, keys_of("a" * 9), reads + 1, {})

    @rule(data=st.data())
    @of_one(lambda room: not room.restored and room.state is HELD)
    def load(self, owner):
        self.load_of(owner)

    def load_of(self, owner):
        """The engine has copied what was on the host only: it holds what belongs there."""
        room = self.rooms[owner]
        room.restored, reads, path = True, room.reads, room.reads.path[: room.found]
        for at in range(room.start, room.found):
            self.holds[FULL, room.own[FULL][at]] = self.holds[FULL_COPY, path[at].pages[FULL_COPY]]
        loads = [one for one, where in reads.checkpoints if where is SWA_COPY]
        for one in loads:
            for at, page in enumerate(one.checkpoints[SWA_COPY]):
                self.holds[SWA, room.own[SWA][at]] = self.holds[SWA_COPY, page]
        if room.start < room.found:
            whole = [entry for entry in path if not entry.dropped]
            whole = [] if whole and whole[0].lost else whole
            here = self.depth(whole, FULL)
            pages = {FULL: array(room.own[FULL][at] for at in range(room.start, room.found))}
            assert self.cache.restored(owner, room.start, pages) == len(whole) - here
            for at in range(here, len(whole)):
                whole[at].pages[FULL] = room.own[FULL].pop(at)
            if len(whole) > reads.device:
                reads.device = len(whole)
                if len(whole) == len(reads.path) and not loads:
                    reads.host = 0
            self.forget_unread()
        for one in loads:
            ids = [room.own[SWA][at] for at in range(len(one.checkpoints[SWA_COPY]))]
            kept = self.cache.keep_checkpoint(owner, room.found, array(ids))
            assert kept is (not one.dropped and not one.lost and FULL in one.pages and SWA not in one.checkpoints)
            if kept:
                one.checkpoints[SWA] = [room.own[SWA].pop(at) for at in range(len(ids))]

    @rule(data=st.data(), pages=st.integers(1, 6), windows=st.integers(0, 2))
    @of_one(lambda room: room.state is HELD)
    def keep(self, owner, pages, windows):
        self.keep_of(owner, pages, windows)

    def keep_of(self, owner, pages, windows):
        room = self.rooms[owner]
        reads, start = room.reads, len(room.reads.path)
        stop = min(len(room.prompt), start + pages)
        own = {space: {at: room.own[space][at] for at in range(start, stop)} for space in self.spaces}
        for space, ids in own.items():
            for at, page in ids.items():
                self.holds[space, page] = room.prompt[: at + 1]
        known = self.match(room.prompt[:stop])
        possible = known[:start] == reads.path and self.depth(reads.path, FULL) == start
        possible = possible and not (known and known[0].lost)
        given = {space: array(ids.values()) for space, ids in own.items()}
        found = self.cache.keep(owner, keys_of(room.prompt)[:stop], start, given)
        assert found == (max(0, stop - max(start, self.depth(known, FULL))) if possible else 0)
        for at in range(start, stop) if possible else ():
            entry = known[at] if at < len(known) else Entry(room.prompt[: at + 1])
            if at >= len(known):
                self.entries.append(entry)
            for space in self.spaces:
                if space not in entry.pages:
                    entry.pages[space] = room.own[space].pop(at)
            reads.path.append(entry)
            reads.device = len(reads.path)
        if possible:
            reads.device = max(reads.device, start)
        if windows and reads.path and len(reads.path) == len(room.prompt):
            self.keep_checkpoint_of(owner, room)

    def keep_checkpoint_of(self, owner, room):
        entry, at = room.reads.path[-1], max(room.own[SWA], default=-1)
        if at < room.to_load:
            return
        self.holds[SWA, room.own[SWA][at]] = "end of " + entry.prompt
        kept = self.cache.keep_checkpoint(owner, len(room.reads.path), array([room.own[SWA][at]]))
        assert kept is (not entry.dropped and not entry.lost and FULL in entry.pages and SWA not in entry.checkpoints)
        if kept:
            entry.checkpoints[SWA] = [room.own[SWA].pop(at)]

    @rule(data=st.data())
    @of_one(lambda room: room.state is not QUARANTINED)
    def lease_or_end_the_lease(self, owner):
        room = self.rooms[owner]
        before, room.state = room.state, LEASED if room.state is HELD else HELD
        self.book.move(owner, before, room.state)

    @rule(data=st.data())
    @of_one(lambda room: room.state is not HELD)
    def quarantine_or_end(self, owner):
        if self.rooms[owner].state is QUARANTINED:
            self.end_of(owner)
        else:
            self.book.quarantine(owner, f"writer of {owner}")
            self.rooms[owner].state = QUARANTINED

    @rule(data=st.data())
    @of_one(lambda room: room.state is HELD)
    def end(self, owner):
        self.end_of(owner)

    def end_of(self, owner):
        before, self.told = self.book.available_pages(), Counter()
        self.cache.let_go(owner)
        now = self.book.available_pages()
        assert +self.told == +Counter({space: now[space] - before[space] for space in now}), "who waits was not told"
        if self.rooms.pop(owner).state is QUARANTINED:
            self.book.release_quarantined(owner)
        else:
            self.book.free(owner)
        self.forget_unread()

    @rule(data=st.data(), pages=st.integers(0, 5))
    @of_one(lambda room: room.state is HELD and room.is_as_admitted)
    def shorten(self, owner, pages):
        """Nodes of one instance have agreed upon an earlier start."""
        room = self.rooms[owner]
        pages = min(pages, room.found)
        reads, path = room.reads, room.reads.path[:pages]
        device = min(room.start, pages)
        fewer = Reads(path, device, pages if device < pages else 0)
        to_load = 0
        if reads.checkpoints and pages:
            where = SWA if SWA in path[-1].checkpoints and not path[-1].lost else SWA_COPY
            if where not in path[-1].checkpoints or (where is SWA_COPY and FULL_COPY not in path[-1].pages):
                return
            fewer.checkpoints = [(path[-1], where)]
            if where is SWA_COPY:
                fewer.host, to_load = pages, len(path[-1].checkpoints[where])
        demand = {FULL: room.start - device, SWA: max(0, to_load - room.to_load)}
        demand |= dict.fromkeys(self.homes, room.found - pages)
        before, others_find_it = self.free(), not any(one.dropped or one.lost for one in reads.path)
        room.reads = Reads([], 0) if others_find_it else reads  # then what it gives up may go for what it needs
        fits = self.fits(demand, fewer)
        room.reads = reads
        try:
            got = self.cache.shorten(owner, pages, from_checkpoint=bool(fewer.checkpoints))
        except CapacityError:
            assert not fits
            assert self.free() == before
            return
        assert fits
        assert (got.prefix_pages, got.device_pages, len(got.checkpoint_own)) == (pages, device, to_load)
        assert got.copies.get(FULL_COPY, array([])).tolist() == [one.pages[FULL_COPY] for one in path[device:]]
        room.own[FULL] |= dict(enumerate(got.own[FULL].tolist(), device))
        for space in self.homes:
            room.own[space] |= dict(enumerate(got.own[space].tolist(), pages))
        loose = [page for at, page in sorted(room.own[SWA].items()) if page not in got.checkpoint_own.tolist()]
        room.own[SWA] = dict(enumerate(got.checkpoint_own.tolist() + loose))
        room.reads, room.start, room.found, room.to_load = fewer, device, pages, to_load
        self.forget_unread()
        self.notice_evictions(before, demand)
        self.given({space: pages.values() for space, pages in room.own.items()})

    @precondition(lambda self: len(self.copies) < 3)
    @rule(prompt=PROMPTS, at_most=st.sampled_from([1, 9]))
    def start_backup(self, prompt, at_most):
        self.start_backup_of(prompt, at_most)

    @precondition(lambda self: len(self.rooms) < 3 and len(self.copies) < 3)
    @rule(prompt=PROMPTS, windows=st.integers(0, 2), stays=st.booleans())
    def serve_and_back_up(self, prompt, windows, stays):
        """As it mostly goes with a host; afterwards the device may need its pages."""
        owner = self.admit_as(prompt, windows, from_checkpoint=bool(windows))
        if owner is not None:
            self.load_of(owner)
            self.keep_of(owner, len(prompt), windows)
            backup = self.start_backup_of(prompt, 9)
            self.end_of(owner)
            if backup is not None:
                self.end_backup_of(backup)
            if not stays:
                self.need_of(FULL, 9)

    def start_backup_of(self, prompt, at_most):
        copied = {entry for copy in self.copies.values() if copy.reads for entry in copy.reads.path[copy.start :]}
        path = self.match(prompt)
        path = path[: self.depth(path, FULL)]
        path = path[: next((at for at, entry in enumerate(path) if entry in copied), len(path))]
        start = self.depth(path, FULL_COPY)
        path = path[: start + at_most]
        under_way = {one for copy in self.copies.values() if copy.reads for one, _ in copy.reads.checkpoints}
        wanted, left = [], PAGES[SWA_COPY]
        for one in reversed([one for one in path if one.checkpoints.keys() == {SWA}]):
            left -= len(one.checkpoints[SWA])
            if left < 0:
                break
            wanted = wanted if one in under_way else [one, *wanted]
        if len(path) == start:
            path = path[: max((path.index(one) for one in wanted), default=-1) + 1]
            start = len(path)
        reads = Reads(path, len(path), start, [(one, SWA) for one in wanted])
        demand = {FULL_COPY: len(path) - start, SWA_COPY: sum(len(one.checkpoints[SWA]) for one in wanted)}
        if start < len(path) and not self.fits({SWA_COPY: demand[SWA_COPY]}, reads):
            wanted, reads.checkpoints, demand[SWA_COPY] = [], [], 0
        before, owner, fits = self.free(), self.owner(room=False), self.fits(demand, reads)
        try:
            backup = self.cache.copies.start_backup(owner, keys_of(prompt), at_most=at_most)
        except CapacityError:
            assert path
            assert not fits
            assert self.free() == before
            return None
        assert (backup is None) == (not path)
        if backup is None:
            return None
        assert fits
        sources, twins = backup.moves.get(FULL, (array([]), array([])))
        assert sources.tolist() == [entry.pages[FULL] for entry in path[start:]]
        ends_from, ends_to = backup.moves.get(SWA, (array([]), array([])))
        assert ends_from.tolist() == [page for one in wanted for page in one.checkpoints[SWA]]
        own = {FULL_COPY: twins.tolist(), SWA_COPY: ends_to.tolist()}
        self.copies[owner] = Copy(prompt, start, own, reads, backup)
        self.notice_evictions(before, demand)
        self.given(own)
        return owner

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "failed", "late"]))
    def end_copy(self, data, outcome):
        owner = data.draw(st.sampled_from(sorted(self.copies)))
        if self.copies[owner].reads:
            self.end_backup_of(owner, outcome)
        else:
            self.end_fetch_of(owner, arrives=outcome == "done")

    def end_backup_of(self, owner, outcome="done"):
        copy = self.copies.pop(owner)
        reads, moves = copy.reads, copy.backup.moves
        for space in moves if outcome == "done" else ():
            for source, twin in zip(*map(np.ndarray.tolist, moves[space]), strict=True):
                self.holds[HOST_COPIES[space], twin] = self.holds[space, source]
        if outcome == "late":
            self.book.quarantine(owner, f"worker of {owner}")
            self.late[owner] = copy
        whole = [entry for entry in reads.path if not entry.dropped]
        here = self.depth(whole, FULL_COPY)
        found = self.cache.copies.end_backup(copy.backup, done=outcome == "done")
        assert found == (max(0, len(whole) - here) if outcome == "done" else 0)
        for at in range(here, len(whole)) if outcome == "done" else ():
            whole[at].pages[FULL_COPY] = copy.own[FULL_COPY][at - copy.start]
        for one, _ in reads.checkpoints if outcome == "done" else ():
            ids, copy.own[SWA_COPY] = np.split(copy.own[SWA_COPY], [len(one.checkpoints[SWA])])
            if not one.dropped and SWA_COPY not in one.checkpoints:
                one.checkpoints[SWA_COPY] = ids.tolist()
        self.forget_unread()

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def end_late(self, data):
        owner = data.draw(st.sampled_from(sorted(self.late)))
        for space, ids in self.late.pop(owner).own.items():
            for page in ids:
                self.holds[space, page] = "what came late"
        self.book.release_quarantined(owner)

    @precondition(lambda self: len(self.copies) < 3)
    @rule(prompt=PROMPTS, start=st.integers(0, 3), end=st.booleans())
    def fetch(self, prompt, start, end):
        """Pages come from elsewhere, behind what is on the host now or was to be."""
        start = min(start, len(prompt) - 1)
        owner, demand = self.owner(room=False), dict.fromkeys((FULL_COPY, *self.homes), len(prompt) - start)
        if not self.homes:
            demand[SWA_COPY] = 1
        if not self.fits(demand):
            return
        before = self.free()
        own = {space: ids.tolist() for space, ids in self.book.reserve(owner, demand).items()}
        self.copies[owner] = Copy(prompt, start, own)
        self.notice_evictions(before, demand)
        self.given(own)
        if end:
            self.end_fetch_of(owner, arrives=True)

    def end_fetch_of(self, owner, arrives):
        copy = self.copies[owner]
        if arrives:
            self.arrive(owner, copy)
        del self.copies[owner]
        self.book.free(owner)
        self.forget_unread()

    def arrive(self, owner, copy):
        own, start, prompt = copy.own, copy.start, copy.prompt
        for space in (FULL_COPY, *self.homes):
            for at, page in enumerate(own[space], start):
                self.holds[space, page] = prompt[: at + 1]
        known = self.match(prompt)
        here = self.depth(known, FULL_COPY)
        ends = {len(prompt): array(own[SWA_COPY])} if SWA_COPY in own else {}
        for page in own.get(SWA_COPY, ()):
            self.holds[SWA_COPY, page] = "end of " + prompt
        pages = {space: array(own[space]) for space in (FULL_COPY, *self.homes)}
        found = self.cache.copies.insert(owner, keys_of(prompt), start, pages, checkpoints=ends)
        assert found == (len(prompt) - here if here >= start else 0)
        for at in range(start, len(prompt)) if here >= start else ():
            entry = known[at] if at < len(known) else Entry(prompt[: at + 1])
            if at >= len(known):
                self.entries.append(entry)
            for space in (FULL_COPY, *self.homes):
                entry.pages.setdefault(space, own[space][at - start])
            if at == len(prompt) - 1 and ends:
                entry.checkpoints.setdefault(SWA_COPY, own[SWA_COPY])

    @rule(data=st.data(), count=st.integers(1, 9))
    def need(self, data, count):
        self.need_of(data.draw(st.sampled_from(sorted(self.total))), count)

    def need_of(self, space, count):
        """Somebody needs pages for a moment."""
        demand = {space: min(count, self.available(space))}
        before, owner = self.free(), self.owner()
        self.given({space: self.book.reserve(owner, demand)[space].tolist()})
        self.book.free(owner)
        self.notice_evictions(before, demand)

    @precondition(lambda self: len(self.entries) > 4)
    @rule()
    def lose_device(self):
        """The device's memory is gone with the worker that had it."""
        self.cache.lose_device()
        for entry in self.entries:
            if FULL in entry.pages and FULL_COPY not in entry.pages:
                entry.dropped = True
            elif FULL in entry.pages and not entry.dropped:
                entry.lost = True
        self.forget_unread()

    @precondition(lambda self: len(self.entries) > 6)
    @rule()
    def drop(self):
        self.cache.drop()
        for entry in self.entries:
            entry.dropped = True
        self.forget_unread()

    @rule(prompt=PROMPTS, page=st.integers(0, 5))
    def drop_page(self, prompt, page):
        page %= len(prompt)
        self.cache.drop(Evicted.INTEGRITY, self.cache.index.match(keys_of(prompt))[page : page + 1])
        for entry in self.entries:
            entry.dropped = entry.dropped or entry.prompt.startswith(prompt[: page + 1])
        self.forget_unread()

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule()
    def a_router_hears_what_has_changed(self):
        self.router.apply(self.feed.changes())
        expected, lost = set(), {FULL, SWA}
        for entry in (entry for entry in self.entries if not entry.dropped):
            (name,) = hashes(keys_of(entry.prompt)[-1:])
            places = [(space, PAGES_OF_PROMPTS) for space in entry.pages if space != HOST]
            places += [(space, CHECKPOINTS) for space, pages in entry.checkpoints.items() if pages]
            expected |= {
                ("CPU" if space in {FULL_COPY, SWA_COPY} else "GPU", group, name)
                for space, group in places
                if not (entry.lost and space in lost)
            }
        late = Subscriber()
        late.apply(self.feed.snapshot())
        assert self.router.known == late.known == expected

    @invariant()
    def adds_up(self):
        if not hasattr(self, "book"):
            return
        check_book(self.book)
        check_cache(self.cache)
        for entry in self.entries:
            if not entry.dropped:
                record = self.index.match(keys_of(entry.prompt))[len(entry.prompt) - 1 :]
                where = {FULL: self.index.device.has(record), FULL_COPY: self.index.host.has(record)}
                assert len(record) == 1
                assert {space for space, there in where.items() if there.all()} == entry.pages.keys() - {HOST}
        assert self.book.available_pages() == {space: self.available(space) for space in self.total}
        for space, total in self.total.items():
            cached = [entry.pages[space] for entry in self.entries if space in entry.pages]
            cached += [page for entry in self.entries for page in entry.checkpoints.get(space, [])]
            everything = cached + self.owned(space)
            assert len(set(everything)) == len(everything)
            counts = self.book.counts()[space]
            assert counts[PageState.CACHED] == len(cached)
            assert counts[PageState.FREE] == total - len(everything)

    @invariant()
    def cached_pages_hold_what_their_keys_name(self):
        for entry in getattr(self, "entries", ()):
            for space, page in entry.pages.items():
                assert self.holds[space, page] == entry.prompt
            for space, pages in entry.checkpoints.items():
                assert all(self.holds[space, page] == "end of " + entry.prompt for page in pages)

    @invariant()
    def the_journal_knows_what_the_host_has(self):
        """A dropped entry is out at once, though an owner reads it."""
        expected = {}
        for entry in (entry for entry in getattr(self, "entries", ()) if not entry.dropped):
            key = keys_of(entry.prompt)[-1]
            if FULL_COPY in entry.pages:
                expected[FULL_COPY, entry.pages[FULL_COPY]] = key
            expected |= {(SWA_COPY, page): key for page in entry.checkpoints.get(SWA_COPY, [])}
        assert getattr(self, "journal", {}) == expected


TestHostCopies = CopyMachine.TestCase
TestHostCopies.settings = fewer(2, stateful_step_count=50)
