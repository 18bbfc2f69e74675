"""Prompts of a random load: conversations of two tenants whose branches share their beginnings.

A prompt is a list of segments, and a segment is one token id that is repeated. So two prompts share exactly the segments with which
both begin, and the page keys say so, as they would for real tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tests.helpers.prompts import Keyed

TENANTS = ("acme", "globex")
PAGE = 256
CUTS = (300, 700)
"""In tokens: where the branches of a conversation part."""
MOST_TOKENS = 2_000
EDGES = tuple(page + near for page in range(PAGE, MOST_TOKENS, PAGE) for near in (-1, 0, 1, 2, 3))
"""Lengths at which the number of pages of a space changes."""

LIES = ("split", "keyless", "liar_at_begin", "liar_at_claim", "foreign_keys")
"""Prefill is told of another prompt than decode, with the same last key; prefill is told no keys; an engine has other tokens than
the room's keys name; the keys are those of the other tenant."""
FORGED = "forged"
"""A lie that only the next reader can notice: prefill's engine writes another prompt than the one whose keys the engine states.
Only the test which shows that wrong bytes are found has this lie."""


@dataclass(frozen=True)
class Branch(Keyed):
    """Tokens of one tenant: (token id, stop) for each segment, with ascending stops."""

    namespace: str
    segments: tuple[tuple[int, int], ...]

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return self.segments[-1][1]

    def tokens(self, count: int) -> npt.NDArray[np.uint32]:
        counts = np.diff([0, *(stop for _, stop in self.segments)])
        return np.repeat(np.array([value for value, _ in self.segments], dtype=np.uint32), counts)[:count]

    def until(self, tokens: int) -> Branch:
        """Return the first `tokens` tokens."""
        kept = [(value, min(stop, tokens)) for value, stop in self.segments]
        count = next(number for number, (_, stop) in enumerate(kept, 1) if stop == tokens)
        return replace(self, segments=tuple(kept[:count]))

    def longer(self, value: int, more: int) -> Branch:
        """Return these tokens with `more` behind them."""
        return replace(self, segments=(*self.segments, (value, self.length + more)))

    def with_other_tokens(self) -> Branch:
        """Return a prompt of the same length and tenant that no client sends, with other tokens from the first on."""
        return replace(self, segments=tuple((value + 500_000, stop) for value, stop in self.segments))

    def of_other_tenant(self) -> Branch:
        """Return the same tokens of the other tenant."""
        return replace(self, namespace=next(name for name in TENANTS if name != self.namespace))


def drawn_prompt(drawn: random.Random, conversations: int) -> Branch:
    """Draw a prompt: a tenant, one of its conversations, a branch at each cut, and a length that is often at a page's edge."""
    # Both tenants have the same tokens: only the namespace tells their pages apart.
    whole = Branch(drawn.choice(TENANTS), ((1_000 + drawn.randrange(conversations), CUTS[0]),))
    for cut, stop in zip(CUTS, (*CUTS[1:], MOST_TOKENS), strict=True):
        whole = whole.longer(10 * cut + drawn.randrange(2), stop - cut)
    return whole.until(drawn.choice(EDGES) if drawn.random() < 0.5 else drawn.randint(1, MOST_TOKENS))


@dataclass(frozen=True)
class Case:
    """One room: what its client tells the daemons, and which tokens its engines have."""

    kind: str
    prompt: Branch
    to_prefill: Branch | None
    to_decode: Branch
    begun: Branch | None
    claimed: Branch | None
    """None: no engine comes."""

    @classmethod
    def of(cls, kind: str, prompt: Branch) -> Case:
        other, theirs = prompt.with_other_tokens(), prompt.of_other_tenant()
        lies: dict[str, tuple[Branch | None, Branch, Branch | None, Branch | None]] = {
            "split": (other, prompt, other, None),
            "keyless": (None, prompt, None, prompt),
            "liar_at_begin": (prompt, prompt, other, prompt),
            "liar_at_claim": (prompt, prompt, prompt, other),
            "foreign_keys": (theirs, theirs, prompt, prompt),
        }
        return cls(kind, prompt, *lies.get(kind, (prompt,) * 4))
