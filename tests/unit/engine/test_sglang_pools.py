"""The geometry of an SGLang server with several ranks: which servers may meet, and where the heads of a rank are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbridge.core.geometry.components import ComponentKind, Encoding, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint, first_difference
from kvbridge.core.geometry.models import geometry_from_config
from kvbridge.core.ids import Rank
from kvbridge.engine.sglang.pools import Buffer, RankPools, instance_geometry, rank_regions

LAYERS, HEAD_BYTES = 4, 128
V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": LAYERS,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "num_key_value_heads": 1,
    "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4],
}


def buffer(kind: ComponentKind, layer: int, page_bytes: int) -> Buffer:
    return Buffer(kind=kind, layer=layer, address=1 << 20, page_bytes=page_bytes, page_count=8)


def heads(layers: range, tp_size: int) -> RankPools:
    size = 16 * (8 // tp_size) * HEAD_BYTES
    pages = (buffer(ComponentKind.MHA_KV, 2 * layer + which, size) for which in (0, 1) for layer in layers)
    return RankPools(16, tuple(pages), "cpu")


def latent(layers: range, tp_size: int) -> RankPools:
    return RankPools(16, tuple(buffer(ComponentKind.MLA_KV, layer, 16 * 1152) for layer in layers), "cpu")


def v4(layers: range, tp_size: int) -> RankPools:
    form = geometry_from_config(V4, encoding=Encoding.FP8_V4, tokens_per_page=256)
    pages = (
        buffer(part.kind, layer, part.page_bytes())
        for part in form.components
        for layer in part.layers
        if layer in layers
    )
    return RankPools(256, tuple(pages), "cpu", window=128, config=V4)


def server(make: Callable[[range, int], RankPools], *, tp_size: int = 1, pp_size: int = 1) -> ModelGeometry:
    each = LAYERS // pp_size
    ranks = {
        Rank(pp=pp, tp=tp): make(range(pp * each, (pp + 1) * each), tp_size)
        for pp in range(pp_size)
        for tp in range(tp_size)
    }
    made = instance_geometry(ranks, name="m", tp_size=tp_size, facts={"dtype": "bfloat16"})
    assert len(made.stage_boundaries) == pp_size - 1
    for rank, pools in ranks.items():
        for region in rank_regions(made.geometry, pools, rank):
            lanes = made.geometry.component(region.component).lanes
            assert (region.lane_start, region.lane_stop) == ((rank.tp, rank.tp + 1) if lanes > 1 else (0, 1))
    return made.geometry


@pytest.mark.parametrize("make", [latent, v4])
def test_servers_of_any_number_of_ranks_meet_where_every_rank_has_the_same_bytes(
    make: Callable[[range, int], RankPools],
) -> None:
    assert len({fingerprint(server(make, tp_size=tp)) for tp in (1, 2, 4, 8)}) == 1


def test_heads_inside_a_page_meet_only_the_same_split() -> None:
    one, two = server(heads), server(heads, tp_size=2)
    assert first_difference(one, two) == (
        "facts.attention_heads is split over 1 ranks (--tp-size) here and split over 2 ranks (--tp-size) on the peer"
    )
    assert first_difference(two, server(heads, tp_size=2)) is None


@pytest.mark.parametrize("make", [heads, latent])
def test_pipeline_stages_of_prefill_meet_a_decode_server_of_one_stage(make: Callable[[range, int], RankPools]) -> None:
    assert fingerprint(server(make, tp_size=2, pp_size=2)) == fingerprint(server(make, tp_size=2))
