"""Swap-in on a GPU and its layout for a batch; rows appended to the hot region."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbridge.core.geometry.costs import AGE_PLANES, TALLIES
from kvbridge.core.plan.operations import PageArray
from kvbridge.kernels.copies import array_at
from kvbridge.kernels.cuda import programs, runtime
from kvbridge.kernels.cuda.staging import DeviceBytes
from kvbridge.kernels.swap_in import LayerMemory, Step, SwapIn, SwapInShape, SwapInState, copy_rows


@dataclass(frozen=True, slots=True)
class Form:
    """How the kernel is laid out; the result does not depend on it."""

    threads: int
    early_rows: int
    """Rows that a warp starts to load before there is a plan; 0: all of them after it, in the order of host addresses."""


SMALL_BATCH = Form(threads=512, early_rows=2)
"""For batches that leave a multiprocessor to each block: a step takes as long as one host read, and planning hides behind it."""
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
    """The kernel's source for these sizes."""
    parts = (*shape.row_parts_bytes, 0)
    defines = {
        "HOT_ROWS": shape.hot_rows,
        "RING_ROWS": shape.ring_rows,
        "MAX_ROWS": shape.max_rows,
        "TOP_K": shape.top_k,
        "SLOTS": shape.slots_per_page,
        "PART0_BYTES": parts[0],
        "PART1_BYTES": parts[1],
        "THREADS": form.threads,
        "EARLY_ROWS": form.early_rows,
    }
    return programs.Source("swap_in", tuple(defines.items()))


def layout_for(batch: int, multiprocessors: int) -> tuple[Form, int]:
    """Form and blocks for a batch: many blocks a request in a small one, since one multiprocessor cannot fill the host link.

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
        self._kernel = None if device is None else programs.kernel(append_source(shape), "append_rows", device)

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


def append_source(shape: SwapInShape) -> programs.Source:
    """The source of the kernel for these sizes."""
    parts = (*shape.row_parts_bytes, 0)
    defines = {"SLOTS": shape.slots_per_page, "PART0_BYTES": parts[0], "PART1_BYTES": parts[1]}
    return programs.Source("append_rows", tuple(defines.items()))
