"""kvbridge against SGLang's own sender and receiver, in turns: `make bench-peers`. `SGLANG` names its environment.

Both go over Mooncake's TCP on loopback with the geometry of DeepSeek-V4-Flash; the bytes of both are compared first.

- *One page*: from the creation of SGLang's receiver until Success; from the router's request to decode until the claim returns.
- *Long prompts*: from the first `send` or `publish` until Success or the claim, 8,192 tokens at a time.

SGLang sends a whole page of windows with every request, kvbridge from `layer_first` pools only live rows: times for each MB stand
beside. Pages are consecutive, or in runs of 8 on kvbridge's side and single on SGLang's, as pools in use give them.
"""

import os
import statistics
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.output import spread, table as text
from tests.bench.peers.kvbridge_pair import LAYOUT, PAGE_TOKENS, Crossed, KvbridgePair, kvbridge_pair
from tests.bench.peers.sglang_pair import Pages, SglangPair

SGLANG = Path(os.environ.get("SGLANG", "out/sglang/venv"))
TURNS, ONE_PAGE_TURNS = 7, 40
PAGES = 1024
LENGTHS_TOKENS = (8_192, 32_768, 131_072)
WARM_UP = 2


@dataclass(frozen=True)
class Shape:
    """Where the pages of long prompts are."""

    name: str
    kvbridge_run: int
    """Pages in a run on kvbridge's side; 0: consecutive."""
    sglang_run: int
    budget: float
    """kvbridge so many times as fast."""


SHAPES = (Shape("consecutive pages", 0, 0, 1.5), Shape("pools in use", 8, 1, 3.0))
ONE_PAGE_BUDGET = 2.0
FEW_PAGES, FEW_ROOMS = 16, 4
"""The pair that sends single pages only."""


def sglang_pages(tokens: int, run: int, rng: np.random.Generator) -> tuple[Pages, Pages]:
    """Pages of both SGLang's pools: consecutive, or every second run of so many in a drawn order, so that no two runs touch."""
    count = tokens // PAGE_TOKENS
    if not run:
        return list(range(count)), list(range(PAGES - count, PAGES))
    sides = []
    for _ in range(2):
        firsts = rng.permutation(PAGES // (2 * run))[: count // run] * (2 * run)
        sides.append((firsts[:, None] + np.arange(run)).ravel().tolist())
    return sides[0], sides[1]


def run(*, quick: bool) -> dict[str, Any]:
    """Measure: milliseconds and bytes. The one page is measured with both layouts of kvbridge's pools."""
    turns, one_page_turns = (1, 2) if quick else (TURNS, ONE_PAGE_TURNS)
    rooms = PAGES // min(shape.kvbridge_run for shape in SHAPES if shape.kvbridge_run) + 2
    with (
        tempfile.TemporaryDirectory(prefix="kvb-peers-") as folder,
        SglangPair(SGLANG / "bin" / "python", Path(folder), PAGES) as theirs,
        kvbridge_pair(PAGES, rooms, LAYOUT) as ours,
    ):
        theirs.connect()
        (other,) = {"layer_first", "page_first"} - {LAYOUT}
        with kvbridge_pair(FEW_PAGES, FEW_ROOMS, other) as others:
            one_page = _one_page({LAYOUT: ours, other: others}, theirs, one_page_turns)
        long = [case for shape in SHAPES for case in _long(ours, theirs, shape, turns)]
    return {"turns": turns, "layout": LAYOUT, "sglang": _versions(), "one_page": one_page, "long": long}


def _versions() -> dict[str, str]:
    library = next((SGLANG / "lib").glob("python*/site-packages"))
    return {
        name: metadata.Distribution.at(each).version
        for name in ("sglang", "torch", "mooncake_transfer_engine_non_cuda")
        for each in library.glob(f"{name}-*.dist-info")
    }


def _one_page(pairs: dict[str, KvbridgePair], theirs: SglangPair, turns: int) -> list[dict[str, Any]]:
    theirs.wipe([0])
    crossed = {layout: [ours.whole_request(PAGE_TOKENS, check=True)] for layout, ours in pairs.items()}
    taken_s = [theirs.whole_request(0)]
    theirs.check([0], [0])
    for _ in range(WARM_UP + turns):
        for layout, ours in pairs.items():
            crossed[layout].append(ours.whole_request(PAGE_TOKENS))
            taken_s.append(theirs.whole_request(0))
    found = []
    for layout, rooms in crossed.items():
        steps = [steps_of(room) for room in rooms[-turns:]]
        found.append(
            {
                "shape": f"one page, {layout}",
                "tokens": PAGE_TOKENS,
                "turns": turns,
                "operations": rooms[-1].operations,
                "steps_ms": {name: _ms([each[name] for each in steps]) for name in steps[0]},
                **_compared(rooms[-turns:], taken_s[-turns * len(pairs) :], theirs.sent_bytes(1)),
                "budget": ONE_PAGE_BUDGET,
            }
        )
    return found


def steps_of(room: Crossed) -> dict[str, float]:
    """Seconds of a one-page request, one after the other; together all of it."""
    told = room.phases_s
    return {
        "request": room.total_s - told["admit_to_commit"] - told["commit_to_claim"],
        "admission": told["admit_to_offer"],
        "offer_to_order": told["offer_to_order"],
        "plan": told["plan"],
        "submit": told["first_byte"] - told["plan"],
        "move": told["move"],
        "rank": told["offer_to_sent"] - told["offer_to_order"] - told["first_byte"] - told["move"],
        "nodes": told["offer_to_commit"] - told["offer_to_sent"],
        "claim": told["commit_to_claim"],
    }


def _long(ours: KvbridgePair, theirs: SglangPair, shape: Shape, turns: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(7)
    cases = []
    with ours.used(shape.kvbridge_run) if shape.kvbridge_run else nullcontext():
        for tokens in LENGTHS_TOKENS:
            source, destination = sglang_pages(tokens, shape.sglang_run, rng)
            theirs.wipe(destination)
            crossed = [ours.published_request(tokens, check=True)]
            taken_s = [theirs.published_request(source, destination)]
            theirs.check(source, destination)
            for _ in range(turns):
                crossed.append(ours.published_request(tokens))
                taken_s.append(theirs.published_request(source, destination))
            crossed, taken_s = crossed[-turns:], taken_s[-turns:]
            cases.append(
                {
                    "shape": shape.name,
                    "tokens": tokens,
                    "pages_in_a_run": {
                        "kvbridge": statistics.median(each.pages_in_a_run for each in crossed),
                        "sglang": shape.sglang_run or len(source),
                    },
                    "operations": crossed[0].operations,
                    **_compared(crossed, taken_s, theirs.sent_bytes(len(source))),
                    "budget": shape.budget,
                }
            )
    return cases


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]


def _compared(crossed: list[Crossed], taken_s: list[float], sglang_bytes: int) -> dict[str, Any]:
    ms = {"kvbridge": _ms([each.total_s for each in crossed]), "sglang": _ms(taken_s)}
    sent = {"kvbridge": crossed[0].bytes, "sglang": sglang_bytes}
    medians = {name: statistics.median(each) for name, each in ms.items()}
    return {
        "ms": ms,
        "bytes": sent,
        "ms_a_mb": {name: medians[name] / sent[name] * 1e6 for name in ms},
        "sglang_over_kvbridge": medians["sglang"] / medians["kvbridge"],
    }


def table(found: dict[str, Any]) -> str:
    headings = ("", "tokens", "kvbridge ms", "SGLang ms", "MB of both", "ms a MB", "x as fast", "budget")
    rows = map(_row, [*found["one_page"], *found["long"]])
    lines = [text(headings, rows)]
    for case in found["one_page"]:
        steps = ", ".join(f"{name} {statistics.median(ms):.2f}" for name, ms in case["steps_ms"].items())
        lines.append(f"{case['shape']}: {case['operations']} operations, ms: {steps}")
    return "\n".join(lines)


def _row(case: dict[str, Any]) -> tuple[object, ...]:
    sizes = " / ".join(f"{each / 1e6:.2f}" for each in case["bytes"].values())
    rates = " / ".join(f"{each:.2f}" for each in case["ms_a_mb"].values())
    times = map(spread, case["ms"].values())
    return (case["shape"], case["tokens"], *times, sizes, rates, case["sglang_over_kvbridge"], case["budget"])
