"""The tokens of a prompt that was computed elsewhere are those of a server that computed it itself."""

import pytest

from tests.engines.fleet import CHUNK_TOKENS, DECODES
from tests.engines.prompts import fresh
from tests.vllm.fleet import Fleet
from tests.vllm.servers import BLOCK_TOKENS, Pair

both_orders = pytest.mark.parametrize("order", ["plain", "paired"])
"""Prefill is asked first, or both at once under one room."""
pytestmark = pytest.mark.parametrize("decode", DECODES)
LENGTHS = {37: 4, 512: 4, 1500: 4, 1: 1, BLOCK_TOKENS: 1, BLOCK_TOKENS + 1: 1, CHUNK_TOKENS + 1: 1}
"""Around a block and around what prefill computes at a time; and how many are asked for at once."""


@both_orders
@pytest.mark.parametrize("tokens", LENGTHS)
def test_prompts_are_transferred(fleet: Fleet, decode: str, tokens: int, order: str) -> None:
    """Rooms are counted, because a prompt that was computed again gives a right answer, too."""
    pair, asked = fleet.pair(decode), [fresh(tokens) for _ in range(LENGTHS[tokens])]
    pair.learn_addresses()
    before = pair.decode.rooms_completed()
    fleet.assert_right(asked, pair.ask_together(asked, order=order))
    assert pair.decode.rooms_completed() - before == len(asked)


def test_without_a_stream_and_by_the_transport_that_was_asked_for(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(700)
    fleet.assert_right([asked], [pair.decode.ask(asked, transfer=pair.hand_over(asked))])
    peers = pair.prefill.node_status()["peers"]
    assert decode in {name for peer in peers for names in peer["transports"].values() for name in names}


def shared_system_prompts(_: Pair) -> list[list[int]]:
    systems = [fresh(4 * BLOCK_TOKENS), fresh(3 * BLOCK_TOKENS + 40)]
    return [[*systems[number % 2], *fresh(60 * (1 + number))] for number in range(6)]


def decode_has_the_beginning(pair: Pair) -> list[list[int]]:
    first = fresh(600)
    pair.ask(first)
    return [[*first[: 4 * BLOCK_TOKENS], *fresh(500)]]


def decode_has_all(pair: Pair) -> list[list[int]]:
    asked = [fresh(8 * BLOCK_TOKENS), fresh(8 * BLOCK_TOKENS - 5)]
    pair.ask_together(asked)
    return asked * 2


def prefill_has_all(pair: Pair) -> list[list[int]]:
    asked = fresh(1000)
    pair.prefill.ask(asked, 1)
    return [asked]


@both_orders
@pytest.mark.parametrize("known", [shared_system_prompts, decode_has_the_beginning, decode_has_all, prefill_has_all])
def test_what_either_side_has_already(fleet, decode, known, order):
    pair = fleet.pair(decode)
    asked = known(pair)
    hits = pair.decode.metric("vllm:prefix_cache_hits_total")
    for _ in range(2):
        fleet.assert_right(asked, pair.ask_together(asked, order=order))
    assert pair.decode.metric("vllm:prefix_cache_hits_total") - hits >= 4 * BLOCK_TOKENS
