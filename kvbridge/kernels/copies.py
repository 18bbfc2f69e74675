"""Copies by address: by the processor, and by one launch of a kernel, wherever the device reaches.

For many short stretches the kernel is faster than the copy engines, which need about 2 us for each; for long ones it is not.

The processor's copies need no compiler: libc makes them through ctypes, one call (0.3 us) a stretch. Below 8 KiB that call costs
more than a second copy in cache, so numpy gathers many equally long stretches into a buffer and scatters them from there. Both let
go of the interpreter lock while bytes move.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.plan.operations import AddressArray, Operations, PageArray
from kvbridge.core.process import Closing
from kvbridge.kernels.cuda import programs
from kvbridge.kernels.cuda.staging import Segments, StagingPool

SEGMENT_BYTES = 4096
"""Bytes that a warp copies at once."""
THREADS = 512
DEFAULT_BLOCKS = 32
"""Enough to read host memory at the speed of the link; between devices more blocks are faster."""


class StretchCopier(Closing):
    """Copies stretches of device memory, of host memory that is registered with CUDA, and of peers' device memory.

    For one thread at a time. Nothing on the host waits. Staging for the arrays of all submissions that run at once (about 60 bytes
    an operation on either side) is kept and reused. Without a device the processor copies, and `submit` returns when it is done.
    """

    def __init__(self, device: int | None, *, blocks: int = DEFAULT_BLOCKS) -> None:
        """`device`: a CUDA ordinal, or None for the processor. `blocks`: the most blocks of 512 threads for one submission."""
        self._blocks = blocks
        self._staging: StagingPool | None = None
        if device is not None:
            self._kernel = programs.kernel(source(), "copy_stretches", device)
            self._staging = StagingPool(device)

    def submit(self, operations: Operations, *, stream: int = 0) -> None:
        """Have all bytes copied, in stream order. The arrays may be dropped at once.

        Nobody checks that the addresses, those of this process, stay valid until the copies are done, and that the stream is not
        being captured into a graph.
        """
        if self._staging is None:
            copy_operations(operations.source, operations.destination, operations.length)
            return
        if not len(operations):
            return
        segments = Segments.of(operations.destination, operations.length, SEGMENT_BYTES)
        columns = (operations.source, operations.destination, operations.length, segments.first)
        staging = self._staging.take(sum(column.nbytes for column in columns))
        addresses = staging.put(columns)
        staging.send(stream=stream)
        grid = max(1, min(self._blocks, segments.count))
        arguments = [*addresses, len(operations), segments.count]
        self._kernel.launch(arguments, grid=grid, block=THREADS, stream=stream)
        staging.record(stream)

    def reserve(self, operations: int, submissions: int) -> None:
        """Allocate what `submissions` at once of so many operations need, so that none of them allocates."""
        if self._staging is not None:
            self._staging.reserve(operations * (3 * 8 + 4), submissions)

    def warm_up(self) -> None:
        """Have the kernel loaded: its first launch waits for all that the device is doing."""
        if self._staging is not None:
            self._kernel.launch([0] * 6, grid=1, block=THREADS, stream=0)

    def close(self) -> None:
        """Wait for what was submitted, and give everything back. Harmless when closed."""
        if self._staging is not None:
            self._staging.close()


def source() -> programs.Source:
    """Return what is compiled."""
    return programs.Source("copy_stretches", (("SEGMENT", SEGMENT_BYTES), ("THREADS", THREADS)))


# ------------------------------------------------------------------------------------------- by the processor

GATHER_BELOW_BYTES = 8192
GATHER_BUFFER_BYTES = 128 * 1024
"""Fits into a core's second-level cache, so that the scatter finds the bytes there."""
GATHER_AT_LEAST = 16
"""Fewer stretches of one length are not worth 10 us of set-up."""

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def copy_operations(source_addresses: AddressArray, destination_addresses: AddressArray, lengths: AddressArray) -> None:
    """Copy `lengths[i]` bytes from `source_addresses[i]` to `destination_addresses[i]`, for every i.

    Three one-dimensional uint64 arrays of equal length: virtual addresses of this process, mapped for as long as the call lasts,
    and bytes. No destination overlaps a source or another destination. Blocks until every byte is copied.
    """
    if not len(lengths):
        return
    each: list[npt.NDArray[np.intp]] = []
    for length, chosen in _by_length(lengths):
        if 0 < length < GATHER_BELOW_BYTES and len(chosen) >= GATHER_AT_LEAST:
            _copy_equal(source_addresses[chosen], destination_addresses[chosen], length)
        else:
            each.append(chosen)
    if each:
        rest = np.concatenate(each) if len(each) > 1 else each[0]
        columns = (destination_addresses[rest], source_addresses[rest], lengths[rest])
        deque(map(_memmove, *(column.tolist() for column in columns)), maxlen=0)


def _by_length(lengths: AddressArray) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Yield each length, with the indices that have it in ascending order."""
    if (lengths == lengths[0]).all():
        yield int(lengths[0]), np.arange(len(lengths))
        return
    order = np.argsort(lengths, kind="stable")
    found, starts = np.unique(lengths[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=True)


def _copy_equal(source: AddressArray, destination: AddressArray, length: int) -> None:
    origins, source_offsets = _items(source, length)
    targets, destination_offsets = _items(destination, length)
    step = max(1, GATHER_BUFFER_BYTES // length)
    for first in range(0, len(source), step):
        part = slice(first, first + step)
        targets[destination_offsets[part]] = origins[source_offsets[part]]


def _items(addresses: AddressArray, length: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.intp]]:
    """Return memory as an array in which item i is the `length` bytes from byte i on, and each address's index in it.

    Byte 0 is at the lowest address. Items overlap, and most of them may not be mapped; only those at the given addresses are ever
    read or written.
    """
    lowest = addresses.min()
    offsets = (addresses - lowest).astype(np.intp)
    view = _View(
        {
            "version": 3,
            "data": (int(lowest), False),
            "shape": (int(offsets.max()) + 1,),
            "strides": (1,),
            "typestr": f"|V{length}",
        }
    )
    return np.asarray(view), offsets


Rows = tuple[PageArray, int, npt.NDArray[np.integer]]
"""Pages of one layer, the rows that a page holds, and row numbers. Row `r` lies in page `r // slots` at slot `r % slots`; a page
holds, for each part of a row, that part of all its slots one after another: a DeepSeek-V4 row (576, 8) lies in two places of its
page. With one slot a page, rows are dense."""


def copy_rows(source: Rows, destination: Rows, row_parts_bytes: Sequence[int]) -> None:
    """Copy rows in memory of this process. Raises PageOutOfBoundsError."""
    sides = []
    for pages, slots, rows in (source, destination):
        page, slot = np.divmod(rows.astype(np.int64), slots)
        offsets = accumulate((part * slots for part in row_parts_bytes[:-1]), initial=0)
        each = zip(row_parts_bytes, offsets, strict=True)
        sides.append([pages.addresses(page, offset + slot * part)[0] for part, offset in each])
    for part_bytes, origins, targets in zip(row_parts_bytes, *sides, strict=True):
        copy_operations(origins, targets, np.full(len(origins), part_bytes, dtype=np.uint64))


def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - any form of a dtype
    """Return memory of this process as an array; it must stay mapped for as long as the array is used."""
    buffer = (ctypes.c_uint8 * (math.prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


class _View:
    """Carries numpy's array interface for memory that no object owns."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
