"""The small DeepSeek-V4 that comes with kvbridge, prompts for it, and how far two runs of it differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.demo.prompts import prose
from kvbridge.engine.adapters.transformers import Generated, decode_step


def load_config() -> dict[str, Any]:
    """Its config.json."""
    text = resources.files("kvbridge.engine.adapters").joinpath("tiny_deepseek_v4.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def prompt_tokens(count: int, *, offset: int = 0) -> list[int]:
    """So many tokens of the prose that comes with kvbridge, from byte `offset` on."""
    return list(prose(count, offset))


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far one run's logits are from another's, over the same fed tokens."""

    mean_kl: float
    """Kullback-Leibler divergence in nats, averaged over steps."""
    top1_agreement: float
    """Share of the steps whose most likely token is the same."""


def follow(model: Any, cache: Any, *, tokens: Sequence[int]) -> Generated:
    """Feed given tokens one by one: another run's, to compare the two step by step."""
    logits = [decode_step(model, cache, token=token) for token in tokens]
    return Generated(tokens=tuple(tokens), logits=torch.stack(logits))


def divergence(reference: Generated, other: Generated) -> Divergence:
    """Compare two runs that were fed the same tokens. Raises InvalidInputError when they were not."""
    if reference.tokens != other.tokens:
        raise InvalidInputError("two runs can be compared step by step only when they were fed the same tokens")
    ours = torch.log_softmax(reference.logits.double(), dim=-1)
    theirs = torch.log_softmax(other.logits.double(), dim=-1)
    kl = (ours.exp() * (ours - theirs)).sum(dim=-1)
    agreed = reference.logits.argmax(dim=-1) == other.logits.argmax(dim=-1)
    return Divergence(mean_kl=float(kl.mean()), top1_agreement=float(agreed.double().mean()))
