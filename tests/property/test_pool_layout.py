"""Any placement: pages never overlap, never leave their mapping, the manifest finds them; and host copies get what they keep."""

from itertools import pairwise

import numpy as np
from hypothesis import given, strategies as st

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.components import ComponentKind, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import check_disjoint
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components, copy_space
from kvbridge.core.ids import IndexSpace, PageMoves, Rank
from kvbridge.pool.memory.layout import (
    Chunking,
    Placement,
    RankPart,
    copy_placement,
    device_placement,
    host_placement,
    registered_extents,
)
from kvbridge.tier.copies import CopyMeans
from tests.helpers.geometries import new_component
from tests.helpers.twin_pools import COMBINATIONS, PAGES, TWIN_PAGES, TwinPools

TINY = preset("tiny-v4")
GAP = 1 << 40
"""Address space between two mappings of a test."""

chunkings = st.builds(
    Chunking, extent_bytes=st.integers(300_000, 1_200_000), mapping_bytes=st.none() | st.integers(303_104, 1_800_000)
)


def check(placement: Placement, chunking: Chunking) -> None:
    addresses = [GAP * (index + 1) for index in range(len(placement.mappings))]
    regions = placement.regions_at(addresses)
    check_disjoint(regions, rank=Rank(pp=0, tp=0))
    extents = registered_extents(regions)
    for left, right in pairwise(extents):
        assert left.address + left.length_bytes <= right.address
    for extent in extents:
        assert extent.length_bytes <= chunking.extent_bytes
        mapping, offset = divmod(extent.address, GAP)
        assert offset + extent.length_bytes <= placement.mappings[mapping - 1].length_bytes
    if chunking.mapping_bytes is not None:
        assert all(mapping.length_bytes <= chunking.mapping_bytes for mapping in placement.mappings)
    # Blocks never touch: neighbouring addresses belong to regions of one stride and one component.
    starts = {region.extent_addresses[0]: region for region in regions}
    for extent in extents:
        after = starts.get(extent.address + extent.length_bytes)
        assert after is None or after.page_stride_bytes > after.page_bytes


@given(
    counts=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 4)),
    chunking=chunkings,
    tp=st.integers(0, 3),
    boundary=st.integers(1, 5),
    stage=st.integers(0, 1),
    page_first=st.booleans(),
)
def test_device_placements(counts, chunking, tp, boundary, stage, *, page_first):
    part = RankPart.of(TINY, Rank(pp=stage, tp=tp), pp_size=2, tp_size=4, boundaries=(boundary,))
    spaces = (IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST)
    whole = dict(zip(spaces, counts, strict=True))
    placement = device_placement(TINY, part, page_counts=whole, chunking=chunking, page_first=page_first)
    assert {region.layer for region in placement.regions} == set(part.layers)
    check(placement, chunking)


@given(count=st.integers(1, 200), chunking=chunkings, layout=st.sampled_from(HostLayout))
def test_host_placements(count, chunking, layout):
    placement = host_placement(TINY, {ComponentKind.C4_KV}, page_count=count, layout=layout, chunking=chunking)
    assert placement.page_counts() == {IndexSpace.HOST: count}
    check(placement, chunking)


@given(
    counts=st.tuples(st.integers(1, 60), st.integers(1, 9)),
    chunking=chunkings,
    layout=st.sampled_from(HostLayout),
    tps=st.sets(st.integers(0, 1), min_size=1),
    checkpoints=st.booleans(),
)
def test_twin_placements(counts, chunking, layout, tps, *, checkpoints):
    for geometry in (TINY, preset("tiny-gqa")):
        parts = [RankPart.of(geometry, Rank(pp=0, tp=tp), pp_size=1, tp_size=2) for tp in tps]
        components = copied_components(geometry, (), checkpoints=checkpoints)
        spaces = {copy_space(component.space) for component in components}
        every = dict(zip((IndexSpace.FULL_COPY, IndexSpace.SWA_COPY), counts, strict=True))
        placement = copy_placement(geometry, parts, components, page_counts=every, layout=layout, chunking=chunking)
        assert placement.page_counts() == {space: every[space] for space in spaces}
        check(placement, chunking)


PAGE_TOKENS = 32


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    """Made-up models of one growing component and one of another kind, split by heads or not."""
    lanes, alignment = draw(st.sampled_from([(1, 1), (1, 48), (2, 1), (4, 1)]))
    form = {"lanes": lanes, "page_alignment_bytes": alignment}
    parts = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
    rate = draw(st.sampled_from([1, 4]))
    page = {"tokens_per_row": rate, "slots": PAGE_TOKENS // rate}
    grows = new_component(ComponentKind.MHA_KV, (0, 2), IndexSpace.FULL, Liveness.GROWING, draw(parts), **page, **form)
    block = draw(st.sampled_from([4, 8, 12]))
    kinds = [
        (Liveness.WINDOW, {"window": draw(st.integers(1, 2 * PAGE_TOKENS)), "slots": PAGE_TOKENS}),
        (Liveness.TAIL, {"block": block, "overlap": 1, "slots": PAGE_TOKENS}),
        (Liveness.TAIL, {"block": 4, "overlap": 1, "slots": 8}),
        (Liveness.WHOLE, {"slots": 1}),
    ]
    liveness, ring = draw(st.sampled_from(kinds))
    form |= {"rows": PAGE_TOKENS} | ring
    other = new_component(ComponentKind.SWA_KV, (1, 2), IndexSpace.SWA, liveness, draw(parts), **form)
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
