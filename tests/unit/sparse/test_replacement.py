"""How much the five classes of age lose against true LRU, by recorded and by synthetic selections."""

from collections.abc import Iterator

import numpy as np
import pytest

from kvbridge.kernels.swap_in import LayerMemory, ReferenceSwapIn, Step, SwapInShape, SwapInState
from tests.helpers.selections import load_selections

PAGE = 64


class Lru:
    """A hot buffer that always gives up what was used longest ago."""

    def __init__(self, hot_rows: int) -> None:
        self.hot_rows = hot_rows
        self._last: dict[int, int] = {}
        self._now = 0

    def step(self, rows: np.ndarray) -> int:
        """Use rows; return how many were there."""
        self._now += 1
        hits = sum(row in self._last for row in rows.tolist())
        for row in rows.tolist():
            self._last[row] = self._now
        over = len(self._last) - self.hot_rows
        if over > 0:
            for row in sorted(self._last, key=self._last.__getitem__)[:over]:
                del self._last[row]
        return hits


class Ours:
    """The real rules, by the reference; rows are 4 bytes, so that nothing but the policy takes time."""

    def __init__(self, hot_rows: int, *, max_rows: int, top_k: int) -> None:
        shape = SwapInShape(hot_rows, 2 * PAGE, max_rows, top_k, slots_per_page=PAGE, row_parts_bytes=(4,))
        self.slot_of_row = np.full((1, 1, max_rows), -1, dtype=np.int16)
        self.row_of_slot = np.full((1, 1, hot_rows), -1, dtype=np.int32)
        self.ages = np.zeros((1, 1, hot_rows // 32, 4), dtype=np.uint32)
        self.tallies = np.zeros((1, 1, 4), dtype=np.int32)
        self.pages = np.repeat(np.arange(max_rows // PAGE, dtype=np.int32)[None, :, None], 2, axis=2).copy()
        self.ring_begin = np.full(1, max_rows, dtype=np.int32)
        self.host = np.zeros((max_rows // PAGE, 4 * PAGE), dtype=np.uint8)
        self.hot = np.zeros(((hot_rows + 2 * PAGE) // PAGE, 4 * PAGE), dtype=np.uint8)
        state = SwapInState(
            1,
            *(
                array.ctypes.data
                for array in (self.slot_of_row, self.row_of_slot, self.ages, self.tallies, self.pages, self.ring_begin)
            ),
        )
        memory = LayerMemory((self.host.ctypes.data,), len(self.host), 4 * PAGE, self.hot.ctypes.data, 4 * PAGE)
        self.swap = ReferenceSwapIn(shape, state, [memory])
        self.selected = np.full((1, top_k), -1, dtype=np.int32)
        self.found = np.empty_like(self.selected)
        self.slots, self.rows = np.zeros(1, dtype=np.int32), np.full(1, max_rows, dtype=np.int32)

    def step(self, rows: np.ndarray) -> int:
        """Use rows; return how many were there."""
        self.selected.fill(-1)
        self.selected[0, : len(rows)] = rows
        before = int(self.tallies[0, 0, 1])
        step = Step(1, self.slots.ctypes.data, self.rows.ctypes.data)
        self.swap.swap_in(0, step, top_k=self.selected.ctypes.data, out=self.found.ctypes.data)
        return int(self.tallies[0, 0, 1]) - before


def hit_rate(policy: Lru | Ours, steps: list[np.ndarray]) -> float:
    """Share of the selected rows that were there, after the first eighth of the steps."""
    hits = wanted = 0
    for number, rows in enumerate(steps):
        found = policy.step(rows)
        if number >= len(steps) // 8:
            hits, wanted = hits + found, wanted + len(rows)
    return hits / wanted


def recorded(tokens: int, layer: int) -> list[np.ndarray]:
    """The selections of one layer's indexer, without rows that are in the ring."""
    top_k, rows = load_selections(tokens)
    return list(_host_rows(top_k[:, layer].astype(np.int32), rows))


def _host_rows(top_k: np.ndarray, rows: np.ndarray) -> Iterator[np.ndarray]:
    for chosen, count in zip(top_k, rows, strict=True):
        ring_start = ((count - 1) // PAGE - 1) * PAGE
        yield np.unique(chosen[(chosen >= 0) & (chosen < ring_start)])


def zipf(rows: int, k: int, steps: int, exponent: float, seed: int = 0) -> list[np.ndarray]:
    """Some rows are wanted far more often than others, always the same ones."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, rows + 1) ** exponent
    names = random.permutation(rows)
    return [names[random.choice(rows, k, replace=False, p=weights / weights.sum())] for _ in range(steps)]


def drifting(rows: int, k: int, steps: int, *, keep: float, seed: int = 0) -> list[np.ndarray]:
    """Each step keeps a share of the last one's rows."""
    random = np.random.default_rng(seed)
    now = random.choice(rows, k, replace=False)
    found = []
    for _ in range(steps):
        stay = now[random.random(len(now)) < keep]
        others = np.setdiff1d(np.arange(rows), stay)
        now = np.concatenate([stay, random.choice(others, k - len(stay), replace=False)])
        found.append(now)
    return found


def scanning(rows: int, k: int, steps: int) -> list[np.ndarray]:
    """Everything in turn, over and over: LRU's worst."""
    return [(number * k + np.arange(k)) % rows for number in range(steps)]


def changing(rows: int, k: int, steps: int, *, phases: int) -> list[np.ndarray]:
    """A skewed choice whose favourites change all at once."""
    return [step for phase in range(phases) for step in zipf(rows, k, steps // phases, 0.9, seed=phase)]


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
