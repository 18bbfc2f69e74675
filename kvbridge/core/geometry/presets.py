"""Geometries by name: the models that people serve, and small ones for tests.

Sources: the published `config.json` of each model (DeepSeek-V4's `compress_ratios`: 0 for a layer that sees its window only, 4 for
a sparse one, 128 for a heavy one). DeepSeek-V3.2 has its latents in bf16, its indexer keys in fp8, and pages of 64 tokens.
"""

from __future__ import annotations

from functools import cache, partial

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Encoding, ModelGeometry
from kvbridge.core.geometry.huggingface import geometry_from_config

_V4 = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
}
_V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
}
_GQA = {"model_type": "llama", "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16}

_fp8_v4 = partial(geometry_from_config, encoding=Encoding.FP8_V4)
_bf16 = partial(geometry_from_config, encoding=Encoding.BF16)

_BUILDERS = {
    "deepseek-v4-flash": partial(
        _fp8_v4, _V4 | {"num_hidden_layers": 43, "compress_ratios": (0, 0, *(4, 128) * 20, 4)}
    ),
    "deepseek-v4-pro": partial(
        _fp8_v4, _V4 | {"num_hidden_layers": 61, "compress_ratios": (128, 128, *(4, 128) * 29, 4)}
    ),
    "deepseek-v3.2": partial(_bf16, _V32, tokens_per_page=64),
    # Rows of 96 + 8 bytes; pages, rings and windows as in the real models.
    "tiny-v4": partial(
        _fp8_v4,
        _V4
        | {"num_hidden_layers": 6, "compress_ratios": (0, 0, 4, 128, 4, 128), "head_dim": 80, "qk_rope_head_dim": 16},
    ),
    "tiny-gqa": partial(_bf16, _GQA),
}

PRESETS: tuple[str, ...] = tuple(_BUILDERS)
"""The names that `preset` knows."""


@cache
def preset(name: str) -> ModelGeometry:
    """Return the geometry of a named model; the same object each time. Raises InvalidInputError for another name."""
    builder = _BUILDERS.get(name)
    if builder is None:
        raise InvalidInputError(f"no preset is called '{name}'; there are {', '.join(PRESETS)}")
    return builder(name=name)
