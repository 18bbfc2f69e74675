"""Device allocations by any address in them, and devices by their UUID: what sharing memory between processes needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvbridge.core.errors import RegistrationError, TransportError, UnsupportedError
from kvbridge.kernels.cuda import runtime


@dataclass(frozen=True, slots=True)
class Allocation:
    """The allocation in which an address lies."""

    address: int
    length_bytes: int


def allocation_of(device: int, address: int) -> Allocation:
    """Return the allocation that holds an address of this process. Raises RegistrationError when it is no device memory."""
    runtime.use(device)
    code, *found = runtime.library("cuda.bindings.driver").cuMemGetAddressRange(address)
    if int(code):
        raise RegistrationError(
            f"{address:#x} is not in any device memory of this process on cuda:{device} ({code.name}); "
            "the tensor was freed, or lies on another device"
        )
    base, length_bytes = found
    return Allocation(int(base), int(length_bytes))


def export_allocation(device: int, allocation: Allocation) -> bytes:
    """Return the IPC handle (64 bytes) of an allocation. Raises RegistrationError for memory that cannot be shared."""
    try:
        return runtime.export_memory(device, allocation.address)
    except TransportError as error:
        raise RegistrationError(
            f"device memory of cuda:{device} at {allocation.address:#x} cannot be shared with other processes: {error}; it must "
            "come from cudaMalloc (torch: no expandable_segments in PYTORCH_CUDA_ALLOC_CONF), not from a virtual, managed or "
            "asynchronous allocation"
        ) from error


_uuids: dict[int, str] = {}
"""What the driver has said. A device keeps its UUID while the process lives."""


def device_uuid(device: int) -> str:
    """Return the UUID of a device: 32 hexadecimal digits, equal in every process of the host.

    The driver says it without a context, so the question takes no memory of the device. Raises UnsupportedError for a device that
    does not exist.
    """
    if device not in _uuids:
        _ask_driver("cuInit", 0, device=device)
        handle = _ask_driver("cuDeviceGet", device, device=device)
        _uuids[device] = bytes(_ask_driver("cuDeviceGetUuid", handle, device=device).bytes).hex()
    return _uuids[device]


def _ask_driver(name: str, argument: Any, *, device: int) -> Any:  # noqa: ANN401 - the bindings ship no types
    code, *found = getattr(runtime.library("cuda.bindings.driver"), name)(argument)
    if int(code):
        raise UnsupportedError(f"cuda:{device} cannot be identified: the CUDA driver answers {code.name} to {name}")
    return found[0] if found else None


def device_by_uuid(uuid: str) -> int:
    """Return the CUDA ordinal of a device in this process. Raises UnsupportedError when the process does not see it."""
    seen = {device_uuid(device): device for device in range(runtime.device_count())}
    try:
        return seen[uuid]
    except KeyError:
        raise UnsupportedError(
            f"this process does not see the GPU {uuid}; it sees {', '.join(seen) or 'none'} (CUDA_VISIBLE_DEVICES): "
            "start it with the device that its peer process uses"
        ) from None
