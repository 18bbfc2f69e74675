"""A request prefilled by one engine and decoded by another gives the very logits that one engine gives alone."""

from __future__ import annotations

import pytest
import torch

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, Encoding
from kvbridge.core.geometry.huggingface import geometry_from_config
from tests.helpers.torch_pools import Form, Pools, copy_request, make_pools

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

from kvbridge.engine.adapters.deepseek_v4 import (
    CacheCodec,
    Placement,
    PrefillPacker,
    reencoded,
    unpack,
)
from kvbridge.engine.adapters.transformers import generate, load_model, prefill_chunks, weights_digest
from tests.helpers.tiny_model import divergence, follow, load_config, prompt_tokens

STEPS = 8
CHUNK = 100
HOST = frozenset({ComponentKind.C4_KV})
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 126, 127, 128, 129, 130, 255, 256, 257, 258, 259, 379, 384, 511, 512, 513]

SMALL = {
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "layer_types": [
        "compressed_sparse_attention",
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32},
    "sliding_window": 48,
    "num_attention_heads": 2,
    "head_dim": 64,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "index_topk": 8,
    "mlp_layer_types": ["moe"] * 5,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
}


class Engine:
    """A model with its codec: what a prefill or a decode process has."""

    def __init__(self, config, encoding=Encoding.NATIVE):
        self.config = config
        self.model = load_model(config, seed=3)
        self.geometry = geometry_from_config(config, encoding=encoding)
        self.codec = CacheCodec(self.geometry, self.model.config)

    def prefill_into(self, pools: list[Pools], tokens: list[int], chunk=CHUNK):
        """Compute a prompt and pack each chunk into every stage's pools; return the prefill."""
        packers = [
            PrefillPacker(self.codec, Placement(stage.views, stage.tables), prompt_tokens=len(tokens))
            for stage in pools
        ]
        return prefill_chunks(
            self.model,
            tokens,
            chunk_tokens=chunk,
            on_chunk=lambda cache, _: [packer.advance(cache) for packer in packers] and None,
        )


@pytest.fixture(scope="module")
def tiny():
    return Engine(load_config())


@pytest.fixture(scope="module")
def small():
    return Engine(SMALL)


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def stages(engine: Engine, tokens: int) -> list[Pools]:
    """Two pipeline stages with pages of their own each."""
    half = engine.geometry.layer_count // 2
    layers = (range(half), range(half, engine.geometry.layer_count))
    return [
        make_pools(engine.geometry, tokens=tokens, seed=seed, form=Form(layers=list(of_stage)))
        for seed, of_stage in enumerate(layers)
    ]


def decode_pools(engine: Engine, tokens: int) -> Pools:
    return make_pools(engine.geometry, tokens=tokens, seed=9, form=Form(host=HOST, page_first=True, extent_pages=2))


def moved(engine: Engine, tokens: list[int], chunk=CHUNK):
    """Prefill on two stages, move, unpack: (the prefill, decode's cache)."""
    sources = stages(engine, len(tokens))
    prefill = engine.prefill_into(sources, tokens, chunk)
    target = decode_pools(engine, len(tokens))
    for source in sources:
        copy_request(engine.geometry, source, target, tokens=len(tokens))
    return prefill, unpack(engine.codec, [Placement(target.views, target.tables)], tokens=len(tokens))


def assert_decodes_alike(engine: Engine, prefill, cache, steps=STEPS):
    ours = generate(engine.model, prefill.cache, first_token=prefill.first_token, steps=steps)
    theirs = generate(engine.model, cache, first_token=prefill.first_token, steps=steps)
    assert ours.tokens == theirs.tokens
    assert torch.equal(ours.logits, theirs.logits)
    return ours


@pytest.mark.parametrize("length", LENGTHS)
def test_decode_continues_bit_for_bit(tiny, length):
    prefill, cache = moved(tiny, prompt_tokens(length))
    assert_decodes_alike(tiny, prefill, cache)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 31, 33, 47, 48, 49, 255, 256, 257, 264, 300])
def test_other_rates_windows_and_layer_patterns(small, length):
    prefill, cache = moved(small, prompt_tokens(length, offset=50), chunk=37)
    # Long enough to close blocks of both compressors after the hand-over.
    assert_decodes_alike(small, prefill, cache, steps=40)


def test_several_thousand_tokens(tiny):
    prefill, cache = moved(tiny, prompt_tokens(4098), chunk=512)
    ours = assert_decodes_alike(tiny, prefill, cache, steps=16)
    assert len(set(ours.tokens)) > 3, "a model that repeats one token would hide a wrong cache"


def test_unpacked_cache_has_the_form_that_the_model_makes(tiny):
    for length in (3, 4, 130):
        prefill, cache = moved(tiny, prompt_tokens(length))
        for ours, theirs in zip(prefill.cache.layers, cache.layers, strict=True):
            assert _form(ours) == _form(theirs)


def _form(layer):
    form = {}
    for name, value in sorted(vars(layer).items()):
        entries = value.items() if isinstance(value, dict) else [("", value)]
        for key, inner in entries:
            is_tensor = isinstance(inner, torch.Tensor)
            form[name, key] = (tuple(inner.shape), inner.dtype, inner.tolist()) if is_tensor else inner
    return form


@pytest.mark.parametrize("kind", list(ComponentKind)[:7])
def test_every_component_decides_the_logits(tiny, kind):
    """A transfer that loses one component must not pass for a good one."""
    length = 507  # both compressors close a block within the steps, and there are more entries than the indexer picks
    source = make_pools(tiny.geometry, tokens=length)
    prefill = tiny.prefill_into([source], prompt_tokens(length))
    component = tiny.geometry.component(kind)
    rows = component.live_rows(length)
    for layer in component.layers:
        nothing = torch.zeros((rows.count, component.row_bytes), dtype=torch.uint8)
        source.views.write_rows(kind, layer, tables=source.tables, start_row=rows.start, rows=nothing)
    cache = unpack(tiny.codec, [Placement(source.views, source.tables)], tokens=length)
    ours = generate(tiny.model, prefill.cache, first_token=prefill.first_token, steps=STEPS)
    theirs = follow(tiny.model, cache, tokens=ours.tokens)
    assert not torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("length", [2, 130, 1027])
def test_fp8_pages_equal_an_encoded_cache_and_stay_close_to_the_model(length):
    engine = Engine(load_config(), Encoding.FP8_V4)
    assert engine.geometry.component(ComponentKind.C4_KV).row_parts_bytes == (576, 8)
    prefill, cache = moved(engine, prompt_tokens(length), chunk=512)
    encoded = reencoded(engine.codec, prefill.cache)
    exact = generate(engine.model, prefill.cache, first_token=prefill.first_token, steps=24)
    theirs = follow(engine.model, cache, tokens=exact.tokens)
    assert torch.equal(follow(engine.model, encoded, tokens=exact.tokens).logits, theirs.logits)
    apart = divergence(exact, theirs)
    assert 0 < apart.mean_kl < 0.05
    assert apart.top1_agreement >= 0.8


def test_weights_depend_on_the_seed_alone():
    one = load_model(SMALL, seed=1)
    torch.manual_seed(99)
    assert weights_digest(load_model(SMALL, seed=1)) == weights_digest(one)
    assert weights_digest(load_model(SMALL, seed=2)) != weights_digest(one)


def test_no_more_is_packed_than_the_prompt(small):
    pools = make_pools(small.geometry, tokens=64)
    placement = Placement(pools.views, pools.tables)
    cache = prefill_chunks(small.model, prompt_tokens(40), chunk_tokens=40).cache
    packer = PrefillPacker(small.codec, placement, prompt_tokens=39)
    with pytest.raises(ConflictError, match="40 tokens; 0 of 39"):
        packer.advance(cache)


def test_a_missing_stage_is_named(small):
    first, _ = stages(small, 20)
    small.prefill_into([first], prompt_tokens(20))
    with pytest.raises(InvalidInputError, match="no rank here holds swa_kv layer 2"):
        unpack(small.codec, [Placement(first.views, first.tables)], tokens=20)


def test_a_geometry_of_another_model_is_refused(tiny, small):
    with pytest.raises(InvalidInputError, match="layer_types"):
        CacheCodec(small.geometry, tiny.model.config)
    other_window = geometry_from_config({**SMALL, "sliding_window": 64})
    with pytest.raises(InvalidInputError, match="window of 64"):
        CacheCodec(other_window, small.model.config)
    with pytest.raises(InvalidInputError, match="dtype"):
        CacheCodec(geometry_from_config(SMALL, native_dtype_bytes=2), small.model.config)
