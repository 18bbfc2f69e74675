"""Prefixes that stay, one situation at a time; tests/property/test_host_copies.py has them in every order."""

import numpy as np
import pytest

from kvbridge.core.errors import CapacityError, ConflictError
from kvbridge.core.prefixes import Retention
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.retention import Claim, Retentions
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_bench import FULL, FULL_COPY, SWA, SWA_COPY, PrefixBench, keys
from tests.helpers.prefix_recount import check_cache

CACHED, HELD, LEASED = PageState.CACHED, PageState.HELD, PageState.LEASED
PAGES = 16
WITH_HOST = {FULL: 8, SWA: 4, FULL_COPY: 16, SWA_COPY: 4}


@pytest.fixture
def bench():
    bench = PrefixBench({FULL: PAGES, SWA: 4})
    yield bench
    check_cache(bench.cache)


@pytest.fixture
def tier():
    tier = PrefixBench(WITH_HOST)
    yield tier
    check_cache(tier.cache)


@pytest.mark.parametrize("state", [LEASED, PageState.QUARANTINED])
def test_pages_whose_lease_has_not_ended_by_proof_are_not_kept(bench, state):
    owner, got = bench.admit("a", 4)
    bench.book.move(owner, HELD, LEASED)
    if state is not LEASED:
        bench.book.quarantine(owner, "x")
    with pytest.raises(ConflictError, match=f"{state} pages cannot be cached"):
        bench.keep(owner, "a", 0, got.own[FULL])
    assert bench.count(FULL, CACHED) == 0
    assert bench.admit("a", 4)[1].prefix_pages == 0


def test_a_key_below_pages_of_others_denies_its_prompt_nothing_before_it(bench):
    """Once it was there, nothing of the prompt was found or kept any more."""
    first, got = bench.admit("x", 4)
    bench.cache.keep(first, Keys(keys("x", 2).data + keys("a", 4)[2:].data), 0, {FULL: got.own[FULL]})
    bench.end(first)
    second, got = bench.admit("a", 4)
    assert bench.keep(second, "a", 0, got.own[FULL]) == 2
    third, got = bench.admit("a", 4)
    assert got.prefix_pages == 2
    for owner in (second, third):
        bench.end(owner)
    assert bench.book.available_pages()[FULL] == PAGES


def test_a_prefix_without_windows_at_its_end_is_of_no_use_to_prefill(bench):
    first, got = bench.admit("a", 6, windows=2)
    bench.keep(first, "a", 0, got.own[FULL])
    assert bench.cache.keep_checkpoint(first, 4, got.own[SWA][:1])
    assert not bench.cache.keep_checkpoint(first, 4, got.own[SWA][1:]), "there is one"
    with pytest.raises(ConflictError, match="reads 6 pages so far"):
        bench.cache.keep_checkpoint(first, 7, got.own[SWA][1:])
    bench.end(first)
    assert bench.count(SWA, CACHED) == 1
    second, again = bench.admit("a", 6, windows=1, from_checkpoint=True)
    assert (again.prefix_pages, again.checkpoint.tolist()) == (4, got.own[SWA][:1].tolist())
    assert bench.book.available_pages()[SWA] == 2
    assert bench.admit("b", 2, from_checkpoint=True)[1].checkpoint.size == 0
    bench.end(second)
    assert bench.book.available_pages()[SWA] == 4


def test_a_pool_that_has_been_full_for_long_still_gives_long_runs():
    book, clock = PageBook({FULL: 4096}), ManualClock()
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
    check_cache(cache)
    assert book.counts()[FULL][PageState.FREE] < 200
    assert lengths[200:].sum() / sum(runs[200:]) > 16, "pages a run"


def test_pages_from_elsewhere_are_kept_only_when_they_are_the_owners_and_held(tier):
    owner, other = Owner(NO_ROOM, 90), Owner(NO_ROOM, 91)
    ids = tier.book.reserve(owner, {FULL_COPY: 2}, state=LEASED)[FULL_COPY]
    tier.book.reserve(other, {FULL_COPY: 2})
    for whose in (owner, other):
        with pytest.raises(ConflictError):
            tier.copies.insert(whose, keys("a", 2), 0, {FULL_COPY: ids})
    assert tier.where("a", 2) == (0, 0)


def test_those_who_wait_for_pages_hear_of_the_end_of_a_backup(tier):
    heard = []

    class Watcher:
        ending = quarantined = gone = staticmethod(lambda owner: None)
        freed = staticmethod(lambda pages: heard.append({space: count for space, count in pages.items() if count}))

    tier.warm("a", 5)
    backup = tier.start("a", 5)
    tier.book.watchers.append(Watcher())
    tier.copies.end_backup(backup, done=True)
    assert {FULL: 5} in heard


def test_checkpoints_that_do_not_fit_on_the_host_keep_no_page_from_it():
    tier = PrefixBench(WITH_HOST | {SWA_COPY: 2})
    for pages in (1, 2, 3):
        tier.warm("a", pages, checkpoint=True)
    assert tier.back_up("a", 3) == 3
    path = tier.index.match(keys("a", 3))
    assert tier.index.host.checkpointed(path).tolist() == [False, True, True], "the last ones"
    taken = Owner(NO_ROOM, 90)
    tier.book.reserve(taken, {SWA_COPY: 2})
    tier.warm("b", 2, checkpoint=True)
    assert tier.back_up("b", 2) == 2
    with pytest.raises(CapacityError, match="'swa_twin' lacks 1 pages"):
        tier.start("b", 2)
    tier.book.free(taken)
    assert list(tier.start("b", 2).moves) == [SWA]
    check_cache(tier.cache)


def test_a_reader_that_cannot_give_up_anything_for_want_of_pages_reads_what_it_read(tier):
    tier.warm("a", 5)
    owner, _ = tier.admit("a", 7)
    other, _ = tier.admit("a", 5)
    with pytest.raises(CapacityError):
        tier.cache.shorten(owner, 1, from_checkpoint=False)
    assert tier.cache.reads(owner) == 5
    check_cache(tier.cache)
    tier.end(other)
    tier.cache.shorten(owner, 1, from_checkpoint=False)
    tier.end(owner)


def claim(priority: int, for_s: float = 30.0, namespace: str = "acme") -> Claim:
    return Claim(namespace, Retention(priority=priority, for_s=for_s))


def retaining(share: float) -> PrefixBench:
    return PrefixBench({FULL: 12, SWA: 4}, retained_share=share)


def test_a_namespace_has_its_share_and_no_more():
    bench = retaining(0.25)  # 3 pages
    bench.warm("a", 3, claim(1))
    bench.warm("b", 2, claim(3))
    bench.warm("c", 2, claim(1, namespace="globex"))
    assert bench.cache.retained() == {"acme": 3, "globex": 2}
    assert bench.cache.retention_refused == 1
    bench.need(7)
    assert [bench.cache.known(keys(name, 12)) for name in "abc"] == [3, 0, 2]
    bench.clock.advance(31.5)  # what was retained has lapsed, so there is place again
    bench.warm("d", 3, claim(3))
    assert bench.cache.retained() == {"acme": 3}
    assert bench.cache.retention_refused == 1


@pytest.mark.parametrize(("share", "together"), [(0.25, 6), (0.5, 6), (0.75, 9)])
def test_any_number_of_namespaces_retain_no_more_than_half_of_the_pages_or_one_s_share(share, together):
    """Whoever may name any namespace would else have a whole node retained by a few names."""
    bench = retaining(share)
    for number in range(4):
        bench.warm(f"prompt {number}", 3, claim(3, namespace=f"tenant {number}"))
    assert sum(bench.cache.retained().values()) == together
    assert bench.cache.retention_refused == (12 - together) // 3
    bench.clock.advance(31.5)
    bench.warm("again", 3, claim(3, namespace="late"))
    assert bench.cache.retained() == {"late": 3}


def test_retained_records_are_looked_at_once_a_second():
    found = Retentions(8, share=1.0)
    for record, for_s in ((0, 1.0), (1, 0.25)):
        assert found.retain(np.array([record], dtype=np.int32), 1.0, claim(1, for_s))
    assert [found.decay(now).tolist() for now in (1.0, 1.5, 2.0)] == [[], [], [0, 1]]
