"""The simulated pool against least recently used pages, counted one at a time, and what long use leaves of its runs."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.cli.fit_trace import CacheRun, run_cache
from kvbridge.tier.keys import PrefixIdentity, page_keys
from kvbridge.tier.victims import Victims

IDENTITY = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=1)


def naive_hits(prompts, page_count: int) -> int:
    used: dict[bytes, float] = {}
    hits = 0
    for now, keys in prompts:
        listed = keys.to_list()
        hit = next((at for at, key in enumerate(listed) if key not in used), len(listed))
        hits += hit
        for at, key in enumerate(reversed(listed)):
            used[key] = now + at * 1e-6  # the end of a prompt goes before its beginning
        for key in sorted(used, key=used.__getitem__)[: max(0, len(used) - page_count)]:
            del used[key]
    return hits


@pytest.mark.parametrize("page_count", [40, 100, 250, 5000])
def test_hits_are_no_fewer_than_those_of_least_recently_used_pages(page_count):
    rng = np.random.default_rng(3)
    prompts = []
    for number in range(400):
        shared, own = int(rng.integers(0, 12)), int(rng.integers(1, 20))
        tokens = [*([shared] * shared), *rng.integers(100, 104, own)]
        prompts.append((float(number), page_keys(IDENTITY, tokens)))
    found = run_cache(prompts, page_count)
    expected = naive_hits(prompts, page_count)
    assert found.hit_pages >= expected > 300
    if page_count == 5000:
        assert found.hit_pages == expected
        assert (found.evicted_pages, found.late_pages, found.too_long) == (0, 0, 0)
    else:
        assert found.evicted_pages
        assert found.late_pages >= found.late_runs


@pytest.mark.parametrize(("page_count", "host_pages"), [(30, 100), (40, 250), (40, 5000), (100, 100)])
def test_a_host_tier_finds_what_a_pool_of_its_size_would(page_count, host_pages):
    """Every page is copied down when it comes, so the host alone decides what is kept; the device, what need not come back."""
    rng = np.random.default_rng(3)
    prompts = []
    for number in range(400):
        shared, own = int(rng.integers(0, 12)), int(rng.integers(1, 20))
        tokens = [*([shared] * shared), *rng.integers(100, 104, own)]
        prompts.append((float(number), page_keys(IDENTITY, tokens)))
    found = run_cache(prompts, page_count, host_pages=host_pages)
    alone = run_cache(prompts, host_pages)
    assert found.hit_pages == pytest.approx(alone.hit_pages, rel=0.02)
    assert 0 < found.host_hit_pages < found.hit_pages
    assert not found.too_long
    small = run_cache(prompts, page_count)
    assert found.hit_pages > small.hit_pages or page_count == host_pages


def conversations(turns: int) -> CacheRun:
    """Sixty conversations at a time, each turn after some others, through a pool that holds about half of them."""
    rng = np.random.default_rng(5)
    talks, prompts = [], []
    for number in range(turns):
        if len(talks) < 60:
            talks.append([1000 + number] * 3)
        talk = talks[int(rng.integers(len(talks)))]
        talk += [2 + number] * int(rng.geometric(0.06))
        prompts.append((float(number), page_keys(IDENTITY, talk)))
        if rng.random() < 0.3:
            talks.remove(talk)
    return run_cache(prompts, 2000)


@pytest.mark.slow
def test_a_pool_that_has_long_been_full_still_has_runs(monkeypatch):
    found = conversations(3000)
    monkeypatch.setattr(Victims, "_neighbours", lambda *_: [])
    by_age = conversations(3000)
    assert found.hit_pages >= 0.99 * by_age.hit_pages > 10_000
    assert found.late_pages / found.late_runs > 1.5 * by_age.late_pages / by_age.late_runs
