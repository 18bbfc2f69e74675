"""Memory that SGLang gives up and takes back, with pages of one token: release and resume, and requests that are retracted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engines.fleet import CHUNK_TOKENS
from tests.engines.prompts import fresh
from tests.engines.servers import ANSWER_S, Setup, under_way, wait_until
from tests.sglang.fleet import Fleet, own_fleet
from tests.sglang.servers import Plan, Server

PLANS = (
    Plan("single", page_tokens=1),
    Plan("prefill", "prefill", page_tokens=1),
    Plan("decode", "decode", page_tokens=1, arguments=("--disaggregation-decode-enable-radix-cache",)),
)
LENGTHS = (1, 37, CHUNK_TOKENS, CHUNK_TOKENS + 1, 1500)
RETRACTED, ANSWER_TOKENS = 3, 150
"""Requests that are retracted at once, and tokens to be generated: enough to go on for two retractions."""


@pytest.fixture(scope="module")
def fleet(setup: Setup) -> Iterator[Fleet]:
    """Servers with pages of one token."""
    yield from own_fleet(setup, "memory", PLANS)


def order(server: Server, what: str, **body: Any) -> None:
    answer = httpx.post(f"http://127.0.0.1:{server.port}/{what}", json=body, timeout=ANSWER_S, trust_env=False)
    assert answer.status_code == 200, answer.text


def sleep_and_wake(server: Server) -> None:
    order(server, "release_memory_occupation", tags=["kv_cache"])
    order(server, "resume_memory_occupation", tags=["kv_cache"])


def test_pages_of_one_token(fleet: Fleet) -> None:
    """Twice, so that both sides have all of each prompt, in pages that lie wherever other requests have left some."""
    pair, asked = fleet.pair("decode"), [fresh(tokens) for tokens in LENGTHS]
    for _ in range(2):
        fleet.assert_right(asked, pair.ask_together(asked))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_memory_is_released_and_resumed(fleet: Fleet, side: str) -> None:
    """A request that comes in between waits."""
    pair, asked = fleet.pair("decode"), [fresh(200), fresh(300), fresh(600)]
    fleet.assert_right(asked[:1], [pair.ask(asked[0])])
    order(fleet.servers[side], "release_memory_occupation", tags=["kv_cache"])
    with under_way([lambda: pair.ask(asked[1])]) as results:
        other = fleet.servers["prefill" if side == "decode" else "decode"]
        wait_until(lambda: sum(other.node_status()["rooms"].values()), "the other side's room")
        order(fleet.servers[side], "resume_memory_occupation", tags=["kv_cache"])
        fleet.assert_right(asked[1:2], [results[0].result(ANSWER_S)])
    fleet.assert_right(asked, pair.ask_together(asked))


def test_retracted_requests_are_computed_again(fleet: Fleet) -> None:
    """Twice, and decode's memory is released in between: as when the weights of a model are updated in the middle of answers."""
    pair, asked = fleet.pair("decode"), [fresh(100 * (1 + number)) for number in range(RETRACTED)]
    decode = pair.decode
    calls = [lambda one=one: pair.ask(one, ANSWER_TOKENS) for one in asked]
    completed = decode.rooms_completed()
    with under_way(calls) as results:
        for attempt in (1, 2):
            wanted = completed + attempt * RETRACTED
            wait_until(lambda wanted=wanted: decode.rooms_completed() >= wanted, f"attempt {attempt} has arrived")
            order(decode, "pause_generation", mode="retract")
            sleep_and_wake(decode)
            order(decode, "continue_generation", torch_empty_cache=False)
        got = [result.result(ANSWER_S) for result in results]
    fleet.assert_right(asked, got)
    assert decode.rooms_completed() - completed == 3 * RETRACTED
