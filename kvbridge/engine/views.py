"""The pools of a rank as torch tensors that share their memory: pages, and rows in and out of them.

A view is the memory itself and keeps nothing alive. Keep the memory mapped until every `PoolViews` over it, and every tensor from
`page`, is gone; a later use is a crash.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.errors import InvalidInputError, NotFoundError, PageOutOfBoundsError
from kvbridge.core.geometry.components import Component, ComponentKind, Liveness, ModelGeometry, RowInterval
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Section

IndexArray = npt.NDArray[np.int64]

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Rows are gathered and scattered in the widest word that divides everything; the bytes are the same."""
_ARRAY_TYPES = {8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}


@dataclass(frozen=True, slots=True, eq=False)
class RowPlaces:
    """Places of consecutive rows: int64 arrays of equal length, `page_ids[i]` and `slots[i]` of the i-th row."""

    page_ids: IndexArray
    slots: IndexArray


def place_rows(component: Component, table: PageTable, start_row: int, stop_row: int) -> RowPlaces:
    """Return the places of rows [start_row, stop_row) of `component` in the pages of `table`.

    Raises InvalidInputError for no interval, and for two rows in one slot of a ring; PageOutOfBoundsError for a row without a page
    in the table.
    """
    if not 0 <= start_row <= stop_row:
        raise InvalidInputError(f"{component.kind}: rows [{start_row}, {stop_row}) are not an interval of rows")
    rows = np.arange(start_row, stop_row, dtype=np.int64)
    pages = rows // component.rows_per_logical_page - table.first_page
    if len(rows) and (pages[0] < 0 or pages[-1] >= len(table)):
        raise PageOutOfBoundsError(
            f"{component.kind}: rows [{start_row}, {stop_row}) need logical pages {pages[0] + table.first_page} to "
            f"{pages[-1] + table.first_page}, the request's '{table.space}' table holds {table.first_page} to "
            f"{table.first_page + len(table) - 1}; reserve the pages before using them"
        )
    slots = component.slots_per_page
    if component.is_ring and len(rows) > slots and int(np.unique(pages, return_counts=True)[1].max()) > slots:
        raise InvalidInputError(
            f"{component.kind}: rows [{start_row}, {stop_row}) do not fit a ring of {slots} slots "
            "at once; ask for live rows only (Component.live_rows)"
        )
    return RowPlaces(page_ids=table.ids[pages].astype(np.int64), slots=rows % slots)


def section_rows(component: Component, section: Section) -> RowInterval:
    """Return the rows that become final with `section`: new growing rows; windows and states with the last section."""
    rows = component.published_rows(
        section.stop_token, prompt_tokens=section.prompt_tokens, prefix_tokens=section.prefix_tokens
    )
    if component.liveness is not Liveness.GROWING:
        return rows
    start = max(rows.start, section.start_token // component.tokens_per_row)
    return RowInterval(start=min(start, rows.stop), stop=rows.stop)


class RegionView:
    """The pages of one component of one layer on one rank.

    A row is uint8 [lanes * row_bytes]: for each lane that the region holds, the row's parts one after another.
    """

    def __init__(self, component: Component, region: Region) -> None:
        needed = component.page_bytes(region.lanes)
        if region.page_bytes < needed or region.lane_stop > component.lanes:
            raise InvalidInputError(
                f"{region.component} layer {region.layer}: pages of {region.page_bytes} bytes with lanes "
                f"[{region.lane_start}, {region.lane_stop}) do not fit a component of {component.lanes} lanes and pages of "
                f"{needed} bytes; the region was made for another geometry"
            )
        self.component = component
        self.region = region
        self.row_bytes = region.lanes * component.row_bytes
        """Bytes of a row, all lanes of the region together."""
        self._word_bytes = gcd(
            max(_WORDS), *component.row_parts_bytes, region.page_stride_bytes, *region.extent_addresses
        )
        self._device = torch.device("cpu") if region.memory is MemoryKind.DRAM else torch.device("cuda", region.device)
        self._pages = tuple(
            torch.as_strided(memory, (pages, region.page_bytes), (region.page_stride_bytes, 1))
            for memory, pages in _extents(region, 1)
        )
        parts = range(len(component.row_parts_bytes))
        self._parts = tuple(self._part(lane, part) for lane in range(region.lanes) for part in parts)
        """Each part of each lane: its columns in a row, in words, and its memory in the pages of each extent."""

    def page(self, page_id: int) -> torch.Tensor:
        """Return the memory of one page: uint8 [page_bytes], shared with the pool. Raises PageOutOfBoundsError."""
        self._check_ids(np.array([page_id]))
        return self._pages[page_id // self.region.pages_per_extent][page_id % self.region.pages_per_extent]

    def table(self, tables: Tables) -> PageTable:
        """Return the request's table for this region's index space. Raises InvalidInputError when it has none."""
        table = tables.get(self.region.space)
        if table is None:
            raise InvalidInputError(f"{self}: the request has no page table for space '{self.region.space}'")
        table.require(self.region.space)
        return table

    def write(self, places: RowPlaces, rows: torch.Tensor) -> None:
        """Write rows, uint8 [n, row_bytes], to `places` (of n rows), onto the region's device."""
        if rows.dtype is not torch.uint8 or tuple(rows.shape) != (len(places.slots), self.row_bytes):
            raise InvalidInputError(
                f"{self}: need uint8 rows of shape {(len(places.slots), self.row_bytes)}, got {rows.dtype} of shape "
                f"{tuple(rows.shape)}"
            )
        self._check_ids(places.page_ids)
        words = self._words(rows)
        for extent, chosen, page, slot in self._addressed(places):
            source = words if chosen is None else words[chosen]
            for columns, extents in self._parts:
                extents[extent][page, slot] = source[:, columns]

    def read(self, places: RowPlaces) -> torch.Tensor:
        """Return a copy of the rows at `places`: uint8 [n, row_bytes], contiguous, on the region's device."""
        self._check_ids(places.page_ids)
        shape = (len(places.slots), self.row_bytes // self._word_bytes)
        words = torch.empty(shape, dtype=_WORDS[self._word_bytes], device=self._device)
        for extent, chosen, page, slot in self._addressed(places):
            for columns, extents in self._parts:
                words[slice(None) if chosen is None else chosen, columns] = extents[extent][page, slot]
        return words.view(torch.uint8)

    def _addressed(self, places: RowPlaces) -> list[tuple[int, torch.Tensor | None, torch.Tensor, torch.Tensor]]:
        """Split `places` by extent: (extent, which rows or None for all, page in the extent, slot)."""
        if len(self._pages) == 1:
            return [(0, None, self._index(places.page_ids), self._index(places.slots))]
        extents, pages = np.divmod(places.page_ids, self.region.pages_per_extent)
        split: list[tuple[int, torch.Tensor | None, torch.Tensor, torch.Tensor]] = []
        for extent in np.unique(extents):
            chosen = np.flatnonzero(extents == extent)
            split.append(
                (int(extent), self._index(chosen), self._index(pages[chosen]), self._index(places.slots[chosen]))
            )
        return split

    def _index(self, numbers: IndexArray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._device)

    def _part(self, lane: int, part: int) -> tuple[slice, tuple[torch.Tensor, ...]]:
        """Each tensor is [pages of the extent, slots_per_page, words of the part], strided over the pool's memory."""
        word, region, component = self._word_bytes, self.region, self.component
        part_bytes = component.row_parts_bytes[part]
        in_page = lane * component.lane_block_bytes + component.part_offset(part)
        in_row = lane * component.row_bytes + sum(component.row_parts_bytes[:part])
        tensors = []
        for memory, pages in _extents(region, word):
            shape = (pages, component.slots_per_page, part_bytes // word)
            strides = (region.page_stride_bytes // word, part_bytes // word, 1)
            tensors.append(torch.as_strided(memory, shape, strides, storage_offset=in_page // word))
        return slice(in_row // word, (in_row + part_bytes) // word), tuple(tensors)

    def _words(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.to(self._device).contiguous()
        if rows.data_ptr() % self._word_bytes:
            rows = rows.clone()
        return rows.view(_WORDS[self._word_bytes])

    def _check_ids(self, page_ids: IndexArray) -> None:
        if len(page_ids) and (page_ids.min() < 0 or page_ids.max() >= self.region.page_count):
            raise PageOutOfBoundsError(
                f"{self}: page ids {page_ids.min()} to {page_ids.max()} do not all exist in a region of "
                f"{self.region.page_count} pages"
            )

    def __repr__(self) -> str:
        region = self.region
        return f"{region.component} layer {region.layer} ({region.space}, {region.page_count} pages)"


class PoolViews:
    """All regions of one rank as tensors, with those of its node's host pool, at addresses of this process.

    A component of a layer may have a device region and a host region; a request with a page table for the host pool lives there.
    """

    def __init__(self, geometry: ModelGeometry, regions: Sequence[Region]) -> None:
        self.geometry = geometry
        devices = sorted({region.device for region in regions if region.memory is MemoryKind.VRAM})
        if len(devices) > 1:
            raise InvalidInputError(f"the regions of one rank lie on several GPUs: {', '.join(map(str, devices))}")
        self.device = devices[0] if devices else None
        """CUDA ordinal of the rank's GPU in this process; None: all of its pools are host memory."""
        self._homes: dict[tuple[ComponentKind, int], dict[IndexSpace, RegionView]] = {}
        for region in regions:
            spaces = self._homes.setdefault((region.component, region.layer), {})
            if region.space in spaces:
                raise InvalidInputError(
                    f"{region.component} layer {region.layer} has two regions in space '{region.space}'"
                )
            spaces[region.space] = RegionView(geometry.component(region.component), region)

    @property
    def regions(self) -> tuple[Region, ...]:
        """All regions, at addresses of this process."""
        return tuple(view.region for spaces in self._homes.values() for view in spaces.values())

    def layers(self, kind: ComponentKind) -> tuple[int, ...]:
        """Return the global ids of the layers whose `kind` this rank holds, ascending."""
        return tuple(sorted(layer for held, layer in self._homes if held is kind))

    def region(self, kind: ComponentKind, layer: int, *, space: IndexSpace) -> RegionView:
        """Return one region. Raises NotFoundError when this rank does not hold it."""
        view = self._spaces(kind, layer).get(space)
        if view is None:
            raise NotFoundError(f"{kind} layer {layer} has no pages in space '{space}' on this rank")
        return view

    def home(self, kind: ComponentKind, layer: int, *, tables: Tables) -> RegionView:
        """Return the region of a request with these tables: the host's if both have one, else the device's.

        Raises NotFoundError when this rank does not hold the component, InvalidInputError when the request has no table for it.
        """
        spaces = self._spaces(kind, layer)
        if IndexSpace.HOST in spaces and IndexSpace.HOST in tables:
            return spaces[IndexSpace.HOST]
        for space, view in spaces.items():
            if space in tables:
                return view
        has, needs = (", ".join(f"'{space}'" for space in sorted(each)) or "no space" for each in (tables, spaces))
        raise InvalidInputError(f"{kind} layer {layer}: the request has pages in {has}, this rank needs one of {needs}")

    def _spaces(self, kind: ComponentKind, layer: int) -> dict[IndexSpace, RegionView]:
        spaces = self._homes.get((kind, layer))
        if spaces is None:
            raise NotFoundError(f"{kind} layer {layer} is not on this rank; it holds {self!r}")
        return spaces

    def __repr__(self) -> str:
        kinds = sorted({kind for kind, _ in self._homes})
        return "PoolViews(" + ", ".join(f"{kind} x {len(self.layers(kind))}" for kind in kinds) + ")"


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one component of one layer on one rank, in the pages of a room."""

    rank: Rank
    kind: ComponentKind
    layer: int
    rows: slice
    """Row numbers along the request. A row of a growing cache stands for one token, or for several compressed tokens."""
    view: RegionView
    table: PageTable

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, bytes of a row): the shape that `write` takes and `read` returns."""
        return self.rows.stop - self.rows.start, self.view.row_bytes

    def write(self, rows: torch.Tensor) -> None:
        """Write these rows, uint8 of `shape`. A row is opaque to kvbridge; both engines must agree on its bytes."""
        self.view.write(self._places(), rows)

    def read(self) -> torch.Tensor:
        """Return a copy of these rows, uint8 of `shape`, on the region's device."""
        return self.view.read(self._places())

    def _places(self) -> RowPlaces:
        return place_rows(self.view.component, self.table, self.rows.start, self.rows.stop)


def parts_of(
    views_of: Mapping[Rank, PoolViews],
    tables: Tables,
    rows_of: Callable[[Component, int], RowInterval],
    layers: Collection[int] | None = None,
) -> Iterator[Part]:
    """Yield rows of a request in the pools of these ranks: those that `rows_of` names for a component and layer."""
    for rank, views in views_of.items():
        for component in views.geometry.components:
            for layer in views.layers(component.kind):
                if layers is not None and layer not in layers:
                    continue
                rows = rows_of(component, layer)
                if rows.count:
                    view = views.home(component.kind, layer, tables=tables)
                    yield Part(rank, component.kind, layer, slice(rows.start, rows.stop), view, view.table(tables))


def _extents(region: Region, word_bytes: int) -> list[tuple[torch.Tensor, int]]:
    """Return each extent as (its memory in words, pages in it); the last one may hold fewer pages."""
    found = []
    for address, pages, length_bytes in region.extents():
        words = length_bytes // word_bytes
        if region.memory is MemoryKind.DRAM:
            buffer = (ctypes.c_uint8 * (words * word_bytes)).from_address(address)
            memory = torch.frombuffer(buffer, dtype=_WORDS[word_bytes])
        else:  # foreign memory, in the form that torch takes over without a copy
            form = {"data": (address, False), "shape": (words,), "strides": None, "typestr": _ARRAY_TYPES[word_bytes]}
            array = SimpleNamespace(__cuda_array_interface__=form | {"version": 3})
            memory = torch.as_tensor(array, device=torch.device("cuda", region.device))
            if memory.data_ptr() != address:  # torch made a copy: nobody would see its changes
                raise InvalidInputError(f"{region.label}: {address:#x} is not memory of cuda:{region.device}")
        found.append((memory, pages))
    return found
