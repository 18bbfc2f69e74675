"""The simulated pool against least recently used pages, counted one at a time, and what long use leaves of its runs."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.cli.fit_trace import run_cache
from kvbridge.tier.keys import PrefixIdentity, page_keys

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
