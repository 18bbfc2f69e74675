"""Ratios between what was measured here and what it is compared with, and the budgets of the design. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.output import cases_table, met, table

KEYS = ("hot_rows", "top_k", "batch", "miss_percent")
SWAP_LIMITS_US = {
    (4096, 512, 1, 0): 4,
    (4096, 512, 64, 0): 5,
    (4096, 512, 1, 2): 7,
    (4096, 512, 16, 2): 9,
    (4096, 512, 64, 2): 26,
    (4096, 512, 1, 100): 14,
    (4096, 2048, 1, 100): 36,
}
"""By `KEYS`: microseconds of one swap-in."""
MOST_OVER_GATHER = 1.1
LEAST_MEAN = 2.0
LEAST_OF_LINK = 0.85
Case = dict[str, Any]
Row = tuple[str, float, str, str]
"""What, measured, the budget, whether it is met."""


def with_budgets(cases: Sequence[Case], rows: Iterable[Row]) -> str:
    """Return the tables of cases and of their budgets."""
    return f"{cases_table(cases)}\n{table(('budget', 'measured', 'limit', ''), rows)}"


def at_most(what: str, measured: float, limit: float, unit: str) -> Row:
    return what, measured, f"<= {limit:g} {unit}", met(measured <= limit)


def at_least(what: str, measured: float, limit: float) -> Row:
    return what, measured, f">= {limit:g} x", met(measured >= limit)


def of_swap_ins(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        if limit := SWAP_LIMITS_US.get(tuple(case[key] for key in KEYS)):
            what = f"swap-in, k {case['top_k']}, batch {case['batch']}, {case['miss_percent']} % missing"
            yield at_most(what, case["us"], limit, "us")
    over = [case["us"] / case["bare_gather_us"] for case in cases if case["batch"] >= 16 and case["miss_percent"] >= 10]
    if over:
        what = "swap-in, batch >= 16, >= 10 % missing, over the bare gather: the worst"
        yield at_most(what, max(over), MOST_OVER_GATHER, "x")
    if faster := times_as_fast(cases):
        yield at_least("swap-in against SGLang: the worst", min(faster), 1.0)
        mean = math.exp(sum(map(math.log, faster)) / len(faster))
        yield at_least(f"swap-in against SGLang: geometric mean of {len(faster)}", mean, LEAST_MEAN)


def times_as_fast(cases: Iterable[Case]) -> list[float]:
    """Return how many times faster than SGLang's kernel each case is that they have, too (`sglang_h200.json`)."""
    measured = json.loads((Path(__file__).parent / "sglang_h200.json").read_text())["swap_in"]
    theirs_us = {tuple(case[key] for key in KEYS): case["us"] for case in measured}
    named = ((tuple(case[key] for key in KEYS), case["us"]) for case in cases)
    return [theirs_us[key] / us for key, us in named if key in theirs_us]


def of_page_copies(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        if case["pages"] == 512:
            what = f"512 scattered pages {case['way']}, layers: {case['layers']}, of a pinned copy"
            yield at_least(what, case["gb_s"] / case["link_gb_s"], LEAST_OF_LINK)


def of_transport(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        what = f"local transport, C4 of {case['tokens'] // 1024}k tokens to the host pool, of a pinned copy"
        yield at_least(what, case["gb_s"] / case["copy_gb_s"], LEAST_OF_LINK)
