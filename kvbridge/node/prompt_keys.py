"""Page keys at a node's door: those that a request names, and those of the engines that work on it.

Whoever names a key gets its page, and the keys of a request come from a router. So engines state the keys of the tokens that they
really have, and a room goes on only with equal ones. Errors name pages, never tokens or keys. A router's keys say nothing of the
tokens behind the last whole page: there the engines of a room are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import InvalidInputError, KeyMismatchError
from kvbridge.core.wire.engine_messages import Begin, Claim
from kvbridge.node.room import Room
from kvbridge.tier.keys import KEY_BYTES, Keys


@dataclass(frozen=True, slots=True)
class Answer:
    """An engine's statement about a room that it releases: so many tokens are whole in its pages, and their keys."""

    valid_tokens: int
    keys: Keys


def keys_of(page_hashes: bytes, tokens: int, tokens_per_page: int) -> Keys:
    """Return the keys of all whole pages of so many tokens. Raises InvalidInputError for another number of bytes."""
    whole = tokens // tokens_per_page
    if len(page_hashes) != whole * KEY_BYTES:
        raise InvalidInputError(
            f"page_hashes has {len(page_hashes)} bytes; {tokens} tokens are {whole} whole pages of {tokens_per_page}, whose keys "
            f"have {whole * KEY_BYTES} bytes ({KEY_BYTES} each)"
        )
    return Keys(page_hashes)


def difference(
    room: Room[Any], said: Begin | Claim, tokens_per_page: int, *, end_keys: Iterable[bytes]
) -> tuple[int, str]:
    """Return the first page in which an engine's tokens differ from those of its room, and a text that is empty if none does.

    `end_keys`: as other engines of the room have stated them. A room without keys shares nothing, and the keys of its engines are
    ignored. Raises InvalidInputError when the room has keys and the engine states none, or another number.
    """
    if not room.keys:
        return 0, ""
    if not said.page_hashes:
        raise InvalidInputError(
            f"room {room.room} was admitted with page keys, so its engines have to state those of their own tokens: give "
            "page_keys=engine.page_keys(tokens, adapter=..., namespace=...)"
        )
    keys = keys_of(said.page_hashes, room.prompt_tokens, tokens_per_page)
    text = _difference(room, keys, tokens_per_page)
    if not text and said.end_key and end_differs((said.end_key, *end_keys)):
        text = (
            "tokens are not those of another engine of the room: the last page, which is not whole, is the first that differs "
            f"(tokens {len(room.keys) * tokens_per_page} to {room.prompt_tokens - 1})"
        )
    return room.keys.shared_with(keys), text


def end_differs(end_keys: Iterable[bytes]) -> bool:
    """Return whether end keys are of different prompts; an empty one says nothing."""
    return len({*end_keys} - {b""}) > 1


def answer_of(room: Room[Any], valid_tokens: int, page_hashes: bytes, tokens_per_page: int) -> Answer | None:
    """Return an engine's statement about a room that it releases; None when it makes none, or the room has no keys.

    Raises InvalidInputError for keys that are not those of so many tokens, KeyMismatchError for another prompt.
    """
    if not room.keys or not valid_tokens:
        return None
    if valid_tokens < room.prompt_tokens:
        raise InvalidInputError(
            f"valid_tokens is {valid_tokens}, but room {room.room} has a prompt of {room.prompt_tokens} tokens, all of which are "
            "in its pages: count them too"
        )
    keys = keys_of(page_hashes, valid_tokens, tokens_per_page)
    if text := _difference(room, keys, tokens_per_page):
        raise KeyMismatchError(f"room {room.room}: nothing of its answer is kept: the decode engine's {text}")
    return Answer(valid_tokens, keys)


def _difference(room: Room[Any], keys: Keys, tokens_per_page: int) -> str:
    page = room.keys.shared_with(keys)
    if page == len(room.keys):
        return ""
    first, last = page * tokens_per_page, (page + 1) * tokens_per_page - 1
    also = " or its model, revision, adapter or namespace" if page == 0 else ""
    return (
        f"tokens are not those that the request's page keys name: page {page} (tokens {first} to {last}) is the first that "
        f"differs; its tokens{also} are others in what computed the request's page_hashes"
    )
