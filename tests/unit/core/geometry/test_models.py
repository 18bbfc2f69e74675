"""Geometry from `config.json`."""

import pytest

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind as Kind, Encoding, Liveness
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import geometry_from_config, preset
from kvbridge.core.ids import IndexSpace as Space

FLASH = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}
PRO = FLASH | {"num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]}
TINY = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "head_dim": 32,
    "index_head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
}
V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
V32 = V3 | {"model_type": "deepseek_v32", "index_head_dim": 128}


@pytest.mark.parametrize(("config", "name"), [(FLASH, "deepseek-v4-flash"), (PRO, "deepseek-v4-pro")])
def test_full_v4_configs_are_the_presets(config, name):
    assert geometry_from_config(config, encoding=Encoding.FP8_V4, name=name) == preset(name)


@pytest.mark.parametrize(
    "rope", [{"qk_rope_head_dim": 64}, {"partial_rotary_factor": 0.125}, {}], ids=["legacy key", "factor", "default"]
)
def test_rope_width_has_three_spellings(rope):
    config = {key: value for key, value in FLASH.items() if key != "qk_rope_head_dim"} | rope
    assert fingerprint(geometry_from_config(config, encoding=Encoding.FP8_V4)) == fingerprint(
        preset("deepseek-v4-flash")
    )


@pytest.mark.parametrize(
    "rates",
    [
        {"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32}},
        {"compress_rate_csa": 8, "compress_rate_hca": 32},
    ],
)
def test_other_compression_rates(rates):
    geometry = geometry_from_config(TINY | rates, tokens_per_page=64)
    kv, heavy = geometry.component(Kind.C4_KV), geometry.component(Kind.C128_KV)
    assert (kv.tokens_per_row, kv.slots_per_page) == (8, 8)
    assert (heavy.tokens_per_row, heavy.slots_per_page) == (32, 2)
    state, ring = geometry.component(Kind.C4_STATE), geometry.component(Kind.C128_STATE)
    assert (state.block, state.overlap, state.slots_per_page) == (8, 1, 16)
    assert (ring.block, ring.overlap, ring.slots_per_page) == (32, 0, 32)


def test_transformers_own_default_pattern():
    config = {key: value for key, value in TINY.items() if key != "layer_types"} | {"num_hidden_layers": 6}
    geometry = geometry_from_config(config)
    assert geometry.component(Kind.C4_KV).layers == (3, 5)
    assert geometry.component(Kind.C128_KV).layers == (0, 1, 2, 4)


def test_grouped_queries():
    geometry = geometry_from_config(LLAMA, native_dtype_bytes=2)
    (part,) = geometry.components
    assert (part.kind, part.lanes, part.row_parts_bytes, part.space) == (Kind.MHA_KV, 2, (2 * 32 * 2,), Space.FULL)
    assert (part.slots_per_page, part.liveness, part.layers) == (256, Liveness.GROWING, (0, 1, 2, 3))
    assert geometry.name == "llama"


@pytest.mark.parametrize(
    ("extra", "full", "sliding"),
    [
        ({"model_type": "mistral", "sliding_window": None}, (0, 1, 2, 3), ()),
        ({"model_type": "mistral", "sliding_window": 4096}, (), (0, 1, 2, 3)),
        ({"model_type": "qwen2", "sliding_window": 4096}, (0, 1, 2, 3), ()),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, (0, 1, 2, 3), ()),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
            (0, 1, 2),
            (3,),
        ),
        (
            {"model_type": "gpt_oss", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (1, 3),
            (0, 2),
        ),
    ],
)
def test_sliding_layers_live_in_the_window_space(extra, full, sliding):
    geometry = geometry_from_config(LLAMA | extra)
    layers = {part.kind: part.layers for part in geometry.components}
    assert layers.get(Kind.MHA_KV, ()) == full
    assert layers.get(Kind.SWA_KV, ()) == sliding
    if sliding:
        part = geometry.component(Kind.SWA_KV)
        assert (part.window, part.lanes, part.space) == (extra["sliding_window"], 2, Space.SWA)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "'model_type' must be a name, got None"),
        ({"model_type": "llama"}, "lacks the key 'num_attention_heads'"),
        (LLAMA | {"num_hidden_layers": 0}, "'num_hidden_layers' must be .* got 0"),
        (LLAMA | {"num_hidden_layers": True}, "'num_hidden_layers' must be .* got True"),
        (LLAMA | {"hidden_size": 2**40}, "'hidden_size' must be .* got 1099511627776"),
        (LLAMA | {"hidden_size": 250}, "'hidden_size' is 250, not a multiple"),
        (LLAMA | {"layer_types": ["full_attention"]}, "'layer_types' must list 4 layers"),
        (LLAMA | {"layer_types": ["full_attention", "sliding_attention"] * 2}, "lacks the key 'sliding_window'"),
        (FLASH | {"compress_rates": [4, 128]}, "'compress_rates' must map"),
        (FLASH | {"compress_rates": {"compressed_sparse_attention": 0}}, "'compress_rates.compressed_.* got 0"),
        (FLASH | {"partial_rotary_factor": 1.5}, r"'partial_rotary_factor' must be in \(0, 1\], got 1.5"),
    ],
)
def test_wrong_configs_name_key_and_value(config, words):
    with pytest.raises(InvalidInputError, match=words):
        geometry_from_config(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"model_type": "gemma2", "sliding_window": 64}, "'sliding_window' is 64.*'gemma2'.*layer_types"),
        (LLAMA | {"layer_types": ["linear_attention"] * 4}, "'layer_types' is 'linear_attention' for layer 0"),
        (LLAMA | {"model_type": "jamba", "attn_layer_period": 8}, "'attn_layer_period' is 8.*'jamba'"),
        (LLAMA | {"per_layer_config": {"05": {"head_dim": 512}}}, "'per_layer_config' is"),
        (FLASH | {"num_key_value_heads": 2}, "'num_key_value_heads' is 2"),
        (FLASH | {"compress_ratios": [2] * 43}, "'compress_ratios' is 2 for layer 0"),
        (FLASH | {"layer_types": ["full_attention"] * 43}, "'layer_types' is 'full_attention' for layer 0"),
        (FLASH | {"compress_rate_csa": 3}, "compression rate of 3 does not divide a page of 256"),
        (V3 | {"layer_types": ["indexed_attention"] * 61}, "'layer_types' is 'indexed_attention'"),
    ],
)
def test_models_without_exact_geometry_are_refused(config, words):
    with pytest.raises(UnsupportedError, match=words):
        geometry_from_config(config)


@pytest.mark.parametrize(
    ("config", "encoding", "words"),
    [
        (LLAMA, Encoding.FP8_V4, "'fp8_v4' does not exist for model_type 'llama'"),
        (FLASH, Encoding.BF16, "'bf16' does not exist for DeepSeek-V4"),
        (TINY, Encoding.FP8_V4, "head_dim 32 - rope 4 leaves 28"),
        (FLASH | {"index_head_dim": 96}, Encoding.FP8_V4, "index_head_dim is 96"),
        (V32 | {"index_head_dim": 96}, Encoding.BF16, "index_head_dim is 96"),
    ],
)
def test_forms_that_a_model_cannot_have(config, encoding, words):
    with pytest.raises(UnsupportedError, match=words):
        geometry_from_config(config, encoding=encoding)
