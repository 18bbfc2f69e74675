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
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.pool.extent import Extent


class PlacedMapping(FrozenModel):
    """One stretch of memory to create: a shared file or a device allocation."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.-]+$")
    length_bytes: Positive


class Place(FrozenModel):
    """A point in the mappings of a placement."""

    mapping: NonNegative
    offset_bytes: NonNegative


class PlacedExtent(FrozenModel):
    """A stretch of one mapping that is registered as one."""

    start: Place
    length_bytes: Positive
    label: str


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
    """A whole pool: its mappings, its regions and the extents to register. All of it is one kind of memory."""

    memory: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    mappings: tuple[PlacedMapping, ...] = Field(min_length=1)
    regions: tuple[PlacedRegion, ...] = Field(min_length=1)
    extents: tuple[PlacedExtent, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = [mapping.length_bytes for mapping in self.mappings]
        for extent in self.extents:
            if (
                extent.start.mapping >= len(lengths)
                or extent.start.offset_bytes + extent.length_bytes > lengths[extent.start.mapping]
            ):
                raise ValueError(f"extent '{extent.label}' does not lie within its mapping")
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
        self._require_one_each("address", addresses)
        return tuple(region.at(addresses, self.memory, self.device) for region in self.regions)

    def extents_at(self, addresses: Sequence[int], paths: Sequence[str] | None = None) -> tuple[Extent, ...]:
        """The extents to register once mapping `i` begins at `addresses[i]`, and is the file `paths[i]` if there are files."""
        self._require_one_each("address", addresses)
        files = paths if paths is not None else [""] * len(self.mappings)
        self._require_one_each("path", files)
        return tuple(
            Extent(
                address=addresses[extent.start.mapping] + extent.start.offset_bytes,
                length_bytes=extent.length_bytes,
                memory=self.memory,
                device=self.device,
                path=files[extent.start.mapping],
                offset_bytes=extent.start.offset_bytes if files[extent.start.mapping] else 0,
                label=extent.label,
            )
            for extent in self.extents
        )

    def shared_regions(self, paths: Sequence[str]) -> tuple[SharedRegion, ...]:
        """The regions as another process finds them, when mapping `i` is the file `paths[i]`."""
        self._require_one_each("path", paths)
        origin = [0] * len(self.mappings)
        return tuple(
            SharedRegion(
                region=region.at(origin, self.memory, self.device),
                paths=tuple(paths[start.mapping] for start in region.starts),
            )
            for region in self.regions
        )

    def _require_one_each(self, what: str, given: Sequence[object]) -> None:
        if len(given) != len(self.mappings):
            raise InvalidInputError(
                f"a placement of {len(self.mappings)} mappings needs one {what} for each, got {len(given)}"
            )
