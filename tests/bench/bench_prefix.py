"""Processor time of what admission and release ask of an index with 1M cached pages; `scattered`: worse than use leaves it."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.core.ids import IndexSpace
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.bench.output import table as text

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
PAGES = 1_000_000
SPARE = 20_000
"""Pages that come while it is measured."""
LONG, LONG_PATHS = 4096, 20
REPEATS = 20
BUDGETS_MS = {"match_pin_512": 0.15, "match_pin_4096": 1.2, "insert_512": 0.5, "evict_1000": 2.0}
BUDGET_BYTES = 300


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _times_ms(call: Callable[[int], object]) -> dict[str, float]:
    times = []
    for number in range(REPEATS):
        begun_ns = time.process_time_ns()
        call(number)
        times.append((time.process_time_ns() - begun_ns) / 1e6)
    return {"best_ms": min(times), "median_ms": statistics.median(times)}


def _filled(page_count: int, *, scattered: bool) -> tuple[PrefixIndex, list[Keys], np.ndarray, float]:
    """An index of so many pages, its long paths, pages that are not in it, and the bytes that a page takes."""
    rng = np.random.default_rng(7)
    pages = rng.permutation(page_count + SPARE).astype(np.int32)
    before = _resident_bytes()
    index = PrefixIndex([FULL, HOST], page_count + SPARE)
    if scattered:
        index.records._unused[:] = rng.permutation(page_count + SPARE)
    lengths, filled, long = [LONG] * LONG_PATHS, 0, []
    while filled < page_count:
        length = min(page_count - filled, lengths.pop() if lengths else int(rng.integers(1, 200)))
        keys, ids = Keys(rng.bytes(16 * length)), pages[filled : filled + length]
        filled += length
        index.insert(keys, 0, {FULL: ids, HOST: ids}, now=float(filled))
        if len(long) < LONG_PATHS:
            long.append(keys)
    return index, long, pages[page_count:], (_resident_bytes() - before) / page_count


def _measure(page_count: int, *, scattered: bool) -> dict[str, Any]:
    index, long, free, page_bytes = _filled(page_count, scattered=scattered)
    pinned = []

    def match_and_pin(keys: Keys) -> None:
        records = index.match(keys)
        index.pin(records)
        pinned.append(records)

    cases = {f"match_pin_{count}": _times_ms(lambda at, n=count: match_and_pin(long[at][:n])) for count in (512, LONG)}
    for records in pinned:
        index.unpin(records)
    rng = np.random.default_rng(8)
    new = [(Keys(rng.bytes(16 * 512)), free[512 * at : 512 * (at + 1)]) for at in range(REPEATS)]
    cases["insert_512"] = _times_ms(
        lambda at: index.insert(new[at][0], 0, {FULL: new[at][1], HOST: new[at][1]}, now=2.0 * page_count)
    )
    cases["evict_1000"] = _times_ms(lambda _: index.evict({FULL: 1000}))
    return {"numbers": "scattered" if scattered else "as filled", "cases": cases, "page_bytes": page_bytes}


def run(*, quick: bool) -> dict[str, Any]:
    identity = PrefixIdentity(model="m", revision="r", fingerprint="f", tokens_per_page=256)
    tokens = np.random.default_rng(9).integers(0, 129_280, 1 << 20)
    return {
        "indexes": [_measure(PAGES // 10 if quick else PAGES, scattered=scattered) for scattered in (False, True)],
        "keys_of_1m_tokens": _times_ms(lambda _: page_keys(identity, tokens)),
    }


def table(found: dict[str, Any]) -> str:
    rows = [
        (index["numbers"], name, case["best_ms"], case["median_ms"], BUDGETS_MS[name])
        for index in found["indexes"]
        for name, case in index["cases"].items()
    ]
    title = f"keys of 1M tokens: {found['keys_of_1m_tokens']['best_ms']:.1f} ms; "
    title += f"memory of a page: {found['indexes'][0]['page_bytes']:.0f} B (budget {BUDGET_BYTES})"
    return text(("numbers", "what", "best ms", "median ms", "budget ms"), rows, title)
