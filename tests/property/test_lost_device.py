"""Device memory that dies under rooms, backups and loads in any order: nobody is given a page that lost what it held.

The model knows of each page what it holds. Whatever a room is given has to hold what its keys name, and when everybody has let go
every page is free or holds what the cache says.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.readers import Admitted
from kvbridge.tier.twins import Backup
from tests.helpers.examples import fewer
from tests.helpers.manual_clock import ManualClock

FULL, TWIN, HOST = IndexSpace.FULL, IndexSpace.FULL_TWIN, IndexSpace.HOST
PROMPTS = st.sampled_from(["aaaa", "aab", "aa"])


def keys_of(prompt: str) -> Keys:
    return Keys.of([prompt[: end + 1].encode().ljust(16) for end in range(len(prompt))])


class LostDevice(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.book = PageBook({FULL: 12, TWIN: 10, HOST: 16})
        index = PrefixIndex((FULL, HOST), 22, has_twins=True)
        self.cache = PrefixCache(self.book, index, clock=self.clock, restores=True)
        self.holds: dict[tuple[IndexSpace, int], bytes] = {}
        """By page: what it holds; nothing after it has been lost, or given to somebody who has yet to write it."""
        self.rooms: dict[Owner, tuple[str, Admitted]] = {}
        self.copies: dict[Owner, Backup] = {}
        self.count = 0

    def owner(self, room: int) -> Owner:
        self.count += 1
        return Owner(room if room == NO_ROOM else self.count, self.count)

    @rule(prompt=PROMPTS)
    def serve_and_back_up(self, prompt: str) -> None:
        """What happens mostly."""
        owner = self.admit_one(prompt)
        if owner is not None:
            self.end_of(owner, keeps=True)
        copy = self.start_backup_of(prompt, 9)
        if copy is not None:
            self.end_backup_of(copy, done=True)

    @rule(prompt=PROMPTS)
    def admit(self, prompt: str) -> None:
        self.admit_one(prompt)

    def admit_one(self, prompt: str) -> Owner | None:
        self.clock.advance(1.0)
        owner, keys = self.owner(0), keys_of(prompt)
        try:
            got = self.cache.admit(
                owner, keys, lambda shared: {space: len(keys) - shared[space] for space in (FULL, HOST)}
            )
        except CapacityError:
            return None
        for page, key in zip(got.prefix[FULL].tolist(), keys.to_list(), strict=False):
            assert self.holds[FULL, page] == key, "a page that was lost"
        for page, key in zip(
            got.twins.get(TWIN, np.empty(0)).tolist(), keys.to_list()[got.device_pages :], strict=False
        ):
            assert self.holds[TWIN, page] == key
        for page, key in zip(got.prefix[HOST].tolist(), keys.to_list(), strict=False):
            assert self.holds[HOST, page] == key
        for space in (FULL, HOST):
            for page in got.own[space].tolist():
                self.holds.pop((space, page), None)
        self.rooms[owner] = prompt, got
        return owner

    @precondition(lambda self: self.rooms)
    @rule(data=st.data(), keeps=st.booleans())
    def end(self, data: st.DataObject, keeps: bool) -> None:
        """A room loads what is on the host only, computes the rest, keeps all of it, and lets go; or lets go at once."""
        self.end_of(data.draw(st.sampled_from(sorted(self.rooms))), keeps=keeps)

    def end_of(self, owner: Owner, *, keeps: bool) -> None:
        prompt, got = self.rooms.pop(owner)
        keys = keys_of(prompt)
        if keeps:
            loaded = got.prefix_pages - got.device_pages
            own = {FULL: got.own[FULL][loaded:], HOST: got.own[HOST]}
            named = keys.to_list()
            for page, key in zip(got.own[FULL].tolist(), named[got.device_pages :], strict=True):
                self.holds[FULL, page] = key
            for page, key in zip(own[HOST].tolist(), named[got.prefix_pages :], strict=True):
                self.holds[HOST, page] = key
            if loaded:
                self.cache.restored(owner, got.device_pages, {FULL: got.own[FULL][:loaded]})
            if len(keys) > got.prefix_pages:
                self.cache.keep(owner, keys, got.prefix_pages, own)
        self.cache.let_go(owner)
        self.book.free(owner)

    @rule(prompt=PROMPTS, at_most=st.sampled_from([1, 9]))
    def start_backup(self, prompt: str, at_most: int) -> None:
        self.start_backup_of(prompt, at_most)

    def start_backup_of(self, prompt: str, at_most: int) -> Owner | None:
        owner = self.owner(NO_ROOM)
        assert self.cache.twins is not None
        try:
            backup = self.cache.twins.start_backup(owner, keys_of(prompt), at_most=at_most)
        except CapacityError:
            return None
        if backup is None:
            return None
        self.copies[owner] = backup
        return owner

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), done=st.booleans())
    def end_backup(self, data: st.DataObject, done: bool) -> None:
        self.end_backup_of(data.draw(st.sampled_from(sorted(self.copies))), done=done)

    def end_backup_of(self, owner: Owner, *, done: bool) -> None:
        backup = self.copies.pop(owner)
        device, twins = backup.moves[FULL]
        held = [self.holds.get((FULL, page)) for page in device.tolist()]
        for twin, key in zip(twins.tolist(), held, strict=True):
            self.holds.pop((TWIN, twin), None)
            if key is not None:
                self.holds[TWIN, twin] = key
        assert self.cache.twins is not None
        self.cache.twins.end_backup(backup, done=done and None not in held)

    @rule()
    def lose_device(self) -> None:
        """Rooms on it go on until they have let go: what they write now is written to memory that is made anew."""
        self.holds = {(space, page): key for (space, page), key in self.holds.items() if space is not FULL}
        self.cache.lose_device()

    @rule(really=st.integers(0, 4))
    def drop(self, really: int) -> None:
        if not really:
            self.cache.drop()

    @invariant()
    def adds_up(self) -> None:
        self.cache.check_integrity()

    @invariant()
    def nothing_is_leaked(self) -> None:
        if not (self.rooms or self.copies):
            counts = self.book.counts()
            assert not any(counts[space][state] for space in counts for state in (PageState.HELD, PageState.LEASED))
            assert self.book.available_pages() == {FULL: 12, TWIN: 10, HOST: 16}
            for residence in self.cache.index.residences:
                assert not residence._lost_count, "lost pages of nobody"


TestLostDevice = LostDevice.TestCase
TestLostDevice.settings = fewer(2, stateful_step_count=40)
