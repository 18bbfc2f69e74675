"""Prompts drawn from a seed, so that no case finds in a cache what another left there; and what a server answered."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

VOCABULARY = 512
_fresh = itertools.count()


def prompt(tokens: int, seed: object) -> list[int]:
    """Return the same ids for the same arguments; without those that mean something to a tokenizer."""
    return random.Random(f"{tokens} {seed}").choices(range(3, VOCABULARY), k=tokens)


def fresh(tokens: int) -> list[int]:
    """Return a prompt of that length that has not been asked for in this process."""
    return prompt(tokens, f"fresh {next(_fresh)}")


@dataclass(frozen=True)
class Answer:
    status: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-likelihood of each token."""
    seconds_best: tuple[float, ...] = ()
    """Distance between the two likeliest tokens, in nats, at each token."""
    reason: str = ""
    """The engine's reason to finish, or the error's text."""
    transfer: dict[str, Any] | None = field(default=None, repr=False)
    """vLLM's `kv_transfer_params`."""
    first_token_s: float = 0.0
    seconds: float = 0.0

    @property
    def is_error(self) -> bool:
        """Whether the client was told that there is no answer."""
        return self.status != 200 or self.reason in {"error", "abort"}


def distances(top: Iterable[Iterable[float]]) -> tuple[float, ...]:
    """Return how far the two likeliest of each token's likelihoods lie apart, in nats."""
    best = [sorted(values, reverse=True) for values in top]
    return tuple(values[0] - values[1] if len(values) > 1 else 0.0 for values in best)
