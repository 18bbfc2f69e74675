"""The geometry of a model: by its name, or from its Hugging Face `config.json`.

A model whose state has no exact geometry here is refused, by the key that says so: a guess would show as wrong answers, not as an
error. The presets come from the published `config.json` of each model. An entry of DeepSeek-V4's `compress_ratios` is 0 for a layer
that sees its window only, 4 for a sparse one, 128 for a heavy one. DeepSeek-V3.2 has bf16 latents, fp8 indexer keys, 64-token
pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.ids import IndexSpace

ENDLESS_PAGES = 2**32
"""Ring turns in the one logical page of a request slot: more than any request has, so that page 0 is the only one."""
FP8_SCALED_VALUES = 64
"""Values that share one ue8m0 scale in a DeepSeek-V4 row."""
FP8_SCALE_ROW_BYTES = 8
"""A DeepSeek-V4 scale row is padded to a multiple of this."""
FP8_INDEXER_SCALED_VALUES = 128
"""Values that share one fp32 scale in an indexer key."""

SLIDING, SPARSE, HEAVY, FULL, INDEXED = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
    "full_attention",
    "indexed_attention",
)
LAYER_TYPE_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}
"""The `layer_types` that the entries of the original `compress_ratios` mean."""
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


@cache
def preset(name: str) -> ModelGeometry:
    """Return the geometry of a named model; the same object each time. Raises InvalidInputError for another name."""
    builder = _BUILDERS.get(name)
    if builder is None:
        raise InvalidInputError(f"no preset is called '{name}'; there are {', '.join(PRESETS)}")
    return builder(name=name)


def geometry_from_config(
    config: Mapping[str, Any],
    *,
    encoding: Encoding | None = None,
    native_dtype_bytes: int = 4,
    tokens_per_page: int = 256,
    name: str | None = None,
) -> ModelGeometry:
    """Return the geometry of the model that a parsed `config.json` describes.

    `encoding` None or `native`: rows as the model computes them, `native_dtype_bytes` a value, without padding. DeepSeek-V4 also
    has its production form `fp8_v4`: fp8 values with scales apart, fp8 indexer keys, fp32 compressor states. Other models have
    `bf16` and `fp32`; beside bf16 latents, indexer keys are fp8, as the published inference code stores them. `name` defaults to
    the model type. Raises InvalidInputError for a missing or invalid key, UnsupportedError for a model or form that cannot be
    expressed; both name the key and its value.
    """
    if native_dtype_bytes not in {1, 2, 4, 8}:
        raise InvalidInputError(f"native_dtype_bytes must be 1, 2, 4 or 8, got {native_dtype_bytes}")
    if not 1 <= tokens_per_page < LARGEST:
        raise InvalidInputError(f"tokens_per_page must be from 1 to {LARGEST - 1}, got {tokens_per_page}")
    text = config.get("text_config")  # the language model of a multimodal one
    reader = _Config(text if isinstance(text, Mapping) and "num_hidden_layers" not in config else config)
    form = encoding or Encoding.NATIVE
    if reader.model_type == "deepseek_v4":
        components = _v4(reader, form, native_dtype_bytes, tokens_per_page)
    elif form not in ENCODING_BYTES and form is not Encoding.NATIVE:
        raise UnsupportedError(f"encoding '{form}' does not exist for model_type '{reader.model_type}'")
    else:
        family = _latent if reader.model_type in LATENT_MODELS else _grouped
        components = family(reader, form, ENCODING_BYTES.get(form, native_dtype_bytes), tokens_per_page)
    return ModelGeometry(
        name=name or reader.model_type,
        layer_count=reader.positive("num_hidden_layers"),
        tokens_per_page=tokens_per_page,
        components=tuple(components),
    )


class _Config:
    """A config's keys, each checked as it is read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.get = config.get
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or not model_type:
            raise InvalidInputError(f"config key 'model_type' must be a name, got {model_type!r}")
        self.model_type = model_type

    def positive(self, key: str, default: int | None = None) -> int:
        """Return an integer in [1, 2**31). A missing or null key is an error unless there is a default."""
        value = self.get(key)
        if value is None:
            if default is None:
                known = ", ".join(("deepseek_v4", *sorted(LATENT_MODELS)))
                raise InvalidInputError(
                    f"config of model_type '{self.model_type}' lacks the key '{key}'; {known} are known, and models whose layers "
                    "all keep keys and values of each KV head"
                )
            return default
        return _checked_positive(key, value)

    def names(self, key: str, count: int, *, allowed: frozenset[str]) -> list[str] | None:
        """Return the first `count` entries of a list of names, or None when it is missing."""
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
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, (list, tuple)) or len(values) < count:
            raise InvalidInputError(f"config key '{key}' must list {count} layers, got {values!r}")
        return list(values[:count])


def _checked_positive(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < LARGEST:
        raise InvalidInputError(f"config key '{key}' must be an integer from 1 to {LARGEST - 1}, got {value!r}")
    return value


# ---------------------------------------------------------------------------------------------- components


class _Row(NamedTuple):
    """The form in which a component's rows are stored; fields as in `Component`."""

    encoding: Encoding
    row_parts_bytes: tuple[int, ...]
    lanes: int = 1
    page_alignment_bytes: int = 1


def _component(kind: ComponentKind, layers: list[int], row: _Row, **fields: Any) -> Component:  # noqa: ANN401 - as `Component` has them
    return Component(kind=kind, layers=tuple(layers), **row._asdict(), **fields)


def _growing(
    kind: ComponentKind, layers: list[int], row: _Row, page: int, rate: int = 1, *, host_capable: bool = False
) -> Component:
    rows, rest = divmod(page, rate)
    if rest:
        raise UnsupportedError(
            f"a compression rate of {rate} does not divide a page of {page} tokens, so an entry "
            f"would cross pages; choose tokens_per_page as a multiple of {rate}"
        )
    fields = {
        "space": IndexSpace.FULL,
        "liveness": Liveness.GROWING,
        "tokens_per_row": rate,
        "host_capable": host_capable,
    }
    return _component(kind, layers, row, **fields, slots_per_page=rows, rows_per_logical_page=rows)


def _window(layers: list[int], row: _Row, page: int, window: int) -> Component:
    fields = {"space": IndexSpace.SWA, "liveness": Liveness.WINDOW, "window": window}
    return _component(ComponentKind.SWA_KV, layers, row, **fields, slots_per_page=page, rows_per_logical_page=page)


def _fp8_indexer_row(index_head_dim: int) -> _Row:
    """Return the form of fp8 indexer keys: their values, then one fp32 scale for each 128 of them."""
    if index_head_dim % FP8_INDEXER_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_indexer scales groups of {FP8_INDEXER_SCALED_VALUES} values, but index_head_dim is {index_head_dim}; "
            "use the native encoding"
        )
    return _Row(Encoding.FP8_INDEXER, (index_head_dim, 4 * (index_head_dim // FP8_INDEXER_SCALED_VALUES)))


# ---------------------------------------------------------------------------------------------- DeepSeek-V4


def _v4(config: _Config, encoding: Encoding, value_bytes: int, page: int) -> list[Component]:
    """Return the components of a DeepSeek-V4 model.

    Every layer attends to its last `sliding_window` tokens. A sparse layer also attends to those compressed entries that its
    indexer picks, a heavy layer to all its compressed entries.
    """
    heads = config.positive("num_key_value_heads", 1)
    if heads != 1:
        raise UnsupportedError(f"config key 'num_key_value_heads' is {heads}; DeepSeek-V4 shares one KV head")
    layer_types = _v4_layer_types(config)
    sparse, heavy = ([layer for layer, kind in enumerate(layer_types) if kind == one] for one in (SPARSE, HEAVY))
    head_dim = config.positive("head_dim")
    window, rope_dim = config.positive("sliding_window"), _v4_rope_dim(config, head_dim)
    index_dim = config.positive("index_head_dim") if sparse else FP8_INDEXER_SCALED_VALUES
    sparse_rate = _v4_rate(config, SPARSE, legacy="compress_rate_csa", default=4)
    heavy_rate = _v4_rate(config, HEAVY, legacy="compress_rate_hca", default=128)
    state_encoding = encoding
    match encoding:
        case Encoding.NATIVE:
            row, index = _Row(encoding, (head_dim * value_bytes,)), _Row(encoding, (index_dim * value_bytes,))
        case Encoding.FP8_V4:
            row, index = _v4_fp8_row(head_dim, rope_dim), _fp8_indexer_row(index_dim)
            value_bytes, state_encoding = 4, Encoding.FP32
        case _:
            raise UnsupportedError(f"encoding '{encoding}' does not exist for DeepSeek-V4: use native or fp8_v4")

    def state(kind: ComponentKind, layers: list[int], values: int, **fields: Any) -> Component:  # noqa: ANN401
        return _component(kind, layers, _Row(state_encoding, (values * value_bytes,)), liveness=Liveness.TAIL, **fields)

    components = []
    if sparse:
        # An entry is pooled from its own block and the one before it, each with its own half of the features, so a state row is [kv
        # a | kv b | score a | score b].
        ring: dict[str, Any] = {"space": IndexSpace.SWA, "block": sparse_rate, "overlap": 1}
        ring |= {"slots_per_page": min(2 * sparse_rate, page), "rows_per_logical_page": page}
        components += [
            # Decode reads only the entries that the indexer picks, so these alone can be far away.
            _growing(ComponentKind.C4_KV, sparse, row, page, sparse_rate, host_capable=True),
            _growing(ComponentKind.C4_INDEXER, sparse, index, page, sparse_rate),
            state(ComponentKind.C4_STATE, sparse, 4 * head_dim, **ring),
            state(ComponentKind.C4_INDEXER_STATE, sparse, 4 * index_dim, **ring),
        ]
    if heavy:
        # Blocks do not overlap, so a state row is [kv | score].
        slot: dict[str, Any] = {"space": IndexSpace.REQUEST, "block": heavy_rate}
        slot |= {"slots_per_page": heavy_rate, "rows_per_logical_page": heavy_rate * ENDLESS_PAGES}
        components += [
            _growing(ComponentKind.C128_KV, heavy, row, page, heavy_rate),
            state(ComponentKind.C128_STATE, heavy, 2 * head_dim, **slot),
        ]
    return [*components, _window([*range(len(layer_types))], row, page, window)]


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
    return config.positive(legacy, _checked_positive(f"compress_rates.{layer_type}", rate))


def _v4_rope_dim(config: _Config, head_dim: int) -> int:
    """Return how many of the `head_dim` values carry the position; they are never quantised."""
    factor = config.get("partial_rotary_factor")
    if factor is None:
        return config.positive("qk_rope_head_dim", max(1, head_dim // 8))
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor <= 1:
        raise InvalidInputError(f"config key 'partial_rotary_factor' must be in (0, 1], got {factor!r}")
    return max(1, int(head_dim * factor))


def _v4_fp8_row(head_dim: int, rope_dim: int) -> _Row:
    """Return the fp8 form: with head_dim 512 and rope_dim 64 a row is 576 + 8 bytes."""
    plain = head_dim - rope_dim
    if plain <= 0 or plain % FP8_SCALED_VALUES:
        raise UnsupportedError(
            f"fp8_v4 scales groups of {FP8_SCALED_VALUES} values, but head_dim {head_dim} - rope "
            f"{rope_dim} leaves {plain}; use the native encoding"
        )
    value_bytes = plain + 2 * rope_dim
    scale_bytes = -(-(plain // FP8_SCALED_VALUES) // FP8_SCALE_ROW_BYTES) * FP8_SCALE_ROW_BYTES
    return _Row(Encoding.FP8_V4, (value_bytes, scale_bytes), page_alignment_bytes=value_bytes)


# ---------------------------------------------------------------------------------------------- others


def _latent(config: _Config, form: Encoding, value_bytes: int, page: int) -> list[Component]:
    """Return the components of a latent-attention model (DeepSeek-V2, V3), with the indexer of a sparse one (V3.2)."""
    layers = [*range(config.positive("num_hidden_layers"))]
    indexed = config.model_type in INDEXED_MODELS
    config.names("layer_types", len(layers), allowed=frozenset({INDEXED if indexed else FULL}))
    width = config.positive("kv_lora_rank") + config.positive("qk_rope_head_dim")
    latent = _Row(form, (width * value_bytes,))
    # A dense model reads all of its latents at each step, so they cannot live in the host pool.
    components = [_growing(ComponentKind.MLA_KV, layers, latent, page, host_capable=indexed)]
    if indexed:
        dim = config.positive("index_head_dim")
        row = _fp8_indexer_row(dim) if form is Encoding.BF16 else _Row(form, (dim * value_bytes,))
        components.append(_growing(ComponentKind.DSA_INDEXER, layers, row, page))
    return components


def _grouped(config: _Config, form: Encoding, value_bytes: int, page: int) -> list[Component]:
    """Return the components of a model whose KV is sharded by head: one lane a KV head, K then V of a head in a row."""
    for key in UNKNOWN_STATE_KEYS:
        if config.get(key):
            raise UnsupportedError(
                f"config key '{key}' is {config.get(key)!r}: model_type '{config.model_type}' keeps more than keys and "
                "values of equal width for each KV head, which has no exact geometry here"
            )
    query_heads = config.positive("num_attention_heads")
    if config.get("head_dim") is None:
        head_dim, rest = divmod(hidden := config.positive("hidden_size"), query_heads)
        if rest:
            raise InvalidInputError(
                f"config key 'hidden_size' is {hidden}, not a multiple of num_attention_heads {query_heads}, and there is "
                "no 'head_dim'"
            )
    else:
        head_dim = config.positive("head_dim")
    row = _Row(form, (2 * head_dim * value_bytes,), lanes=config.positive("num_key_value_heads", query_heads))
    count = config.positive("num_hidden_layers")
    sliding = _sliding_layers(config, count)
    full = sorted({*range(count)} - {*sliding})
    components = [_growing(ComponentKind.MHA_KV, full, row, page)] if full else []
    if sliding:
        components.append(_window(sliding, row, page, config.positive("sliding_window")))
    return components


def _sliding_layers(config: _Config, count: int) -> list[int]:
    named = config.names("layer_types", count, allowed=frozenset({FULL, SLIDING}))
    if named is not None:
        return [layer for layer, kind in enumerate(named) if kind == SLIDING]
    window = config.get("sliding_window")
    switched = config.get("use_sliding_window")
    if window is None or switched is False or (switched is None and config.model_type.startswith("qwen")):
        return []
    if switched:
        return [*range(config.positive("max_window_layers", count), count)]
    if config.model_type in ALL_LAYERS_SLIDE:
        return [*range(count)]
    raise UnsupportedError(
        f"config key 'sliding_window' is {window!r}, but nothing says which layers of model_type "
        f"'{config.model_type}' slide; add 'layer_types' ('{FULL}' or '{SLIDING}' for each layer)"
    )


# ---------------------------------------------------------------------------------------------- presets

_fp8_v4 = partial(geometry_from_config, encoding=Encoding.FP8_V4)
_bf16 = partial(geometry_from_config, encoding=Encoding.BF16)
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
_FLASH = _V4 | {"num_hidden_layers": 43, "compress_ratios": (0, 0, *(4, 128) * 20, 4)}
_PRO = _V4 | {"num_hidden_layers": 61, "compress_ratios": (128, 128, *(4, 128) * 29, 4)}
# Rows of 96 + 8 bytes; pages, rings and windows as in the real models.
_TINY = _V4 | {
    "num_hidden_layers": 6,
    "compress_ratios": (0, 0, 4, 128, 4, 128),
    "head_dim": 80,
    "qk_rope_head_dim": 16,
}

_BUILDERS = {
    "deepseek-v4-flash": partial(_fp8_v4, _FLASH),
    "deepseek-v4-pro": partial(_fp8_v4, _PRO),
    "deepseek-v3.2": partial(_bf16, _V32, tokens_per_page=64),
    "tiny-v4": partial(_fp8_v4, _TINY),
    "tiny-gqa": partial(_bf16, _GQA),
}
PRESETS: tuple[str, ...] = tuple(_BUILDERS)
"""The names that `preset` knows."""
