"""Geometry of any model that its Hugging Face `config.json` describes well enough.

A model that keeps something which cannot be expressed here exactly is refused by the key that says so. Guessing would
show as wrong answers, not as an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Encoding, ModelGeometry
from kvbridge.core.geometry.families import (
    Layers,
    RowForm,
    V4Dimensions,
    fp8_indexer_row,
    grouped_geometry,
    latent_geometry,
    v4_geometry,
)

SLIDING, SPARSE, HEAVY, FULL, INDEXED = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "full_attention",
    "indexed_attention",
)
LAYER_TYPE_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""What the entries of the original `compress_ratios` are called in `layer_types`."""

LATENT_MODELS = frozenset({"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2"})
INDEXED_MODELS = frozenset({"deepseek_v32"})
ALL_LAYERS_SLIDE = frozenset({"mistral", "mixtral"})
"""Models whose `sliding_window` holds for every layer, without a list."""

LARGEST = 2**31
"""No dimension of a model is this large; products of a few of them stay within the fields of a component."""

ENCODING_BYTES = {Encoding.BF16: 2, Encoding.FP32: 4}

UNKNOWN_STATE_KEYS = (
    "attention_chunk_size",
    "attention_k_eq_v",
    "attn_layer_indices",
    "attn_layer_period",
    "block_types",
    "cla_share_factor",
    "compress_ratios",
    "conv_L_cache",
    "cross_attention_layers",
    "global_head_dim",
    "hybrid_override_pattern",
    "index_head_dim",
    "is_encoder_decoder",
    "kv_lora_rank",
    "layer_group_size",
    "layers_block_type",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "multi_query",
    "num_global_key_value_heads",
    "num_kv_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "ssm_state_size",
    "state_size",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "v_head_dim",
)
"""Keys that mean, when they are set, that layers keep something else than equal keys and values for each KV head."""


def geometry_from_config(
    config: Mapping[str, Any],
    *,
    encoding: Encoding | None = None,
    native_dtype_bytes: int = 4,
    tokens_per_page: int = 256,
    name: str | None = None,
) -> ModelGeometry:
    """Return the geometry of the model that a `config.json`, parsed, describes.

    `encoding` None or `native` stores rows as the model computes them, `native_dtype_bytes` a value. DeepSeek-V4 also
    knows `fp8_v4`; the others `bf16` and `fp32` (a sparse model's indexer keys are fp8 beside bf16 latents, as the
    published inference code stores them). `name` defaults to the model type. Raises InvalidInputError for a missing or
    invalid key and UnsupportedError for a model or a form that cannot be expressed; both name the key and its value.
    """
    if native_dtype_bytes not in {1, 2, 4, 8}:
        raise InvalidInputError(f"native_dtype_bytes must be 1, 2, 4 or 8, got {native_dtype_bytes}")
    if not 1 <= tokens_per_page < LARGEST:
        raise InvalidInputError(f"tokens_per_page must be from 1 to {LARGEST - 1}, got {tokens_per_page}")
    reader = _Config(_language_model(config))
    called = name or reader.model_type
    form = encoding or Encoding.NATIVE
    if reader.model_type == "deepseek_v4":
        dimensions = _v4_dimensions(reader, tokens_per_page)
        return v4_geometry(called, dimensions, encoding=form, native_dtype_bytes=native_dtype_bytes)
    if form not in ENCODING_BYTES and form is not Encoding.NATIVE:
        raise UnsupportedError(f"encoding '{form}' does not exist for model_type '{reader.model_type}'")
    value_bytes = ENCODING_BYTES.get(form, native_dtype_bytes)
    if reader.model_type in LATENT_MODELS:
        return _latent(reader, called, form=form, value_bytes=value_bytes, tokens_per_page=tokens_per_page)
    return _grouped(reader, called, form=form, value_bytes=value_bytes, tokens_per_page=tokens_per_page)


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal model's config that describes its language model, or else the config itself."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) and "num_hidden_layers" not in config else config


class _Config:
    """A config's keys, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise InvalidInputError(f"config key 'model_type' must be a name, got {model_type!r}")
        self.model_type = model_type

    def get(self, key: str) -> Any:  # noqa: ANN401 - JSON
        """Return the raw value; None when it is missing."""
        return self._config.get(key)

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer in [1, 2**31). A missing or null key is an error unless there is a default."""
        value = self._config.get(key)
        if value is None:
            if default is None:
                raise InvalidInputError(f"config of model_type '{self.model_type}' lacks the key '{key}'")
            return default
        return checked_positive(key, value)

    def names(self, key: str, count: int, *, allowed: frozenset[str]) -> list[str] | None:
        """Return the first `count` entries of a list of names, or None when the key is missing or null."""
        values = self.items(key, count)
        for layer, value in enumerate(values or ()):
            if not isinstance(value, str) or value not in allowed:
                raise UnsupportedError(
                    f"config key '{key}' is {value!r} for layer {layer}; model_type '{self.model_type}' may have "
                    f"{', '.join(sorted(allowed))}"
                )
        return values

    def items(self, key: str, count: int) -> list[Any] | None:
        """Return the first `count` entries of a list, or None when it is missing. Draft layers may follow them."""
        values = self._config.get(key)
        if values is None:
            return None
        if not isinstance(values, (list, tuple)) or len(values) < count:
            raise InvalidInputError(f"config key '{key}' must list {count} layers, got {values!r}")
        return list(values[:count])


def checked_positive(key: str, value: object) -> int:
    """Return `value` when it is an integer in [1, 2**31), as JSON means it; raises InvalidInputError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < LARGEST:
        raise InvalidInputError(f"config key '{key}' must be an integer from 1 to {LARGEST - 1}, got {value!r}")
    return value


# ---------------------------------------------------------------------------------------------- DeepSeek-V4


def _v4_dimensions(config: _Config, tokens_per_page: int) -> V4Dimensions:
    heads = config.positive("num_key_value_heads", 1)
    if heads != 1:
        raise UnsupportedError(f"config key 'num_key_value_heads' is {heads}; DeepSeek-V4 shares one KV head")
    layer_types = _v4_layer_types(config)
    sparse = tuple(layer for layer, kind in enumerate(layer_types) if kind == SPARSE)
    head_dim = config.positive("head_dim")
    return V4Dimensions(
        layer_count=len(layer_types),
        sparse_layers=sparse,
        heavy_layers=tuple(layer for layer, kind in enumerate(layer_types) if kind == HEAVY),
        window=config.positive("sliding_window"),
        head_dim=head_dim,
        rope_dim=_v4_rope_dim(config, head_dim),
        index_head_dim=config.positive("index_head_dim") if sparse else 128,
        sparse_rate=_v4_rate(config, SPARSE, legacy="compress_rate_csa", default=4),
        heavy_rate=_v4_rate(config, HEAVY, legacy="compress_rate_hca", default=128),
        tokens_per_page=tokens_per_page,
    )


def _v4_layer_types(config: _Config) -> list[str]:
    count = config.positive("num_hidden_layers")
    named = config.names("layer_types", count, allowed=frozenset({SLIDING, SPARSE, HEAVY}))
    if named is not None:
        return named
    ratios = config.items("compress_ratios", count)
    if ratios is None:
        # The pattern that transformers gives a config with neither key.
        return [SPARSE if layer >= 2 and layer % 2 else HEAVY for layer in range(count)]
    for layer, ratio in enumerate(ratios):
        if not isinstance(ratio, int) or ratio not in LAYER_TYPE_OF_RATIO:
            raise UnsupportedError(
                f"config key 'compress_ratios' is {ratio!r} for layer {layer}; DeepSeek-V4 has 0, 4 and 128"
            )
    return [LAYER_TYPE_OF_RATIO[ratio] for ratio in ratios]


def _v4_rate(config: _Config, layer_type: str, *, legacy: str, default: int) -> int:
    rates = config.get("compress_rates")
    if rates is not None and not isinstance(rates, Mapping):
        raise InvalidInputError(f"config key 'compress_rates' must map layer types to rates, got {rates!r}")
    rate = (rates or {}).get(layer_type, default)
    return config.positive(legacy, checked_positive(f"compress_rates.{layer_type}", rate))


def _v4_rope_dim(config: _Config, head_dim: int) -> int:
    factor = config.get("partial_rotary_factor")
    if factor is None:
        return config.positive("qk_rope_head_dim", max(1, head_dim // 8))
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise InvalidInputError(f"config key 'partial_rotary_factor' must be in (0, 1], got {factor!r}")
    return max(1, int(head_dim * factor))


# ---------------------------------------------------------------------------------------------- latent attention


def _latent(config: _Config, name: str, *, form: Encoding, value_bytes: int, tokens_per_page: int) -> ModelGeometry:
    layer_count = config.positive("num_hidden_layers")
    indexed = config.model_type in INDEXED_MODELS
    config.names("layer_types", layer_count, allowed=frozenset({INDEXED if indexed else FULL}))
    width = config.positive("kv_lora_rank") + config.positive("qk_rope_head_dim")
    indexer = None
    if indexed:
        dim = config.positive("index_head_dim")
        plain = RowForm(encoding=form, parts=(dim * value_bytes,))
        indexer = fp8_indexer_row(dim) if form is Encoding.BF16 else plain
    return latent_geometry(
        name,
        layer_count=layer_count,
        latent=RowForm(encoding=form, parts=(width * value_bytes,)),
        indexer=indexer,
        tokens_per_page=tokens_per_page,
    )


# ---------------------------------------------------------------------------------------------- grouped queries


def _grouped(config: _Config, name: str, *, form: Encoding, value_bytes: int, tokens_per_page: int) -> ModelGeometry:
    for key in UNKNOWN_STATE_KEYS:
        if config.get(key):
            raise UnsupportedError(
                f"config key '{key}' is {config.get(key)!r}: model_type '{config.model_type}' keeps more than keys and "
                "values of equal width for each KV head, which has no exact geometry here"
            )
    query_heads = config.positive("num_attention_heads")
    row = RowForm(
        encoding=form,
        parts=(2 * _grouped_head_dim(config, query_heads) * value_bytes,),
        lanes=config.positive("num_key_value_heads", query_heads),
    )
    count = config.positive("num_hidden_layers")
    sliding = _sliding_layers(config, count)
    window = config.positive("sliding_window") if sliding else 0
    return grouped_geometry(name, count, sliding=sliding, window=window, row=row, tokens_per_page=tokens_per_page)


def _grouped_head_dim(config: _Config, query_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config.positive("head_dim")
    hidden = config.positive("hidden_size")
    if hidden % query_heads:
        raise InvalidInputError(
            f"config key 'hidden_size' is {hidden}, not a multiple of num_attention_heads {query_heads}, and there is "
            "no 'head_dim'"
        )
    return hidden // query_heads


def _sliding_layers(config: _Config, count: int) -> Layers:
    named = config.names("layer_types", count, allowed=frozenset({FULL, SLIDING}))
    if named is not None:
        return tuple(layer for layer, kind in enumerate(named) if kind == SLIDING)
    window = config.get("sliding_window")
    switched = config.get("use_sliding_window")
    if window is None or switched is False or (switched is None and config.model_type.startswith("qwen")):
        return ()
    if switched:
        return tuple(range(config.positive("max_window_layers", count), count))
    if config.model_type in ALL_LAYERS_SLIDE:
        return tuple(range(count))
    raise UnsupportedError(
        f"config key 'sliding_window' is {window!r}, but nothing says which layers of model_type "
        f"'{config.model_type}' slide; add 'layer_types' ('{FULL}' or '{SLIDING}' for each layer)"
    )
