"""The device memory of sparse decode, made once and never moved, and the places of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component
from kvbridge.core.geometry.costs import AGE_PLANES, TALLIES, SparseBytes, SparseSettings
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import PageArray
from kvbridge.kernels.swap_in import LayerMemory, SwapInShape, SwapInState


class HotMemory:
    """All tensors of one cache, on its device. L layers, R request slots, N = hot rows + ring rows of a request.

    Physical row p of a layer lies in page p // slots_per_page of `pages[layer]`, slot p % slots_per_page.
    """

    def __init__(
        self, settings: SparseSettings, component: Component, *, layer_count: int, device: torch.device
    ) -> None:
        """Allocate, and set everything to its start: nothing is resident. Raises InvalidInputError or UnsupportedError."""
        settings.check_component(component)
        self.shape = SwapInShape(
            hot_rows=settings.hot_rows,
            ring_rows=settings.ring_pages * component.slots_per_page,
            max_rows=settings.max_rows(component),
            top_k=settings.top_k,
            slots_per_page=component.slots_per_page,
            row_parts_bytes=component.row_parts_bytes,
        )
        shape, requests = self.shape, settings.max_requests

        def integers(*sizes: int, fill: int = 0, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(sizes, fill, dtype=dtype, device=device)

        pages = requests * settings.pages_per_request(component)
        self.pages = integers(layer_count, pages, component.page_bytes(), dtype=torch.uint8)
        """uint8 [L, R * N / slots_per_page, page_bytes]."""
        self.slot_of_row = integers(layer_count, requests, shape.max_rows, fill=-1, dtype=torch.int16)
        self.row_of_slot = integers(layer_count, requests, shape.hot_rows, fill=-1)
        self.ages = integers(layer_count, requests, shape.hot_rows // 32, AGE_PLANES)
        self.tallies = integers(layer_count, requests, TALLIES)
        self.host_pages = integers(requests, shape.max_pages, 2, fill=-1)
        """int32 [R, max_pages, 2]: (host page id, its rank among the request's pages)."""
        self.ring_begin = integers(requests)
        self.step = integers(3, requests, fill=-1)
        """int32 [3, R]: request slots, rows, places of a step."""
        self.found = integers(requests, shape.top_k, fill=-1)
        """int32 [R, top_k]: the answers of `swap_in` by default."""
        self.numbers = torch.arange(settings.preload_limit_rows, dtype=torch.int32, device=device)
        """int32: 0, 1, 2, ... as far as a request is preloaded."""
        self.short_numbers = self.numbers.to(torch.int16)

    @property
    def state(self) -> SwapInState:
        """The addresses of the arrays of `swap_in`."""
        return SwapInState(
            requests=self.ring_begin.shape[0],
            slot_of_row=self.slot_of_row.data_ptr(),
            row_of_slot=self.row_of_slot.data_ptr(),
            ages=self.ages.data_ptr(),
            tallies=self.tallies.data_ptr(),
            pages=self.host_pages.data_ptr(),
            ring_begin=self.ring_begin.data_ptr(),
        )

    def forget(self, slot: int) -> None:
        """Set everything of a request slot back to its start, in the order of torch's current stream. Allocates nothing."""
        self.slot_of_row[:, slot].fill_(-1)
        self.row_of_slot[:, slot].fill_(-1)
        self.ages[:, slot].zero_()
        self.tallies[:, slot].zero_()

    def note_resident(self, slot: int, rows: int) -> None:
        """Note that rows [0, rows) are in the hot slots of the same numbers, in the order of torch's current stream."""
        layers = self.pages.shape[0]
        self.slot_of_row[:, slot, :rows].copy_(self.short_numbers[:rows].expand(layers, rows))
        self.row_of_slot[:, slot, :rows].copy_(self.numbers[:rows].expand(layers, rows))

    def bytes_by_part(self) -> SparseBytes:
        """Return the device memory by part; `steps` includes the constants for preloading."""
        ring_bytes = self.pages.nbytes * self.shape.ring_rows // self.shape.rows_per_request
        return SparseBytes(
            hot_rows=self.pages.nbytes - ring_bytes,
            ring=ring_bytes,
            residency=self.slot_of_row.nbytes + self.row_of_slot.nbytes,
            ages=self.ages.nbytes + self.tallies.nbytes,
            page_tables=self.host_pages.nbytes + self.ring_begin.nbytes,
            steps=self.step.nbytes + self.found.nbytes + self.numbers.nbytes + self.short_numbers.nbytes,
        )


def layer_memory(hot: torch.Tensor, host: Region) -> LayerMemory:
    """Return the places of one layer as swap-in takes them. `hot`: uint8 [pages, page_bytes]."""
    pages = PageArray.of([host])
    return LayerMemory(
        host_addresses=tuple(pages.bases[0].tolist()),
        pages_per_extent=pages.pages_per_extent,
        host_stride_bytes=pages.stride_bytes,
        hot_address=hot.data_ptr(),
        hot_stride_bytes=hot.stride(0),
    )


def layer_pages(hot_pages: torch.Tensor, host_regions: Sequence[Region]) -> list[tuple[PageArray, PageArray]]:
    """Return hot pages, from uint8 [layers, pages, page_bytes], and host pages; layers whose host pages lie alike are together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for position, region in enumerate(host_regions):
        alike.setdefault(region.form, []).append(position)
    return [
        (
            PageArray.contiguous(
                *(hot_pages[position].data_ptr() for position in positions),
                page_count=hot_pages.shape[1],
                stride_bytes=hot_pages.stride(1),
            ),
            PageArray.of([host_regions[position] for position in positions]),
        )
        for positions in alike.values()
    ]


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
