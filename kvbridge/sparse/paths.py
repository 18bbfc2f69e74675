"""Between the hot region and the host pool: what copies pages and rows of all layers at once.

Owns: the copiers of one cache. Must not know: which pages, when.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace
from kvbridge.kernels.page_copies import page_copier
from kvbridge.kernels.places import IdPairs, PageMemory, PagePair, RowPair
from kvbridge.kernels.row_copies import row_copier
from kvbridge.kernels.swap_in import LayerMemory


class HostPaths:
    """Both ways between the layers' hot regions and their host regions."""

    def __init__(
        self, component: Component, host_regions: Sequence[Region], hot_pages: torch.Tensor, ordinal: int | None
    ) -> None:
        """`host_regions`: one a layer; `hot_pages`: uint8 [layers, pages, page_bytes]; `ordinal`: CUDA's, None for the CPU."""
        hosts = [PageMemory.of(region) for region in host_regions]
        hots = [
            PageMemory.contiguous(pages.data_ptr(), page_count=pages.shape[0], page_stride_bytes=pages.stride(0))
            for pages in hot_pages
        ]
        both = list(enumerate(zip(hosts, hots, strict=True)))
        page_bytes = component.page_bytes()
        self.layers = tuple(
            LayerMemory(
                host_addresses=host.extent_addresses,
                pages_per_extent=host.pages_per_extent,
                host_stride_bytes=host.page_stride_bytes,
                hot_address=hot.extent_addresses[0],
                hot_stride_bytes=hot.page_stride_bytes,
            )
            for _, (host, hot) in both
        )
        self._load = page_copier(ordinal, [PagePair(host, hot, page_bytes, group) for group, (host, hot) in both])
        self._back_up = page_copier(ordinal, [PagePair(hot, host, page_bytes, group) for group, (host, hot) in both])
        slots = component.slots_per_page
        self._flush = row_copier(
            ordinal, [RowPair(hot, host, component.row_parts_bytes, slots, slots) for _, (host, hot) in both]
        )

    def load(self, pages: IdPairs, *, stream: int) -> None:
        """Host pages into hot pages, of every layer."""
        self._load.copy([pages], stream=stream)

    def back_up(self, pages: IdPairs, *, stream: int) -> None:
        """Hot pages into host pages, of every layer."""
        self._back_up.copy([pages], stream=stream)

    def flush(self, rows: IdPairs, *, stream: int) -> None:
        """Physical rows into host rows (page * slots + slot), of every layer."""
        self._flush.copy(rows, stream=stream)

    def check(self) -> None:
        """Wait for all copies; raise PageOutOfBoundsError if one was told an id that does not exist."""
        for copier in (self._load, self._back_up, self._flush):
            copier.check()

    def close(self) -> None:
        """Give back what the copiers hold. Harmless when closed."""
        for copier in (self._load, self._back_up, self._flush):
            copier.close()


def id_pairs(words: torch.Tensor, ids: Sequence[tuple[int, int]]) -> IdPairs:
    """Write (source, destination) ids into a staging buffer and describe them."""
    count = len(ids)
    words.numpy()[: 2 * count] = np.array(ids, dtype=np.int32).T.ravel()
    return IdPairs(words.data_ptr(), words.data_ptr() + 4 * count, count)


def checked_regions(component: Component, host_regions: Sequence[Region]) -> list[Region]:
    """Return the regions by ascending layer. Raises InvalidInputError unless they are host regions of the component."""
    regions = sorted(host_regions, key=lambda region: region.layer)
    if not regions:
        raise InvalidInputError(f"a sparse cache needs the host regions of its layers of {component.kind}, got none")
    for region in regions:
        if region.component is not component.kind or region.space is not IndexSpace.HOST:
            raise InvalidInputError(f"{region.label} is not a host region of {component.kind}")
        if region.page_bytes != component.page_bytes():
            raise InvalidInputError(
                f"{region.label} has pages of {region.page_bytes} bytes, not {component.page_bytes()}"
            )
    if len({region.layer for region in regions}) != len(regions):
        raise InvalidInputError(f"a layer of {component.kind} is named twice")
    return regions
