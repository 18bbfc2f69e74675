"""Bodies of OpenAI requests, and the members that the router adds for each server: `kv_transfer_params`, or those of SGLang.

The router never passes on a client's own ones: they name addresses, to which a decode server would connect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvbridge.core.errors import InvalidInputError, PeerError
from kvbridge.core.ids import Role

Added = Mapping[str, Any]
"""Members that the router adds to a body."""
Body = tuple[bytes, bytes]
"""The text of a JSON object, in two parts. The first part is long, and the same in all attempts."""
PARAMS = "kv_transfer_params"
EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM passes this member to its engine unchanged, and puts the parameters there as well."""
OURS = "kvbridge"
"""kvbridge's section of the parameters."""
STREAM = ("stream", "stream_options")
"""Members for decode only: prefill answers without a stream."""
NOT_SHARED = (*STREAM, "max_tokens", "max_completion_tokens", "min_tokens", "min_completion_tokens")
"""Members that vLLM's prefill does not get either: it answers one token, and would refuse some of these."""
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

HOLD: Added = {
    PARAMS: {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        # Connectors other than ours ask for these.
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
}
"""For prefill in plain order."""
SEVERAL_PROMPTS = "several prompts"

SGLANG_INFO = "/server_info"
"""Page of a server of SGLang that says whether it is one of a pair, and the port of its directory."""
BOOTSTRAP_HOST, BOOTSTRAP_PORT, BOOTSTRAP_ROOM = BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
SGLANG_MODES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
SGLANG_ROOMS = (1 << 63) - (1 << 22)
"""Rooms have 63 bits. SGLang gives the room to the first prompt of a list, and the numbers behind the room to the others."""
Directory = Mapping[str, Any]
"""Address of the directory of a prefill server of SGLang, as members of a request. Decode asks there for the prompt's node."""


@dataclass(frozen=True)
class Asked:
    """A client's request. The body stays text, because its objects would take many times the memory."""

    path: str
    headers: Mapping[str, str]
    """Headers for the servers."""
    shared: bytes
    """The beginning of both bodies: the members that both servers get."""
    not_shared: Mapping[str, bytes]
    """The texts of `NOT_SHARED`."""
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
        for name in (PARAMS, *BOOTSTRAP):
            texts.pop(name, None)
        not_shared = {name: texts.pop(name) for name in NOT_SHARED if name in texts}
        return cls(
            path,
            headers,
            shared=b"{" + _written(texts),
            not_shared=not_shared,
            stream=bool(values.get("stream")),
            size=1 + _tokens(values.get("messages", values.get("prompt"))),
            decode_alone=_decode_alone(values),
        )

    def for_prefill(self, added: Added) -> Body:
        """Return the body for prefill. Decode samples the first token of vLLM's answer, prefill that of SGLang's."""
        own = {"stream": b"false"}
        if PARAMS not in added:
            own |= {name: text for name, text in self.not_shared.items() if name not in STREAM}
        else:
            own |= {"max_tokens": b"1"}
            own |= {"max_completion_tokens": b"1"} if "max_completion_tokens" in self.not_shared else {}
        return self._body(own, added)

    def for_decode(self, added: Added) -> Body:
        """Return the body for decode. With nothing added decode computes the prompt itself."""
        return self._body(self.not_shared, added)

    def _body(self, own: Mapping[str, bytes], added: Added) -> Body:
        rest = _written({**own, **{name: json.dumps(value).encode() for name, value in added.items()}})
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
        return SEVERAL_PROMPTS
    if values.get("echo") or values.get("prompt_logprobs") is not None:
        return "the prompt's own probabilities"
    return ""


def paired_params(room: int, addresses: Any) -> tuple[Added, Added]:  # noqa: ANN401 - passed on as they are
    """Return the parameters for prefill and for decode. The room is a string, because many parsers read numbers as doubles."""
    named = {"room": str(room)}
    return (
        {PARAMS: {"do_remote_decode": True, "do_remote_prefill": False, OURS: named}},
        {PARAMS: {"do_remote_decode": False, "do_remote_prefill": True, OURS: named | {"prefill": addresses}}},
    )


@dataclass(frozen=True)
class HeldPrompt:
    """Prefill's answer."""

    added: Added
    """Parameters that decode is sent unchanged. Empty: prefill holds nothing."""
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
            return cls({})
        added, ours = {PARAMS: params}, params.get(OURS)
        return cls(added, ours.get("prefill") or None, ours.get("room")) if isinstance(ours, dict) else cls(added)


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


def sglang_directory(role: Role, url: str, info: bytes) -> Directory | None:
    """Return the directory of a server of SGLang from its answer to `SGLANG_INFO`; None when the server is none of a pair.

    Raises PeerError when it has the other role.
    """
    try:
        found = json.loads(info)
        mode = SGLANG_MODES.get(found.get("disaggregation_mode"))
        port = int(found["disaggregation_bootstrap_port"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    if mode is None:
        return None
    if mode is not role:
        raise PeerError(f"it runs with --disaggregation-mode {mode}: name it as a {mode} server")
    return {BOOTSTRAP_HOST: urlsplit(url).hostname, BOOTSTRAP_PORT: port}


def sglang_members(directory: Directory) -> dict[str, Any]:
    """Return the members for both servers, with a room for one request: never 0, which SGLang takes for none."""
    return {**directory, BOOTSTRAP_ROOM: 1 + secrets.randbelow(SGLANG_ROOMS)}
