"""How much the five classes of age lose against true LRU, by recorded and by synthetic selections."""

from __future__ import annotations

import pytest

from tests.helpers.replacement import Lru, Ours, changing, drifting, hit_rate, recorded, scanning, zipf

MOST_LOST = 0.02
ROWS, K = 8192, 128

WORKLOADS = {
    **{
        f"recorded {tokens} layer {layer}": (lambda t=tokens, n=layer: recorded(t, n))
        for tokens, layer in ((2000, 0), (8000, 2))
    },
    "zipf 0.8": lambda: zipf(ROWS, K, 300, 0.8),
    "zipf 1.1": lambda: zipf(ROWS, K, 300, 1.1),
    "drifting 0.6": lambda: drifting(ROWS, K, 300, keep=0.6),
    "changing": lambda: changing(ROWS, K, 304, phases=8),
    "scanning": lambda: scanning(896, K, 300),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_hit_rate_is_close_to_that_of_lru(name, record_property):
    steps = WORKLOADS[name]()
    top_k = max(len(rows) for rows in steps)
    lost = {}
    for hot_rows in (128, 512, 1024):
        if hot_rows < top_k:
            continue
        lru, ours = hit_rate(Lru(hot_rows), steps), hit_rate(Ours(hot_rows, max_rows=ROWS, top_k=top_k), steps)
        lost[hot_rows] = lru - ours
        print(f"{name}: {hot_rows} hot rows: {ours:.3f}, LRU {lru:.3f}")
        record_property(f"hit_rate_{hot_rows}", f"{ours:.3f} (LRU {lru:.3f})")
    assert max(lost.values()) <= MOST_LOST, lost
