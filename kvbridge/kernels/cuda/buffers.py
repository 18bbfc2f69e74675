"""Device memory with an owner, and questions of the kernels to CUDA about addresses and streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import RegistrationError, UnsupportedError
from kvbridge.kernels.cuda import runtime

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


def wait_value(device: int, address: int, value: int, stream: int) -> None:
    """Have a stream wait until the uint32 at a device address is `value` or later; numbers go round."""
    runtime.use(device)
    driver = runtime.library("cuda.bindings.driver")
    (code,) = driver.cuStreamWaitValue32(
        stream, address, value & 0xFFFFFFFF, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    )
    if int(code):
        raise UnsupportedError(f"a stream of cuda:{device} cannot wait for a kernel's signal: {code.name}")
