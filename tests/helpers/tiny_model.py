"""The small DeepSeek-V4 that comes with kvbridge, and prompts for it."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from kvbridge.demo.prompts import prose


def load_config() -> dict[str, Any]:
    """Its config.json."""
    text = resources.files("kvbridge.engine.adapters").joinpath("tiny_deepseek_v4.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def prompt_tokens(count: int, *, offset: int = 0) -> list[int]:
    """So many tokens of the prose that comes with kvbridge, from byte `offset` on."""
    return list(prose(count, offset))
