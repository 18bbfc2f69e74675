"""SGLang with kvbridge beside SGLang with its own Mooncake backend, on the same work in one run: `make bench-sglang`.

Pairs take turns on the same cores, over Mooncake's TCP. `SGLANG` names the directory of SGLang's environment.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.engines import LOOK_S, busy_s, cores, in_turn, milliseconds
from tests.bench.output import met, spread, table as text
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import ROOT, Setup, together, under_way
from tests.sglang.fleet import Fleet
from tests.sglang.servers import Pair, Plan

BACKENDS = ("kvbridge", "mooncake_tcp")
WORDS = (60, 300, 900, 3_600)
"""Tokens of a prompt."""
ANSWER_TOKENS = 32
TURNS = 15
PYTHON = Path(os.environ.get("SGLANG", ROOT / "out/sglang/venv")).absolute() / "bin/python"
WORK = ROOT / "out/sglang"
"""For models and logs."""


def run(*, quick: bool) -> dict[str, Any]:
    """Start two servers for each backend, and measure them."""
    WORK.mkdir(parents=True, exist_ok=True)
    settings = {"transports": {"order": ["mooncake"]}}
    modes = ("prefill", "decode")
    plans = [Plan(f"bench-{each}-{mode}", mode, each, settings) for each in BACKENDS for mode in modes]
    fleet = Fleet(Setup(PYTHON, WORK), plans)
    try:
        pairs = {each: Pair(*(fleet.servers[f"bench-{each}-{mode}"] for mode in modes)) for each in BACKENDS}
        return measure(pairs, 3 if quick else TURNS)
    finally:
        fleet.end()


def measure(pairs: dict[str, Pair], turns: int) -> dict[str, Any]:
    return {
        "turns": turns,
        "cases": [answers(pairs, words, turns) for words in WORDS],
        "idle": {each: cores((pair.prefill, pair.decode)) for each, pair in pairs.items()},
        "waiting": {each: waiting(pair) for each, pair in pairs.items()},
        "seconds": LOOK_S,
    }


def answers(pairs: dict[str, Pair], words: int, turns: int) -> dict[str, Any]:
    """From the request to both servers until decode's first token, between its tokens, and the processor time of all processes.

    Both backends answer the same.
    """
    first, between, busy = ({each: [] for each in pairs} for _ in range(3))
    for turn in range(turns + 1):
        asked, got = fresh(words), {}
        for each in in_turn(BACKENDS, turn):
            servers = pairs[each].prefill, pairs[each].decode
            before_s = busy_s(servers)
            answer = got[each] = streamed(pairs[each], asked)
            if turn:  # the first request of a length is slower on either side
                first[each].append(answer.first_token_s)
                between[each].append((answer.seconds - answer.first_token_s) / (ANSWER_TOKENS - 1))
                busy[each].append(busy_s(servers) - before_s)
        assert len({answer.tokens for answer in got.values()}) == 1, got
    return {
        "words": words,
        "first_token_ms": {each: milliseconds(values) for each, values in first.items()},
        "between_tokens_ms": {each: milliseconds(values) for each, values in between.items()},
        "processors_ms": {each: milliseconds(values) for each, values in busy.items()},
    }


def streamed(pair: Pair, asked: list[int]) -> Answer:
    told = pair.room()
    calls = [
        lambda: pair.prefill.ask(asked, ANSWER_TOKENS, told=told),
        lambda: pair.decode.stream(asked, ANSWER_TOKENS, told=told),
    ]
    prefilled, answer = together(calls)
    assert not prefilled.is_error, prefilled
    assert not answer.is_error, answer
    return answer


def waiting(pair: Pair) -> float:
    """Return the cores of a pair whose decode waits for a prompt that prefill has not been asked for."""
    asked, told = fresh(300), pair.room()
    with under_way([lambda: pair.decode.ask(asked, told=told)]) as (answer,):
        found = cores((pair.prefill, pair.decode))
        assert not answer.done(), answer.result()
        pair.prefill.ask(asked, told=told)
        assert not answer.result().is_error, answer.result()
    return found


WHAT = {
    "first_token_ms": "first token",
    "between_tokens_ms": "  between tokens",
    "processors_ms": f"  processors, with {ANSWER_TOKENS} tokens",
}


def table(found: dict[str, Any]) -> str:
    title = f"Medians and ranges of {found['turns']} turns; the budget is the other's best"
    return text(("", *BACKENDS, "best, times as fast", "median, times as fast", "met"), _rows(found), title)


def _rows(found: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    for case in found["cases"]:
        for key, what in WHAT.items():
            ours, theirs = (case[key][each] for each in BACKENDS)
            best, usual = min(theirs) / min(ours), median(theirs) / median(ours)
            yield f"{what}, {case['words']:,} words, ms", spread(ours), spread(theirs), best, usual, met(best >= 1)
    for what, key in (("nothing asked", "idle"), ("decode waits for one prompt", "waiting")):
        ours, theirs = (found[key][each] for each in BACKENDS)
        yield (
            f"cores of both servers with their children, {what}",
            ours,
            theirs,
            None,
            theirs / ours,
            met(ours <= theirs),
        )
