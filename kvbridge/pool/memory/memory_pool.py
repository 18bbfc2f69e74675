"""A pool with memory behind it: regions at addresses of this process.

Owns: what every pool answers, whoever made its memory. Must not know: which pages are free, how memory was made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from kvbridge.core.errors import InvalidInputError, NotFoundError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.pool.memory.extent import Extent


class MemoryPool(ABC):
    """The regions of one rank's device pool, or of a node's host pool, in this process."""

    def __init__(self, regions: Sequence[Region], extents: Sequence[Extent]) -> None:
        self._regions = {(region.component, region.layer): region for region in regions}
        self._extents = tuple(extents)
        self._page_counts: dict[IndexSpace, int] = {}
        for region in regions:
            if self._page_counts.setdefault(region.space, region.page_count) != region.page_count:
                raise InvalidInputError(
                    f"{region.label} has {region.page_count} pages, other regions of space '{region.space}' have "
                    f"{self._page_counts[region.space]}; a page id must exist in all of them"
                )

    def regions(self) -> tuple[Region, ...]:
        """All regions, for the rank's manifest. Addresses are valid until `close`."""
        return tuple(self._regions.values())

    def extents(self) -> tuple[Extent, ...]:
        """All memory, in the pieces to register it in."""
        return self._extents

    def page_counts(self) -> dict[IndexSpace, int]:
        """Pages of each index space that the pool has regions of."""
        return dict(self._page_counts)

    def region(self, component: ComponentKind, layer: int) -> Region:
        """One region. Raises NotFoundError when this pool does not hold that component of that layer."""
        try:
            return self._regions[component, layer]
        except KeyError:
            raise NotFoundError(f"this pool has no region of {component} layer {layer}") from None

    def page_address(self, component: ComponentKind, layer: int, page: int) -> int:
        """Address of a page. Raises PageOutOfBoundsError, NotFoundError."""
        region = self.region(component, layer)
        if not 0 <= page < region.page_count:
            raise PageOutOfBoundsError(
                f"{component} layer {layer}: page {page} is not in [0, {region.page_count}) of '{region.space}'"
            )
        extent, within = divmod(page, region.pages_per_extent)
        return region.extent_addresses[extent] + within * region.page_stride_bytes

    def page_view(self, component: ComponentKind, layer: int, page: int) -> memoryview:
        """A writable view of one page (`page_bytes` bytes). Raises as `page_address`; UnsupportedError for VRAM."""
        region = self.region(component, layer)
        return self._view(self.page_address(component, layer, page), region.page_bytes, region.memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _view(self, address: int, length_bytes: int, memory: MemoryKind) -> memoryview:
        """A view of bytes of this process."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory up. No peer holds a manifest of it and nothing is in flight. Harmless when closed."""
