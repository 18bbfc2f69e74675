"""Device memory that processes of one host share by CUDA IPC: each allocation is opened once a process.

CUDA cannot open an allocation in the process that made it. So what is exported here is remembered, and opening it gives
its own address: an engine that brings its memory, its rank worker and a peer in the same process all find it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge.core.closing import Closing
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.allocations import Allocation, allocation_of, device_by_uuid, device_uuid, export_allocation
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.holding import HeldThings


@dataclass(frozen=True, eq=False)
class ProcessAllocations:
    """The allocations that one process shares. There is one of it in each process, since CUDA counts by process."""

    exported: dict[bytes, int] = field(default_factory=dict)
    """Handle to address, of the process's own."""
    exported_lock: threading.Lock = field(default_factory=threading.Lock)
    opened: HeldThings[tuple[bytes, int], int] = field(default_factory=HeldThings)
    """Handle and the device that it was opened from, to the address here."""


_here = ProcessAllocations()


@dataclass(frozen=True, slots=True)
class ExportedAllocation:
    """An allocation of this process as others open it."""

    allocation: Allocation
    device: int
    device_uuid: str
    handle: bytes
    """64 bytes."""

    @property
    def extent(self) -> Extent:
        """All of it."""
        origin = CudaOrigin(handle=self.handle, device_uuid=self.device_uuid, length_bytes=self.allocation.length_bytes)
        return device_extent(self.allocation.address, self.device, origin)

    def forget(self) -> None:
        """The allocation is about to be freed: CUDA may give its handle to another one. Harmless when forgotten."""
        with _here.exported_lock:
            _here.exported.pop(self.handle, None)


def export(device: int, address: int) -> ExportedAllocation:
    """Say how other processes open the allocation in which `address` lies. Raises RegistrationError.

    Whoever frees the allocation calls `forget` first.
    """
    allocation = allocation_of(device, address)
    handle = export_allocation(device, allocation)
    with _here.exported_lock:
        _here.exported[handle] = allocation.address
    return ExportedAllocation(allocation, device, device_uuid(device), handle)


def device_extent(address: int, device: int, origin: CudaOrigin) -> Extent:
    """All of an allocation, which begins at `address` and is used from `device`."""
    return Extent(
        address=address,
        length_bytes=origin.length_bytes,
        kind=MemoryKind.VRAM,
        device=device,
        origin=origin,
        label=f"cuda:{device}",
    )


class OpenedAllocation(Closing):
    """An exported allocation, usable in this process until `close`. `address` is where it begins here.

    Any thread may open and close it; every holder has one of its own.
    """

    def __init__(self, handle: bytes, *, device_uuid: str, device: int | None = None) -> None:
        """Open it for use from `device`; none: from the device that holds it, by its UUID.

        From another device than that, peer access to it is switched on. Raises RegistrationError when its process is gone
        or cannot be reached, UnsupportedError when this process does not see the device.
        """
        self._close: Callable[[], None] | None = None
        with _here.exported_lock:
            own = _here.exported.get(handle)
        if own is not None:
            self.device = device_by_uuid(device_uuid) if device is None else device
            self.address = own
            return
        self.device = chosen = device_by_uuid(device_uuid) if device is None else device
        key, opened = (handle, chosen), _here.opened
        self.address = opened.hold(key, lambda: runtime.open_memory(chosen, handle))
        self._close = lambda: opened.let_go(key, lambda address: runtime.close_memory(chosen, address))

    def close(self) -> None:
        """Give it up; nothing on any device uses it through this holder any more. Harmless when closed."""
        close, self._close = self._close, None
        if close is not None:
            close()
