"""Ratios between what was measured here and what it is compared with. Pure.

Owns: SGLang's figures (`sglang_h200.json`), which case of theirs belongs to which of ours, means and budgets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Results = dict[str, Any]
KEYS = ("hot_rows", "top_k", "batch", "miss_percent")


@cache
def sglang() -> dict[str, Any]:
    """The figures of SGLang's kernels, with their source and conditions."""
    return dict(json.loads((Path(__file__).parent / "sglang_h200.json").read_text()))


@dataclass(frozen=True)
class SwapComparison:
    """One swap-in case beside SGLang's. Times in microseconds a call."""

    hot_rows: int
    top_k: int
    batch: int
    miss_percent: int
    us: float
    sglang_us: float
    bare_gather_us: float | None
    wrong: str

    @property
    def faster(self) -> float:
        """How many times faster than SGLang's kernel."""
        return self.sglang_us / self.us

    @property
    def over_gather(self) -> float | None:
        """How many times the bare gather's time; None where nothing is missing."""
        return self.us / self.bare_gather_us if self.bare_gather_us else None


def swap_comparisons(cases: Iterable[Case]) -> list[SwapComparison]:
    """Pair our cases with SGLang's; cases that they have not are left out."""
    theirs = {tuple(case[key] for key in KEYS): case["us"] for case in sglang()["swap_in"]}
    return [
        SwapComparison(
            **{key: case[key] for key in KEYS},
            us=case["us"],
            sglang_us=theirs[tuple(case[key] for key in KEYS)],
            bare_gather_us=case["bare_gather_us"],
            wrong=case["wrong"],
        )
        for case in cases
        if tuple(case[key] for key in KEYS) in theirs
    ]


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers; 0 of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 0.0


@dataclass(frozen=True)
class Budget:
    """A figure of the design beside what was measured."""

    what: str
    measured: float
    limit: float
    unit: str
    at_most: bool
    """Whether the limit is the most allowed, else the least."""

    @property
    def met(self) -> bool:
        """Whether it is kept."""
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


def budgets(results: Results) -> list[Budget]:
    """Every budget for which there are measurements."""
    parts = {name: part["cases"] for name, part in results["parts"].items()}
    found = [*_swap_budgets(swap_comparisons(parts.get("swap_in", [])))]
    found += _row_budgets(parts.get("copy_rows", []))
    found += _page_budgets(parts.get("copy_pages", []))
    found += _twin_budgets(parts.get("twin_copies", []))
    found += _transport_budgets(parts.get("transport", []))
    found += step_budgets(parts.get("sparse_buys", []))
    return found


_SWAP_LIMITS_US = (
    # top_k, batch, miss_percent, limit in microseconds
    (512, 1, 0, 4),
    (512, 64, 0, 5),
    (512, 1, 2, 7),
    (512, 16, 2, 9),
    (512, 64, 2, 26),
    (512, 1, 100, 14),
    (2048, 1, 100, 36),
)
MOST_OVER_GATHER = 1.1
LEAST_MEAN = 2.0
MOST_OVER_NOTHING_MISSING = 1.15
LEAST_OF_LINK = 0.85
LEAST_OF_LINK_WITH_TWINS = 0.90
_ROW_LIMITS_US = {1: 5, 64: 17}


def _swap_budgets(compared: Sequence[SwapComparison]) -> Iterable[Budget]:
    for top_k, batch, miss, limit in _SWAP_LIMITS_US:
        wanted = (4096, top_k, batch, miss)
        for case in compared:
            if (case.hot_rows, case.top_k, case.batch, case.miss_percent) == wanted:
                what = f"swap-in, k {top_k}, batch {batch}, {miss} % missing"
                yield Budget(what, case.us, limit, "us", at_most=True)
    over = [case.over_gather for case in compared if case.batch >= 16 and case.miss_percent >= 10]
    ratios = [ratio for ratio in over if ratio is not None]
    if ratios:
        what = "swap-in, batch >= 16, >= 10 % missing, over the bare gather: the worst"
        yield Budget(what, max(ratios), MOST_OVER_GATHER, "x", at_most=True)
    if compared:
        faster = [case.faster for case in compared]
        yield Budget("swap-in against SGLang: the worst", min(faster), 1.0, "x", at_most=False)
        what = f"swap-in against SGLang: geometric mean of {len(faster)}"
        yield Budget(what, geometric_mean(faster), LEAST_MEAN, "x", at_most=False)


def _row_budgets(cases: Sequence[Case]) -> Iterable[Budget]:
    for rows, limit in _ROW_LIMITS_US.items():
        for case in _matching(cases, rows=rows, order="random"):
            what = f"row backup, {rows} {'row' if rows == 1 else 'rows'}, {case['layers']} layers"
            yield Budget(what, case["us"], limit, "us", at_most=True)


def _page_budgets(cases: Sequence[Case]) -> Iterable[Budget]:
    for way in ("d2h", "h2d"):
        for case in _matching(cases, way=way, pages=512, blocks=0):
            layers = "1 layer" if case["layers"] == 1 else f"{case['layers']} layers"
            what = f"512 scattered pages {way}, {layers}, of a pinned copy"
            yield Budget(what, case["gb_s"] / case["link_gb_s"], LEAST_OF_LINK, "x", at_most=False)


def _twin_budgets(cases: Sequence[Case]) -> Iterable[Budget]:
    for backend, fewest, name in (("kernel", 8, "kernel with 4 blocks"), ("direct", 64, "copy engines, page first")):
        for way in ("backup", "load_back"):
            ratios = [
                case["gb_s"] / case["link_gb_s"]
                for case in _matching(cases, what="rate", backend=backend, way=way, space="full")
                if case["pages"] >= fewest
            ]
            if ratios:
                what = f"{way.replace('_', '-')} of Flash pages by {name}, of a pinned copy: the worst"
                yield Budget(what, min(ratios), LEAST_OF_LINK_WITH_TWINS, "x", at_most=False)
    for case in _matching(cases, what="by layer", pages=512):
        what = f"load-back of 512 pages, {case['layout']}"
        late_ms = (case["first_us"] - case["first_link_us"]) / 1e3
        yield Budget(f"{what}: first layer ready beyond its bytes", late_ms, 0.15, "ms", at_most=True)
        yield Budget(
            f"{what}: by layer, of all at once", case["whole_us"] / case["at_once_us"], 1.05, "x", at_most=True
        )
    for case in _matching(cases, what="enqueue"):
        what = f"host time to enqueue a load-back of 512 pages, {case['layout']}"
        yield Budget(what, case["us"] / 1e3, 0.1, "ms", at_most=True)
    for case in _matching(cases, what="compute"):
        larger_us = max(case["compute_us"], case["load_us"])
        what = "4k new tokens on 32k restored, of the larger of compute and load"
        yield Budget(what, case["both_us"] / larger_us, 1.1, "x", at_most=True)
        yield Budget(
            "compute beside loads, of compute alone", case["beside_us"] / case["compute_us"], 1.05, "x", at_most=True
        )


def _transport_budgets(cases: Sequence[Case]) -> Iterable[Budget]:
    for case in _matching(cases, to="host", gpus=1, layout="layer_first"):
        what = f"local transport, C4 of {case['tokens'] // 1024}k tokens to the host pool, of a pinned copy"
        yield Budget(what, case["gb_s"] / case["copy_gb_s"], LEAST_OF_LINK, "x", at_most=False)


def step_budgets(cases: Sequence[Case]) -> Iterable[Budget]:
    """A decode step with 2 % of the selected rows missing against the same with nothing missing."""
    facts = {"tokens": 131_072, "batch": 64, "way": "sparse", "overlapped": True}
    ms = {case["selections"]: case["ms"] for case in _matching(cases, **facts)}
    if "0 %" in ms and "2 %" in ms:
        what = "decode step, batch 64, 128k tokens, 2 % missing, of the same with nothing missing"
        yield Budget(what, ms["2 %"] / ms["0 %"], MOST_OVER_NOTHING_MISSING, "x", at_most=True)


def _matching(cases: Iterable[Case], **facts: Any) -> list[Case]:
    return [case for case in cases if all(case.get(key) == value for key, value in facts.items())]


def wrong_cases(results: Results) -> list[str]:
    """What delivered wrong bytes, over all parts."""
    found = []
    for name, part in results["parts"].items():
        for case in part["cases"]:
            if case.get("wrong"):
                facts = ", ".join(f"{key} {value}" for key, value in case.items() if _names_a_case(key, value))
                found.append(f"{name} ({facts}): {case['wrong']}")
    return found


def _names_a_case(key: str, value: object) -> bool:
    named = {*KEYS, "way", "pages", "layers", "rows", "order", "tokens", "to", "gpus", "layout", "backend", "what"}
    return key in named and bool(value)


def one_case(results: Results, part: str, choose: Callable[[Case], bool]) -> Case | None:
    """The first case of a part that is chosen; None when there is none."""
    cases = results["parts"].get(part, {}).get("cases", [])
    return next((case for case in cases if choose(case)), None)
