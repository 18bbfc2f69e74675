"""Prefixes on the device, on the host and on both, one situation at a time; tests/property/test_twins.py has every order."""

from __future__ import annotations

from itertools import count

import pytest

from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner, PageState
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


def test_what_is_backed_up_is_found_after_the_device_needed_its_pages(bench):
    ids = bench.warm("a", 5)
    backup = bench.start("a", 5)
    assert backup.moves[FULL][0].tolist() == ids
    assert backup.pages == 5
    assert bench.book.state(backup.owner) is LEASED
    assert bench.where("a", 5) == (5, 0), "its copy has not been proved done"
    assert bench.twins.end_backup(backup, done=True) == 5
    assert bench.where("a", 5) == (5, 5)
    bench.push_out()
    assert bench.where("a", 5) == (0, 5)
    owner, got = bench.admit("a", 7)
    assert (got.prefix_pages, got.device_pages, got.prefix[FULL].tolist()) == (5, 0, [])
    assert got.twins[FULL_TWIN].tolist() == backup.moves[FULL][1].tolist()
    assert len(got.own[FULL]) == 7
    assert bench.book.available_pages()[FULL_TWIN] == 16 - 5, "it reads them"
    assert bench.cache.restored(owner, 0, {FULL: got.own[FULL][:5]}) == 5
    assert bench.where("a", 7) == (5, 5)
    assert bench.book.available_pages()[FULL_TWIN] == 16
    assert bench.cache.keep(owner, keys("a", 7), 5, {FULL: got.own[FULL][5:]}) == 2
    bench.end(owner)
    assert bench.where("a", 7) == (7, 5)
