"""Prompts drawn from a seed, so that no case finds in a cache what another left there; and what a server answered."""

from __future__ import annotations

import itertools
import random
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
    """An answer, as a client gets it."""

    status: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Log-likelihood of each token (`Server.stream`)."""
    seconds_best: tuple[float, ...] = ()
    """Distance between the two likeliest tokens, in nats, at each token."""
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
