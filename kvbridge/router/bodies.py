"""Bodies of OpenAI requests, and the `kv_transfer_params` that the router sends to each server.

The router never passes on a client's own `kv_transfer_params`: they name addresses, to which a decode server would connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import InvalidInputError

Params = Mapping[str, Any]
"""`kv_transfer_params`."""
Body = tuple[bytes, bytes]
"""The text of a JSON object, in two parts. The first part is long, and the same in all attempts."""
PARAMS = "kv_transfer_params"
EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM passes this member to its engine unchanged, and puts the parameters there as well."""
OURS = "kvbridge"
"""kvbridge's section of the parameters."""
NOT_SHARED = ("max_tokens", "max_completion_tokens", "stream", "stream_options", "min_tokens", "min_completion_tokens")
"""Members for decode only: prefill answers one token without a stream, and would refuse some of these."""
LOOKED_AT = frozenset(
    {"prompt", "messages", "stream", "n", "best_of", "use_beam_search", "echo", "prompt_logprobs", EXTRA_ARGUMENTS}
)
MOST_VALUES = 1_500_000
"""Limit of values in one body, because values take time of the event loop and many times the memory of their text. Prompts of a
million tokens, as numbers or as texts, are below it."""
BLANK = " \t\n\r"
_SCANNER = json.JSONDecoder()
TEXT_BYTES_PER_TOKEN = 4
OTHER_PART_TOKENS = 1_000
"""Estimated tokens of a picture, or of any other part that is no text."""

HOLD: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    # Connectors other than ours ask for these.
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters for prefill in plain order."""


@dataclass(frozen=True)
class Asked:
    """A client's request. The body stays text, because its objects would take many times the memory."""

    path: str
    headers: Mapping[str, str]
    """Headers for the servers."""
    shared: bytes
    """The beginning of both bodies: the members that both servers get."""
    for_decode_only: bytes
    for_prefill_only: bytes
    stream: bool
    size: int
    """Estimated tokens of the prompt, at least 1."""
    decode_alone: str
    """Reason why decode computes the prompt itself; empty: prefill computes it. A room serves one request of an engine once, and
    a prompt that is loaded from a room has no logits."""

    @classmethod
    def read(cls, path: str, content: bytes, headers: Mapping[str, str]) -> Asked:
        """Read a request. Raises InvalidInputError."""
        # Commas and brackets inside of texts count as well. Counting costs a hundredth of reading so many values.
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

    def for_prefill(self, params: Params) -> Body:
        """Return the body for prefill, which asks for the first token alone."""
        return self._body(self.for_prefill_only, params)

    def for_decode(self, params: Params | None) -> Body:
        """Return the body for decode. Without `params` decode computes the prompt itself."""
        return self._body(self.for_decode_only, params)

    def _body(self, own: bytes, params: Params | None) -> Body:
        ours = _written({PARAMS: json.dumps(params).encode()}) if params else b""
        rest = b",".join(filter(None, (own, ours)))
        separator = b"," if rest and len(self.shared) > 1 else b""
        return self.shared, separator + rest + b"}"


def _written(members: Mapping[str, bytes]) -> bytes:
    return b",".join(b"%s:%s" % (json.dumps(name).encode(), text) for name, text in members.items())


def _members(content: bytes) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return each member of a JSON object as its text, and the values of `LOOKED_AT`. The last of several equal names counts.

    Raises ValueError and RecursionError.
    """

    def scan(text: str, begin: int) -> tuple[tuple[str, Any], int]:
        value, end = _SCANNER.scan_once(text, begin)  # type: ignore[attr-defined]  # typeshed lacks it
        return (text[begin:end], value), end

    text = content.decode(json.detect_encoding(content), "surrogatepass").strip(BLANK)
    if not text.startswith("{"):
        raise ValueError("it does not begin with '{'")
    pairs, end = json.decoder.JSONObject((text, 1), True, scan, None, list)  # type: ignore[attr-defined]  # as above
    if end < len(text):
        raise ValueError(f"something follows the object at character {end}")
    texts = {name: member.encode("utf-8", "surrogatepass") for name, (member, _) in pairs}
    return texts, {name: value for name, (_, value) in pairs if name in LOOKED_AT}


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
    """Return the parameters for prefill and for decode. The room is a string, because many parsers read numbers as doubles."""
    named = {"room": str(room)}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, OURS: named},
        {"do_remote_decode": False, "do_remote_prefill": True, OURS: named | {"prefill": addresses}},
    )


@dataclass(frozen=True)
class HeldPrompt:
    """Prefill's answer."""

    params: Mapping[str, Any] | None
    """Parameters that decode is sent unchanged. None: prefill holds nothing."""
    addresses: Any = None
    """Addresses at which decode reaches the prefill node. None: another connector has answered."""
    room: Any = None
    """Room that holds the prompt, as a string."""

    @classmethod
    def read(cls, content: bytes) -> HeldPrompt:
        """Read an answer. Raises ValueError when the answer is no JSON object."""
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise ValueError("no JSON object")  # noqa: TRY004 - it came over a socket
        params = answer.get(PARAMS)
        if not isinstance(params, dict):
            return cls(None)
        ours = params.get(OURS)
        return cls(params, ours.get("prefill") or None, ours.get("room")) if isinstance(ours, dict) else cls(params)


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
