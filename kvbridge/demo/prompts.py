"""The demo's requests: single prompts, or conversations in which each prompt continues the answer before.

Moving a cache goes wrong at edges: an incomplete block of 4 or of 128 tokens, a last page of 256 tokens with one, two or three of
them, a prompt as long as the window. So single prompts have such lengths, and turns end at such places.
"""

from __future__ import annotations

from importlib import resources
from itertools import cycle, islice
from typing import NamedTuple

from kvbridge.core.errors import InvalidInputError

Text = tuple[int, ...]
"""Token ids."""


class Order(NamedTuple):
    """A request that is on its way: prefill computes its prompt into the room, decode is told what the room brings."""

    number: int
    room: int
    prompt: Text


TOKEN_COUNT = 256
"""A token is a byte of UTF-8."""
LENGTHS = (259, 3, 128, 1024, 257, 1, 127, 2047, 4, 129, 258, 511, 2, 255, 513, 66)
"""The first few are spread over all kinds of edges already."""
SPARSE_LENGTHS = (2049, 4099, 3070, 2560)
"""Much longer than the hot buffer, with every remainder by 4 and last pages of 0, 1 and 3 tokens."""
SYSTEM_TOKENS, SPARSE_SYSTEM_TOKENS = 600, 1700
"""Two pages (or six) and a part of one: so a known prefix ends inside a page for whoever else begins so."""
_LEAST_NEW_TOKENS = 40
_REMAINDERS = (3, 129, 0, 255, 1, 127, 4, 128, 2)
"""Of turns' prompts by a page: every place where a block of 4 or of 128 tokens, or the page itself, ends or nearly does."""
_STRIDE = 97
"""Prompts begin at different places of the text."""
_PAGE = 256


class Request(NamedTuple):
    """One request of the demo. Numbers begin with 1; 0 means none."""

    number: int
    tokens: int
    """Of its whole prompt."""
    new: Text
    """What its prompt has beyond the request `previous` and its answer."""
    conversation: int = 0
    turn: int = 0
    previous: int = 0
    """The request that this one continues."""


def single_prompts(count: int, *, sparse: bool, most_tokens: int) -> list[Request]:
    """Return requests that have nothing to do with one another; beyond the list, lengths come again with other text.

    Raises InvalidInputError when the model is too short for any (or, for sparse decode, for some) of the lengths.
    """
    listed = SPARSE_LENGTHS if sparse else LENGTHS
    lengths = [tokens for tokens in listed if tokens <= most_tokens]
    if not lengths or (sparse and len(lengths) < len(listed)):
        raise InvalidInputError(f"need prompts of up to {max(listed)} tokens, the model takes {most_tokens}")
    numbered = enumerate(islice(cycle(lengths), count), start=1)
    return [Request(number, tokens, prose(tokens, number * _STRIDE)) for number, tokens in numbered]


def conversations(count: int, turns: int, *, steps: int, sparse: bool) -> list[Request]:
    """Return the requests of `count` conversations with answers of `steps` tokens, interleaved by turns.

    Every other conversation begins with the same system prompt.
    """
    system_tokens = SPARSE_SYSTEM_TOKENS if sparse else SYSTEM_TOKENS
    made: list[Request] = []
    for number in range(1, count * turns + 1):
        turn, conversation = (number - 1) // count + 1, (number - 1) % count + 1
        previous, begun, begin = max(0, number - count), system_tokens, Text()
        if previous:
            begun = made[previous - 1].tokens + steps
        else:
            begin = prose(system_tokens, 0 if conversation % 2 else number * _STRIDE + 1)
        tokens = _prompt_tokens(number, begun, steps=steps)
        made.append(
            Request(number, tokens, begin + prose(tokens - begun, number * _STRIDE), conversation, turn, previous)
        )
    return made


def _prompt_tokens(number: int, begun: int, *, steps: int) -> int:
    """Return where a prompt ends that has `begun` tokens already: so that it, or every fifth answer, ends at an edge."""
    ending = _REMAINDERS[number % len(_REMAINDERS)] if number % 5 else -steps
    least = begun + _LEAST_NEW_TOKENS
    return least + (ending - least) % _PAGE


def prose(tokens: int, offset: int) -> Text:
    """Return so many tokens of the prose that comes with kvbridge, going round at its end."""
    text = resources.files("kvbridge").joinpath("engine/adapters/prompts.txt").read_bytes()
    return tuple(text[(offset + index) % len(text)] for index in range(tokens))
