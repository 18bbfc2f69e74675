"""kvbridge against SGLang's own sender and receiver, in turns: `make bench-peers`. `SGLANG` names its environment.

Two processes of SGLang (`sglang_end.py`, an environment of its own) and kvbridge's daemons run beside each other on the same cores,
both over Mooncake's TCP on loopback, both with the geometry of DeepSeek-V4-Flash; only one of the two has anything to do at a time.

- *One page*: all is computed. SGLang's clock runs from the creation of its receiver (its sender is there and polls) until `poll` of
  the receiver says Success; kvbridge's from the router's request to decode until the decode engine's `claim` has returned. What
  SGLang has in front of its scheduler, HTTP and a tokenizer, is not in it; kvbridge's HTTP is.
- *Long prompts*: both receivers wait, both senders know their pages, which are consecutive. The clock runs from the first `send`
  or `publish` until Success or the claim. Either side publishes 8,192 tokens at a time, without computing in between.

Both send a whole page of windows with every request. The bytes of both are compared before anything is measured.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench.output import spread
from tests.bench.output import table as text
from tests.bench.peers.kvbridge_pair import LAYOUT, PAGE_TOKENS, Crossed, KvbridgePair, kvbridge_pair
from tests.bench.peers.sglang_pair import SglangPair

SGLANG = Path(os.environ.get("SGLANG", "out/peers/sglang"))
TURNS, ONE_PAGE_TURNS = 7, 40
PAGES, ROOMS = 1024, 4
LENGTHS_TOKENS = (8_192, 32_768, 131_072)
WARM_UP = 2
LONG_BUDGET, ONE_PAGE_BUDGET = 1.5, 2.0
"""kvbridge so many times as fast."""


def run(*, quick: bool) -> dict[str, Any]:
    """Measure milliseconds and bytes."""
    turns, one_page_turns = (1, 2) if quick else (TURNS, ONE_PAGE_TURNS)
    with (
        tempfile.TemporaryDirectory(prefix="kvb-peers-") as folder,
        SglangPair(SGLANG / "bin" / "python", Path(folder), PAGES) as theirs,
        kvbridge_pair(PAGES, ROOMS) as ours,
    ):
        theirs.connect()
        cases = [_one_page(ours, theirs, one_page_turns)]
        cases += [_long(ours, theirs, tokens, turns) for tokens in LENGTHS_TOKENS]
    return {"layout": LAYOUT, "sglang": _versions(), "cases": cases}


def _versions() -> dict[str, str]:
    library = next((SGLANG / "lib").glob("python*/site-packages"))
    return {
        name: metadata.Distribution.at(each).version
        for name in ("sglang", "torch", "mooncake_transfer_engine_non_cuda")
        for each in library.glob(f"{name}-*.dist-info")
    }


def _one_page(ours: KvbridgePair, theirs: SglangPair, turns: int) -> dict[str, Any]:
    theirs.wipe([0])
    ours.whole_request(PAGE_TOKENS, check=True)
    theirs.whole_request(0)
    theirs.check([0], [0])
    rooms, taken_s = _in_turns(lambda: ours.whole_request(PAGE_TOKENS), lambda: theirs.whole_request(0), turns)
    steps = [steps_of(room) for room in rooms]
    steps_ms = {name: _ms([each[name] for each in steps]) for name in steps[0]}
    compared = _compared(rooms, taken_s, theirs.sent_bytes(1))
    return {"shape": "one page", "tokens": PAGE_TOKENS, **compared, "budget": ONE_PAGE_BUDGET, "steps_ms": steps_ms}


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


def _long(ours: KvbridgePair, theirs: SglangPair, tokens: int, turns: int) -> dict[str, Any]:
    count = tokens // PAGE_TOKENS
    source, destination = list(range(count)), list(range(PAGES - count, PAGES))
    theirs.wipe(destination)
    ours.published_request(tokens, check=True)
    theirs.published_request(source, destination)
    theirs.check(source, destination)
    rooms, taken_s = _in_turns(
        lambda: ours.published_request(tokens), lambda: theirs.published_request(source, destination), turns
    )
    compared = _compared(rooms, taken_s, theirs.sent_bytes(count))
    return {"shape": "consecutive pages", "tokens": tokens, **compared, "budget": LONG_BUDGET}


def _in_turns(
    ours: Callable[[], Crossed], theirs: Callable[[], float], turns: int
) -> tuple[list[Crossed], list[float]]:
    both = [(ours(), theirs()) for _ in range(WARM_UP + turns)][WARM_UP:]
    return [room for room, _ in both], [taken_s for _, taken_s in both]


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * each, 3) for each in seconds]


def _compared(crossed: list[Crossed], taken_s: list[float], sglang_bytes: int) -> dict[str, Any]:
    ms = {"kvbridge": _ms([each.total_s for each in crossed]), "sglang": _ms(taken_s)}
    sent = {"kvbridge": crossed[0].bytes, "sglang": sglang_bytes}
    medians = {name: statistics.median(each) for name, each in ms.items()}
    return {
        "turns": len(taken_s),
        "operations": crossed[0].operations,
        "ms": ms,
        "bytes": sent,
        "ms_a_mb": {name: medians[name] / sent[name] * 1e6 for name in ms},
        "sglang_over_kvbridge": medians["sglang"] / medians["kvbridge"],
    }


def table(found: dict[str, Any]) -> str:
    """The result as plain text."""
    headings = ("", "tokens", "kvbridge ms", "SGLang ms", "MB of both", "ms a MB", "x as fast", "budget")
    shown = [text(headings, map(_row, found["cases"]))]
    for case in found["cases"][:1]:
        steps = ", ".join(f"{name} {statistics.median(ms):.2f}" for name, ms in case["steps_ms"].items())
        shown.append(f"{case['shape']}: {case['operations']} operations, ms: {steps}")
    return "\n".join(shown)


def _row(case: dict[str, Any]) -> tuple[object, ...]:
    sizes = " / ".join(f"{each / 1e6:.2f}" for each in case["bytes"].values())
    rates = " / ".join(f"{each:.2f}" for each in case["ms_a_mb"].values())
    times = map(spread, case["ms"].values())
    return (case["shape"], case["tokens"], *times, sizes, rates, case["sglang_over_kvbridge"], case["budget"])
