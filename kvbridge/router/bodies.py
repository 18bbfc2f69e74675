"""What is sent to which server: bodies of the OpenAI API and `kv_transfer_params`.

Owns: what prefill is asked for in place of what the client asked, which requests need no prefill server, rooms in parameters.
Must not know: servers, HTTP.

The client's own `kv_transfer_params` are never passed on: they name addresses, to which a decode server would connect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvbridge.core.errors import InvalidInputError

Body = dict[str, Any]
PARAMS = "kv_transfer_params"
OURS = "kvbridge"
"""Of what is ours in the parameters."""
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens")
"""Of streams, and of answers longer than one token: prefill would refuse them."""
TEXT_BYTES_PER_TOKEN = 4
OTHER_PART_TOKENS = 1_000
"""What a picture, or anything else that is no text, is taken for."""

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
    """A client's request."""

    path: str
    body: Body
    headers: Mapping[str, str]
    """Of its headers those that are passed on."""

    @classmethod
    def read(cls, path: str, content: bytes, headers: Mapping[str, str]) -> Asked:
        """Read a request. Raises InvalidInputError."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(f"the body is not JSON: {error}") from None
        if not isinstance(body, dict):
            raise InvalidInputError("the body is no JSON object")
        body.pop(PARAMS, None)
        return cls(path, body, headers)

    @cached_property
    def size(self) -> int:
        """Tokens of its prompt, estimated; at least one."""
        asked = self.body.get("messages", self.body.get("prompt"))
        return 1 + _tokens([one.get("content") if isinstance(one, dict) else one for one in _listed(asked)])

    @property
    def decode_alone(self) -> str:
        """Why decode computes the prompt itself; empty where prefill does.

        A room is for one request of the engine, used once, and what is loaded from it has no logits.
        """
        body = self.body
        if any(body.get(key) not in (None, 1) for key in ("n", "best_of")) or body.get("use_beam_search"):
            return "several answers"
        if isinstance(body.get("prompt"), list) and len(body["prompt"]) > 1 and not isinstance(body["prompt"][0], int):
            return "several prompts"
        if body.get("echo") or body.get("prompt_logprobs") is not None:
            return "the prompt's own probabilities"
        return ""

    def for_prefill(self, params: Mapping[str, Any]) -> Body:
        """Return what prefill is asked: the first token, at once, with the blocks held."""
        body = {key: value for key, value in self.body.items() if key not in NOT_FOR_PREFILL}
        body |= {"max_tokens": 1, "stream": False, PARAMS: dict(params)}
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        return body

    def for_decode(self, params: Mapping[str, Any] | None) -> Body:
        """Return what decode is asked: what the client has asked, and where the KV cache is, unless it computes that itself."""
        return self.body | ({PARAMS: dict(params)} if params else {})


def paired_params(room: int, addresses: Any) -> tuple[Body, Body]:  # noqa: ANN401 - passed on as they are
    """Return the parameters for prefill and for decode under one room, a string, since many read numbers as doubles."""
    named = {"room": str(room)}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, OURS: named},
        {"do_remote_decode": False, "do_remote_prefill": True, OURS: named | {"prefill": addresses}},
    )


@dataclass(frozen=True)
class HeldPrompt:
    """What prefill has answered."""

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


def _listed(value: Any) -> list[Any]:  # noqa: ANN401 - from a client
    return value if isinstance(value, list) else [value]


def _tokens(contents: list[Any]) -> int:
    texts = [one for one in contents if isinstance(one, str)]
    found = sum(len(text) for text in texts) // TEXT_BYTES_PER_TOKEN
    found += sum(isinstance(one, int) for one in contents)
    for parts in (one for one in contents if isinstance(one, list)):
        for part in parts:
            text = part.get("text") if isinstance(part, dict) else part
            found += 1 if isinstance(text, int) else len(text) // 4 if isinstance(text, str) else OTHER_PART_TOKENS
    return found
