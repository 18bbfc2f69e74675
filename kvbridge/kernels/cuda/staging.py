"""Arguments of kernels: segments of stretches, arrays on their way to the device, and device memory with an owner."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.plan.operations import AddressArray
from kvbridge.kernels.cuda import runtime

LINE_BYTES = 128
"""Segments begin at cache lines."""
SMALLEST_STAGING_BYTES = 64 * 1024


class DeviceBytes:
    """Device memory with an owner."""

    def __init__(self, device: int, length_bytes: int) -> None:
        self.device = device
        self.address = runtime.allocate(device, length_bytes)

    def write(self, content: np.ndarray[Any, Any]) -> None:
        """Copy an array there, and wait for the copy."""
        flat = np.ascontiguousarray(content)
        with runtime.Stream.create(self.device) as stream:
            runtime.copy(self.address, flat.ctypes.data, flat.nbytes, device=self.device, stream=stream.handle)
            stream.synchronize()

    def close(self) -> None:
        """Give it back when the device does not use it any more. Harmless when closed."""
        if self.address:
            address, self.address = self.address, 0
            runtime.free(self.device, address)


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """How stretches are cut: stretch `i` has the segments [first[i], first[i + 1]), the last one up to `count`."""

    first: npt.NDArray[np.uint32]
    count: int

    @classmethod
    def of(cls, addresses: AddressArray, lengths: npt.NDArray[np.integer], segment_bytes: int) -> Self:
        """Cut where an address is a multiple of a cache line, each at most `segment_bytes`. Lengths are at least 1."""
        ahead = (addresses & np.uint64(LINE_BYTES - 1)).astype(np.int64)
        each = (lengths.astype(np.int64) + ahead + (segment_bytes - 1)) // segment_bytes
        last = np.cumsum(each)
        count = int(last[-1]) if len(last) else 0
        if count >= 1 << 32:
            raise UnsupportedError(
                f"{count} segments of {segment_bytes} bytes are too many for one launch; split the work"
            )
        return cls((last - each).astype(np.uint32), count)


class Staging:
    """Arrays on their way to the device and back: host memory that is registered with CUDA, and as much on the device.

    One launch uses it at a time: `record` after the launch; `idle` says when the next may.
    """

    def __init__(self, device: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self._device = device
        self._host: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, length_bytes), dtype=np.uint8)
        self._used_bytes = 0
        runtime.register_host(
            self._host.ctypes.data, length_bytes, device=device, label="staging of a kernel's arguments"
        )
        # Without this an owner that forgets to close would leave a registration behind, and other memory will be mapped there.
        self._unregister = weakref.finalize(self, runtime.unregister_host, self._host.ctypes.data)
        self._unregister.atexit = False
        self._memory = DeviceBytes(device, length_bytes)
        self._event = runtime.Event.create(device)

    def put(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[int]:
        """Write arrays one after another, each at a multiple of 8 bytes; return where they will be on the device."""
        offsets, offset = [], 0
        for array in arrays:
            self._host[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            offsets.append(offset)
            offset += -(-array.nbytes // 8) * 8
        self._used_bytes = offset
        return [self._memory.address + offset for offset in offsets]

    def send(self, *, stream: int) -> None:
        """Copy what was put to the device, in stream order."""
        self._copy(self._memory.address, self._host.ctypes.data, self._used_bytes, stream)

    def fetch(self, device_address: int, length_bytes: int, *, stream: int) -> npt.NDArray[np.uint8]:
        """Copy bytes back, in stream order; return where they will be on the host, until the next use."""
        offset = device_address - self._memory.address
        self._copy(self._host.ctypes.data + offset, device_address, length_bytes, stream)
        return self._host[offset : offset + length_bytes]

    def record(self, stream: int) -> None:
        """Note that everything that uses it has been submitted."""
        self._event.record(stream)

    def idle(self) -> bool:
        """Whether what was submitted is done; never waits."""
        return self._event.reached()

    def close(self) -> None:
        """Wait for what uses it, and give everything back. Harmless when closed."""
        if self._memory.address:
            self._event.synchronize()
            self._memory.close()
            self._event.close()
            self._unregister()

    def _copy(self, destination: int, source: int, length_bytes: int, stream: int) -> None:
        runtime.copy(destination, source, length_bytes, device=self._device, stream=stream)


class StagingPool:
    """As many stagings as are in use at once. One that is too short is replaced by a longer one."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._all: list[Staging] = []
        """The least recently used one first."""

    def reserve(self, length_bytes: int, count: int) -> None:
        """Make `count` stagings of so many bytes each beforehand, because making one allocates, which may wait for the device."""
        needed = self._rounded(length_bytes)
        while sum(staging.length_bytes >= needed for staging in self._all) < count:
            self._all.append(Staging(self._device, needed))

    @staticmethod
    def _rounded(length_bytes: int) -> int:
        return max(SMALLEST_STAGING_BYTES, 1 << (length_bytes + 64).bit_length())

    def take(self, length_bytes: int) -> Staging:
        """Return a staging that is idle and long enough for arrays of so many bytes in all. Makes one if there is none."""
        needed = self._rounded(length_bytes)
        found = next((each for each in self._all if each.length_bytes >= needed and each.idle()), None)
        if found is None:
            short = next((each for each in self._all if each.length_bytes < needed and each.idle()), None)
            if short is not None:
                self._all.remove(short)
                short.close()
            found = Staging(self._device, needed)
        else:
            self._all.remove(found)
        self._all.append(found)
        return found

    def close(self) -> None:
        """Wait for what is in use, and give everything back."""
        while self._all:
            self._all.pop().close()
