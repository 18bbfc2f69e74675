"""Swap-in: selected rows of one layer become physical rows of the hot region; those that are not there are loaded from the host.

The hot region of a layer has, for each request slot, `hot_rows` hot slots and after them a ring of `ring_rows` rows. Row r of a
request is in the ring, at r % ring_rows, when r >= max(ring_begin, ((rows - 1) // slots_per_page - (ring pages - 1)) *
slots_per_page). Any earlier row is on the host, and in a hot slot if `slot_of_row` says so.

A step does exactly this for one request:

1. Selected rows that are -1, or not below `rows`, give -1. Ring rows give their place in the ring. Resident rows give their slot:
   these slots are *used*.
2. The other rows are *missing*, each once. They are numbered by (rank of their page, row in the page), where the rank orders a
   request's pages by their host page ids: so each step reads the host in the order of addresses.
3. Missing row m takes the m-th slot of this order: oldest age first, then lowest slot; used slots never. The age of a slot is the
   index of the first of its four bit planes that is set, or 4; plane 0 is the present generation. Empty slots have age 4.
4. The rows are copied. The row that the slot held before is not resident any more.
5. Used and loaded slots are set in plane 0. When two thirds of the hot slots are, the planes move up by one and plane 0 is empty.

This is LRU in five classes of age. On recorded and made-up selections it costs at most 0.3 % of hits against LRU; with generations
of a quarter of the slots it costs up to 10 %, with an eighth 22 %.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.costs import AGE_PLANES, MOST_HOT_ROWS, TALLIES
from kvbridge.core.plan.operations import PageArray
from kvbridge.kernels.copies import array_at, copy_rows
from kvbridge.kernels.cuda import programs, runtime
from kvbridge.kernels.cuda.staging import DeviceBytes


@dataclass(frozen=True, slots=True)
class SwapInShape:
    """The sizes that a kernel is made for. Row counts are multiples of `slots_per_page`, itself a multiple of 32."""

    hot_rows: int
    """Hot slots of a request in a layer; at least `top_k`."""
    ring_rows: int
    max_rows: int
    """The longest request, in rows."""
    top_k: int
    slots_per_page: int = 64
    row_parts_bytes: tuple[int, ...] = (576, 8)
    """One or two parts, multiples of 4; a page holds all first parts, then all second ones."""

    def __post_init__(self) -> None:
        page = self.slots_per_page
        if (
            page < 32
            or page % 32
            or any(rows < page or rows % page for rows in (self.hot_rows, self.ring_rows, self.max_rows))
        ):
            raise InvalidInputError(
                f"hot_rows, ring_rows and max_rows must be multiples of a page's {page} rows (itself one of 32), got "
                f"{self.hot_rows}, {self.ring_rows} and {self.max_rows}"
            )
        if not 1 <= self.top_k <= self.hot_rows <= MOST_HOT_ROWS:
            raise InvalidInputError(
                f"need 1 <= top_k <= hot_rows <= {MOST_HOT_ROWS}, got top_k {self.top_k} and hot_rows {self.hot_rows}: the rows "
                "of one step must fit into the hot slots together"
            )
        if len(self.row_parts_bytes) not in {1, 2} or any(part < 4 or part % 4 for part in self.row_parts_bytes):
            raise UnsupportedError(
                f"rows of one or two parts that are multiples of 4 bytes, got {self.row_parts_bytes}"
            )

    @property
    def rows_per_request(self) -> int:
        """Physical rows of one request in a layer."""
        return self.hot_rows + self.ring_rows

    @property
    def generation_rows(self) -> int:
        """How many hot slots a generation sees before the next one begins."""
        return self.hot_rows * 2 // 3

    @property
    def max_pages(self) -> int:
        """Host pages of the longest request."""
        return self.max_rows // self.slots_per_page

    def ring_start(self, rows: int, ring_begin: int) -> int:
        """The first row that is found in the ring when a request has `rows` rows; ring_begin is what admission set."""
        newest_page = max(rows - 1, 0) // self.slots_per_page
        return max(ring_begin, (newest_page - (self.ring_rows // self.slots_per_page - 1)) * self.slots_per_page)


@dataclass(frozen=True, slots=True)
class SwapInState:
    """Addresses of arrays that live as long as the hot region: C order, made once, in the device's memory.

    Before its first step a request's parts are: slot_of_row and row_of_slot -1, ages and tallies 0.
    """

    requests: int
    slot_of_row: int
    """int16 [layers, requests, max_rows]; -1: not resident."""
    row_of_slot: int
    """int32 [layers, requests, hot_rows]; -1: empty."""
    ages: int
    """uint32 [layers, requests, hot_rows / 32, 4]: bit s % 32 of word s // 32 of each plane belongs to slot s."""
    tallies: int
    """int32 [layers, requests, 4]."""
    pages: int
    """int32 [requests, max_pages, 2]: for each logical page its host page id, and its rank by host page id in the request."""
    ring_begin: int
    """int32 [requests]."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Places of one layer's rows: pages on the host, and the hot region. Addresses as the device sees them."""

    host_addresses: tuple[int, ...]
    """The first page of each extent."""
    pages_per_extent: int
    host_stride_bytes: int
    hot_address: int
    hot_stride_bytes: int


@dataclass(frozen=True, slots=True)
class Step:
    """Addresses of a step's arrays in the device's memory; the kernel may read them under graph replay."""

    batch: int
    request_slots: int
    """int32 [batch]; -1: padding."""
    rows: int
    """int32 [batch]: rows of each request, this step's own included; at most `max_rows`."""


class SwapIn(ABC):
    """One form of the operation, for all layers."""

    def __init__(self, shape: SwapInShape, state: SwapInState, layers: Sequence[LayerMemory]) -> None:
        self.shape = shape
        self.state = state
        self.layers = tuple(layers)
        width = _width(shape)
        for layer in self.layers:
            facts = (*layer.host_addresses, layer.host_stride_bytes, layer.hot_address, layer.hot_stride_bytes)
            if any(fact % width for fact in facts):
                raise UnsupportedError(
                    f"rows of parts {shape.row_parts_bytes} are copied {width} bytes at a time, so pages must begin at "
                    f"multiples of {width}; got {facts}"
                )

    @abstractmethod
    def swap_in(self, layer: int, step: Step, *, top_k: int, out: int, stream: int = 0) -> None:
        """Swap the selected rows of one layer (its position in `layers`) in, in stream order.

        `top_k`, `out`: addresses of int32 [batch, top_k]: selected rows, in any order, and the physical rows that they get.
        """


class ReferenceSwapIn(SwapIn):
    """The rules in numpy, over memory of this process."""

    def __init__(self, shape: SwapInShape, state: SwapInState, layers: Sequence[LayerMemory]) -> None:
        super().__init__(shape, state, layers)
        count, requests = len(self.layers), state.requests
        self._slot_of_row = array_at(state.slot_of_row, (count, requests, shape.max_rows), np.int16)
        self._row_of_slot = array_at(state.row_of_slot, (count, requests, shape.hot_rows), np.int32)
        self._ages = array_at(state.ages, (count, requests, shape.hot_rows // 32, AGE_PLANES), np.uint32)
        self._tallies = array_at(state.tallies, (count, requests, TALLIES), np.int32)
        self._pages = array_at(state.pages, (requests, shape.max_pages, 2), np.int32)
        self._ring_begin = array_at(state.ring_begin, (requests,), np.int32)
        self._rows = [self._memory(layer) for layer in self.layers]

    def swap_in(self, layer: int, step: Step, *, top_k: int, out: int, stream: int = 0) -> None:
        """Done when it returns."""
        del stream
        selected = array_at(top_k, (step.batch, self.shape.top_k), np.int32)
        found = array_at(out, (step.batch, self.shape.top_k), np.int32)
        requests = array_at(step.request_slots, (step.batch,), np.int32)
        rows = array_at(step.rows, (step.batch,), np.int32)
        for entry in range(step.batch):
            if requests[entry] < 0:
                found[entry] = -1
            else:
                found[entry] = self._one(layer, int(requests[entry]), int(rows[entry]), selected[entry])

    def _one(self, layer: int, request: int, rows: int, selected: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        shape = self.shape
        slot_of_row, first = self._slot_of_row[layer, request], request * shape.rows_per_request
        start = shape.ring_start(rows, int(self._ring_begin[request]))
        valid = (selected >= 0) & (selected < rows)
        on_host = valid & (selected < start)
        resident = slot_of_row[np.where(on_host, selected, 0)].astype(np.int32)
        used = np.unique(resident[on_host & (resident >= 0)])
        missing = self._in_host_order(request, np.unique(selected[on_host & (resident < 0)]))
        slots = self._give_way(layer, request, used, len(missing))
        self._load(layer, request, missing, slots)
        self._remember(layer, request, used, slots)
        places = first + slot_of_row[np.where(on_host, selected, 0)].astype(np.int32)
        ring = first + shape.hot_rows + selected % shape.ring_rows
        answer: npt.NDArray[np.int32] = np.where(on_host, places, np.where(valid, ring, -1)).astype(np.int32)
        return answer

    def _in_host_order(self, request: int, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        ranks = self._pages[request, rows // self.shape.slots_per_page, 1]
        return rows[np.lexsort((rows % self.shape.slots_per_page, ranks))]

    def _give_way(self, layer: int, request: int, used: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.intp]:
        """Return the slots that `count` missing rows take, in that order."""
        planes = self._bits(layer, request)
        ages = np.where(planes.any(axis=1), planes.argmax(axis=1), AGE_PLANES)
        free = np.ones(self.shape.hot_rows, dtype=np.bool_)
        free[used] = False
        slots = np.flatnonzero(free)
        return slots[np.argsort(-ages[slots], kind="stable")][:count]

    def _bits(self, layer: int, request: int) -> npt.NDArray[np.bool_]:
        """Return the age planes of each slot: bool [hot_rows, 4]."""
        words = self._ages[layer, request]
        bits = words[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None] & np.uint32(1)
        planes: npt.NDArray[np.bool_] = bits.reshape(self.shape.hot_rows, AGE_PLANES).astype(np.bool_)
        return planes

    def _load(self, layer: int, request: int, rows: npt.NDArray[np.int32], slots: npt.NDArray[np.intp]) -> None:
        if not len(rows):
            return
        shape = self.shape
        pages = self._pages[request, rows // shape.slots_per_page, 0]
        host_rows = pages.astype(np.int64) * shape.slots_per_page + rows % shape.slots_per_page
        host, hot = self._rows[layer]
        places = request * shape.rows_per_request + slots
        copy_rows((host, shape.slots_per_page, host_rows), (hot, shape.slots_per_page, places), shape.row_parts_bytes)
        slot_of_row, row_of_slot = self._slot_of_row[layer, request], self._row_of_slot[layer, request]
        old = row_of_slot[slots]
        slot_of_row[old[old >= 0]] = -1
        row_of_slot[slots] = rows
        slot_of_row[rows] = slots

    def _memory(self, layer: LayerMemory) -> tuple[PageArray, PageArray]:
        """Return the pages of a layer on the host and in the hot region."""
        shape, each = self.shape, layer.pages_per_extent
        bases = np.array([layer.host_addresses], dtype=np.uint64)
        host = PageArray(bases, each, layer.host_stride_bytes, each * len(layer.host_addresses))
        pages = self.state.requests * shape.rows_per_request // shape.slots_per_page
        return host, PageArray.contiguous(layer.hot_address, page_count=pages, stride_bytes=layer.hot_stride_bytes)

    def _remember(self, layer: int, request: int, used: npt.NDArray[np.int32], loaded: npt.NDArray[np.intp]) -> None:
        words, tallies = self._ages[layer, request], self._tallies[layer, request]
        marked = np.zeros(self.shape.hot_rows, dtype=np.uint32)
        marked[used] = marked[loaded] = 1
        fresh = marked.astype(np.bool_) & ~self._bits(layer, request)[:, 0]
        now = words[:, 0] | (marked.reshape(-1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=1, dtype=np.uint32)
        recent = int(tallies[0]) + int(fresh.sum())
        if recent >= self.shape.generation_rows:
            words[:, 1:] = np.column_stack([now, words[:, 1:-1]])
            words[:, 0] = 0
            recent = 0
        else:
            words[:, 0] = now
        tallies[0] = recent
        tallies[1] += len(used)
        tallies[2] += len(loaded)


def _width(shape: SwapInShape) -> int:
    return next(width for width in (16, 8, 4) if shape.row_parts_bytes[0] % width == 0)


# ------------------------------------------------------------------------------------------- by the device


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel is laid out; the result does not depend on it."""

    threads: int
    early_rows: int
    """Rows that a warp starts to load before there is a plan; 0: all of them after it, in the order of host addresses."""


SMALL_BATCH = Form(threads=512, early_rows=2)
"""For batches that leave a multiprocessor to each block. A step takes as long as one host read, and planning hides behind it."""
LARGE_BATCH = Form(threads=256, early_rows=0)
"""For batches that fill the host link: the order of addresses decides."""
MOST_BLOCKS = 64


class CudaSwapIn(SwapIn):
    """The kernel. No synchronisation, no allocation; may be captured into a graph."""

    def __init__(self, device: int, shape: SwapInShape, state: SwapInState, layers: Sequence[LayerMemory]) -> None:
        super().__init__(shape, state, layers)
        self._multiprocessors = runtime.device_facts(device).multiprocessors
        self._kernels = {form: self._kernel(device, form) for form in (SMALL_BATCH, LARGE_BATCH)}
        self._extents = [_uploaded(device, layer.host_addresses) for layer in self.layers]

    def swap_in(
        self,
        layer: int,
        step: Step,
        *,
        top_k: int,
        out: int,
        stream: int = 0,
        layout: tuple[Form, int] | None = None,
    ) -> None:
        """`SwapIn.swap_in` by the kernel.

        `layout`: the form, and how many blocks (a power of 2, at most 128) share a request's copies; None: by the batch.
        """
        if not step.batch:
            return
        form, blocks = layout or layout_for(step.batch, self._multiprocessors)
        shape, state, memory, extents = self.shape, self.state, self.layers[layer], self._extents[layer]
        before = layer * state.requests
        arguments = (
            top_k,
            out,
            step.request_slots,
            step.rows,
            state.slot_of_row + before * shape.max_rows * 2,
            state.row_of_slot + before * shape.hot_rows * 4,
            state.ages + before * shape.hot_rows // 32 * AGE_PLANES * 4,
            state.tallies + before * TALLIES * 4,
            state.pages,
            state.ring_begin,
            extents.address if extents is not None else 0,
            memory.host_addresses[0],
            memory.host_stride_bytes,
            memory.hot_address,
            memory.hot_stride_bytes,
            np.int32(memory.pages_per_extent),
            np.uint32(blocks),
        )
        grid, shared_bytes = step.batch * blocks, _shared_bytes(shape, form)
        self._kernels[form].launch(arguments, grid=grid, block=form.threads, stream=stream, shared_bytes=shared_bytes)

    def _kernel(self, device: int, form: Form) -> programs.Kernel:
        kernel = programs.kernel(source(self.shape, form), "swap_in", device)
        kernel.allow_shared(_shared_bytes(self.shape, form))
        return kernel

    def close(self) -> None:
        """Free what this object allocated; no launch of it is under way."""
        for extents in self._extents:
            if extents is not None:
                extents.close()


def source(shape: SwapInShape, form: Form) -> programs.Source:
    """Return the kernel's source for these sizes."""
    defines = {
        "HOT_ROWS": shape.hot_rows,
        "RING_ROWS": shape.ring_rows,
        "MAX_ROWS": shape.max_rows,
        "TOP_K": shape.top_k,
        "THREADS": form.threads,
        "EARLY_ROWS": form.early_rows,
    }
    return programs.Source("swap_in", (*defines.items(), *_row_form(shape)))


def _row_form(shape: SwapInShape) -> tuple[tuple[str, int], ...]:
    first, second, *_ = *shape.row_parts_bytes, 0
    return ("SLOTS", shape.slots_per_page), ("PART0_BYTES", first), ("PART1_BYTES", second)


def layout_for(batch: int, multiprocessors: int) -> tuple[Form, int]:
    """Return form and blocks for a batch: many blocks a request in a small one, since one multiprocessor cannot fill the host link.

    The limits were measured on an H200, for 512 to 2,048 selected rows of which 0 to 100 % were missing.
    """
    each = multiprocessors // batch
    if each >= 4:
        return SMALL_BATCH, min(MOST_BLOCKS, 1 << each.bit_length() - 1)
    return LARGE_BATCH, 2 if each else 1


def _uploaded(device: int, extents: Sequence[int]) -> DeviceBytes | None:
    """Put the extents of a layer into device memory, where there is more than one."""
    if len(extents) == 1:
        return None
    made = DeviceBytes(device, 8 * len(extents))
    made.write(np.array(extents, dtype=np.uint64))
    return made


def _shared_bytes(shape: SwapInShape, form: Form) -> int:
    """Return the size of `struct Shared` in the kernel."""
    listed = -(-shape.top_k // form.threads) * form.threads
    lists = (16 if form.early_rows else 12) * listed
    words = 4 * shape.hot_rows // 32 + 4 * shape.max_rows // 32
    halves = 2 * shape.max_rows // 32 + 2 * shape.top_k
    scratch = 2 * 32 * 4 + 4
    total = -(-(lists + words + halves) // 4) * 4 + scratch
    return -(-total // 16) * 16


APPEND_THREADS = 192


class AppendRows:
    """Writes new rows into the hot region of one layer, each to its physical row, its parts apart."""

    def __init__(self, shape: SwapInShape, device: int | None) -> None:
        """`shape` gives the form of pages and rows. `device` None: the processor writes, and is done when `append` returns.

        On a device: no synchronisation, no allocation; may be captured into a graph.
        """
        self.row_bytes = sum(shape.row_parts_bytes)
        self._shape = shape
        made = programs.Source("append_rows", _row_form(shape))
        self._kernel = None if device is None else programs.kernel(made, "append_rows", device)

    def append(
        self, *, rows: int, places: int, count: int, hot_address: int, hot_stride_bytes: int, stream: int = 0
    ) -> None:
        """Write `count` rows in stream order. Addresses, as the device sees them; all are multiples of 4.

        `rows`: uint8 [count, row_bytes], C order. `places`: int32 [count], physical rows; negative: the row is skipped.
        `hot_address`: first page of the layer's hot region.
        """
        if self._kernel is not None:
            if count:
                arguments = (rows, places, hot_address, hot_stride_bytes)
                self._kernel.launch(arguments, grid=count, block=APPEND_THREADS, stream=stream)
            return
        wanted = array_at(places, (count,), np.int32)
        chosen = np.flatnonzero(wanted >= 0)
        if len(chosen):
            slots = self._shape.slots_per_page
            new = PageArray.contiguous(rows, page_count=count, stride_bytes=self.row_bytes)
            pages = 1 + int(wanted.max()) // slots
            hot = PageArray.contiguous(hot_address, page_count=pages, stride_bytes=hot_stride_bytes)
            copy_rows((new, 1, chosen), (hot, slots, wanted[chosen]), self._shape.row_parts_bytes)
