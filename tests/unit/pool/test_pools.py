from __future__ import annotations

from itertools import pairwise

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PageOutOfBoundsError,
    RegistrationError,
    UnsupportedError,
)
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import FileOrigin, SharedRegion
from kvbridge.pool.memory.device_pool import DevicePool
from kvbridge.pool.memory.host_pool import HostPool
from kvbridge.pool.memory.layout import Chunking, RankPart, device_placement, host_placement
from kvbridge.pool.memory.mapped_pool import mapping_paths
from kvbridge.pool.memory.sharing import MappedRegions

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
    with HostPool.create(placement, shm, "kvb-1") as ours:
        assert ours.paths == mapping_paths(placement, shm, "kvb-1")
        layers = [region.layer for region in ours.regions()]
        for layer in layers:
            for page in range(9):
                ours.page_view(C4, layer, page)[:] = bytes([layer * 16 + page]) * 6720
        with HostPool.open(placement, ours.paths) as theirs, MappedRegions(ours.shared_regions()) as mapped:
            for layer in layers:
                for page in range(9):
                    assert theirs.page_view(C4, layer, page) == bytes([layer * 16 + page]) * 6720
            assert [region.layer for region in mapped.regions] == layers
            region = mapped.regions[-1]
            start = region.extent_addresses[-1]
            mapping = next(one for one in mapped.mappings if 0 <= start - one.address < one.length_bytes)
            first_page = (len(region.extent_addresses) - 1) * region.pages_per_extent
            assert mapping.buffer[start - mapping.address] == layers[-1] * 16 + first_page


@pytest.mark.parametrize("layout", HostLayout)
@pytest.mark.parametrize("chunking", [Chunking(), SPLIT])
def test_every_page_lies_in_exactly_one_extent_with_its_file(shm, layout, chunking):
    with HostPool.create(host(layout, chunking), shm, "kvb-1") as pool:
        extents = sorted(pool.extents(), key=lambda extent: extent.address)
        for left, right in pairwise(extents):
            assert left.address + left.length_bytes <= right.address
        for region in pool.regions():
            for page in range(region.page_count):
                address = pool.page_address(region.component, region.layer, page)
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


def test_a_device_pool_on_the_cpu(shm):
    with DevicePool.create(device_placement(TINY, PART, page_counts=COUNTS), shm, "kvb-1") as pool:
        assert pool.page_counts() == COUNTS
        views = {
            (region.component, region.layer): pool.page_view(region.component, region.layer, region.page_count - 1)
            for region in pool.regions()
        }
        for number, view in enumerate(views.values()):
            view[:] = bytes([number]) * len(view)
        for number, view in enumerate(views.values()):
            assert view == bytes([number]) * len(view)
        with pytest.raises(ConflictError):
            pool.close()
        views.clear()
        del view
    assert list(shm.iterdir()) == []


def test_pages_that_do_not_exist(shm):
    with HostPool.create(host(), shm, "kvb-1") as pool:
        layer = pool.regions()[0].layer
        for page in (-1, 9):
            with pytest.raises(PageOutOfBoundsError, match=f"page {page} is not in \\[0, 9\\) of 'host'"):
                pool.page_view(C4, layer, page)
        with pytest.raises(NotFoundError):
            pool.page_view(C4, 99, 0)


def test_progress_counts_over_all_files(shm):
    seen = []
    placement = host(chunking=SPLIT)
    HostPool.create(placement, shm, "kvb-1", on_progress=lambda *report: seen.append(report)).close()
    assert len(seen) == len(placement.mappings)
    assert seen[-1] == (placement.total_bytes, placement.total_bytes)
    assert seen == sorted(seen)


def test_a_pool_that_cannot_be_created_leaves_nothing(shm):
    placement = host(chunking=SPLIT)
    last = shm / f"kvb-1.{placement.mappings[-1].name}"
    last.touch()
    with pytest.raises(RegistrationError, match="exists"):
        HostPool.create(placement, shm, "kvb-1")
    assert list(shm.iterdir()) == [last]
    last.unlink()


def test_the_wrong_kind_of_pool_is_refused(shm):
    with pytest.raises(InvalidInputError, match="a DevicePool holds pages of"):
        DevicePool.create(host(), shm, "kvb-1")
    with pytest.raises(InvalidInputError, match="a HostPool holds pages of"):
        HostPool.create(device_placement(TINY, PART, page_counts=COUNTS), shm, "kvb-1")
    part = PART.model_copy(update={"memory": MemoryKind.VRAM})
    with pytest.raises(UnsupportedError, match="vram"):
        DevicePool.create(device_placement(TINY, part, page_counts=COUNTS), shm, "kvb-1")


def test_opening_with_another_placement_is_refused(shm):
    with HostPool.create(host(), shm, "kvb-1") as pool:
        larger = host_placement(TINY, {C4}, page_count=10)
        with pytest.raises(RegistrationError, match="another configuration"):
            HostPool.open(larger, pool.paths)
        with pytest.raises(InvalidInputError, match="one path for each"):
            HostPool.open(host(), [])


def test_a_region_beyond_its_file_is_refused_before_it_is_touched(shm):
    with HostPool.create(host(), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        offset = pool.total_bytes - good.region.page_bytes
        far = good.region.model_copy(update={"extent_addresses": (offset,)})
        with pytest.raises(InvalidInputError, match="ends at byte"):
            MappedRegions([SharedRegion(region=far, origins=good.origins)])
        with pytest.raises(InvalidInputError, match="1 extents, but 2 origins"):
            MappedRegions([SharedRegion(region=good.region, origins=good.origins * 2)])


def test_repr_is_for_the_operator(shm):
    with HostPool.create(host(), shm, "kvb-1") as pool:
        assert repr(pool) == f"<HostPool: 2 regions, pages 9 host, {pool.total_bytes} bytes in 1 files>"
