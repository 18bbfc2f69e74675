from __future__ import annotations

from itertools import pairwise

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.checks import check_manifest
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.geometry.twins import twin_components
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import FileOrigin
from kvbridge.pool.memory.extent import pages_per_extent
from kvbridge.pool.memory.layout import (
    Chunking,
    RankPart,
    device_placement,
    host_placement,
    stage_layers,
    twin_placement,
)
from kvbridge.pool.memory.placement import Placement
from kvbridge.pool.memory.sharing import registered_extents

FLASH = preset("deepseek-v4-flash")
GQA = preset("tiny-gqa")
COUNTS = {IndexSpace.FULL: 100, IndexSpace.SWA: 10, IndexSpace.REQUEST: 3}
C4 = ComponentKind.C4_KV


def part(geometry=FLASH, pp=0, tp=0, *, pp_size=1, tp_size=1, boundaries=None):
    return RankPart.of(geometry, Rank(pp=pp, tp=tp), pp_size=pp_size, tp_size=tp_size, boundaries=boundaries)


def test_stages_split_layers_evenly_and_the_first_take_the_rest():
    stages = [stage_layers(43, 4, pp) for pp in range(4)]
    assert [len(stage) for stage in stages] == [11, 11, 11, 10]
    assert sum(stages, ()) == tuple(range(43))


def test_stages_with_boundaries():
    assert stage_layers(10, 3, 0, (2, 9)) == (0, 1)
    assert stage_layers(10, 3, 1, (2, 9)) == tuple(range(2, 9))
    assert stage_layers(10, 3, 2, (2, 9)) == (9,)
    assert stage_layers(10, 1, 0, ()) == tuple(range(10))


@pytest.mark.parametrize(
    ("layers", "pp_size", "pp", "boundaries"),
    [
        (10, 3, 3, None),
        (10, 0, 0, None),
        (2, 3, 0, None),
        (10, 3, 0, (2,)),
        (10, 3, 0, (9, 2)),
        (10, 3, 0, (0, 5)),
        (10, 2, 0, (10,)),
    ],
)
def test_impossible_stages_are_refused(layers, pp_size, pp, boundaries):
    with pytest.raises(InvalidInputError):
        stage_layers(layers, pp_size, pp, boundaries)


def test_a_whole_model_on_one_rank_has_every_component_of_every_layer():
    placement = device_placement(FLASH, part(), page_counts=COUNTS)
    assert len(placement.regions) == 21 * 4 + 20 * 2 + 43
    assert len(placement.mappings) == 1
    assert placement.page_counts() == COUNTS
    expected = sum(
        len(component.layers) * component.page_bytes() * COUNTS[component.space] for component in FLASH.components
    )
    # What is not pages is alignment: less than two memory pages for each block.
    assert expected <= placement.total_bytes < expected + len(placement.regions) * 2 * 4096
    for region in placement.regions:
        assert region.page_stride_bytes == region.page_bytes
        assert region.extent_addresses[0] % 4096 == 0


def test_regions_pass_the_check_of_every_manifest():
    for geometry, tp_size in ((FLASH, 8), (GQA, 2), (GQA, 8)):
        ours = part(geometry, tp=1, tp_size=tp_size)
        regions = device_placement(geometry, ours, page_counts=COUNTS).regions_at([0x10000])
        manifest = RankManifest(
            fingerprint=fingerprint(geometry), rank=ours.rank, pp_size=1, tp_size=tp_size, regions=regions
        )
        check_manifest(manifest, geometry)


def test_heads_are_split_over_ranks():
    regions = device_placement(GQA, part(GQA, tp=1, tp_size=2), page_counts=COUNTS).regions
    assert {(region.lane_start, region.lane_stop) for region in regions} == {(2, 4)}
    assert regions[0].page_bytes == GQA.components[0].page_bytes(2)
    with pytest.raises(UnsupportedError):
        device_placement(GQA, part(GQA, tp_size=3), page_counts=COUNTS)


def test_a_stage_holds_its_layers_and_decode_leaves_out_what_lives_on_the_host():
    second = part(pp=1, pp_size=2, boundaries=(40,))
    placement = device_placement(FLASH, second, page_counts=COUNTS, exclude={C4})
    assert {region.layer for region in placement.regions} == {40, 41, 42}
    assert C4 not in {region.component for region in placement.regions}


def test_missing_page_counts_and_empty_ranks_are_refused():
    with pytest.raises(InvalidInputError, match="needs at least one page of space 'request'"):
        device_placement(FLASH, part(), page_counts={IndexSpace.FULL: 1, IndexSpace.SWA: 1})
    with pytest.raises(InvalidInputError, match="would hold no component"):
        device_placement(GQA, part(GQA), page_counts=COUNTS, exclude={ComponentKind.MHA_KV})
    with pytest.raises(InvalidInputError, match="does not exist"):
        part(tp=2, tp_size=2)


def test_memory_kind_and_device_come_from_the_part():
    ours = part().model_copy(update={"memory": MemoryKind.VRAM, "device": 3})
    region = device_placement(FLASH, ours, page_counts=COUNTS).regions_at([4096])[0]
    assert (region.memory, region.device) == (MemoryKind.VRAM, 3)


def test_extents_are_whole_pages_begin_aligned_and_touch():
    placement = device_placement(FLASH, part(), page_counts=COUNTS, chunking=Chunking(extent_bytes=3 << 20))
    region = next(region for region in placement.regions if region.component is C4)
    assert region.pages_per_extent == 64  # 84 pages would fit, 64 x 37,440 is a multiple of 4,096
    assert len(region.extent_addresses) == 2
    assert region.extent_addresses[1] == region.extent_addresses[0] + 64 * 37_440
    assert region.extent_addresses[1] % 4096 == 0


@pytest.mark.parametrize(
    ("count", "stride", "limit", "expected"),
    [(100, 4096, 8192, 2), (100, 37_440, 1 << 30, 100), (100, 37_440, 80_000, 2), (1000, 1728, 300_000, 128)],
)
def test_pages_per_extent(count, stride, limit, expected):
    assert pages_per_extent(count, stride, limit) == expected


def test_a_page_longer_than_an_extent_is_refused_with_its_name():
    with pytest.raises(InvalidInputError, match="c128_state, 1 layers together: a page of 524288 bytes is longer"):
        device_placement(FLASH, part(), page_counts=COUNTS, chunking=Chunking(extent_bytes=500_000))


def test_layer_first_host_pool():
    placement = host_placement(FLASH, {C4}, page_count=50)
    first, second = placement.regions[:2]
    assert {region.space for region in placement.regions} == {IndexSpace.HOST}
    assert first.page_stride_bytes == 37_440
    assert second.extent_addresses[0] >= 50 * 37_440
    assert placement.mappings[0].name == "host"


def test_page_first_host_pool():
    placement = host_placement(FLASH, {C4}, page_count=50, layout=HostLayout.PAGE_FIRST)
    assert [region.extent_addresses[0] for region in placement.regions] == [37_440 * index for index in range(21)]
    assert {region.page_stride_bytes for region in placement.regions} == {21 * 37_440}
    assert placement.total_bytes == -(-50 * 21 * 37_440 // 4096) * 4096


def test_a_page_of_a_page_first_device_pool_is_one_stretch_of_memory_and_one_of_what_may_live_on_the_host():
    placement = device_placement(FLASH, part(), page_counts=COUNTS, page_first=True)
    check_manifest(manifest_of(placement), FLASH)
    full = [region for region in placement.regions if region.space is IndexSpace.FULL]
    for regions, page_bytes in (
        ([region for region in full if region.component is C4], 786_240),
        ([region for region in full if region.component is not C4], 211_968),
    ):
        offsets = sorted((region.extent_addresses[0], region.page_bytes) for region in regions)
        assert all(first + length == after for (first, length), (after, _) in pairwise(offsets))
        assert sum(offsets[-1]) - offsets[0][0] == page_bytes
        assert {region.page_stride_bytes for region in regions} == {page_bytes}, "pages go on without a gap"
    swa = {region.page_stride_bytes for region in placement.regions if region.space is IndexSpace.SWA}
    assert swa == {8_160_192}, "8,160,000 bytes, and a multiple of a row's values as attention wants it"
    assert all(region.page_stride_bytes % 576 == 0 for region in placement.regions)


@pytest.mark.parametrize("pages", [1, 3])
def test_neighbours_are_registered_together_also_where_an_extent_holds_one_page(pages):
    counts = COUNTS | {IndexSpace.FULL: pages}
    chunking = Chunking(extent_bytes=16 << 20)
    placement = device_placement(FLASH, part(), page_counts=counts, page_first=True, chunking=chunking)
    regions = placement.regions_at([1 << 40] * len(placement.mappings))
    extents = registered_extents(regions)
    for region in regions:
        last = region.extents()[-1][0]
        home = next(each for each in extents if each.address <= last < each.address + each.length_bytes)
        alike = [each for each in regions if each.page_stride_bytes == region.page_stride_bytes]
        begins = [each.extents()[-1][0] for each in alike]
        assert home.address <= min(begins), f"{region.label}: its page of all layers is one piece"
        assert max(begins) + alike[-1].page_bytes <= home.address + home.length_bytes


TWIN_COUNTS = {IndexSpace.FULL_TWIN: 30, IndexSpace.SWA_TWIN: 4}


def test_layer_first_twins_keep_what_is_live():
    everything = twin_components(FLASH, (), checkpoints=True)
    placement = twin_placement(FLASH, [part()], everything, page_counts=TWIN_COUNTS)
    assert placement.page_counts() == TWIN_COUNTS
    assert placement.memory is MemoryKind.DRAM
    assert {(region.lane_start, region.lane_stop) for region in placement.regions} == {(0, 1)}
    assert all(region.page_stride_bytes == region.page_bytes for region in placement.regions)
    found = dict.fromkeys(TWIN_COUNTS, 0)
    for region in placement.regions:
        found[region.space] += region.page_bytes
    assert found == {IndexSpace.FULL_TWIN: 998_208, IndexSpace.SWA_TWIN: 4_080_000}


def test_page_first_twins():
    everything = twin_components(FLASH, (), checkpoints=True)
    placement = twin_placement(FLASH, [part()], everything, page_counts=TWIN_COUNTS, layout=HostLayout.PAGE_FIRST)
    strides = {region.space: region.page_stride_bytes for region in placement.regions}
    assert strides == {IndexSpace.FULL_TWIN: 998_208, IndexSpace.SWA_TWIN: 4_080_000}


@pytest.mark.parametrize("layout", HostLayout)
def test_twins_hold_the_layers_and_the_lanes_of_the_ranks_of_the_node(layout):
    sizes = {"pp_size": 2, "tp_size": 2}
    parts = [RankPart.of(GQA, Rank(pp=1, tp=tp), **sizes) for tp in range(2)]
    components = twin_components(GQA, (), checkpoints=True)
    counts = {IndexSpace.FULL_TWIN: 3}
    placement = twin_placement(GQA, parts, components, page_counts=counts, layout=layout)
    assert {region.layer for region in placement.regions} == set(parts[0].layers)
    assert {(region.lane_start, region.lane_stop) for region in placement.regions} == {(0, 4)}
    second = twin_placement(GQA, parts[1:], components, page_counts=counts, layout=layout)
    assert {(region.lane_start, region.lane_stop) for region in second.regions} == {(2, 4)}
    assert {2 * region.page_bytes for region in second.regions} == {region.page_bytes for region in placement.regions}


def test_impossible_twins_are_refused():
    everything = twin_components(FLASH, (), checkpoints=True)
    with pytest.raises(InvalidInputError, match="at least one page of space 'swa_twin'"):
        twin_placement(FLASH, [part()], everything, page_counts={IndexSpace.FULL_TWIN: 1})
    with pytest.raises(InvalidInputError, match="holds no component of 'deepseek-v4-flash'"):
        twin_placement(FLASH, [part()], (), page_counts=TWIN_COUNTS)
    with pytest.raises(InvalidInputError, match="pages of 'request' have no twins"):
        twin_placement(FLASH, [part()], FLASH.components, page_counts=TWIN_COUNTS)


def test_no_manifest_ever_names_twins():
    placement = twin_placement(FLASH, [part()], twin_components(FLASH, (), checkpoints=True), page_counts=TWIN_COUNTS)
    with pytest.raises(InvalidInputError, match=r"c4_kv layer 2 \(twin\): its page ids count space 'full_twin'"):
        check_manifest(manifest_of(placement), FLASH)


def manifest_of(placement: Placement) -> RankManifest:
    return RankManifest(
        fingerprint=fingerprint(FLASH),
        rank=Rank(pp=0, tp=0),
        pp_size=1,
        tp_size=1,
        regions=placement.regions_at([1 << 40]),
    )


@pytest.mark.parametrize("layout", HostLayout)
def test_a_host_pool_in_several_mappings(layout):
    chunking = Chunking(extent_bytes=2 << 20, mapping_bytes=5 << 20)
    placement = host_placement(FLASH, {C4}, page_count=50, layout=layout, chunking=chunking)
    assert len(placement.mappings) > 5
    assert [mapping.name for mapping in placement.mappings[:2]] == ["host-0", "host-1"]
    assert all(mapping.length_bytes <= 5 << 20 for mapping in placement.mappings)
    ids = range(len(placement.mappings))
    assert {mapping for homes in placement.homes for mapping in homes} == set(ids)


def test_a_mapping_limit_that_is_not_aligned_is_kept():
    chunking = Chunking(mapping_bytes=100_001)
    placement = host_placement(FLASH, {C4}, page_count=9, chunking=chunking)
    assert all(mapping.length_bytes <= 100_001 for mapping in placement.mappings)


def test_only_layers_of_this_node():
    placement = host_placement(FLASH, {C4}, page_count=5, layers={2, 3, 4})
    assert {region.layer for region in placement.regions} <= {2, 3, 4}
    assert placement.regions


def test_what_cannot_live_on_the_host_is_refused():
    with pytest.raises(InvalidInputError, match="cannot live in the host pool"):
        host_placement(FLASH, {ComponentKind.SWA_KV}, page_count=5)
    with pytest.raises(InvalidInputError, match="no layer of this node"):
        host_placement(FLASH, {C4}, page_count=5, layers={0})
    for kinds, count in (((), 5), ({C4}, 0)):
        with pytest.raises(InvalidInputError, match="needs a component and a page"):
            host_placement(FLASH, kinds, page_count=count)
    split = GQA.model_copy(update={"components": (GQA.components[0].model_copy(update={"host_capable": True}),)})
    with pytest.raises(UnsupportedError, match="split by heads"):
        host_placement(split, {ComponentKind.MHA_KV}, page_count=5)


def test_a_placement_that_reaches_beyond_its_mapping_is_not_built():
    placement = host_placement(FLASH, {C4}, page_count=50)
    for change in ({"length_bytes": 4096}, {"name": "a/b"}):
        document = placement.model_dump()
        document["mappings"] = [document["mappings"][0] | change]
        with pytest.raises(ValueError, match=r"does not lie within|pattern"):
            Placement.model_validate(document)


def test_addresses_and_origins_must_match_the_mappings():
    placement = host_placement(FLASH, {C4}, page_count=5)
    with pytest.raises(InvalidInputError, match="one address or origin for each, got 2"):
        placement.regions_at([1, 2])
    with pytest.raises(InvalidInputError, match="one address or origin for each, got 0"):
        placement.shared_regions([])
    shared = placement.shared_regions([FileOrigin(path="/dev/shm/x")])
    assert shared[0].region.extent_addresses == (0,)
    assert shared[0].origins == (FileOrigin(path="/dev/shm/x"),)


def test_blocks_never_touch_even_where_pages_fill_memory_pages_exactly():
    regions = device_placement(FLASH, part(), page_counts=COUNTS).regions_at([1 << 40])
    state = [region for region in regions if region.component is ComponentKind.C128_STATE]
    starts = {region.extent_addresses[0] for region in state}
    assert state[0].page_bytes % 4096 == 0
    assert not starts & {start + state[0].page_count * state[0].page_bytes for start in starts}
