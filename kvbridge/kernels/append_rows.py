"""New rows into the hot region of one layer, each to its physical row, its parts apart."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from kvbridge.kernels.cuda import programs
from kvbridge.kernels.places import PageMemory, RowMemory, copy_rows
from kvbridge.kernels.reference import array_at
from kvbridge.kernels.swap_in import SwapInShape

THREADS = 192


class AppendRows(ABC):
    """One form of the operation."""

    def __init__(self, shape: SwapInShape) -> None:
        """Only the form of pages and rows is taken from `shape`."""
        self.shape = shape
        self.row_bytes = sum(shape.row_parts_bytes)

    @abstractmethod
    def append(
        self, *, rows: int, places: int, count: int, hot_address: int, hot_stride_bytes: int, stream: int = 0
    ) -> None:
        """Write `count` rows in stream order. Addresses, as the device sees them; all are multiples of 4.

        `rows`: uint8 [count, row_bytes], C order. `places`: int32 [count], physical rows; negative: the row is skipped.
        `hot_address`: first page of the layer's hot region.
        """


class CudaAppendRows(AppendRows):
    """The kernel. No synchronisation, no allocation; may be captured into a graph."""

    def __init__(self, device: int, shape: SwapInShape) -> None:
        super().__init__(shape)
        self._kernel = programs.kernel(source(shape), "append_rows", device)

    def append(
        self, *, rows: int, places: int, count: int, hot_address: int, hot_stride_bytes: int, stream: int = 0
    ) -> None:
        if count:
            arguments = (rows, places, hot_address, hot_stride_bytes)
            self._kernel.launch(arguments, grid=count, block=THREADS, stream=stream)


class ReferenceAppendRows(AppendRows):
    """The same by address, over memory of this process. `stream` means nothing here."""

    def append(
        self, *, rows: int, places: int, count: int, hot_address: int, hot_stride_bytes: int, stream: int = 0
    ) -> None:
        """See `AppendRows.append`; done when it returns."""
        del stream
        wanted = array_at(places, (count,), np.int32)
        chosen = np.flatnonzero(wanted >= 0)
        if len(chosen):
            slots = self.shape.slots_per_page
            new = PageMemory.contiguous(rows, page_count=count, page_stride_bytes=self.row_bytes)
            pages = 1 + int(wanted.max()) // slots
            hot = PageMemory.contiguous(hot_address, page_count=pages, page_stride_bytes=hot_stride_bytes)
            source, target = RowMemory(new, 1), RowMemory(hot, slots)
            copy_rows((source, chosen), (target, wanted[chosen]), self.shape.row_parts_bytes)


def append_rows(shape: SwapInShape, device: int | None) -> AppendRows:
    """The form for a CUDA device, or for the CPU (None)."""
    return ReferenceAppendRows(shape) if device is None else CudaAppendRows(device, shape)


def source(shape: SwapInShape) -> programs.Source:
    """The kernel's source for these sizes."""
    parts = (*shape.row_parts_bytes, 0)
    defines = {"SLOTS": shape.slots_per_page, "PART0_BYTES": parts[0], "PART1_BYTES": parts[1]}
    return programs.Source("append_rows", tuple(defines.items()))
