"""Where every region of a pool lies, before there is any memory: offsets into mappings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, TypeVar

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive
from kvbridge.core.wire.shared_memory import Origin, SharedRegion

ThingT = TypeVar("ThingT")


class PlacedMapping(FrozenModel):
    """One stretch of memory to create: a shared file or a device allocation."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.-]+$")
    length_bytes: Positive


class Placement(FrozenModel):
    """A whole pool: its mappings and its regions. All of it is one kind of memory."""

    mappings: tuple[PlacedMapping, ...] = Field(min_length=1)
    regions: tuple[Region, ...] = Field(min_length=1)
    """`extent_addresses` are offsets, each into the mapping that `homes` numbers at the same position."""
    homes: tuple[tuple[NonNegative, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = [mapping.length_bytes for mapping in self.mappings]
        for region, homes in zip(self.regions, self.homes, strict=True):
            for mapping, (offset, _, length_bytes) in zip(homes, region.extents(), strict=True):
                if mapping >= len(lengths) or offset + length_bytes > lengths[mapping]:
                    raise ValueError(f"{region.label}: an extent does not lie within its mapping")
        return self

    @property
    def memory(self) -> MemoryKind:
        """The kind of memory of the mappings."""
        return self.regions[0].memory

    @property
    def device(self) -> int:
        """CUDA ordinal of VRAM; 0 for DRAM."""
        return self.regions[0].device

    @property
    def total_bytes(self) -> int:
        """Bytes of all mappings."""
        return sum(mapping.length_bytes for mapping in self.mappings)

    def page_counts(self) -> dict[IndexSpace, int]:
        """Pages of each index space."""
        return {region.space: region.page_count for region in self.regions}

    def regions_at(self, addresses: Sequence[int]) -> tuple[Region, ...]:
        """The regions once mapping `i` begins at address `addresses[i]`."""
        return tuple(region.at(bases) for region, bases in self._by_region(addresses))

    def shared_regions(self, origins: Sequence[Origin]) -> tuple[SharedRegion, ...]:
        """The regions as another process of the host finds them, when mapping `i` is `origins[i]`."""
        return tuple(SharedRegion(region=region, origins=found) for region, found in self._by_region(origins))

    def _by_region(self, of_mappings: Sequence[ThingT]) -> Iterator[tuple[Region, tuple[ThingT, ...]]]:
        if len(of_mappings) != len(self.mappings):
            raise InvalidInputError(
                f"a placement of {len(self.mappings)} mappings needs one address or origin for each, got {len(of_mappings)}"
            )
        for region, homes in zip(self.regions, self.homes, strict=True):
            yield region, tuple(of_mappings[mapping] for mapping in homes)
