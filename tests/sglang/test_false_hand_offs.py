"""The right tokens or an error, when a router mixes rooms up; never the answer to another prompt."""

from __future__ import annotations

import pytest

from tests.engines.fleet import DECODES
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import together
from tests.sglang.fleet import Fleet

LIMIT_S = 60.0
pytestmark = pytest.mark.parametrize("decode", DECODES)


def test_two_prompts_share_a_room(fleet: Fleet, decode: str) -> None:
    """Prefill computes one prompt, decode is asked for another one of the same length, under the same room."""
    pair, ours, theirs = fleet.pair(decode), fresh(700), fresh(700)
    told = pair.room()
    _, got = together(
        [
            lambda: pair.prefill.ask(theirs, told=told, timeout_s=LIMIT_S),
            lambda: pair.decode.ask(ours, told=told, timeout_s=LIMIT_S),
        ]
    )
    assert got.is_error, got
    fleet.assert_right([ours], [pair.ask(ours)])


def test_room_zero_is_refused(fleet: Fleet, decode: str) -> None:
    pair = fleet.pair(decode)
    answers: list[Answer] = pair.ask_both(fresh(100), told=pair.room(0), timeout_s=LIMIT_S)
    assert all(one.is_error for one in answers), answers
    assert "bootstrap_room is 0" in answers[1].reason


def test_a_room_is_used_again(fleet: Fleet, decode: str) -> None:
    """Another prompt under a room that is over: its own tokens, or an error."""
    pair, first, second = fleet.pair(decode), fresh(300), fresh(300)
    told = pair.room()
    fleet.assert_right([first], [pair.ask_both(first, told=told)[1]])
    again = pair.ask_both(second, told=told, timeout_s=LIMIT_S)[1]
    if not again.is_error:
        fleet.assert_right([second], [again])
