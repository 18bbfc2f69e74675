"""What is sent to which server."""

from __future__ import annotations

import json

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.router.bodies import HOLD, Asked, HeldPrompt, paired_params


def asked(**body: object) -> Asked:
    return Asked.read("/v1/completions", json.dumps(body).encode(), {})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 200_000], ids=range(6))
def test_what_is_no_object_is_refused(content):
    with pytest.raises(InvalidInputError, match="JSON"):
        Asked.read("/v1/completions", content, {})


def test_prefill_is_asked_for_one_token_at_once():
    mine = asked(
        prompt="p", max_tokens=100, min_tokens=50, stream=True, stream_options={"include_usage": True}, temperature=0
    )
    assert mine.for_prefill(HOLD) == {
        "prompt": "p",
        "max_tokens": 1,
        "stream": False,
        "temperature": 0,
        "kv_transfer_params": dict(HOLD),
    }
    assert mine.for_decode({"a": 1}) == mine.body | {"kv_transfer_params": {"a": 1}}
    assert mine.body["min_tokens"] == 50


def test_a_chat_may_have_another_name_for_its_length():
    mine = asked(messages=[], max_completion_tokens=100, tools=[{"type": "function"}])
    sent = mine.for_prefill(HOLD)
    assert (sent["max_tokens"], sent["max_completion_tokens"]) == (1, 1)
    assert sent["tools"] == [{"type": "function"}]  # they are in the prompt
    assert "max_completion_tokens" not in asked(messages=[], max_tokens=3).for_prefill(HOLD)


def test_parameters_of_clients_are_dropped():
    mine = asked(prompt="p", kv_transfer_params={"remote_host": "10.0.0.1"})
    assert mine.for_decode(None) == {"prompt": "p"}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 400}, 101),
        ({"prompt": [1, 2, 3]}, 4),
        ({"prompt": [[1, 2, 3]]}, 4),
        ({"prompt": ["x" * 40]}, 11),
        ({"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant"}]}, 11),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url"}]}]}, 1011),
        ({"messages": "nonsense"}, 3),
        ({"messages": [None, 3, {"content": {}}]}, 2),
        ({}, 1),
    ],
)
def test_size_is_about_its_tokens(body, tokens):
    assert asked(**body).size == tokens


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "several answers"),
        ({"n": "2"}, "several answers"),
        ({"best_of": 2}, "several answers"),
        ({"use_beam_search": True}, "several answers"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"echo": True}, "the prompt's own probabilities"),
        ({"prompt_logprobs": 0}, "the prompt's own probabilities"),
        ({"n": 1, "best_of": None, "prompt": [1, 2], "echo": False, "logprobs": 3}, ""),
        ({"prompt": ["a"]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": []}, ""),
    ],
)
def test_what_one_room_cannot_serve(body, reason):
    assert asked(**body).decode_alone == reason


def test_a_room_is_a_string():
    to_prefill, to_decode = paired_params(2**53 - 1, ["somewhere"])
    assert to_prefill["kvbridge"] == {"room": "9007199254740991"}
    assert to_decode["kvbridge"] == {"room": "9007199254740991", "prefill": ["somewhere"]}


@pytest.mark.parametrize(
    ("answer", "params", "addresses"),
    [
        ({}, None, None),
        ({"kv_transfer_params": None}, None, None),
        ({"kv_transfer_params": {"remote_host": "a"}}, {"remote_host": "a"}, None),
        ({"kv_transfer_params": {"kvbridge": {"room": "7", "prefill": ["a"]}}}, ..., ["a"]),
        ({"kv_transfer_params": {"kvbridge": {"room": "7", "prefill": []}}}, ..., None),
        ({"kv_transfer_params": {"kvbridge": 3}}, ..., None),
    ],
)
def test_what_prefill_holds(answer, params, addresses):
    held = HeldPrompt.read(json.dumps(answer).encode())
    assert held.params == (answer["kv_transfer_params"] if params is ... else params)
    assert held.addresses == addresses
    assert held.is_in(7) is ('"7"' in json.dumps(answer))
    assert not held.is_in(8)


@pytest.mark.parametrize("content", [b"", b"[]", b"<html>"])
def test_an_answer_that_is_none(content):
    with pytest.raises(ValueError):  # noqa: PT011 - of the library
        HeldPrompt.read(content)
