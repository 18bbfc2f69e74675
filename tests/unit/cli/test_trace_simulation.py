"""The simulated pool against least recently used pages, counted one at a time."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.cli.trace import SimulatedCache
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


def drawn_prompts():
    rng = np.random.default_rng(3)
    for number in range(400):
        shared, own = int(rng.integers(0, 12)), int(rng.integers(1, 20))
        tokens = [*([shared] * shared), *rng.integers(100, 104, own)]
        yield float(number), page_keys(IDENTITY, tokens)


def run_cache(prompts, page_count: int, host_pages: int = 0) -> SimulatedCache:
    cache = SimulatedCache(page_count, host_pages)
    for now, keys in prompts:
        cache.request(now, keys)
    return cache


@pytest.mark.parametrize("page_count", [40, 250, 5000])
def test_hits_are_no_fewer_than_those_of_least_recently_used_pages(page_count):
    prompts = list(drawn_prompts())
    found, expected = run_cache(prompts, page_count), naive_hits(prompts, page_count)
    assert found.hit_pages >= expected > 300
    if page_count == 5000:
        assert (found.hit_pages, found.too_long) == (expected, 0)


@pytest.mark.parametrize(("page_count", "host_pages"), [(30, 100), (40, 5000), (100, 100)])
def test_a_host_tier_finds_what_a_pool_of_its_size_would(page_count, host_pages):
    """Every page is copied down when it comes, so the host alone decides what is kept; the device, what need not come back."""
    prompts = list(drawn_prompts())
    found, alone = run_cache(prompts, page_count, host_pages), run_cache(prompts, host_pages)
    assert found.hit_pages == pytest.approx(alone.hit_pages, rel=0.02)
    assert 0 < found.host_hit_pages < found.hit_pages
    assert not found.too_long
    assert found.hit_pages > run_cache(prompts, page_count).hit_pages or page_count == host_pages
