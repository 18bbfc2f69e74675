"""The small DeepSeek-V4 that comes with kvbridge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch

from kvbridge.demo.plan import prose
from kvbridge.engine.adapters.transformers import forward


def load_config() -> dict[str, Any]:
    """Its config.json."""
    text = resources.files("kvbridge.engine.adapters").joinpath("tiny_deepseek_v4.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def prompt_tokens(count: int, *, offset: int = 0) -> list[int]:
    """So many tokens of the prose that comes with kvbridge, from byte `offset` on."""
    return list(prose(count, offset))


def follow(model: Any, cache: Any, *, tokens: Sequence[int]) -> torch.Tensor:
    """Feed given tokens one by one, those of another run: logits [steps, vocabulary]."""
    return torch.stack([forward(model, cache, [token]) for token in tokens])
