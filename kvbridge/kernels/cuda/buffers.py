"""What the copy and digest kernels keep besides the bytes they work on: descriptions, counters, arrays on their way.

Owns: small device allocations and registered host memory of the kernels' own, and a few questions to CUDA about addresses and
streams. Must not know: what a kernel does with them.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import RegistrationError, TransportError, UnsupportedError
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.places import PageMemory

SIDE = np.dtype(
    [
        ("first_extent", "<u8"),
        ("extents", "<u8"),
        ("page_stride", "<u8"),
        ("pages_per_extent", "<u4"),
        ("page_count", "<u4"),
    ]
)
"""`struct Side` in `csrc/copies.cuh`."""

ByteArray = npt.NDArray[np.uint8]


class Extents:
    """The extent addresses of many sides, one after another; a side refers to its first by index until they are uploaded."""

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def side(self, memory: PageMemory) -> np.ndarray[Any, Any]:
        """Return the side's record, with the index of its first extent instead of the address."""
        record = np.zeros((), dtype=SIDE)
        record["first_extent"], record["extents"] = memory.extent_addresses[0], len(self.addresses)
        record["page_stride"], record["pages_per_extent"] = memory.page_stride_bytes, memory.pages_per_extent
        record["page_count"] = memory.page_count
        self.addresses.extend(memory.extent_addresses)
        return record


class DeviceBytes:
    """Device memory with an owner."""

    def __init__(self, device: int, length_bytes: int) -> None:
        self.device = device
        self.length_bytes = length_bytes
        self.address = runtime.allocate(device, length_bytes)

    def write(self, content: np.ndarray[Any, Any], *, offset_bytes: int = 0) -> None:
        """Put an array there, and wait until it is."""
        flat = np.ascontiguousarray(content)
        with runtime.Stream.create(self.device) as stream:
            runtime.copy(
                self.address + offset_bytes, flat.ctypes.data, flat.nbytes, device=self.device, stream=stream.handle
            )
            stream.synchronize()

    def clear(self) -> None:
        """Set all of it to 0, and wait until it is."""
        with runtime.Stream.create(self.device) as stream:
            runtime.fill(self.device, self.address, self.length_bytes, stream=stream.handle)
            stream.synchronize()

    def read(self, offset_bytes: int, length_bytes: int) -> ByteArray:
        """Wait for everything on the device, and return what is there then."""
        runtime.synchronize(self.device)
        found = np.empty(length_bytes, dtype=np.uint8)
        with runtime.Stream.create(self.device) as stream:
            runtime.copy(
                found.ctypes.data, self.address + offset_bytes, length_bytes, device=self.device, stream=stream.handle
            )
            stream.synchronize()
        return found

    def close(self) -> None:
        """Give it back when the device does not use it any more. Harmless when closed."""
        if self.address:
            address, self.address = self.address, 0
            runtime.free(self.device, address)


def upload(device: int, table: np.ndarray[Any, Any], extents: Extents) -> DeviceBytes:
    """Return a description on the device: the table's records, then the extents that their sides refer to."""
    memory = DeviceBytes(device, table.nbytes + 8 * len(extents.addresses))
    placed = table.copy()
    for side in ("source", "destination"):
        placed[side]["extents"] = memory.address + table.nbytes + 8 * placed[side]["extents"]
    memory.write(placed)
    memory.write(np.array(extents.addresses, dtype=np.uint64), offset_bytes=table.nbytes)
    return memory


class State:
    """What a copier's launches leave for the next one and for others: `struct State` in `csrc/places.cuh`.

    Layout: refused ids (uint32), unused (uint32), then for each flag: items done in the present launch (uint64), then for each
    flag its value (uint32).
    """

    def __init__(self, device: int, *, flags: int) -> None:
        self._flags = flags
        self._memory = DeviceBytes(device, 8 + 12 * flags)
        self._memory.clear()

    @property
    def address(self) -> int:
        """Where it begins."""
        return self._memory.address

    def flag_address(self, index: int) -> int:
        """Where a flag lies."""
        return self._memory.address + 8 + 8 * self._flags + 4 * index

    def read_refused(self) -> int:
        """Wait for the device; return how many ids were refused so far."""
        return int(self._memory.read(0, 4).view(np.uint32)[0])

    def close(self) -> None:
        """Give it back."""
        self._memory.close()


# ------------------------------------------------------------------------------------------- questions to CUDA


def is_host(device: int, address: int, *, what: str) -> bool:
    """Whether an address is host memory, or else device memory. Raises RegistrationError for memory that CUDA does not know."""
    runtime.use(device)
    code, found = _runtime().cudaPointerGetAttributes(address)
    kinds = _runtime().cudaMemoryType
    if int(code) or found.type == kinds.cudaMemoryTypeUnregistered:
        raise RegistrationError(
            f"{what} at {address:#x} is neither device memory nor host memory that is registered with CUDA in this process, so "
            f"a kernel on cuda:{device} cannot use it; register the mapping first (runtime.register_host)"
        )
    return bool(found.type == kinds.cudaMemoryTypeHost)


def is_capturing(device: int, stream: int) -> bool:
    """Whether a stream records a graph instead of running."""
    runtime.use(device)
    code, status = _runtime().cudaStreamIsCapturing(stream)
    if int(code):
        raise TransportError(f"CUDA: cudaStreamIsCapturing failed: {code.name}")
    return bool(int(status))


def wait_value(device: int, address: int, value: int, stream: int) -> None:
    """Have a stream wait until the uint32 at a device address is `value` or later; numbers go round."""
    runtime.use(device)
    driver = _driver()
    (code,) = driver.cuStreamWaitValue32(
        stream, address, value & 0xFFFFFFFF, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    )
    if int(code):
        raise UnsupportedError(f"a stream of cuda:{device} cannot wait for a kernel's signal: {code.name}")


@cache
def _runtime() -> Any:  # noqa: ANN401 - the bindings ship no types
    return importlib.import_module("cuda.bindings.runtime")


@cache
def _driver() -> Any:  # noqa: ANN401
    return importlib.import_module("cuda.bindings.driver")
