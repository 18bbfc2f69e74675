"""Prompts that nobody has asked for before, and what a server answered.

A prompt is drawn from a seed: so no case finds in a cache what another case left there, unless it wants to.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
BLOCK_TOKENS = 128
"""vLLM's on a processor."""
_fresh = itertools.count()


def prompt(tokens: int, seed: object) -> list[int]:
    """Return the same ids for the same arguments; without those that mean something to a tokenizer."""
    return random.Random(f"{tokens} {seed}").choices(range(3, VOCABULARY), k=tokens)


def fresh(tokens: int) -> list[int]:
    """Return a prompt of that length that has not been asked for in this process."""
    return prompt(tokens, f"fresh {next(_fresh)}")


@dataclass(frozen=True)
class Answer:
    """What a client has got."""

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each token."""
    seconds_best: tuple[float, ...] = ()
    """How much less likely than the token the next likely one was, in nats."""
    reason: str = ""
    """vLLM's `finish_reason`, or the error's text."""
    transfer: dict[str, Any] | None = field(default=None, repr=False)
    """`kv_transfer_params`."""
    first_token_s: float = 0.0
    seconds: float = 0.0

    @property
    def is_error(self) -> bool:
        """Whether the client was told that there is no answer."""
        return self.status != 200 or self.reason in {"error", "abort"}


def difference(got: Answer, expected: Answer) -> str:
    """Return '' for equal tokens, else where they part, and how near to a tie that step was."""
    if got.is_error or len(got.tokens) != len(expected.tokens):
        return f"got {got}, expected {len(expected.tokens)} tokens"
    for step, (ours, theirs) in enumerate(zip(got.tokens, expected.tokens, strict=True)):
        if ours != theirs:
            return (
                f"token {step} is {ours} instead of {theirs}; the best two of the server alone are "
                f"{expected.seconds_best[step]:.6f} nats apart there, and the likelihood of its token before differs by "
                f"{_gap(got, expected, step):.6f}"
            )
    return ""


def _gap(got: Answer, expected: Answer, step: int) -> float:
    return abs(got.logprobs[step - 1] - expected.logprobs[step - 1]) if step else float("nan")


def largest_gap(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    """Return by how much log-likelihoods of the same tokens differ at most."""
    return max((abs(a - b) for got, expected in pairs for a, b in _both(got, expected)), default=0.0)


def _both(got: Answer, expected: Answer) -> Iterator[tuple[float, float]]:
    return zip(got.logprobs, expected.logprobs, strict=False)
