"""What the copy and digest kernels keep besides the bytes they work on: descriptions, counters, arrays on their way.

Owns: small device allocations and registered host memory of the kernels' own, and a few questions to CUDA about addresses and
streams. Must not know: what a kernel does with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import PageOutOfBoundsError, RegistrationError, UnsupportedError
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.places import PagePair, RowPair

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


class DeviceBytes:
    """Device memory with an owner."""

    def __init__(self, device: int, length_bytes: int) -> None:
        self.device = device
        self.length_bytes = length_bytes
        self.address = runtime.allocate(device, length_bytes)

    def write(self, content: np.ndarray[Any, Any], *, offset_bytes: int = 0) -> None:
        """Put an array there, and wait until it is."""
        flat = np.ascontiguousarray(content)
        self._copy(self.address + offset_bytes, flat.ctypes.data, flat.nbytes)

    def read(self, offset_bytes: int, length_bytes: int) -> ByteArray:
        """Wait for everything on the device, and return what is there then."""
        runtime.synchronize(self.device)
        found = np.empty(length_bytes, dtype=np.uint8)
        self._copy(found.ctypes.data, self.address + offset_bytes, length_bytes)
        return found

    def _copy(self, destination: int, source: int, length_bytes: int) -> None:
        with runtime.Stream.create(self.device) as stream:
            runtime.copy(destination, source, length_bytes, device=self.device, stream=stream.handle)
            stream.synchronize()

    def close(self) -> None:
        """Give it back when the device does not use it any more. Harmless when closed."""
        if self.address:
            address, self.address = self.address, 0
            runtime.free(self.device, address)


class CopierBuffers:
    """What a copier keeps on its device: its description, and what its launches leave for the next one and for others.

    The description is a table of pairs, then the extents that their sides refer to. The rest is `struct State` in
    `csrc/copies.cuh`: refused ids (uint32), unused (uint32), then for each flag: items done in the present launch (uint64), then
    for each flag its value (uint32).
    """

    def __init__(
        self,
        device: int,
        pairs: Sequence[PagePair | RowPair],
        table: np.ndarray[Any, Any],
        *,
        what: str,
        flags: int = 0,
    ) -> None:
        """`table`: a record a pair, all but its sides filled in; `what` is copied, for messages."""
        self.device = device
        self._what = what
        self._flags = flags
        self._description = _upload(device, pairs, table)
        self._state = DeviceBytes(device, 8 + 12 * flags)
        self._state.write(np.zeros(self._state.length_bytes, dtype=np.uint8))

    @property
    def addresses(self) -> list[int]:
        """Where the description and the state begin."""
        return [self._description.address, self._state.address]

    def flag_address(self, index: int) -> int:
        """Where a flag lies."""
        return self._state.address + 8 + 8 * self._flags + 4 * index

    def check(self) -> None:
        """Wait for the whole device. Raises PageOutOfBoundsError when ids were refused."""
        refused = int(self._state.read(0, 4).view(np.uint32)[0])
        if refused:
            raise PageOutOfBoundsError(
                f"{refused} times a {self._what} copy on cuda:{self.device} was given a {self._what} id that its region does not "
                f"have; those {self._what}s were not copied"
            )

    def close(self) -> None:
        """Wait until the device does not use them any more, and give them back."""
        self._description.close()
        self._state.close()


def _upload(device: int, pairs: Sequence[PagePair | RowPair], table: np.ndarray[Any, Any]) -> DeviceBytes:
    sides = [
        (row, side, memory)
        for row, pair in zip(table, pairs, strict=True)
        for side, memory in (("source", pair.source), ("destination", pair.destination))
    ]
    extents = np.array([address for _, _, memory in sides for address in memory.extent_addresses], dtype=np.uint64)
    uploaded = DeviceBytes(device, table.nbytes + extents.nbytes)
    place = uploaded.address + table.nbytes
    for row, side, memory in sides:
        first, stride = memory.extent_addresses[0], memory.page_stride_bytes
        row[side] = (first, place, stride, memory.pages_per_extent, memory.page_count)
        place += 8 * len(memory.extent_addresses)
    uploaded.write(table)
    uploaded.write(extents, offset_bytes=table.nbytes)
    return uploaded


# ------------------------------------------------------------------------------------------- questions to CUDA


def is_host(device: int, address: int, *, what: str) -> bool:
    """Whether an address is host memory, or else device memory. Raises RegistrationError for memory that CUDA does not know."""
    runtime.use(device)
    code, found = runtime.library().cudaPointerGetAttributes(address)
    kinds = runtime.library().cudaMemoryType
    if int(code) or found.type == kinds.cudaMemoryTypeUnregistered:
        raise RegistrationError(
            f"{what} at {address:#x} is neither device memory nor host memory that is registered with CUDA in this process, so "
            f"a kernel on cuda:{device} cannot use it; register the mapping first (runtime.register_host)"
        )
    return bool(found.type == kinds.cudaMemoryTypeHost)


def is_capturing(device: int, stream: int) -> bool:
    """Whether a stream records a graph instead of running."""
    runtime.use(device)
    return bool(int(runtime.call("cudaStreamIsCapturing", stream)))


def wait_value(device: int, address: int, value: int, stream: int) -> None:
    """Have a stream wait until the uint32 at a device address is `value` or later; numbers go round."""
    runtime.use(device)
    driver = runtime.library("cuda.bindings.driver")
    (code,) = driver.cuStreamWaitValue32(
        stream, address, value & 0xFFFFFFFF, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    )
    if int(code):
        raise UnsupportedError(f"a stream of cuda:{device} cannot wait for a kernel's signal: {code.name}")
