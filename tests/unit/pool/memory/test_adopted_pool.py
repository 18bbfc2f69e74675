from __future__ import annotations

import ctypes

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.pool.memory.layout import RankPart, device_placement
from kvbridge.pool.memory.pools import MemoryPool
from tests.helpers.pool_pages import page_address, region_of

TINY = preset("tiny-v4")
GQA = preset("tiny-gqa")
KV = ComponentKind.MHA_KV
PAGE = 32_768  # two of four heads
PART = RankPart.of(GQA, Rank(pp=0, tp=1), pp_size=1, tp_size=2)
PAGES = 6


@pytest.fixture
def memory():
    return (ctypes.c_ubyte * (3 * PAGES * PAGE))()


def region(address: int, layer: int, **changes) -> Region:
    facts = {
        "component": KV,
        "layer": layer,
        "space": IndexSpace.FULL,
        "memory": MemoryKind.DRAM,
        "extent_addresses": (address,),
        "pages_per_extent": PAGES,
        "page_count": PAGES,
        "page_bytes": PAGE,
        "page_stride_bytes": PAGE,
        "lane_start": 2,
        "lane_stop": 4,
    }
    return Region(**facts | changes)


def apart(buffer, /, **changes) -> list[Region]:
    return [region(ctypes.addressof(buffer) + layer * PAGES * PAGE, layer, **changes) for layer in range(3)]


def interleaved(memory) -> list[Region]:
    return [region(ctypes.addressof(memory) + layer * PAGE, layer, page_stride_bytes=3 * PAGE) for layer in range(3)]


def test_interleaved_layers_share_extents_and_are_cut_at_the_same_page(memory):
    pool = MemoryPool.adopted(GQA, PART, interleaved(memory), extent_bytes=12 * PAGE)
    assert [extent.length_bytes // PAGE for extent in pool.extents()] == [12, 6]
    for layer in range(3):
        for page in range(PAGES):
            assert (
                page_address(region_of(pool, KV, layer), page) == ctypes.addressof(memory) + (3 * page + layer) * PAGE
            )


def test_memory_in_a_shared_mapping_carries_its_file(shm):
    part = RankPart.of(TINY, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
    counts = {IndexSpace.FULL: 3, IndexSpace.SWA: 3, IndexSpace.REQUEST: 3}
    with MemoryPool.in_files(device_placement(TINY, part, page_counts=counts), shm, "engine") as owned:
        pool = MemoryPool.adopted(TINY, part, owned.regions(), shared=[mapping.extent for mapping in owned.mappings])
        assert pool.extents() == owned.extents()
        assert {extent.origin for extent in pool.extents()} == {mapping.extent.origin for mapping in owned.mappings}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": PAGE // 2}, "layer 0: pages of 16384 bytes, but 2 lanes take 32768"),
        ({"lane_start": 0, "lane_stop": 2}, "must hold \\[2, 4\\)"),
        ({"space": IndexSpace.SWA}, "count space 'swa'"),
        ({"space": IndexSpace.HOST}, "must be device memory"),
    ],
)
def test_memory_of_another_form_is_refused(memory, change, message):
    given = apart(memory)
    with pytest.raises(InvalidInputError, match=message):
        MemoryPool.adopted(GQA, PART, [given[0].model_copy(update=change), *given[1:]])


def test_missing_foreign_and_double_regions_are_refused(memory):
    given = apart(memory)
    with pytest.raises(InvalidInputError, match="gave no memory for mha_kv layer 2 \\(1 regions"):
        MemoryPool.adopted(GQA, PART, given[:2])
    with pytest.raises(InvalidInputError, match="holds no mha_kv layer 0"):
        MemoryPool.adopted(GQA, PART, given, exclude={KV})
    with pytest.raises(InvalidInputError, match="4 regions for 3"):
        MemoryPool.adopted(GQA, PART, [*given, given[0]])


def test_layers_that_share_memory_are_refused(memory):
    given = apart(memory)
    aliased = region(given[0].extent_addresses[0], 2)
    with pytest.raises(InvalidInputError, match="share memory"):
        MemoryPool.adopted(GQA, PART, [*given[:2], aliased])
