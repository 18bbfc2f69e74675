"""Where every region of a pool lies, before there is any memory: offsets into mappings.

Owns: `Placement` and what it becomes once the mappings have addresses or paths. Must not know: how a placement is
decided (`layout`), how mappings are made.

A placement is data that travels: the process that creates a pool, those that map it and the node that only names it all
hold the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive
from kvbridge.core.wire.shared_memory import Origin, SharedRegion


class PlacedMapping(FrozenModel):
    """One stretch of memory to create: a shared file or a device allocation."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.-]+$")
    length_bytes: Positive


class Place(FrozenModel):
    """A point in the mappings of a placement."""

    mapping: NonNegative
    offset_bytes: NonNegative


class PlacedRegion(FrozenModel):
    """A `Region` whose extents begin at places instead of addresses."""

    component: ComponentKind
    layer: NonNegative
    space: IndexSpace
    starts: tuple[Place, ...] = Field(min_length=1)
    """Where the region's first page in each extent begins."""
    pages_per_extent: Positive
    page_count: Positive
    page_bytes: Positive
    page_stride_bytes: Positive
    lane_start: NonNegative = 0
    lane_stop: Positive = 1

    def extent_end(self, extent: int) -> int:
        """Offset behind the last byte of the region's last page in that extent."""
        pages = min(self.pages_per_extent, self.page_count - extent * self.pages_per_extent)
        return self.starts[extent].offset_bytes + (pages - 1) * self.page_stride_bytes + self.page_bytes

    def at(self, addresses: Sequence[int], memory: MemoryKind, device: int) -> Region:
        """The region once mapping `i` begins at `addresses[i]`."""
        facts = self.model_dump(exclude={"starts"})
        starts = tuple(addresses[start.mapping] + start.offset_bytes for start in self.starts)
        return Region(memory=memory, device=device, extent_addresses=starts, **facts)


class Placement(FrozenModel):
    """A whole pool: its mappings and its regions. All of it is one kind of memory."""

    memory: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    mappings: tuple[PlacedMapping, ...] = Field(min_length=1)
    regions: tuple[PlacedRegion, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = [mapping.length_bytes for mapping in self.mappings]
        for region in self.regions:
            for index, start in enumerate(region.starts):
                if start.mapping >= len(lengths) or region.extent_end(index) > lengths[start.mapping]:
                    raise ValueError(
                        f"{region.component} layer {region.layer}: extent {index} does not lie within its mapping"
                    )
        return self

    @property
    def total_bytes(self) -> int:
        """Bytes of all mappings."""
        return sum(mapping.length_bytes for mapping in self.mappings)

    def page_counts(self) -> dict[IndexSpace, int]:
        """Pages of each index space."""
        return {region.space: region.page_count for region in self.regions}

    def regions_at(self, addresses: Sequence[int]) -> tuple[Region, ...]:
        """The regions once mapping `i` begins at address `addresses[i]`."""
        if len(addresses) != len(self.mappings):
            raise InvalidInputError(
                f"a placement of {len(self.mappings)} mappings needs one address for each, got {len(addresses)}"
            )
        return tuple(region.at(addresses, self.memory, self.device) for region in self.regions)

    def shared_regions(self, origins: Sequence[Origin]) -> tuple[SharedRegion, ...]:
        """The regions as another process of the host finds them, when mapping `i` is `origins[i]`."""
        if len(origins) != len(self.mappings):
            raise InvalidInputError(
                f"a placement of {len(self.mappings)} mappings needs one origin for each, got {len(origins)}"
            )
        offsets = self.regions_at([0] * len(self.mappings))
        return tuple(
            SharedRegion(region=region, origins=tuple(origins[start.mapping] for start in placed.starts))
            for region, placed in zip(offsets, self.regions, strict=True)
        )
