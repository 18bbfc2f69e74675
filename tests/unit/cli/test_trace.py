"""A trace as it is read, the words for a wrong one, and its simulated pool against least recently used pages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvbridge.cli.fit import SimulatedCache, read_trace
from kvbridge.core.errors import InvalidInputError
from kvbridge.tier.keys import PrefixIdentity, page_keys
from tests.helpers.traces import trace_line, write_trace


def refused(path, **wanted) -> str:
    with pytest.raises(InvalidInputError) as caught:
        read_trace(path, **wanted)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_all_of_it_in_order_or_a_part_of_it(tmp_path):
    path = write_trace(tmp_path / "t.jsonl", 5)
    requests = read_trace(path)
    assert [request.timestamp for request in requests] == [0, 50, 100, 150, 200]
    assert (requests[2].input_length, requests[2].output_length, requests[2].hash_ids) == (1000, 7, (0, 2))
    path.write_text(path.read_text() + "rubbish\n")
    assert len(read_trace(path, count=5)) == 5, "no more is looked at"
    assert "line 6" in refused(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 0}, "input_length"),
        ({"input_length": 1 << 40}, "input_length"),
        (
            {"output_length": "many"},
            "output_length: Input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
        ({"timestamp": 1e999}, "timestamp"),
        ({"timestamp": 49}, "timestamp 49 comes after 50"),
        ({"hash_ids": [1, -2]}, "hash_ids.1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, changes, words):
    path = write_trace(tmp_path / "t.jsonl", 2)
    path.write_text(path.read_text() + json.dumps(trace_line(2, **changes)) + "\n")
    told = refused(path)
    assert "line 3" in told
    assert words in told


def test_what_is_missing_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    for content, words in (
        (b'{"timestamp": 1, "output_length": 3}\n', "line 1: has no 'input_length'"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"", "has 0 requests, 1 are asked for"),
    ):
        path.write_bytes(content)
        assert words in refused(path)
    assert "No such file" in refused(tmp_path / "none")
    short = write_trace(tmp_path / "short", 3)
    assert "has 3 requests, 4 are asked for" in refused(short, count=4)


# ---------------------------------------------------------------------------------------------- the simulation

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
