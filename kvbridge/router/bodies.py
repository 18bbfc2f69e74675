"""Bodies of the OpenAI API, and the `kv_transfer_params` that each server is sent.

The client's own `kv_transfer_params` are never passed on: they name addresses, to which a decode server would connect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import InvalidInputError

Params = dict[str, Any]
"""`kv_transfer_params`."""
Body = tuple[bytes, bytes]
"""The text of an object, in two parts: the first is long, and the same in all attempts."""
PARAMS = "kv_transfer_params"
EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM gives this member to the engine as it is, and also puts the parameters there."""
OURS = "kvbridge"
"""Member of the parameters with the values of kvbridge."""
NOT_SHARED = (
    *("max_tokens", "max_completion_tokens", "stream"),
    *("stream_options", "min_tokens", "min_completion_tokens"),
)
"""Members about streams and longer answers: prefill is told otherwise, or would refuse them."""
LOOKED_AT = frozenset(
    {"prompt", "messages", "stream", "n", "best_of", "use_beam_search", "echo", "prompt_logprobs", EXTRA_ARGUMENTS}
)
MOST_VALUES = 1_500_000
"""Values in one body: they take the time of the event loop, and memory many times their length. Prompts of a million tokens, as
numbers or as texts, are below this limit."""
_OPENED = re.compile(r"[ \t\n\r]*\{[ \t\n\r]*(\})?")
_QUOTE = re.compile(r"[ \t\n\r]*\"")
_COLON = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
_FOLLOWING = re.compile(r"[ \t\n\r]*([,}])")
_END = re.compile(r"[ \t\n\r]*\Z")
_SCANNER = json.JSONDecoder()
TEXT_BYTES_PER_TOKEN = 4
OTHER_PART_TOKENS = 1_000
"""Estimate for a picture, or anything else that is no text."""

HOLD: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    # Connectors other than ours ask for these.
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""To prefill, in plain order."""


@dataclass(frozen=True)
class Asked:
    """A client's request. Its body is kept as it came, in parts, and not as objects, which take many times as much."""

    path: str
    headers: Mapping[str, str]
    """Headers that are passed on."""
    shared: bytes
    """The beginning of both bodies: the members that both servers are sent."""
    for_decode_only: bytes
    for_prefill_only: bytes
    stream: bool
    size: int
    """Tokens of its prompt, estimated; at least one."""
    decode_alone: str
    """Why decode computes the prompt itself; empty where prefill does.

    A room is for one request of the engine, used once, and what is loaded from it has no logits.
    """

    @classmethod
    def read(cls, path: str, content: bytes, headers: Mapping[str, str]) -> Asked:
        """Read a request. Raises InvalidInputError."""
        # They are counted in texts, too: that costs a hundredth of what reading so many of them costs.
        if len(content) > MOST_VALUES and len(content) - len(content.translate(None, b",[{")) > MOST_VALUES:
            raise InvalidInputError(
                f"the body has more than {MOST_VALUES} values: commas, brackets and braces are counted; send a shorter prompt, or "
                "a text instead of tokens"
            )
        try:
            texts, values = _members(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"the body is no JSON object: {error}") from None
        xargs = values.get(EXTRA_ARGUMENTS)
        if isinstance(xargs, dict) and PARAMS in xargs:
            del xargs[PARAMS]
            texts[EXTRA_ARGUMENTS] = json.dumps(xargs).encode()
        texts.pop(PARAMS, None)
        own = {name: texts.pop(name) for name in NOT_SHARED if name in texts}
        told = {"max_tokens": b"1", "stream": b"false"}
        if "max_completion_tokens" in own:
            told["max_completion_tokens"] = b"1"
        return cls(
            path,
            headers,
            shared=b"{" + _written(texts),
            for_decode_only=_written(own),
            for_prefill_only=_written(told),
            stream=bool(values.get("stream")),
            size=1 + _tokens(values.get("messages", values.get("prompt"))),
            decode_alone=_decode_alone(values),
        )

    def for_prefill(self, params: Mapping[str, Any]) -> Body:
        """Return what prefill is asked: the first token, at once, with the blocks held."""
        return self._body(self.for_prefill_only, params)

    def for_decode(self, params: Mapping[str, Any] | None) -> Body:
        """Return what decode is asked: what the client has asked, and where the KV cache is, unless it computes that itself."""
        return self._body(self.for_decode_only, params)

    def _body(self, own: bytes, params: Mapping[str, Any] | None) -> Body:
        ours = _written({PARAMS: json.dumps(params).encode()}) if params else b""
        rest = b",".join(filter(None, (own, ours)))
        separator = b"," if rest and len(self.shared) > 1 else b""
        return self.shared, separator + rest + b"}"


def _written(members: Mapping[str, bytes]) -> bytes:
    return b",".join(b"%s:%s" % (json.dumps(name).encode(), text) for name, text in members.items())


def _members(content: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the text of each member of an object, and the value of those that are looked at. Of equal names the last one counts.

    Raises ValueError and RecursionError.
    """
    text = content.decode(json.detect_encoding(content), "surrogatepass")
    texts: dict[str, bytes] = {}
    values: dict[str, Any] = {}
    opened = _match(_OPENED, text, 0)
    place, more = opened.end(), not opened[1]
    while more:
        name, place = json.decoder.scanstring(text, _match(_QUOTE, text, place).end())  # type: ignore[attr-defined]  # typeshed lacks it
        begin = _match(_COLON, text, place).end()
        try:
            value, end = _SCANNER.scan_once(text, begin)  # type: ignore[attr-defined]  # as above
        except StopIteration as stopped:
            raise ValueError(f"no value at character {stopped.value}") from None
        texts[name] = text[begin:end].encode("utf-8", "surrogatepass")
        if name in LOOKED_AT:
            values[name] = value
        following = _match(_FOLLOWING, text, end)
        place, more = following.end(), following[1] == ","
    _match(_END, text, place)
    return texts, values


def _match(expected: re.Pattern[str], text: str, place: int) -> re.Match[str]:
    if (found := expected.match(text, place)) is None:
        raise ValueError(f"something else is expected at character {place}")
    return found


def _decode_alone(values: Mapping[str, Any]) -> str:
    prompt = values.get("prompt")
    if any(values.get(key) not in (None, 1) for key in ("n", "best_of")) or values.get("use_beam_search"):
        return "several answers"
    if isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int):
        return "several prompts"
    if values.get("echo") or values.get("prompt_logprobs") is not None:
        return "the prompt's own probabilities"
    return ""


def paired_params(room: int, addresses: Any) -> tuple[Params, Params]:  # noqa: ANN401 - passed on as they are
    """Return the parameters for prefill and for decode under one room, a string, since many read numbers as doubles."""
    named = {"room": str(room)}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, OURS: named},
        {"do_remote_decode": False, "do_remote_prefill": True, OURS: named | {"prefill": addresses}},
    )


@dataclass(frozen=True)
class HeldPrompt:
    """The answer of prefill."""

    params: Mapping[str, Any] | None
    """For decode as they are; None: it holds nothing."""

    @classmethod
    def read(cls, content: bytes) -> HeldPrompt:
        """Read an answer. Raises ValueError when it is none."""
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")  # noqa: TRY004 - it came over a socket
        params = answer.get(PARAMS)
        return cls(params if isinstance(params, dict) else None)

    @property
    def _ours(self) -> Mapping[str, Any]:
        ours = (self.params or {}).get(OURS)
        return ours if isinstance(ours, dict) else {}

    @property
    def addresses(self) -> Any:  # noqa: ANN401
        """Where decode reaches the node; None when another connector has answered."""
        return self._ours.get("prefill") or None

    def is_in(self, room: int) -> bool:
        """Whether it is held in this room."""
        return self._ours.get("room") == str(room)


def _tokens(asked: Any) -> int:  # noqa: ANN401 - from a client
    contents = asked if isinstance(asked, list) else [asked]
    if contents and isinstance(contents[0], int):
        return len(contents)
    return sum(_tokens_of(one.get("content") if isinstance(one, dict) else one) for one in contents)


def _tokens_of(content: Any) -> int:  # noqa: ANN401
    if not isinstance(content, list):
        return len(content) // TEXT_BYTES_PER_TOKEN if isinstance(content, str) else int(isinstance(content, int))
    if content and isinstance(content[0], int):
        return len(content)
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return sum(len(text) // TEXT_BYTES_PER_TOKEN if isinstance(text, str) else OTHER_PART_TOKENS for text in texts)
