"""From a results file to tables and a picture, on any machine: `python -m tests.bench.gpu.report FILE`.

Owns: the choice of figures for `docs/performance.md`, where `tests.bench.page` writes them. The picture goes beside the results,
or where `--plot` says. With several FILES (runs on one and on more GPUs), parts of later ones replace those of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.gpu import plots
from tests.bench.gpu.comparison import (
    Case,
    Results,
    budgets,
    geometric_mean,
    one_case,
    sglang,
    swap_comparisons,
    wrong_cases,
)
from tests.bench.gpu.sparse_figures import sparse_rows
from tests.bench.gpu.tables import Table, markdown, number, part_tables, plain, share

Row = tuple[str, str, str, str]


def main() -> int:
    """Print the tables, the page's section and the budgets; draw the picture, of the host tier where that alone was measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="what the benchmark wrote")
    parser.add_argument("--plot", type=Path, help="where the picture goes (default: beside the last file)")
    given = parser.parse_args()
    results = merged([json.loads(file.read_text()) for file in given.files])
    for name, part in results["parts"].items():
        for table in part_tables(name, part["cases"]):
            print(plain(table) + "\n")
    print(plain(budget_table(results)) + "\n")
    text = section(results, given.files[-1].name)
    print(text)
    plot = given.plot or given.files[-1].with_suffix(".png")
    (plots.draw_twins if set(results["parts"]) == {"twin_copies"} else plots.draw)(results, plot)
    print(f"picture: {plot}", file=sys.stderr)
    wrong = wrong_cases(results)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def merged(runs: Sequence[Results]) -> Results:
    """One set of results: each part from the last run that measured something of it."""
    parts: dict[str, Any] = {}
    for run in runs:
        parts |= {name: part for name, part in run["parts"].items() if part["cases"]}
    return {"environment": runs[-1]["environment"], "parts": parts}


def budget_table(results: Results) -> Table:
    """The design's budgets beside what was measured."""
    rows = tuple(
        (
            budget.what,
            number(budget.measured),
            f"{'<=' if budget.at_most else '>='} {budget.limit:g} {budget.unit}",
            "met" if budget.met else "MISSED",
        )
        for budget in budgets(results)
    )
    return Table("Budgets", ("what", "measured", "budget", ""), rows)


def section(results: Results, file_name: str) -> str:
    """What the page says, in Markdown."""
    rows = tuple(row for build in ROWS for row in build(results))
    table = Table("", ("what", "kvbridge", "beside it", "ratio"), rows)
    conditions = (
        f"On {machine(results)} (`tests/bench/results/{file_name}`; every figure beside its ceiling or its peer; ratios above 1 "
        "are in favour of kvbridge). Swap-in and row backup stand beside "
        f"{sglang()['source'].replace('under these conditions', 'under the same conditions')}: 128k tokens of context, cold "
        f"caches, each request's host pages scattered.{_checked(results)}"
    )
    return f"{conditions}\n\n{markdown(table)}"


def _checked(results: Results) -> str:
    cases = [case for part in results["parts"].values() for case in part["cases"] if "wrong" in case]
    wrong = sum(bool(case["wrong"]) for case in cases)
    return f" {len(cases)} cases were compared byte by byte, {wrong} were wrong." if cases else ""


def machine(results: Results) -> str:
    """The GPUs and the processor in words."""
    environment = results["environment"]
    names = environment.get("devices", [])
    counted = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    driver = next((gpu.get("driver_version", "") for gpu in environment.get("nvidia_smi", [])), "")
    parts = [f"one {counted[0]}" if len(names) == 1 else ", ".join(counted)]
    parts += [f"driver {driver}"] if driver else []
    parts += [f"{environment['cpu_count']} cores"] if "cpu_count" in environment else []
    return ", ".join(parts)


# ------------------------------------------------------------------------------------------- rows


def _joined(values: Iterable[float | None]) -> str:
    return " / ".join(number(value) for value in values)


def _swap_row(label: str, wanted: Sequence[tuple[int, int, int]]) -> Callable[[Results], list[Row]]:
    """A row over cases (top_k, batch, miss_percent) at 4,096 hot rows, if all of them are there."""

    def build(results: Results) -> list[Row]:
        compared = {
            (case.top_k, case.batch, case.miss_percent): case
            for case in swap_comparisons(results["parts"].get("swap_in", {}).get("cases", []))
            if case.hot_rows == 4096
        }
        chosen = [compared[key] for key in wanted if key in compared]
        if len(chosen) < len(wanted):
            return []
        beside = f"SGLang {_joined(case.sglang_us for case in chosen)}"
        if any(case.bare_gather_us for case in chosen):
            beside += f"; bare gather {_joined(case.bare_gather_us for case in chosen)}"
        ours = f"{_joined(case.us for case in chosen)} us"
        return [(label, ours, beside, " / ".join(f"{case.faster:.1f} x" for case in chosen))]

    return build


def _swap_mean(results: Results) -> list[Row]:
    faster = [case.faster for case in swap_comparisons(results["parts"].get("swap_in", {}).get("cases", []))]
    if not faster:
        return []
    slower = sum(ratio < 1 for ratio in faster)
    label = f"swap-in, all {len(faster)} cases"
    verdict = f"slower in {slower}, least {min(faster):.2f} x"
    return [(label, verdict, "SGLang, geometric mean", f"{geometric_mean(faster):.1f} x")]


def _row_backup(results: Results) -> list[Row]:
    theirs = {(case["rows"], case["order"]): case["us"] for case in sglang()["row_backup"]}
    cases = [case for case in results["parts"].get("copy_rows", {}).get("cases", []) if case["order"] == "random"]
    if not cases:
        return []
    beside = [theirs[case["rows"], "random"] for case in cases]
    counts = " / ".join(f"{case['rows']:,}" for case in cases)
    label = f"backup of {counts} rows, {cases[0]['layers']} layers"
    ratios = " / ".join(f"{slow / case['us']:.1f} x" for slow, case in zip(beside, cases, strict=True))
    return [(label, f"{_joined(case['us'] for case in cases)} us", f"SGLang {_joined(beside)}", ratios)]


def _page_copies(results: Results) -> list[Row]:
    rows = []
    for way, words in (("d2h", "to the host"), ("h2d", "from the host")):
        case = one_case(results, "copy_pages", lambda one, way=way: _is(one, way=way, pages=512, layers=21, blocks=0))
        if case:
            label = f"512 scattered pages of 21 layers {words}, one launch"
            rows.append(_rates(label, case, "link_gb_s", "one pinned copy"))
    return rows


def _transfers(results: Results) -> list[Row]:
    rows = []
    for case in results["parts"].get("transport", {}).get("cases", []):
        if case["tokens"] != 131_072 or case["layout"] != "layer_first":
            continue
        from_gpus = "one GPU" if case["gpus"] == 1 else f"{case['gpus']} GPUs at once"
        to = "the shared host pool" if case["to"] == "host" else "another process's GPU memory"
        rows.append(_rates(f"local transport, C4 of 128k tokens, {from_gpus} to {to}", case, "copy_gb_s", "plain copy"))
    return rows


def _ttft(results: Results) -> list[Row]:
    cases = results["parts"].get("ttft", {}).get("cases", [])
    times = {(case["way"], case["tokens"]): case["ms"]["offer_to_first_swap_in"] for case in cases}
    lengths = [tokens for way, tokens in times if way == "direct" and ("staged", tokens) in times]
    if not lengths:
        return []
    direct, staged = ([times[way, tokens] for tokens in lengths] for way in ("direct", "staged"))
    label = f"offer to first swap-in, {' / '.join(f'{tokens // 1024}k' for tokens in lengths)} tokens, C4 straight to the host"
    ratios = " / ".join(f"{slow / fast:.2f} x" for slow, fast in zip(staged, direct, strict=True))
    return [(label, f"{_joined(direct)} ms", f"staged through decode's GPU {_joined(staged)}", ratios)]


def _digest(results: Results) -> list[Row]:
    cases = results["parts"].get("digest", {}).get("cases", [])
    if not cases:
        return []
    case = max(cases, key=lambda one: one["pages"])
    return [_rates(f"digests of {case['pages']:,} pages in GPU memory", case, "read_gb_s", "reading them")]


def _rates(label: str, case: Case, beside: str, words: str) -> Row:
    return (label, f"{number(case['gb_s'])} GB/s", f"{words} {number(case[beside])}", share(case["gb_s"], case[beside]))


def _is(case: Case, **facts: Any) -> bool:
    return all(case[key] == value for key, value in facts.items())


ROWS: tuple[Callable[[Results], list[Row]], ...] = (
    _swap_row("swap-in, k 512, nothing missing, batch 1 / 64", ((512, 1, 0), (512, 64, 0))),
    _swap_row("swap-in, k 512, 2 % missing, batch 1 / 16 / 64", ((512, 1, 2), (512, 16, 2), (512, 64, 2))),
    _swap_row("swap-in, all missing, batch 1, k 512 / 2,048", ((512, 1, 100), (2048, 1, 100))),
    _swap_row("swap-in, k 1,024, 10 % missing, batch 16 / 256", ((1024, 16, 10), (1024, 256, 10))),
    _swap_mean,
    _row_backup,
    _page_copies,
    _transfers,
    _ttft,
    sparse_rows,
    _digest,
)


if __name__ == "__main__":
    sys.exit(main())
