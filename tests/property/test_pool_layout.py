"""Any placement: pages never overlap, never leave their mapping, and the manifest's formula finds them."""

from itertools import pairwise

from hypothesis import given, strategies as st

from kvbridge.config.pools import HostLayout
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import check_disjoint
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components, copy_space
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.pool.memory.layout import (
    Chunking,
    Placement,
    RankPart,
    copy_placement,
    device_placement,
    host_placement,
    registered_extents,
)

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
