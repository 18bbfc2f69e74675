"""Any geometry, layout, backend and scattered pages, both ways: twins get what they keep, and nothing beside it is touched."""

import numpy as np
from hypothesis import given, strategies as st

from kvbridge.config.pools import DeviceLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageMoves
from kvbridge.pool.memory.layout import Chunking
from kvbridge.tier.copies import CopyMeans
from tests.helpers.twin_pools import COMBINATIONS, PAGES, TWIN_PAGES, TwinPools

PAGE_TOKENS = 32


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    """Made-up models of one growing component and one of another kind, split by heads or not."""
    lanes, alignment = draw(st.sampled_from([(1, 1), (1, 48), (2, 1), (4, 1)]))
    encoding = {"encoding": Encoding.NATIVE, "lanes": lanes, "page_alignment_bytes": alignment}
    parts = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    rate = draw(st.sampled_from([1, 4]))
    grows = Component(
        kind=ComponentKind.MHA_KV,
        layers=(0, 2),
        space=IndexSpace.FULL,
        liveness=Liveness.GROWING,
        tokens_per_row=rate,
        row_parts_bytes=draw(parts),
        slots_per_page=PAGE_TOKENS // rate,
        rows_per_logical_page=PAGE_TOKENS // rate,
        **encoding,
    )
    block = draw(st.sampled_from([4, 8, 12]))
    slides = draw(
        st.sampled_from(
            [
                {
                    "liveness": Liveness.WINDOW,
                    "window": draw(st.integers(1, 2 * PAGE_TOKENS)),
                    "slots_per_page": PAGE_TOKENS,
                },
                {"liveness": Liveness.TAIL, "block": block, "overlap": 1, "slots_per_page": PAGE_TOKENS},
                {"liveness": Liveness.TAIL, "block": 4, "overlap": 1, "slots_per_page": 8},
                {"liveness": Liveness.WHOLE, "slots_per_page": 1},
            ]
        )
    )
    other = Component(
        kind=ComponentKind.SWA_KV,
        layers=(1, 2),
        space=IndexSpace.SWA,
        row_parts_bytes=draw(parts),
        rows_per_logical_page=PAGE_TOKENS,
        **slides,
        **encoding,
    )
    return ModelGeometry(name="drawn", layer_count=3, tokens_per_page=PAGE_TOKENS, components=(grows, other))


@st.composite
def moves(draw: st.DrawFn, geometry: ModelGeometry) -> PageMoves:
    """Some pages of each space and some twins, in any order; often in runs."""
    found: PageMoves = {}
    for space in {component.space for component in geometry.components} - {IndexSpace.REQUEST}:
        twins = TWIN_PAGES[IndexSpace.FULL_COPY if space is IndexSpace.FULL else IndexSpace.SWA_COPY]
        count = draw(st.integers(0, min(PAGES[space], twins)))
        if draw(st.booleans()):
            both = [draw(st.integers(0, most - count)) + np.arange(count) for most in (PAGES[space], twins)]
        else:
            both = [np.array(draw(st.permutations(range(most)))[:count]) for most in (PAGES[space], twins)]
        found[space] = both[0].astype(np.int32), both[1].astype(np.int32)
    return found


@given(st.data())
def test_copies(data: st.DataObject):
    geometry = data.draw(st.sampled_from([preset("tiny-v4"), preset("tiny-gqa")]) | geometries())
    layout, device_layout, backend, direction = data.draw(st.sampled_from(COMBINATIONS))
    lanes = {component.lanes for component in geometry.components}
    tp_size = data.draw(st.sampled_from([1, 2] if lanes == {1} else sorted({1, *lanes, 2 * max(lanes)})))
    extent_bytes = data.draw(st.sampled_from([1 << 30, 1_100_000]))
    asked = data.draw(moves(geometry))
    with TwinPools(
        geometry,
        tp_size=tp_size,
        layout=layout,
        page_first=device_layout is DeviceLayout.PAGE_FIRST,
        chunking=Chunking(extent_bytes=extent_bytes, mapping_bytes=extent_bytes),
        seed=data.draw(st.integers(0, 1000)),
    ) as pools:
        rank = data.draw(st.integers(0, tp_size - 1))
        expected = pools.expected(asked, direction, ranks=[rank])
        with pools.copier(direction, CopyMeans(CopyBackend(backend)), rank=rank) as copier:
            assert copier.done(copier.copy(asked))
        pools.compare(expected)
