"""Prefixes on the device, on the host and on both, one situation at a time; tests/property/test_twins.py has every order."""

from __future__ import annotations

from itertools import count

import pytest

from kvbridge.core.errors import CapacityError, ConflictError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock

FULL, SWA, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.HOST
FULL_TWIN, SWA_TWIN = IndexSpace.FULL_TWIN, IndexSpace.SWA_TWIN
LEASED, HELD, CACHED = PageState.LEASED, PageState.HELD, PageState.CACHED


def keys(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class Bench:
    """A node with a small device and a larger host; with a home if `HOST` is among its spaces."""

    def __init__(self, spaces=(FULL,), *, restores: bool = True, **pages: int) -> None:
        self.total = {FULL: 8, SWA: 4, FULL_TWIN: 16, SWA_TWIN: 4} | ({HOST: 16} if HOST in spaces else {})
        self.total |= {IndexSpace(space): count for space, count in pages.items()}
        self.book, self.clock = PageBook(self.total), ManualClock()
        self.index = PrefixIndex(spaces, self.total[FULL] + self.total[FULL_TWIN], has_twins=True)
        self.cache = PrefixCache(self.book, self.index, clock=self.clock, restores=restores)
        self.twins = self.cache.twins
        self.rooms, self.copies = count(1), count(1)

    def admit(self, name: str, pages: int, windows: int = 0, **wanted):
        self.clock.advance(1.0)
        owner = Owner(next(self.rooms), 1)
        demand = lambda shared: {space: pages - shared[space] for space in self.index.spaces} | {SWA: windows}  # noqa: E731
        return owner, self.cache.admit(owner, keys(name, pages), demand, **wanted)

    def end(self, owner: Owner) -> None:
        self.cache.let_go(owner)
        self.book.free(owner)
        self.cache.check_integrity()

    def warm(self, name: str, pages: int, *, checkpoint: bool = False) -> list[int]:
        """Have a prompt computed and kept; return its pages of `full`."""
        owner, got = self.admit(name, pages, windows=int(checkpoint))
        start = got.prefix_pages
        self.cache.restored(owner, got.device_pages, {FULL: got.own[FULL][: start - got.device_pages]})
        own = {space: got.own[space][-(pages - start) or len(got.own[space]) :] for space in self.index.spaces}
        self.cache.keep(owner, keys(name, pages), start, own)
        if checkpoint:
            assert self.cache.keep_checkpoint(owner, pages, got.own[SWA])
        self.end(owner)
        return self.index.device.pages(self.index.match(keys(name, pages)))[FULL].tolist()

    def start(self, name: str, pages: int, at_most: int = 99, **options):
        return self.twins.start_backup(Owner(NO_ROOM, next(self.copies)), keys(name, pages), at_most=at_most, **options)

    def back_up(self, name: str, pages: int) -> int:
        done = self.twins.end_backup(self.start(name, pages), done=True)
        self.cache.check_integrity()
        return done

    def fetch(self, name: str, pages: int, start: int = 0) -> list[int]:
        """Have pages come to the host from elsewhere; return those that are kept."""
        owner = Owner(NO_ROOM, next(self.copies))
        got = self.book.reserve(owner, dict.fromkeys((FULL_TWIN, *self.index.spaces[1:]), pages - start))
        new = self.twins.insert(owner, keys(name, pages), start, got)
        self.book.free(owner)
        self.cache.check_integrity()
        return got[FULL_TWIN][-new:].tolist() if new else []

    def where(self, name: str, pages: int) -> tuple[int, int]:
        """How many pages of a prompt are on the device, and how many on the host."""
        path = self.index.match(keys(name, pages))
        return self.index.device.depth(path), self.index.host.depth(path)

    def push_out(self) -> None:
        """Let something else need all of the device."""
        owner = Owner(next(self.rooms), 1)
        self.book.reserve(owner, {FULL: self.total[FULL]})
        self.book.free(owner)
        self.cache.check_integrity()


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.cache.check_integrity()


def test_pages_from_elsewhere_are_kept_only_when_they_are_the_owners_and_held(bench):
    owner, other = Owner(NO_ROOM, 90), Owner(NO_ROOM, 91)
    ids = bench.book.reserve(owner, {FULL_TWIN: 2}, state=LEASED)[FULL_TWIN]
    bench.book.reserve(other, {FULL_TWIN: 2})
    for whose in (owner, other):
        with pytest.raises(ConflictError):
            bench.twins.insert(whose, keys("a", 2), 0, {FULL_TWIN: ids})
    assert bench.where("a", 2) == (0, 0)
    bench.cache.check_integrity()


def test_those_who_wait_for_pages_hear_of_the_end_of_a_backup(bench):
    heard = []

    class Watcher:
        ending = quarantined = gone = staticmethod(lambda owner: None)
        freed = staticmethod(lambda pages: heard.append({space: count for space, count in pages.items() if count}))

    bench.warm("a", 5)
    backup = bench.start("a", 5)
    bench.book.watch(Watcher())
    bench.twins.end_backup(backup, done=True)
    assert {FULL: 5} in heard


def test_checkpoints_that_do_not_fit_on_the_host_keep_no_page_from_it():
    bench = Bench(swa_twin=2)
    for pages in (1, 2, 3):
        bench.warm("a", pages, checkpoint=True)
    assert bench.back_up("a", 3) == 3
    path = bench.index.match(keys("a", 3))
    assert bench.index.host.checkpointed(path).tolist() == [False, True, True], "the last ones"
    taken = Owner(NO_ROOM, 90)
    bench.book.reserve(taken, {SWA_TWIN: 2})
    bench.warm("b", 2, checkpoint=True)
    assert bench.back_up("b", 2) == 2
    with pytest.raises(CapacityError, match="'swa_twin' lacks 1 pages"):
        bench.start("b", 2)
    bench.book.free(taken)
    assert list(bench.start("b", 2).moves) == [SWA]
    bench.cache.check_integrity()


def test_a_reader_that_cannot_give_up_anything_for_want_of_pages_reads_what_it_read():
    bench = Bench()
    bench.warm("a", 5)
    owner, _ = bench.admit("a", 7)
    other, _ = bench.admit("a", 5)
    with pytest.raises(CapacityError):
        bench.cache.shorten(owner, 1, from_checkpoint=False)
    assert bench.cache.reads(owner) == 5
    bench.cache.check_integrity()
    bench.end(other)
    bench.cache.shorten(owner, 1, from_checkpoint=False)
    bench.end(owner)
