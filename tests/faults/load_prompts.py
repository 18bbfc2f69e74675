"""Prompts of a random load: conversations of two tenants whose branches share their beginnings.

A prompt is a list of segments, and a segment is one token id that is repeated. So two prompts share exactly the segments with which
both begin, and the page keys say so, as they would for real tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TENANTS = ("acme", "globex")
PAGE = 256
CUTS = (300, 700)
"""In tokens: where the branches of a conversation part."""
MOST_TOKENS = 2_000
EDGES = tuple(page + near for page in range(PAGE, MOST_TOKENS, PAGE) for near in (-1, 0, 1, 2, 3))
"""Lengths at which the number of pages of a space changes."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one tenant: (token id, stop) for each segment, with ascending stops."""

    namespace: str
    segments: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return self.segments[-1][1]

    def ids(self) -> npt.NDArray[np.uint32]:
        """Return all token ids."""
        counts = np.diff([0, *(stop for _, stop in self.segments)])
        return np.repeat(np.array([value for value, _ in self.segments], dtype=np.uint32), counts)

    def until(self, tokens: int) -> TokenSequence:
        """Return the first `tokens` tokens."""
        kept = [(value, min(stop, tokens)) for value, stop in self.segments]
        count = next(number for number, (_, stop) in enumerate(kept, 1) if stop == tokens)
        return TokenSequence(self.namespace, tuple(kept[:count]))

    def longer(self, value: int, more: int) -> TokenSequence:
        """Return this sequence with `more` tokens behind it."""
        return TokenSequence(self.namespace, (*self.segments, (value, self.tokens + more)))


def drawn_prompt(random_numbers: random.Random, conversations: int) -> TokenSequence:
    """Draw a prompt: a tenant, one of its conversations, a branch at each cut, and a length that is often at a page's edge."""
    namespace = random_numbers.choice(TENANTS)
    conversation = random_numbers.randrange(conversations)
    # Both tenants have the same tokens: only the namespace tells their pages apart.
    whole = TokenSequence(namespace, ((1_000 + conversation, CUTS[0]),))
    for cut, stop in zip(CUTS, (*CUTS[1:], MOST_TOKENS), strict=True):
        whole = whole.longer(10 * cut + random_numbers.randrange(2), stop - cut)
    tokens = random_numbers.choice(EDGES) if random_numbers.random() < 0.5 else random_numbers.randint(1, MOST_TOKENS)
    return whole.until(tokens)


def other_tokens(prompt: TokenSequence) -> TokenSequence:
    """Return a prompt of the same length and tenant that no client of the load sends, with other tokens from the first on."""
    return TokenSequence(prompt.namespace, tuple((value + 500_000, stop) for value, stop in prompt.segments))
