from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import (
    InvalidInputError,
    RegistrationError,
)
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.pool.memory.layout import Chunking, host_placement
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from kvbridge.pool.memory.shared_mapping import SharedMapping

TINY = preset("tiny-v4")
C4 = ComponentKind.C4_KV
SPLIT = Chunking(extent_bytes=16_384, mapping_bytes=40_960)


def host(layout=HostLayout.LAYER_FIRST, chunking=None):
    return host_placement(TINY, {C4}, page_count=9, layout=layout, chunking=chunking)


def test_a_pool_that_cannot_be_created_leaves_nothing(shm):
    placement = host(chunking=SPLIT)
    last = shm / f"kvb-1.{placement.mappings[-1].name}"
    last.touch()
    with pytest.raises(RegistrationError, match="exists"):
        MemoryPool.in_files(placement, shm, "kvb-1")
    assert list(shm.iterdir()) == [last]
    last.unlink()


def test_a_region_beyond_its_file_is_refused_before_it_is_touched(shm):
    with MemoryPool.in_files(host(), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        offset = host().total_bytes - good.region.page_bytes
        far = good.region.model_copy(update={"extent_addresses": (offset,)})
        with pytest.raises(InvalidInputError, match="ends at byte"):
            MappedRegions([SharedRegion(region=far, origins=good.origins)])
        with pytest.raises(InvalidInputError, match="1 extents, but 2 origins"):
            MappedRegions([SharedRegion(region=good.region, origins=good.origins * 2)])


def test_regions_of_which_one_is_gone_leave_none_mapped(shm):
    with MemoryPool.in_files(host(chunking=SPLIT), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        origins = (*good.origins[:-1], good.origins[-1].model_copy(update={"path": str(shm / "gone")}))
        mine = Path("/proc/self/maps").read_text().count(str(shm))
        with pytest.raises(RegistrationError, match="gone") as refused:
            MappedRegions([good, SharedRegion(region=good.region, origins=origins)])
        assert Path("/proc/self/maps").read_text().count(str(shm)) == mine, f"while {refused.value} is dealt with"


def test_a_file_that_is_shared_is_open_to_its_group_alone(shm):
    with SharedMapping.create(shm, "kvb-1", 4096) as mapping:
        assert mapping.path.stat().st_mode & 0o777 == 0o600
        mapping.share(os.getgid())
        assert mapping.path.stat().st_mode & 0o777 == 0o660
