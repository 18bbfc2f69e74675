"""Prefixes that stay, one situation at a time; tests/property/test_twins.py has them in every order."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import ConflictError, IntegrityError
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock

FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
HELD, LEASED = PageState.HELD, PageState.LEASED
PAGES = 16
A, B, C, D = (Owner(room, 1) for room in (7, 8, 9, 10))


def keys(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class Bench:
    def __init__(self) -> None:
        self.book = PageBook({FULL: PAGES, SWA: 4})
        self.clock = ManualClock()
        self.cache = PrefixCache(self.book, PrefixIndex((FULL,), PAGES), clock=self.clock)

    def admit(self, owner: Owner, name: str, pages: int, windows: int = 0, **wanted):
        self.clock.advance(1.0)
        demand = lambda prefix: {FULL: pages - prefix[FULL], SWA: windows}  # noqa: E731 - it is one
        return self.cache.admit(owner, keys(name, pages), demand, **wanted)

    def keep(self, owner: Owner, name: str, start: int, ids) -> int:
        return self.cache.keep(owner, keys(name, start + len(ids)), start, {FULL: np.array(ids, dtype=np.int32)})

    def end(self, owner: Owner) -> None:
        self.cache.let_go(owner)
        self.book.free(owner)

    def warm(self, owner: Owner, name: str, pages: int):
        ids = self.admit(owner, name, pages).own[FULL]
        assert self.keep(owner, name, 0, ids) == pages
        self.end(owner)
        return ids.tolist()

    @property
    def cached(self) -> int:
        return self.book.counts()[FULL][PageState.CACHED]


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    bench.cache.check_integrity()


@pytest.mark.parametrize("state", [LEASED, PageState.QUARANTINED])
def test_pages_whose_lease_has_not_ended_by_proof_are_not_kept(bench, state):
    ids = bench.admit(A, "a", 4).own[FULL]
    bench.book.move(A, HELD, LEASED)
    if state is not LEASED:
        bench.book.quarantine(A, "x")
    with pytest.raises(ConflictError, match=f"{state} pages cannot be cached"):
        bench.keep(A, "a", 0, ids)
    assert bench.cached == 0
    assert bench.admit(B, "a", 4).prefix_pages == 0


def test_a_key_below_pages_of_others_denies_its_prompt_nothing_before_it(bench):
    """Once it was there, nothing of the prompt was found or kept any more."""
    ids = bench.admit(A, "x", 4).own[FULL]
    strange = Keys(keys("x", 2).data + keys("a", 4)[2:].data)
    bench.cache.keep(A, strange, 0, {FULL: ids})
    bench.end(A)
    own = bench.admit(B, "a", 4).own[FULL]
    assert bench.keep(B, "a", 0, own) == 2
    assert bench.admit(C, "a", 4).prefix_pages == 2
    for owner in (B, C):
        bench.end(owner)
    assert bench.book.available_pages()[FULL] == PAGES


def test_a_prefix_without_windows_at_its_end_is_of_no_use_to_prefill(bench):
    got = bench.admit(A, "a", 6, windows=2)
    bench.keep(A, "a", 0, got.own[FULL])
    assert bench.cache.keep_checkpoint(A, 4, got.own[SWA][:1])
    assert not bench.cache.keep_checkpoint(A, 4, got.own[SWA][1:]), "there is one"
    with pytest.raises(ConflictError, match="it reads 6 pages so far"):
        bench.cache.keep_checkpoint(A, 7, got.own[SWA][1:])
    bench.end(A)
    assert bench.book.counts()[SWA][PageState.CACHED] == 1
    again = bench.admit(B, "a", 6, windows=1, from_checkpoint=True)
    assert (again.prefix_pages, again.checkpoint.tolist()) == (4, got.own[SWA][:1].tolist())
    assert bench.book.available_pages()[SWA] == 2
    assert bench.admit(C, "b", 2, from_checkpoint=True).checkpoint.size == 0
    bench.end(B)
    assert bench.book.available_pages()[SWA] == 4


def test_a_pool_that_has_been_full_for_long_still_gives_long_runs():
    book = PageBook({FULL: 4096})
    clock = ManualClock()
    cache = PrefixCache(book, PrefixIndex((FULL,), 4096), clock=clock)
    lengths = np.random.default_rng(1).integers(16, 200, size=400)
    runs = []
    for room, pages in enumerate(lengths.tolist()):
        clock.advance(1.0)
        chain, owner = keys(f"{room}", pages), Owner(room, 1)
        got = cache.admit(owner, chain, lambda prefix, pages=pages: {FULL: pages - prefix[FULL]})
        cache.keep(owner, chain, 0, got.own)
        cache.let_go(owner)
        book.free(owner)
        runs.append(1 + np.count_nonzero(np.diff(got.own[FULL]) != 1))
    cache.check_integrity()
    assert book.counts()[FULL][PageState.FREE] < 200
    assert lengths[200:].sum() / sum(runs[200:]) > 16, "pages a run"


@pytest.mark.parametrize("spoil", ["a pin too many", "a page of nobody", "a reader too many"])
def test_the_recount_finds_what_is_wrong_between_book_and_index(spoil):
    bench = Bench()
    bench.warm(A, "a", 4)
    bench.admit(B, "a", 4)
    match spoil:
        case "a pin too many":
            bench.cache.index.pin(bench.cache.index.match(keys("a", 2)))
        case "a page of nobody":
            bench.book.reserve(C, {FULL: 1})
            bench.book.cache(C, bench.book.pages(C))
        case "a reader too many":
            bench.cache._readers[C] = bench.cache._readers[B]
    with pytest.raises(IntegrityError):
        bench.cache.check_integrity()
