"""Geometries by name: the models that people serve, and small ones for tests.

Owns: the dimensions of each named model. Must not know: the rules that turn dimensions into components.

Sources: DeepSeek-V4 dimensions and layer patterns from the model's published `config.json` (`compress_ratios`, 0 / 4 /
128 a layer); DeepSeek-V3.2 from its own (`kv_lora_rank` 512, `qk_rope_head_dim` 64, `index_head_dim` 128, 61 layers),
its latents in bf16, its indexer keys in fp8, in pages of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Encoding, ModelGeometry
from kvbridge.core.geometry.families import (
    GroupedLayers,
    TokenRow,
    V4Dimensions,
    fp8_indexer_parts,
    grouped_geometry,
    latent_geometry,
    v4_fp8_rows,
    v4_geometry,
)


def _v4(name: str, dimensions: V4Dimensions) -> ModelGeometry:
    return v4_geometry(name, dimensions, rows=v4_fp8_rows(dimensions))


def _deepseek_v4_flash() -> ModelGeometry:
    """43 layers: 0 and 1 see their window only, then sparse and heavy ones in turn."""
    return _v4(
        "deepseek-v4-flash",
        V4Dimensions(layer_count=43, sparse_layers=tuple(range(2, 43, 2)), heavy_layers=tuple(range(3, 42, 2))),
    )


def _deepseek_v4_pro() -> ModelGeometry:
    """61 layers: 0 and 1 heavy, then sparse and heavy ones in turn."""
    return _v4(
        "deepseek-v4-pro",
        V4Dimensions(layer_count=61, sparse_layers=tuple(range(2, 61, 2)), heavy_layers=(0, *range(1, 60, 2))),
    )


def _deepseek_v32() -> ModelGeometry:
    return latent_geometry(
        "deepseek-v3.2",
        layer_count=61,
        latent=TokenRow(encoding=Encoding.BF16, parts=((512 + 64) * 2,)),
        indexer=TokenRow(encoding=Encoding.FP8_INDEXER, parts=fp8_indexer_parts(128)),
        tokens_per_page=64,
    )


def _tiny_v4() -> ModelGeometry:
    """Six layers, two of each kind, rows of 96 + 8 bytes; pages, rings and windows as in the real models."""
    return _v4(
        "tiny-v4",
        V4Dimensions(layer_count=6, sparse_layers=(2, 4), heavy_layers=(3, 5), head_dim=80, rope_dim=16),
    )


def _tiny_gqa() -> ModelGeometry:
    """Three layers, four KV heads of 16 bf16 values each."""
    return grouped_geometry(
        "tiny-gqa",
        GroupedLayers(full=(0, 1, 2)),
        heads=4,
        row=TokenRow(encoding=Encoding.BF16, parts=(2 * 16 * 2,)),
        tokens_per_page=256,
    )


_BUILDERS: dict[str, Callable[[], ModelGeometry]] = {
    "deepseek-v4-flash": _deepseek_v4_flash,
    "deepseek-v4-pro": _deepseek_v4_pro,
    "deepseek-v3.2": _deepseek_v32,
    "tiny-v4": _tiny_v4,
    "tiny-gqa": _tiny_gqa,
}

PRESETS: tuple[str, ...] = tuple(_BUILDERS)
"""The names that `preset` knows."""


@cache
def preset(name: str) -> ModelGeometry:
    """Return the geometry of a named model; the same object each time. Raises InvalidInputError for another name."""
    builder = _BUILDERS.get(name)
    if builder is None:
        raise InvalidInputError(f"no preset is called '{name}'; there are {', '.join(PRESETS)}")
    return builder()
