"""The figures of vLLM with kvbridge beside vLLM with NixlConnector: as tables, each with its budget.

Owns: which of them are shown, and the budgets. Must not know: how they were measured, where on the page they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tests.bench.gpu.tables import Table, markdown

FASTER, SHORT_MS, AFTER_SHARE = 1.3, 2.0, 0.5
STEP_MS, REQUEST_MS = 0.1, 1.0
IDLE_CORES = 0.1
ABORT_S, GONE_S, DECODE_KILLED_S, KILLED_S, FROZEN_S = 0.1, 1.0, 5.0, 3.0, 25.0
HEADINGS = ("", "kvbridge", "NixlConnector, eased", "budget", "")


def section(results: dict[str, Any]) -> str:
    """All tables of one result; parts that were not measured are left out."""
    found = results["vllm"]
    before, after = found["load"]
    said = f"Medians and ranges of {found['turns']} turns. Load average {before:.1f} before, {after:.1f} after."
    tables = [_transfers(found["transfers"])] if "transfers" in found else []
    return "\n\n".join((said, *map(markdown, (*tables, Table("", HEADINGS, tuple(rows(found)))))))


def rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Every figure but those of transfers: what, ours, theirs, budget, and whether it is met."""
    shown: list[tuple[str, ...]] = []
    for name, tell in (
        ("short", _short),
        ("overlapped", _overlapped),
        ("neighbours", _neighbours),
        ("hooks", _hooks),
        ("idle", _idle),
        ("endings", _endings),
    ):
        if name in found:
            shown += tell(found[name])
    return shown


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median and range."""
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def times_as_fast(case: dict[str, Any]) -> float:
    """How many times as fast a load was."""
    return median(case["load_ms"]["nixl"]) / median(case["load_ms"]["kvbridge"])


def _transfers(cases: list[dict[str, Any]]) -> Table:
    shown = tuple(
        (
            f"{8.4 * -(-case['tokens'] // 128):.0f} MB",
            str(case["at_once"]),
            case["order"],
            *(spread(case["load_ms"][name]) for name in ("kvbridge", "nixl")),
            f"{times_as_fast(case):.2f}",
            f"{FASTER:g}",
            *(spread(case["first_token_ms"][name]) for name in ("kvbridge", "nixl")),
        )
        for case in cases
    )
    headings = (
        "load",
        "at once",
        "blocks",
        "kvbridge, ms",
        "NixlConnector, ms",
        "times as fast",
        "budget",
        "decode's first token: kvbridge, ms",
        "NixlConnector, ms",
    )
    return Table("", headings, shown)


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def _short(found: dict[str, Any]) -> list[tuple[str, ...]]:
    ours, theirs = (found["first_token_ms"][name] for name in ("kvbridge", "nixl"))
    return [
        (
            "decode's first token at 1 MB, plain order, ms",
            spread(ours),
            spread(theirs),
            f"eased + {SHORT_MS:g}",
            _met(median(ours) <= median(theirs) + SHORT_MS),
        ),
        ("of which the load, ms", *(spread(found["load_ms"][name]) for name in ("kvbridge", "nixl")), "", ""),
        *(_phases(found["phases_ms"]) if "phases_ms" in found else ()),
    ]


def _phases(found: dict[str, dict[str, float]]) -> list[tuple[str, ...]]:
    """Where the load goes, as the nodes saw it."""
    prefill, decode = found["prefill"], found["decode"]
    shown = {
        "of which from decode's offer until every row is accounted for": decode["offer_to_commit"],
        "of which prefill's node had the offer until all was sent": prefill["offer_to_sent"],
        "of which its rank planned": prefill["plan"],
        "of which bytes were under way": prefill["move"],
    }
    return [(f"{what}, ms", f"{value:.1f}", "", "", "") for what, value in shown.items()]


def _overlapped(found: dict[str, Any]) -> list[tuple[str, ...]]:
    ours, theirs = (found["after_prefill_ms"][name] for name in ("kvbridge", "nixl"))
    whole, their_whole = (found["first_token_ms"][name] for name in ("kvbridge", "nixl"))
    return [
        (
            "prefill's end to decode's first token at 100 MB, paired order, ms",
            spread(ours),
            spread(theirs),
            f"{AFTER_SHARE:g} x eased",
            _met(median(ours) <= AFTER_SHARE * median(theirs)),
        ),
        (
            "first token of the whole, ms",
            spread(whole),
            spread(their_whole),
            "not longer",
            _met(median(whole) <= median(their_whole)),
        ),
    ]


def _neighbours(found: dict[str, Any]) -> list[tuple[str, ...]]:
    both = [found["token_ms"][name] for name in ("kvbridge", "nixl")]
    quiet = [found["quiet_token_ms"][name] for name in ("kvbridge", "nixl")]
    shown = [
        (
            f"tokens of a stream while 100 MB arrive, {what}, ms",
            *(f"{one[key]:.1f} (quiet {calm[key]:.1f})" for one, calm in zip(both, quiet, strict=True)),
            "as eased",
            _met(both[0][key] <= 1.1 * both[1][key]),
        )
        for what, key in (("p50", "median"), ("p99", "p99"))
    ]
    ours, theirs = (found["prefill_ms"][name] for name in ("kvbridge", "nixl"))
    alone = [found["prefill_alone_ms"][name] for name in ("kvbridge", "nixl")]
    return [
        *shown,
        (
            "the next prefill of 512 tokens while 100 MB leave, ms",
            *(f"{spread(one)}, alone {median(calm):.0f}" for one, calm in zip((ours, theirs), alone, strict=True)),
            "as eased",
            _met(median(ours) <= 1.1 * median(theirs)),
        ),
    ]


def _hooks(found: dict[str, Any]) -> list[tuple[str, ...]]:
    shown = []
    for what, key, budget in (
        ("a step without work", "step_ms", STEP_MS),
        ("all hooks of one request", "request_ms", REQUEST_MS),
    ):
        for side in ("prefill", "decode"):
            ours, theirs = (found[name][side][key] for name in ("kvbridge", "nixl"))
            shown.append(
                (
                    f"hooks on {side}'s main thread, {what}, p99, ms",
                    f"{ours['p99']:.3f} (median {ours['median']:.3f})",
                    f"{theirs['p99']:.3f} (median {theirs['median']:.3f})",
                    f"{budget:g}",
                    _met(ours["p99"] <= budget),
                )
            )
    return shown


def _idle(found: dict[str, Any]) -> list[tuple[str, ...]]:
    ours, theirs = (found["cores"][name] for name in ("kvbridge", "nixl"))
    return [
        (
            "idle: cores of both servers with their children, nothing held",
            f"{ours['nothing']:.3f}",
            f"{theirs['nothing']:.3f}",
            f"{IDLE_CORES:g}",
            _met(ours["nothing"] <= IDLE_CORES),
        ),
        (
            f"the same, {found['held']} prompts held",
            f"{ours['held']:.3f}",
            f"{theirs['held']:.3f}",
            "as eased",
            _met(ours["held"] <= 1.1 * theirs["held"]),
        ),
    ]


def _endings(found: dict[str, Any]) -> list[tuple[str, ...]]:
    shown = []
    for what, key, budget in (
        ("prefill's blocks back after decode's abort, s", "abort_s", ABORT_S),
        ("after its client has left, s", "client_gone_s", GONE_S),
        ("after decode was killed, s", "decode_killed_s", DECODE_KILLED_S),
        ("a request ends whose prefill was killed, s", "killed_s", KILLED_S),
        ("whose prefill was frozen, s", "frozen_s", FROZEN_S),
    ):
        values = [_taken(found[key][name]) for name in ("kvbridge", "nixl")]
        told = [
            f"not in {found['limit_s']:g}" if None in each else spread([one for one in each if one is not None], 2)
            for each in values
        ]
        ours = [one for one in values[0] if one is not None]
        met = bool(ours) and None not in values[0] and median(ours) <= budget
        shown.append((what, *told, f"{budget:g}", _met(met)))
    return shown


def _taken(value: float | list[float | None] | None) -> list[float | None]:
    return value if isinstance(value, list) else [value]
