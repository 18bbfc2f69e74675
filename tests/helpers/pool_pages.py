"""Single pages of a pool in this process's memory, for tests that look at bytes."""

from __future__ import annotations

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.pool.memory.pools import MemoryPool


def page_address(region: Region, page: int) -> int:
    """Where a page begins."""
    assert 0 <= page < region.page_count
    extent, within = divmod(page, region.pages_per_extent)
    return region.extent_addresses[extent] + within * region.page_stride_bytes


def region_of(pool: MemoryPool, component: ComponentKind, layer: int) -> Region:
    """The pool's region of one component of one layer."""
    return next(one for one in pool.regions() if (one.component, one.layer) == (component, layer))
