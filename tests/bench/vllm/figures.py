"""The figures of vLLM with kvbridge beside vLLM with NixlConnector: as tables, each with its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from tests.bench.output import met, spread, table
from tests.bench.vllm.pairs import CONNECTORS

FASTER, SHORT_MS, AFTER_SHARE = 1.3, 2.0, 0.5
IDLE_CORES = 0.1
Row = tuple[object, ...]


def text(found: dict[str, Any]) -> str:
    """All tables of one result."""
    title = f"Medians and ranges of {found['turns']} turns"
    rows = [row for name, tell in _ROWS.items() for row in tell(found[name])]
    return table(("", "kvbridge", "NixlConnector, eased", "budget", "met"), rows, title)


def _both(found: dict[str, list[float]]) -> tuple[str, str]:
    ours, theirs = (spread(found[name]) for name in CONNECTORS)
    return ours, theirs


def _medians(found: dict[str, list[float]]) -> tuple[float, float]:
    ours, theirs = (median(found[name]) for name in CONNECTORS)
    return ours, theirs


def _transfers(cases: list[dict[str, Any]]) -> Iterator[Row]:
    for case in cases:
        ours, theirs = _medians(case["load_ms"])
        what = f"load of {8.4 * -(-case['tokens'] // 128):.0f} MB, {case['at_once']} at once, blocks {case['order']}"
        budget = f"{FASTER:g} x as fast"
        yield f"{what}, ms", *_both(case["load_ms"]), budget, f"{theirs / ours:.2f} x"
        yield "  decode's first token, ms", *_both(case["first_token_ms"]), "", ""


def _short(found: dict[str, Any]) -> Iterator[Row]:
    ours, theirs = _medians(found["first_token_ms"])
    what = "decode's first token at 1 MB, plain order, ms"
    yield what, *_both(found["first_token_ms"]), f"eased + {SHORT_MS:g}", met(ours <= theirs + SHORT_MS)
    yield "  of which the load, ms", *_both(found["load_ms"]), "", ""
    prefill, decode = found["phases_ms"]["prefill"], found["phases_ms"]["decode"]
    yield "  of which from decode's offer to the commit, ms", decode["offer_to_commit"], "", "", ""
    for phase in ("offer_to_sent", "plan", "move"):
        yield f"  of which {phase} on prefill, ms", prefill[phase], "", "", ""


def _overlapped(found: dict[str, Any]) -> Iterator[Row]:
    what = "prefill's end to decode's first token at 100 MB, paired order, ms"
    ours, theirs = _medians(found["after_prefill_ms"])
    yield what, *_both(found["after_prefill_ms"]), f"{AFTER_SHARE:g} x eased", met(ours <= AFTER_SHARE * theirs)
    ours, theirs = _medians(found["first_token_ms"])
    yield "first token of the whole, ms", *_both(found["first_token_ms"]), "not longer", met(ours <= theirs)


def _idle(found: dict[str, Any]) -> Iterator[Row]:
    ours, theirs = (found["cores"][name] for name in CONNECTORS)
    what = "idle: cores of both servers with their children"
    shown = ours["nothing"], theirs["nothing"], IDLE_CORES, met(ours["nothing"] <= IDLE_CORES)
    yield f"{what}, nothing held", *shown
    shown = ours["held"], theirs["held"], "as eased", met(ours["held"] <= 1.1 * theirs["held"])
    yield f"{what}, {found['held']} prompts held", *shown


_ROWS: dict[str, Callable[[Any], Iterator[Row]]] = {
    "transfers": _transfers,
    "short": _short,
    "overlapped": _overlapped,
    "idle": _idle,
}
