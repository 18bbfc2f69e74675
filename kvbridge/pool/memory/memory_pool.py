"""A pool with memory behind it: regions at addresses of this process.

Owns: what every pool answers, whoever made its memory. Must not know: which pages are free, how memory was made.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.placement import Placement
from kvbridge.pool.memory.sharing import registered_extents


class MemoryPool(Closing):
    """The regions of one rank's device pool, or of a node's host pool, in this process."""

    def __init__(self, regions: Sequence[Region], shared: Sequence[Extent] = ()) -> None:
        """`shared`: whole files and allocations in which some of the regions lie, and that other processes can reach."""
        self._regions = tuple(regions)
        self._extents = tuple(registered_extents(regions, shared))
        self._page_counts: dict[IndexSpace, int] = {}
        for region in regions:
            if self._page_counts.setdefault(region.space, region.page_count) != region.page_count:
                raise InvalidInputError(
                    f"{region.label} has {region.page_count} pages, other regions of space '{region.space}' have "
                    f"{self._page_counts[region.space]}; a page id must exist in all of them"
                )

    def regions(self) -> tuple[Region, ...]:
        """All regions, for the rank's manifest. Addresses are valid until `close`."""
        return self._regions

    def extents(self) -> tuple[Extent, ...]:
        """All memory, in the pieces to register it in."""
        return self._extents

    def close(self) -> None:
        """Give up what the pool has made. No peer holds a manifest of it and nothing is in flight. Harmless when closed."""

    def __repr__(self) -> str:
        pages = ", ".join(f"{count} {space}" for space, count in self._page_counts.items())
        size_bytes = sum(extent.length_bytes for extent in self._extents)
        return f"<{type(self).__name__}: {len(self._regions)} regions, pages {pages}, {size_bytes} bytes>"


class PlacedPool(MemoryPool):
    """A pool in memory that this process made for it, which other processes of the host can reach."""

    def __init__(self, placement: Placement, made: Sequence[Extent]) -> None:
        """`made`: the placement's mappings, each as a whole."""
        super().__init__(placement.regions_at([whole.address for whole in made]), made)
        self.placement = placement
        self._origins = [whole.origin for whole in made if whole.origin is not None]

    def shared_regions(self) -> tuple[SharedRegion, ...]:
        """The regions as other processes of the host open them (`sharing.MappedRegions`)."""
        return self.placement.shared_regions(self._origins)
