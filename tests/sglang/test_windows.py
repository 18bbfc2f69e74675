"""A model with a sliding window beside full attention: two pools, two index spaces, and windows of which only the end is moved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines.fleet import CHUNK_TOKENS
from tests.engines.prompts import fresh
from tests.engines.servers import Setup
from tests.sglang.fleet import Fleet, own_fleet
from tests.sglang.servers import PAGE_TOKENS, Pair, Plan

WINDOW_TOKENS = 64
"""The window of the model (`tests/engines/models.py`)."""
CACHED = ("--disaggregation-decode-enable-radix-cache",)
"""Decode then allocates more window pages than it needs for the next token."""
PLANS = (
    Plan("single", shape="window"),
    Plan("prefill", "prefill", shape="window"),
    Plan("decode", "decode", shape="window", arguments=CACHED),
    Plan("own-prefill", "prefill", "mooncake_tcp", shape="window"),
    Plan("own-decode", "decode", "mooncake_tcp", shape="window", arguments=CACHED),
)
PAIRS = {"kvbridge": ("prefill", "decode"), "mooncake_tcp": ("own-prefill", "own-decode")}
BORDERS = (WINDOW_TOKENS, WINDOW_TOKENS + PAGE_TOKENS, CHUNK_TOKENS, CHUNK_TOKENS + WINDOW_TOKENS)
LENGTHS = (1, PAGE_TOKENS, *(border + beside for border in BORDERS for beside in (-2, -1, 0, 1)), 1500)


@pytest.fixture(scope="module")
def fleet(setup: Setup) -> Iterator[Fleet]:
    """Servers of the window model."""
    yield from own_fleet(setup, "window", PLANS)


@pytest.fixture(params=PAIRS)
def pair(fleet: Fleet, request: pytest.FixtureRequest) -> Pair:
    prefill, decode = PAIRS[request.param]
    return Pair(fleet.servers[prefill], fleet.servers[decode])


def test_prompts_around_the_window(fleet: Fleet, pair: Pair) -> None:
    asked = [fresh(tokens) for tokens in LENGTHS]
    for begin in range(0, len(asked), 6):
        fleet.assert_right(asked[begin : begin + 6], pair.ask_together(asked[begin : begin + 6]))


@pytest.mark.parametrize("shared", [2 * PAGE_TOKENS, WINDOW_TOKENS, 30 * PAGE_TOKENS + 7])
def test_prompts_with_a_beginning_that_is_known(fleet: Fleet, pair: Pair, shared: int) -> None:
    """Once to fill the caches, and once more: then both have all of each prompt."""
    begin = fresh(shared)
    asked = [[*begin, *fresh(more)] for more in (1, WINDOW_TOKENS - 1, 4 * WINDOW_TOKENS)]
    for _ in range(2):
        for one in asked:
            fleet.assert_right([one], [pair.ask(one)])
    fleet.assert_right(asked, pair.ask_together(asked))
