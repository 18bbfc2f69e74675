"""The tokens of a prompt that was computed elsewhere are those of a server that computed it itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.fleet import CHUNK_TOKENS, DECODES
from tests.engines.prompts import fresh
from tests.sglang.fleet import Fleet
from tests.sglang.servers import PAGE_TOKENS, Pair

pytestmark = pytest.mark.parametrize("decode", DECODES)
LENGTHS = {37: 8, 512: 4, 1500: 4, 1: 1, PAGE_TOKENS: 1, PAGE_TOKENS + 1: 1, CHUNK_TOKENS + 1: 1, 3600: 1}
"""Around a page and around what prefill computes at a time; and how many are asked for at once."""


@pytest.mark.parametrize(
    "tokens", [each if each != 512 else pytest.param(each, marks=pytest.mark.sglang_short) for each in LENGTHS]
)
def test_prompts_are_transferred(fleet: Fleet, decode: str, tokens: int) -> None:
    pair, asked = fleet.pair(decode), [fresh(tokens) for _ in range(LENGTHS[tokens])]
    before = pair.decode.rooms_completed()
    fleet.assert_right(asked, pair.ask_together(asked))
    assert pair.decode.rooms_completed() - before == len(asked)


def shared_system_prompts(_: Pair) -> list[list[int]]:
    systems = [fresh(4 * PAGE_TOKENS), fresh(30 * PAGE_TOKENS + 7)]
    return [[*systems[number % 2], *fresh(60 * (1 + number))] for number in range(6)]


def prefill_has_all(pair: Pair) -> list[list[int]]:
    asked = fresh(1000)
    pair.ask(asked, 1)
    return [asked]


@pytest.mark.parametrize(
    "known", [shared_system_prompts, pytest.param(prefill_has_all, marks=pytest.mark.sglang_short)]
)
def test_what_either_side_has_already(fleet: Fleet, decode: str, known: Callable[[Pair], list[list[int]]]) -> None:
    pair = fleet.pair(decode)
    asked = known(pair)
    for _ in range(2):
        fleet.assert_right(asked, pair.ask_together(asked))
