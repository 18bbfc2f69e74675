"""The tokens of a prompt that was computed elsewhere are those of a server that computed it itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.vllm.fleet import CHUNK_TOKENS, DECODES, Fleet
from tests.vllm.prompts import BLOCK_TOKENS, Answer, fresh
from tests.vllm.servers import Pair, together

LENGTHS = (37, 512, 1500)
"""Less than a block; whole blocks; what prefill computes in chunks."""
ORDERS = ("plain", "paired")
"""Of asking: prefill first, or both at once under one room."""
both_orders = pytest.mark.parametrize("order", ORDERS)
pytestmark = pytest.mark.parametrize("decode", DECODES)


def assert_right(fleet: Fleet, asked: Sequence[Sequence[int]], got: Sequence[Answer]) -> None:
    wrong = [
        f"prompt of {len(one)}: {what}"
        for one, answer in zip(asked, got, strict=True)
        if (what := fleet.wrong(one, answer))
    ]
    assert not wrong, "\n".join(wrong)


class Rooms:
    """Counts rooms, so that a right answer is known to come from a transfer and not from a prompt computed again."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        pair.learn_addresses()
        self._before = pair.decode.rooms_completed()

    def assert_transferred(self, rooms: int) -> None:
        assert self._pair.decode.rooms_completed() - self._before == rooms


@both_orders
@pytest.mark.parametrize("tokens", LENGTHS)
def test_four_at_once(fleet: Fleet, decode: str, tokens: int, order: str) -> None:
    pair, asked = fleet.pair(decode), [fresh(tokens) for _ in range(8)]
    rooms = Rooms(pair)
    assert_right(
        fleet, asked, [answer for four in (asked[:4], asked[4:]) for answer in pair.ask_together(four, order=order)]
    )
    rooms.assert_transferred(8)


def test_without_a_stream(fleet: Fleet, decode: str) -> None:
    pair, asked = fleet.pair(decode), fresh(700)
    assert_right(fleet, [asked], [pair.decode.ask(asked, transfer=pair.hand_over(asked))])


def test_the_transport_is_the_one_that_was_asked_for(fleet: Fleet, decode: str) -> None:
    pair = fleet.pair(decode)
    pair.ask(fresh(100))
    peers = pair.prefill.node_status()["peers"]
    used = {name for peer in peers for names in peer["transports"].values() for name in names}
    assert decode in used


@both_orders
@pytest.mark.parametrize("tokens", [CHUNK_TOKENS, CHUNK_TOKENS + 1])
def test_around_a_chunk_of_prefill(fleet: Fleet, decode: str, tokens: int, order: str) -> None:
    pair, asked = fleet.pair(decode), fresh(tokens)
    assert_right(fleet, [asked], [pair.ask(asked, order=order)])


@both_orders
@pytest.mark.parametrize("tokens", [1, BLOCK_TOKENS, BLOCK_TOKENS + 1])
def test_around_a_block(fleet: Fleet, decode: str, tokens: int, order: str) -> None:
    pair, asked = fleet.pair(decode), fresh(tokens)
    rooms = Rooms(pair)
    assert_right(fleet, [asked], [pair.ask(asked, order=order)])
    rooms.assert_transferred(1)


@both_orders
def test_shared_system_prompts_at_once(fleet: Fleet, decode: str, order: str) -> None:
    pair = fleet.pair(decode)
    systems = [fresh(4 * BLOCK_TOKENS), fresh(3 * BLOCK_TOKENS + 40)]
    asked = [[*systems[number % 2], *fresh(60 * (1 + number))] for number in range(6)]
    assert_right(fleet, asked, pair.ask_together(asked, order=order))
    assert_right(fleet, asked, pair.ask_together(asked, order=order))


@both_orders
def test_decode_has_the_beginning_of_a_prompt(fleet: Fleet, decode: str, order: str) -> None:
    pair, first = fleet.pair(decode), fresh(600)
    pair.ask(first, order=order)
    asked = [*first[: 4 * BLOCK_TOKENS], *fresh(500)]
    hits = pair.decode.metric("vllm:prefix_cache_hits_total")
    rooms = Rooms(pair)
    assert_right(fleet, [asked], [pair.ask(asked, order=order)])
    assert pair.decode.metric("vllm:prefix_cache_hits_total") - hits >= 4 * BLOCK_TOKENS
    rooms.assert_transferred(1)


@both_orders
@pytest.mark.parametrize("tokens", [8 * BLOCK_TOKENS, 8 * BLOCK_TOKENS - 5])
def test_decode_has_all_of_a_prompt(fleet: Fleet, decode: str, tokens: int, order: str) -> None:
    pair, asked = fleet.pair(decode), fresh(tokens)
    assert_right(fleet, [asked] * 3, [pair.ask(asked, order=order) for _ in range(3)])
    assert_right(fleet, [asked] * 3, together([lambda: pair.ask(asked, order=order)] * 3))


@both_orders
def test_prefill_has_all_of_a_prompt(fleet: Fleet, decode: str, order: str) -> None:
    pair, asked = fleet.pair(decode), fresh(1000)
    pair.prefill.ask(asked, 1)
    assert_right(fleet, [asked], [pair.ask(asked, order=order)])
