"""What sparse decode buys, as tables and a section of the page. Pure.

Owns: which figures stand beside which. Must not know: how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.gpu.comparison import Case, Results, one_case, step_budgets
from tests.bench.gpu.tables import Table, markdown, number, share

CHOICES = {"": "all rows on the device", "0 %": "nothing missing", "2 %": "2 % missing", "10 %": "10 % missing"}
CHOICES["recorded"] = "as recorded"


def sparse_tables(cases: Sequence[Case]) -> list[Table]:
    """What fits at each context, and what a step takes in each case."""
    fits = tuple(
        (
            f"{case['tokens'] // 1024}k",
            CHOICES[case["selections"]],
            str(case["batch"]),
            number(case["device_bytes"] / 1e6),
            number(case["host_bytes"] / 1e6),
            number(case["ms"]),
            number(case["tokens_s"]),
            _beside_the_device(case, cases),
        )
        for case in cases
        if case["fits"]
    )
    steps = tuple(
        (
            f"{case['tokens'] // 1024}k",
            str(case["batch"]),
            CHOICES[case["selections"]],
            f"{case['missing_percent']:.1f}" if case["way"] == "sparse" else "-",
            "yes" if case["overlapped"] else "no",
            number(case["ms"]),
            f"{number(case['least_ms'])} - {number(case['most_ms'])}",
            number(case.get("host_us")),
            number(case["tokens_s"]),
        )
        for case in cases
    )
    found = [
        Table(
            "What 80 GB for caches hold, DeepSeek-V4-Flash, one of eight GPUs",
            ("tokens", "rows", "requests", "device MB each", "host MB each", "step ms", "tokens/s", "of the device's"),
            fits,
        ),
        Table(
            "Decode steps",
            ("tokens", "batch", "rows", "missing %", "overlapped", "ms", "range", "host us", "tokens/s"),
            steps,
        ),
    ]
    return [table for table in found if table.rows]


def _beside_the_device(case: Case, cases: Sequence[Case]) -> str:
    device = next(
        (one for one in cases if one["way"] == "device" and one["fits"] and one["tokens"] == case["tokens"]), None
    )
    return share(case["tokens_s"], device["tokens_s"]) if device and case["way"] == "sparse" else "-"


def sparse_rows(results: Results) -> list[tuple[str, str, str, str]]:
    """The row of the page's table, when it was measured."""

    def of(way: str) -> Case | None:
        return one_case(
            results,
            "sparse_buys",
            lambda case: (
                case["way"] == way and case["fits"] and case["tokens"] == 131_072 and case["selections"] in {"", "2 %"}
            ),
        )

    sparse, device = of("sparse"), of("device")
    if sparse is None or device is None:
        return []
    label = "tokens a second that fit, 128k tokens, 2 % missing, a stand-in of Flash"
    ours = f"{number(sparse['tokens_s'])}, {sparse['batch']} requests"
    beside = f"all on the device {number(device['tokens_s'])}, {device['batch']} requests"
    return [(label, ours, beside, share(sparse["tokens_s"], device["tokens_s"]))]


def sparse_section(results: Results) -> str:
    """Both tables and the budget, as Markdown."""
    cases = results["parts"]["sparse_buys"]["cases"]
    budgets = tuple(
        (each.what, f"{each.measured:.2f} x", f"{each.limit:g} x", "yes" if each.met else "no")
        for each in step_budgets(cases)
    )
    parts = [f"{table.title}:\n\n{markdown(table)}" for table in sparse_tables(cases)]
    if budgets:
        parts.append(markdown(Table("", ("budget", "measured", "limit", "met"), budgets)))
    return "\n\n".join(parts)
