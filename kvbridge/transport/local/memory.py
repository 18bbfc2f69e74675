"""Memory within reach of this process: its place here, on the host or on a device, and whether devices may use it.

Registering host memory with CUDA takes 0.05 to 0.4 s for each GiB, minutes for a large pool, and a rank worker must not stop for
so long. So connecting waits for a short time only, and transfers that need the memory wait for the rest. Other CUDA calls of the
process may be held up while the driver pins a chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.operations import AddressArray
from kvbridge.pool.memory.extent import Progress
from kvbridge.transport.local.host import SharedExtent

log = structlog.get_logger(__name__)

Undo = Callable[[], None]
Register = Callable[[Progress], Undo]
"""Registers, reports its progress, and returns how to undo it."""


def apart(function: Callable[[], None], *, name: str) -> None:
    """Do what may wait for a device on a thread of its own, or here where the process may have no more threads."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError:
        function()


class _CancelledError(Exception):
    """Raised through a registration by its progress report."""


class DeviceAccess:
    """A host range that devices may use once `ready`; `error` says why it never will be. Begins at once."""

    def __init__(self, address: int, length_bytes: int, register: Register | None, *, label: str) -> None:
        """`register`: None for memory that its owner has registered, and keeps registered for longer than this."""
        self.address = address
        """Where the registration, and with it its first chunk, begins."""
        self.length_bytes = length_bytes
        self.error = ""
        self._is_ours = register is not None
        self._label = label
        self._done_bytes = 0
        self._ended = threading.Event()
        self._undo: Undo | None = None
        self._cancelled = False
        if register is None:
            self._done_bytes = length_bytes
            self._ended.set()
            return
        try:
            threading.Thread(target=self._run, args=(register,), name="kvbridge-register", daemon=True).start()
        except RuntimeError as error:
            self.error = (
                f"{label}: {error}; raise the limit of processes of this rank worker (ulimit -u, TasksMax, pids.max)"
            )
            self._ended.set()

    def __repr__(self) -> str:
        state = "failed" if self.error else "ready" if self.ready else "being registered"
        return f"<DeviceAccess to {self._label}: {self._done_bytes} of {self.length_bytes} bytes, {state}>"

    @property
    def ready(self) -> bool:
        """Whether devices may use the memory."""
        return self._ended.is_set() and not self.error

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is ready or has failed, but not longer; whether it is or has."""
        return self._ended.wait(timeout_s)

    def close(self, then: Undo = lambda: None) -> None:
        """End the registration, then do something more; in another thread. No device uses the memory any more.

        A registration that is still being made ends with its present chunk. The owner's is left alone, and waits for nobody.
        """
        if not self._is_ours:
            then()
            return
        self._cancelled = True
        apart(partial(self._end, then), name="kvbridge-unregister")

    def _run(self, register: Register) -> None:
        log.info("registering_memory", memory=self._label, bytes=self.length_bytes)
        try:
            self._undo = register(self._report)
        except _CancelledError:
            self.error = f"{self._label}: nobody needs it any more"
        except Exception as error:
            self.error = str(error) or repr(error)
            known = isinstance(error, BridgeError)
            log.error("memory_not_registered", memory=self._label, reason=self.error, exc_info=None if known else error)
        self._ended.set()

    def _report(self, done_bytes: int, _: int) -> None:
        self._done_bytes = done_bytes
        if self._cancelled:
            raise _CancelledError

    def _end(self, then: Undo) -> None:
        self._ended.wait()
        undo, self._undo = self._undo, None
        try:
            if undo is not None:
                undo()
        except BridgeError as error:
            log.error("memory_not_unregistered", memory=self._label, reason=str(error))
        then()


HOST = -1
"""In arrays of devices: no device, but the host."""

IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ReachableExtent:
    """`length_bytes` that its owner knows by `address`, and this process by `here`."""

    address: int
    length_bytes: int
    here: int
    device: int = HOST
    """The device of this process by which it is reached, for device memory."""
    access: Callable[[int], DeviceAccess] | None = None
    """Makes host memory usable by a device; None for device memory."""

    def all_here(self, addresses: AddressArray) -> AddressArray:
        """Addresses in this process of bytes that all lie in it."""
        return addresses + np.uint64((self.here - self.address) % (1 << 64))  # wraps back where it lies below


def reach(who: str, extents: Iterable[SharedExtent], opened: Sequence[ReachableExtent]) -> tuple[ReachableExtent, ...]:
    """Find what a peer shares in its opened files or allocations. Raises TransportError for bytes that are not there."""
    found = []
    for extent in extents:
        origin = opened[extent.origin] if extent.origin < len(opened) else None
        if origin is None or extent.offset_bytes + extent.length_bytes > origin.length_bytes:
            raise TransportError(f"{who} names {extent.length_bytes} bytes that its file or allocation does not have")
        here = origin.here + extent.offset_bytes
        found.append(replace(origin, address=extent.address, length_bytes=extent.length_bytes, here=here))
    return tuple(found)


class ReachableExtents:
    """Extents that do not overlap, looked up by their owner's addresses, each of which lies in one."""

    def __init__(self, extents: Iterable[ReachableExtent]) -> None:
        self._all = sorted(extents, key=lambda extent: extent.address)
        self._starts = np.array([extent.address for extent in self._all], dtype=np.uint64)
        here = np.array([extent.here for extent in self._all], dtype=np.uint64)
        self._shift = here - self._starts  # wraps where memory lies below its owner's address; the sum wraps back
        self._devices = np.array([extent.device for extent in self._all], dtype=np.int32)

    def __getitem__(self, index: int) -> ReachableExtent:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def devices(self) -> set[int]:
        """Devices with memory among the extents."""
        return {extent.device for extent in self._all} - {HOST}

    def only(self, addresses: AddressArray) -> ReachableExtent | None:
        """The extent that all of these lie in, if it is one."""
        if not len(addresses):
            return None
        first, last = self.find(np.array([addresses.min(), addresses.max()])).tolist()
        return self._all[first] if first == last else None

    def find(self, addresses: AddressArray) -> IndexArray:
        """The extent of each address."""
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def here(self, addresses: AddressArray, found: IndexArray) -> AddressArray:
        """Addresses in this process; `found` as `find` gave it for them."""
        if not len(addresses):
            return addresses
        return addresses + self._shift[found]

    def device(self, found: IndexArray) -> npt.NDArray[np.int32]:
        """The device of each, or HOST."""
        return self._devices[found] if len(found) else np.empty(0, dtype=np.int32)
