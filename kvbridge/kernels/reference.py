"""The CPU reference of the operations on memory: what compiled forms must agree with, and what runs without a device.

No compiler is assumed, so the copies are made by libc through ctypes, one call (0.3 us) a stretch. Where that call
costs more than a second copy in cache would, below 8 KiB, numpy gathers many equally long stretches into a buffer
and scatters them from there. Both let go of the interpreter lock while bytes move.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

AddressArray = npt.NDArray[np.uint64]

GATHER_BELOW_BYTES = 8192
GATHER_BUFFER_BYTES = 128 * 1024
"""Fits into a core's second-level cache, so that the scatter finds the bytes there."""
GATHER_AT_LEAST = 16
"""Fewer stretches of one length are not worth the set-up of about 10 us."""

_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


def copy_operations(source_addresses: AddressArray, destination_addresses: AddressArray, lengths: AddressArray) -> None:
    """Copy `lengths[i]` bytes from `source_addresses[i]` to `destination_addresses[i]`, for every i.

    Three one-dimensional uint64 arrays of equal length: virtual addresses of this process, mapped for as long as
    the call lasts, and bytes. No destination overlaps a source or another destination. Blocks until every byte is
    copied.
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
        rest = np.concatenate(each)
        copy_each(source_addresses[rest].tolist(), destination_addresses[rest].tolist(), lengths[rest].tolist())


def copy_each(source: Sequence[int], destination: Sequence[int], lengths: Sequence[int]) -> None:
    """As `copy_operations`, each stretch by a call of its own: for those of a KiB and more, and without looking at them first."""
    deque(map(_memmove, destination, source, lengths), maxlen=0)


def _by_length(lengths: AddressArray) -> Iterator[tuple[int, npt.NDArray[np.intp]]]:
    """Each length, with the indices that have it in ascending order."""
    if (lengths == lengths[0]).all():
        yield int(lengths[0]), np.arange(len(lengths))
        return
    order = np.argsort(lengths, kind="stable")
    found, starts = np.unique(lengths[order], return_index=True)
    yield from zip(found.tolist(), np.split(order, starts[1:]), strict=True)


def _copy_equal(source: AddressArray, destination: AddressArray, length: int) -> None:
    """Copy stretches of one length, by way of a buffer."""
    origins, source_offsets = _items(source, length)
    targets, destination_offsets = _items(destination, length)
    step = max(1, GATHER_BUFFER_BYTES // length)
    for first in range(0, len(source), step):
        part = slice(first, first + step)
        targets[destination_offsets[part]] = origins[source_offsets[part]]


def _items(addresses: AddressArray, length: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.intp]]:
    """See memory as an array in which item i is the `length` bytes from byte i on; with it, each address's index.

    Byte 0 is at the lowest address. Items overlap, and most of them may not be mapped; only those at the given
    addresses are ever looked at.
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


def array_at(address: int, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - any form of a dtype
    """See memory of this process as an array; it must stay mapped for as long as the array is used."""
    buffer = (ctypes.c_uint8 * (math.prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype=dtype).reshape(shape)


class _View:
    """Carries numpy's array interface for memory that no object owns."""

    def __init__(self, interface: dict[str, Any]) -> None:
        self.__array_interface__ = interface
