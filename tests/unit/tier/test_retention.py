"""Pages that requests want to keep for a while: which goes first, for how long, how many of one namespace."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.ids import IndexSpace
from kvbridge.core.prefixes import Retention
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.retention import Claim, Retentions
from tests.helpers.manual_clock import ManualClock

FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
PAGES = 12


def keys(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


def claim(priority: int, for_s: float = 30.0, namespace: str = "acme") -> Claim:
    return Claim(namespace, Retention(priority=priority, for_s=for_s))


class Bench:
    def __init__(self, share: float = 0.5) -> None:
        self.book = PageBook({FULL: PAGES, SWA: 4})
        self.clock = ManualClock()
        index = PrefixIndex((FULL,), PAGES, retained_share=share)
        self.cache = PrefixCache(self.book, index, clock=self.clock)
        self.rooms = 0

    def warm(self, name: str, pages: int, wanted: Claim | None = None, *, checkpoint: bool = False) -> None:
        """A request comes, leaves its prompt and is over."""
        self.rooms += 1
        owner = Owner(self.rooms, 1)
        prompt = keys(name, pages)
        got = self.cache.admit(owner, prompt, lambda shared: {FULL: pages - shared[FULL], SWA: int(checkpoint)})
        if wanted is not None:
            self.cache.retain(owner, wanted)
        self.cache.keep(owner, prompt, got.prefix_pages, {FULL: got.own[FULL]})
        if checkpoint:
            self.cache.keep_checkpoint(owner, pages, got.own[SWA])
        self.cache.let_go(owner)
        if owner in self.book:
            self.book.free(owner)

    def need(self, pages: int, windows: int = 0) -> None:
        """A request without keys takes so many pages and gives them back."""
        owner = Owner(1000, 1)
        self.book.reserve(owner, {FULL: pages, SWA: windows})
        self.book.free(owner)

    def known(self, name: str) -> int:
        return self.cache.known(keys(name, PAGES))


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.cache.check_integrity()


def test_a_namespace_has_its_share_and_no_more():
    bench = Bench(share=0.25)  # 3 pages
    bench.warm("a", 3, claim(1))
    bench.warm("b", 2, claim(3))
    bench.warm("c", 2, claim(1, namespace="globex"))
    assert bench.cache.retained() == {"acme": 3, "globex": 2}
    assert bench.cache.retention_refused == 1
    bench.need(7)
    assert [bench.known(name) for name in "abc"] == [3, 0, 2]
    bench.clock.advance(31.5)  # what was retained has lapsed, so there is place again
    bench.warm("d", 3, claim(3))
    assert bench.cache.retained() == {"acme": 3}
    assert bench.cache.retention_refused == 1
    bench.cache.check_integrity()


@pytest.mark.parametrize(("share", "together"), [(0.25, 6), (0.5, 6), (0.75, 9)])
def test_any_number_of_namespaces_retain_no_more_than_half_of_the_pages_or_one_s_share(share, together):
    """Whoever may name any namespace would else have a whole node retained by a few names."""
    bench = Bench(share=share)
    for number in range(PAGES // 3):
        bench.warm(f"prompt {number}", 3, claim(3, namespace=f"tenant {number}"))
    assert sum(bench.cache.retained().values()) == together
    assert bench.cache.retention_refused == (PAGES - together) // 3
    bench.cache.check_integrity()
    bench.clock.advance(31.5)
    bench.warm("again", 3, claim(3, namespace="late"))
    assert bench.cache.retained() == {"late": 3}


def test_retained_records_are_looked_at_once_a_second():
    found = Retentions(8, share=1.0)
    for record, for_s in ((0, 1.0), (1, 0.25)):
        assert found.retain(np.array([record], dtype=np.int32), 1.0, claim(1, for_s))
    assert [found.decay(now).tolist() for now in (1.0, 1.5, 2.0)] == [[], [], [0, 1]]
