"""Ratios between what was measured here and what it is compared with, and the budgets of the design. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Case = Mapping[str, Any]
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


@dataclass(frozen=True)
class Budget:
    """A figure of the design beside what was measured."""

    what: str
    measured: float
    limit: float
    unit: str
    at_most: bool = False
    """Whether the limit is the most allowed, else the least."""

    @property
    def met(self) -> bool:
        """Tell whether it is kept."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def budgets(parts: Mapping[str, Sequence[Case]]) -> list[Budget]:
    """Return every budget for which there are measurements; `parts`: cases by the name of their part."""
    return [
        *_swap_budgets(parts.get("swap_in", ())),
        *_page_budgets(parts.get("copy_pages", ())),
        *_transport_budgets(parts.get("transport", ())),
    ]


def _swap_budgets(cases: Sequence[Case]) -> Iterator[Budget]:
    for case in cases:
        limit = SWAP_LIMITS_US.get(tuple(case[key] for key in KEYS))  # type: ignore[arg-type]
        if limit is not None:
            what = f"swap-in, k {case['top_k']}, batch {case['batch']}, {case['miss_percent']} % missing"
            yield Budget(what, case["us"], limit, "us", at_most=True)
    over = [case["us"] / case["bare_gather_us"] for case in cases if case["batch"] >= 16 and case["miss_percent"] >= 10]
    if over:
        what = "swap-in, batch >= 16, >= 10 % missing, over the bare gather: the worst"
        yield Budget(what, max(over), MOST_OVER_GATHER, "x", at_most=True)
    faster = times_as_fast(cases)
    if faster:
        yield Budget("swap-in against SGLang: the worst", min(faster), 1.0, "x")
        mean = math.exp(sum(map(math.log, faster)) / len(faster))
        yield Budget(f"swap-in against SGLang: geometric mean of {len(faster)}", mean, LEAST_MEAN, "x")


def times_as_fast(cases: Iterable[Case]) -> list[float]:
    """Return how many times faster than SGLang's kernel each case is that they have, too (`sglang_h200.json`)."""
    measured = json.loads((Path(__file__).parent / "sglang_h200.json").read_text())["swap_in"]
    theirs_us = {tuple(case[key] for key in KEYS): case["us"] for case in measured}
    named = ((tuple(case[key] for key in KEYS), case["us"]) for case in cases)
    return [theirs_us[key] / us for key, us in named if key in theirs_us]


def _page_budgets(cases: Sequence[Case]) -> Iterator[Budget]:
    for case in cases:
        if case["pages"] == 512:
            what = f"512 scattered pages {case['way']}, layers: {case['layers']}, of a pinned copy"
            yield Budget(what, case["gb_s"] / case["link_gb_s"], LEAST_OF_LINK, "x")


def _transport_budgets(cases: Sequence[Case]) -> Iterator[Budget]:
    for case in cases:
        if case["to"] == "host" and case["gpus"] == 1 and case["layout"] == "layer_first":
            what = f"local transport, C4 of {case['tokens'] // 1024}k tokens to the host pool, of a pinned copy"
            yield Budget(what, case["gb_s"] / case["copy_gb_s"], LEAST_OF_LINK, "x")
