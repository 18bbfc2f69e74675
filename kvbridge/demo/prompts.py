"""The demo's requests: single prompts, or conversations in which each prompt continues the answer before.

What can go wrong in moving a cache goes wrong at an edge: an incomplete block of 4 or of 128 tokens, a last page of 256 tokens with
one, two or three of them, a prompt as long as the window. So single prompts have such lengths, and turns end at such places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from itertools import cycle, islice

from kvbridge.core.errors import InvalidInputError

Text = tuple[int, ...]
"""Token ids."""

LENGTHS = (
    *(259, 3, 128, 1024, 257, 1, 127, 2047),
    *(4, 129, 258, 511, 2, 255, 513, 66),
    *(4099, 256, 384, 1027, 7, 130, 3073, 1538),
)
"""The first few are spread over all kinds of edges already."""
SPARSE_LENGTHS = (2049, 4099, 3070, 2560)
"""Much longer than the hot buffer, with every remainder by 4 and last pages of 0, 1 and 3 tokens."""
SYSTEM_TOKENS, SPARSE_SYSTEM_TOKENS = 600, 1700
"""Two pages (or six) and a part of one: so a known prefix ends inside a page for whoever else begins so."""
PAIRS = 3
"""Of requests by themselves, whose times are compared: one alone tells more about what else the machine did."""
_LEAST_NEW_TOKENS = 40
_REMAINDERS = (3, 129, 0, 255, 1, 127, 4, 128, 2)
"""Of turns' prompts by a page: every place where a block of 4 or of 128 tokens, or the page itself, ends or nearly does."""
_STRIDE = 97
"""Prompts begin at different places of the text."""
_PAGE = 256


@dataclass(frozen=True)
class Request:
    """One request of the demo."""

    number: int
    """From 1."""
    tokens: int
    """Of its whole prompt."""
    new: Text
    """What its prompt has beyond the request `previous` and its answer."""
    conversation: int = 0
    """From 1; 0: a prompt of its own."""
    turn: int = 0
    previous: int = 0
    """0: nothing comes before what is new."""
    after: int = 0
    """The request that has to be answered before this one is made, `previous` or another; 0: none."""
    page_keys: bool = False
    """Whether its pages may be shared."""
    by_itself: bool = False
    """Made when nothing else is running, so that its time can be compared."""


def single_prompts(count: int, *, sparse: bool, most_tokens: int) -> tuple[Request, ...]:
    """Return requests that have nothing to do with one another; beyond the list, lengths come again with other text.

    Raises InvalidInputError when the model is too short for any (or, for sparse decode, for some) of the lengths.
    """
    listed = SPARSE_LENGTHS if sparse else LENGTHS
    lengths = [tokens for tokens in listed if tokens <= most_tokens]
    if not lengths or (sparse and len(lengths) < len(listed)):
        raise InvalidInputError(f"need prompts of up to {max(listed)} tokens, the model takes {most_tokens}")
    numbered = enumerate(islice(cycle(lengths), count), start=1)
    return tuple(Request(number, tokens, prose(tokens, number * _STRIDE)) for number, tokens in numbered)


def conversations(count: int, turns: int, *, steps: int, system_tokens: int) -> tuple[Request, ...]:
    """Return the requests of `count` conversations with answers of `steps` tokens, interleaved by turns.

    Every other conversation begins with the same system prompt. The longest conversation has one turn more, by itself, with reuse
    and without, `PAIRS` times, each time with another prompt.
    """
    made: list[Request] = []
    for turn in range(1, turns + 1):
        for conversation in range(1, count + 1):
            number = len(made) + 1
            if turn > 1:
                made.append(_next_turn(number, made[-count], steps=steps))
                continue
            shares = conversation % 2 == 1
            system = prose(system_tokens, 0 if shares else number * _STRIDE + 1)
            tokens = _prompt_tokens(number, system_tokens, steps=steps)
            new = system + prose(tokens - system_tokens, number * _STRIDE)
            # Whoever shares the system prompt comes when it is known.
            after = conversation - 2 if shares and conversation > 2 else 0
            made.append(Request(number, tokens, new, conversation, turn, after=after, page_keys=True))
    longest = max(made, key=lambda request: request.tokens)
    apart = replace(_next_turn(len(made) + 1, longest, steps=steps), by_itself=True)
    for number in range(apart.number, apart.number + 2 * PAIRS, 2):
        hit = replace(apart, number=number, new=prose(len(apart.new), number * _STRIDE))
        made += [hit, replace(hit, number=number + 1, page_keys=False)]
    return tuple(made)


def _next_turn(number: int, before: Request, *, steps: int) -> Request:
    """Return the request that continues another one and its answer."""
    begun = before.tokens + steps
    tokens = _prompt_tokens(number, begun, steps=steps)
    new = prose(tokens - begun, number * _STRIDE)
    return Request(
        number, tokens, new, before.conversation, before.turn + 1, before.number, before.number, page_keys=True
    )


def _prompt_tokens(number: int, begun: int, *, steps: int) -> int:
    """Return where a prompt ends that has `begun` tokens already: so that it, or every fifth answer, ends at an edge."""
    ending = _REMAINDERS[number % len(_REMAINDERS)] if number % 5 else -steps
    least = begun + _LEAST_NEW_TOKENS
    return least + (ending - least) % _PAGE


def prose(tokens: int, offset: int) -> Text:
    """Return so many tokens of the prose that comes with kvbridge (a token is a byte), going round at its end."""
    text = resources.files("kvbridge").joinpath("engine/adapters/prompts.txt").read_bytes()
    return tuple(text[(offset + index) % len(text)] for index in range(tokens))
