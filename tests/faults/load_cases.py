"""What one room of a random load is to be: honest, or one of the lies about page keys."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvbridge.core.ids import Role
from tests.faults.load_engines import Order
from tests.faults.load_prompts import TENANTS, TokenSequence, other_tokens

LIES = ("split", "keyless", "liar_at_begin", "liar_at_claim", "foreign_keys")
"""Prefill is told of another prompt than decode, with the same last key; prefill is told no keys; an engine has other tokens than
the room's keys name; the keys are those of the other tenant."""
FORGED = "forged"
"""A lie that only the next reader can notice: prefill's engine writes another prompt than the one whose keys the engine states.
Only the test which shows that wrong bytes are found has this lie."""


@dataclass(frozen=True)
class LoadCase:
    """What one room is to be: honest, or one of the lies."""

    kind: str
    prompt: TokenSequence
    """The one that the caller names to the daemons."""
    prefill_keys: TokenSequence | None
    decode_keys: TokenSequence
    computed: TokenSequence
    """The one that prefill's engine has."""
    read: TokenSequence | None
    """The one that decode's engine has; None: no engine comes."""
    answer_tokens: int
    hold_s: float
    aborts: Role | None

    @classmethod
    def of(cls, kind: str, prompt: TokenSequence, drawn: random.Random) -> LoadCase:
        other = other_tokens(prompt)
        prefill_keys: TokenSequence | None = prompt
        decode_keys, computed, read = prompt, prompt, prompt
        if kind == "split":
            prefill_keys, computed, read = other, other, None
        elif kind == "keyless":
            prefill_keys, computed = None, other
        elif kind in {"liar_at_begin", FORGED}:
            computed = other
        elif kind == "liar_at_claim":
            read = other
        elif kind == "foreign_keys":
            theirs = TokenSequence(next(name for name in TENANTS if name != prompt.namespace), prompt.segments)
            prefill_keys = decode_keys = theirs
        answer_tokens = drawn.randint(1, 300) if kind == "honest" and drawn.random() < 0.4 else 0
        aborts = drawn.choice(list(Role)) if drawn.random() < 0.05 else None
        hold_s = drawn.random() * 0.5
        return cls(kind, prompt, prefill_keys, decode_keys, computed, read, answer_tokens, hold_s, aborts)

    def prefill_order(self, room: int) -> Order:
        told = self.prompt if self.kind == FORGED else self.computed
        states = told if self.prefill_keys is not None else None
        return Order(room, self.computed, states, aborts=self.aborts is Role.PREFILL)

    def decode_order(self, room: int) -> Order | None:
        """None when no engine comes."""
        return (
            None
            if self.read is None
            else Order(
                room,
                self.read,
                self.read,
                aborts=self.aborts is Role.DECODE,
                hold_s=self.hold_s,
                answer_tokens=self.answer_tokens,
                compares=self.kind in {"honest", "foreign_keys", FORGED},
            )
        )
