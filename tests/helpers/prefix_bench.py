"""A prefix cache with its page book, on a clock that tests turn."""

from collections.abc import Mapping
from itertools import count

import numpy as np

from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import Admitted, PrefixCache
from kvbridge.tier.retention import Claim
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_recount import check_cache

FULL, SWA, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.HOST
FULL_COPY, SWA_COPY = IndexSpace.FULL_COPY, IndexSpace.SWA_COPY


def keys(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class PrefixBench:
    """A node with these pages; with a host tier if `FULL_COPY` is among them, and a home if `HOST` is."""

    def __init__(self, pages: Mapping[IndexSpace, int], *, restores: bool = True, retained_share: float = 0.0) -> None:
        self.total = dict(pages)
        self.spaces = tuple(space for space in (FULL, HOST) if space in pages)
        self.book, self.clock = PageBook(self.total), ManualClock()
        records, has_copies = pages[FULL] + pages.get(FULL_COPY, 0), FULL_COPY in pages
        self.index = PrefixIndex(self.spaces, records, has_copies=has_copies, retained_share=retained_share)
        self.cache = PrefixCache(self.book, self.index, clock=self.clock, restores=restores)
        self.rooms, self.owners = count(1), count(1)

    @property
    def copies(self):
        assert self.cache.copies is not None
        return self.cache.copies

    def admit(self, name: str, pages: int, windows: int = 0, **wanted) -> tuple[Owner, Admitted]:
        self.clock.advance(1.0)
        owner = Owner(next(self.rooms), 1)
        demand = lambda shared: {space: pages - shared[space] for space in self.spaces} | {SWA: windows}  # noqa: E731
        return owner, self.cache.admit(owner, keys(name, pages), demand, **wanted)

    def keep(self, owner: Owner, name: str, start: int, ids) -> int:
        return self.cache.keep(owner, keys(name, start + len(ids)), start, {FULL: np.array(ids, dtype=np.int32)})

    def end(self, owner: Owner) -> None:
        self.cache.let_go(owner)
        self.book.free(owner)
        check_book(self.book)
        check_cache(self.cache)

    def warm(self, name: str, pages: int, claim: Claim | None = None, *, checkpoint: bool = False) -> None:
        owner, got = self.admit(name, pages, windows=int(checkpoint))
        if claim is not None:
            self.cache.retain(owner, claim)
        start = got.prefix_pages
        if start > got.device_pages:
            self.cache.restored(owner, got.device_pages, {FULL: got.own[FULL][: start - got.device_pages]})
        own = {space: got.own[space][-(pages - start) or len(got.own[space]) :] for space in self.spaces}
        self.cache.keep(owner, keys(name, pages), start, own)
        if checkpoint:
            assert self.cache.keep_checkpoint(owner, pages, got.own[SWA])
        self.end(owner)

    def new_owner(self) -> Owner:
        return Owner(NO_ROOM, next(self.owners))

    def start(self, name: str, pages: int, at_most: int = 99, **options):
        return self.copies.start_backup(self.new_owner(), keys(name, pages), at_most=at_most, **options)

    def back_up(self, name: str, pages: int) -> int:
        done = self.copies.end_backup(self.start(name, pages), done=True)
        check_book(self.book)
        check_cache(self.cache)
        return done

    def where(self, name: str, pages: int) -> tuple[int, int]:
        path = self.index.match(keys(name, pages))
        return self.index.device.depth(path), 0 if self.index.host is None else self.index.host.depth(path)

    def count(self, space: IndexSpace, *states: PageState) -> int:
        return sum(self.book.counts()[space][state] for state in states)

    def need(self, pages: int, windows: int = 0) -> None:
        owner = self.new_owner()
        self.book.reserve(owner, {FULL: pages, SWA: windows})
        self.book.free(owner)
        check_book(self.book)
        check_cache(self.cache)
