"""`kv_transfer_params` that no prefill server has answered: decode computes the prompt itself, and goes on serving."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.fleet import DECODES, Fleet
from tests.vllm.prompts import fresh

FORGED: dict[str, dict[str, Any]] = {
    "no endpoint": {"prefill": [{"endpoint": "x"}]},
    "no prefill node, and what the room is of": {"prefill": [], "prompt_tokens": 256},
}
NO_OBJECTS: tuple[Any, ...] = ("x", ["do_remote_prefill"])
TOO_LONG = 3_000
"""Tokens of a prompt that the API refuses; the scheduler hears of the room all the same."""


@pytest.mark.parametrize("ours", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("decode", DECODES)
def test_a_decode_server_computes_what_forged_params_are_about(decode: str, ours: dict[str, Any], fleet: Fleet) -> None:
    server = fleet.servers[decode]
    told = {"do_remote_prefill": True, "kvbridge": {"room": "42", **ours}}
    asked = fresh(300)
    answer = server.ask(asked, transfer=told)
    assert not (wrong := fleet.wrong(asked, answer)), wrong
    assert server.ask(fresh(TOO_LONG), 1, transfer=told).is_error
    fleet.wait_settled(server)
    assert server.metric("vllm:kvbridge_failures_total", code="invalid_input")


@pytest.mark.parametrize("params", NO_OBJECTS)
@pytest.mark.parametrize("decode", DECODES[:1])
def test_a_server_goes_on_after_params_that_are_no_object(decode: str, params: object, fleet: Fleet) -> None:
    """They come past the API's own checks. What their sender gets is up to vLLM."""
    server = fleet.servers[decode]
    server.ask(fresh(300), further={"vllm_xargs": {"kv_transfer_params": params}})
    fleet.wait_settled(server)
