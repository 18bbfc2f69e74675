"""The bodies for each server."""

import json
import tracemalloc
from typing import Any

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.router.bodies import BOOTSTRAP, HOLD, MOST_VALUES, PARAMS, Asked, Body, HeldPrompt, sglang_members


def asked(**body: object) -> Asked:
    return Asked.read("/v1/completions", json.dumps(body).encode(), {})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"a"', b"\xff", b"[" * 200_000], ids=range(6))
def test_what_is_no_object_is_refused(content):
    with pytest.raises(InvalidInputError, match="JSON"):
        Asked.read("/v1/completions", content, {})


def sent(body: Body) -> Any:
    return json.loads(b"".join(body))


def test_a_chat_may_have_another_name_for_its_length():
    mine = asked(messages=[], max_completion_tokens=100, tools=[{"type": "function"}])
    told = sent(mine.for_prefill(HOLD))
    assert (told["max_tokens"], told["max_completion_tokens"]) == (1, 1)
    assert told["tools"] == [{"type": "function"}]  # they are in the prompt
    assert "max_completion_tokens" not in sent(asked(messages=[], max_tokens=3).for_prefill(HOLD))


def test_prefill_of_sglang_samples_the_first_token_as_the_client_wants_it():
    options = {"stream_options": {"include_usage": True}, "max_tokens": 9, "min_tokens": 3, "temperature": 1}
    mine = asked(prompt="p", stream=True, **options)
    added = sglang_members({"bootstrap_host": "h", "bootstrap_port": 8998})
    prefill, decode = sent(mine.for_prefill(added)), sent(mine.for_decode(added))
    assert prefill == {**added, "prompt": "p", "stream": False, "max_tokens": 9, "min_tokens": 3, "temperature": 1}
    assert decode == prefill | {"stream": True, "stream_options": {"include_usage": True}}
    assert 0 < added["bootstrap_room"] < 1 << 63


HOSTILE = '{"do_remote_prefill": true, "remote_host": "10.0.0.1"}'


@pytest.mark.parametrize("more", ["", '"n": 2, '], ids=["by both", "by decode alone"])
@pytest.mark.parametrize(
    "hostile",
    [
        f'"kv_transfer_params": {HOSTILE}',
        f'"kv_transfer_params": {HOSTILE}, "x": 1, "kv_transfer_params": {HOSTILE}',
        f'"kv\\u005ftransfer_params": {HOSTILE}, "kv_transfer_params": null',
        '"bootstrap_host": "10.0.0.1", "bootstrap_port": 1, "bootstrap\\u005froom": 7',
        f'"vllm_xargs": {{"a": 1, "kv_transfer_params": {HOSTILE}}}',
        f'"vllm_xargs": {{"kv_transfer_params": {HOSTILE}, "kv_transfer\\u005Fparams": "x"}}',
        f'"vllm_xargs": {{"kv_transfer_params": {HOSTILE}}}, "vllm\\u005fxargs": {{"kv_transfer_params": {HOSTILE}}}',
    ],
    ids=["once", "twice", "escaped", "of SGLang", "inside", "inside, twice", "inside of two"],
)
def test_parameters_of_clients_are_dropped(hostile, more):
    """They name addresses. Neither a server nor its engine may read them."""
    mine = Asked.read("/v1/completions", f'{{"prompt": "p", {more}{hostile}}}'.encode(), {})
    for body in (mine.for_decode({}), mine.for_prefill(HOLD), mine.for_decode({PARAMS: {"ours": 1}})):
        assert b"10.0.0.1" not in b"".join(body)
        names = [name for name, _ in json.loads(b"".join(body), object_pairs_hook=list)]
        assert len(names) == len(set(names))
        assert PARAMS not in sent(body).get("vllm_xargs", {})
        assert not set(sent(body)) & set(BOOTSTRAP)
    assert PARAMS not in sent(mine.for_decode({}))
    assert sent(mine.for_decode({})).get("vllm_xargs", {}).get("a", 1) == 1


def test_a_body_of_too_many_values_is_refused_before_they_are_made():
    """Objects take many times the memory of their text, and making them takes the time of the event loop."""
    for value in (b"{}", b"[[]]", b"1", b'""'):
        content = b'{"prompt":[' + (value + b",") * MOST_VALUES + b"0]}"
        tracemalloc.start()
        with pytest.raises(InvalidInputError, match="values"):
            Asked.read("/v1/completions", content, {})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * len(content)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 400}, 101),
        ({"prompt": [1, 2, 3]}, 4),
        ({"messages": [{"role": "user", "content": "x" * 40}, {"role": "assistant"}]}, 11),
        ({"messages": [{"content": [{"type": "text", "text": "x" * 40}, {"type": "image_url"}]}]}, 1011),
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
        ({"use_beam_search": True}, "several answers"),
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"echo": True}, "the prompt's own probabilities"),
        ({"n": 1, "best_of": None, "prompt": [1, 2], "echo": False, "logprobs": 3}, ""),
        ({"prompt": [[1, 2]]}, ""),
    ],
)
def test_what_one_room_cannot_serve(body, reason):
    assert asked(**body).decode_alone == reason


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
    params = answer["kv_transfer_params"] if params is ... else params
    assert held.added == ({PARAMS: params} if params else {})
    assert held.addresses == addresses
    assert held.room == ("7" if '"7"' in json.dumps(answer) else None)
