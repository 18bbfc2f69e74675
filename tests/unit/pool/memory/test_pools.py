from __future__ import annotations

from itertools import pairwise

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import (
    InvalidInputError,
    RegistrationError,
    UnsupportedError,
)
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import FileOrigin, SharedRegion
from kvbridge.pool.memory.layout import Chunking, RankPart, device_placement, host_placement
from kvbridge.pool.memory.pools import MappedPool, MemoryPool
from kvbridge.pool.memory.sharing import MappedRegions
from tests.helpers.pool_pages import page_address, page_view

TINY = preset("tiny-v4")
C4 = ComponentKind.C4_KV
PART = RankPart.of(TINY, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
COUNTS = {IndexSpace.FULL: 9, IndexSpace.SWA: 4, IndexSpace.REQUEST: 2}
SPLIT = Chunking(extent_bytes=16_384, mapping_bytes=40_960)


def host(layout=HostLayout.LAYER_FIRST, chunking=None):
    return host_placement(TINY, {C4}, page_count=9, layout=layout, chunking=chunking)


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("chunking", [Chunking(), SPLIT])
def test_two_processes_see_the_same_pages(shm, layout, chunking):
    placement = host(layout, chunking)
    with MappedPool.create(placement, shm, "kvb-1") as ours:
        assert [one.path for one in ours.mappings] == [shm / f"kvb-1.{one.name}" for one in placement.mappings]
        layers = [region.layer for region in ours.regions()]
        for layer in layers:
            for page in range(9):
                page_view(ours, C4, layer, page)[:] = bytes([layer * 16 + page]) * 6720
        with MappedRegions(ours.shared_regions()) as mapped:
            theirs = MemoryPool(mapped.regions)
            for layer in layers:
                for page in range(9):
                    assert page_view(theirs, C4, layer, page) == bytes([layer * 16 + page]) * 6720
            assert [region.layer for region in mapped.regions] == layers
            region = mapped.regions[-1]
            start = region.extent_addresses[-1]
            mapping = next(one for one in mapped.mappings if 0 <= start - one.address < one.length_bytes)
            first_page = (len(region.extent_addresses) - 1) * region.pages_per_extent
            assert mapping.buffer[start - mapping.address] == layers[-1] * 16 + first_page


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("chunking", [Chunking(), SPLIT])
def test_every_page_lies_in_exactly_one_extent_with_its_file(shm, layout, chunking):
    with MappedPool.create(host(layout, chunking), shm, "kvb-1") as pool:
        extents = sorted(pool.extents(), key=lambda extent: extent.address)
        for left, right in pairwise(extents):
            assert left.address + left.length_bytes <= right.address
        for region in pool.regions():
            for page in range(region.page_count):
                address = page_address(region, page)
                holding = [
                    extent
                    for extent in extents
                    if extent.address <= address and address + region.page_bytes <= extent.address + extent.length_bytes
                ]
                assert len(holding) == 1
        for extent in extents:
            assert extent.length_bytes <= chunking.extent_bytes
            mapping = next(one for one in pool.mappings if FileOrigin(path=str(one.path)) == extent.origin)
            assert extent.address == mapping.address + extent.offset_bytes
            assert mapping.path.name in extent.label


def test_progress_counts_over_all_files(shm):
    seen = []
    placement = host(chunking=SPLIT)
    MappedPool.create(placement, shm, "kvb-1", on_progress=lambda *report: seen.append(report)).close()
    assert len(seen) == len(placement.mappings)
    assert seen[-1] == (placement.total_bytes, placement.total_bytes)
    assert seen == sorted(seen)


def test_a_pool_that_cannot_be_created_leaves_nothing(shm):
    placement = host(chunking=SPLIT)
    last = shm / f"kvb-1.{placement.mappings[-1].name}"
    last.touch()
    with pytest.raises(RegistrationError, match="exists"):
        MappedPool.create(placement, shm, "kvb-1")
    assert list(shm.iterdir()) == [last]
    last.unlink()


def test_device_memory_is_no_shared_file(shm):
    part = PART.model_copy(update={"memory": MemoryKind.VRAM})
    with pytest.raises(UnsupportedError, match="vram"):
        MappedPool.create(device_placement(TINY, part, page_counts=COUNTS), shm, "kvb-1")


def test_a_region_beyond_its_file_is_refused_before_it_is_touched(shm):
    with MappedPool.create(host(), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        offset = host().total_bytes - good.region.page_bytes
        far = good.region.model_copy(update={"extent_addresses": (offset,)})
        with pytest.raises(InvalidInputError, match="ends at byte"):
            MappedRegions([SharedRegion(region=far, origins=good.origins)])
        with pytest.raises(InvalidInputError, match="1 extents, but 2 origins"):
            MappedRegions([SharedRegion(region=good.region, origins=good.origins * 2)])
