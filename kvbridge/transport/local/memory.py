"""The memory of this process that a local transport has registered, and host memory made usable by devices.

Registering host memory with CUDA takes 0.05 to 0.4 s for each GiB, minutes for a large pool, and a rank worker must not stop for
so long. So connecting waits for a short time only, and transfers that need the memory wait for the rest. Other CUDA calls of the
process may be held up while the driver pins a piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import structlog
from pydantic import Field

from kvbridge.core.errors import BridgeError, RegistrationError
from kvbridge.core.ids import FrozenModel, MemoryKind
from kvbridge.core.plan.operations import AddressArray
from kvbridge.core.process import Closing
from kvbridge.core.wire.shared_memory import CudaOrigin, FileOrigin
from kvbridge.pool.memory.extent import Extent, Progress
from kvbridge.pool.memory.gpu_memory import HostRegistration, registered_range
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.extents import Extents
from kvbridge.transport.local.host import (
    PROCESS_LOCK_FILES,
    FileIdentity,
    HostClaim,
    LockFile,
    SharedExtent,
    SharedFile,
    shared_file,
)

log = structlog.get_logger(__name__)

HOST = -1
"""In place of a device: no device, but the host."""


class LocalEndpoint(FrozenModel):
    """What a peer needs to know, as JSON in `Endpoint.data`."""

    claim: HostClaim | None
    """None as long as no shared memory is registered."""
    files: tuple[FileIdentity, ...]
    extents: tuple[SharedExtent, ...]
    allocations: tuple[CudaOrigin, ...] = ()
    device_extents: tuple[SharedExtent, ...] = ()
    lock_file: FileIdentity | None = None
    """Stands for the device memory where writers take their locks."""
    epoch: Annotated[int, Field(ge=0, lt=1 << 60)]
    private: tuple[Annotated[str, Field(max_length=200)], ...]
    """Labels of registered memory that is not shared."""


def apart(function: Callable[[], object], *, name: str) -> None:
    """Do what may take long on a thread of its own, or here where the process may have no more threads."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError:
        function()


# ------------------------------------------------------------------------------------------- host memory and devices


class _CancelledError(Exception):
    """Raised through a registration by its progress report."""


class DeviceAccess:
    """Host memory that devices may use once `ready`; `error` says why they never will. Registering begins at once."""

    def __init__(
        self, length_bytes: int, register: Callable[[Progress], Closing], *, label: str, at_once: bool = False
    ) -> None:
        """`at_once`: registering takes no time, since the memory is registered already."""
        self.length_bytes = length_bytes
        self.error = ""
        self._label = label
        self._at_once = at_once
        self._done_bytes = 0
        self._ended = threading.Event()
        self._registration: Closing | None = None
        self._cancelled = False
        if at_once:
            self._run(register)
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

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """End the registration, then do something more; in another thread. No device uses the memory any more.

        A registration that is still being made ends with its present piece. One that others hold, too, waits for nobody.
        """
        self._cancelled = True
        end = partial(self._end, then)
        if self._at_once:
            end()
        else:
            apart(end, name="kvbridge-unregister")

    def _run(self, register: Callable[[Progress], Closing]) -> None:
        if not self._at_once:
            log.info("registering_memory", memory=self._label, bytes=self.length_bytes)
        try:
            self._registration = register(self._report)
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

    def _end(self, then: Callable[[], None]) -> None:
        self._ended.wait()
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        except BridgeError as error:
            log.error("memory_not_unregistered", memory=self._label, reason=str(error))
        then()


def device_access(
    memory: Sequence[SharedMapping | Extent], device: int, extents: Sequence[Extent], *, label: str
) -> DeviceAccess:
    """Have memory registered with CUDA in the background; that takes no time where all of it is registered already.

    No operation crosses the borders of `extents`.
    """
    known = all(registered_range((each.address, each.length_bytes)) is not None for each in memory)
    total_bytes = sum(each.length_bytes for each in memory)
    return DeviceAccess(
        total_bytes,
        lambda report: HostRegistration(memory, extents=extents, device=device, on_progress=report),
        label=label,
        at_once=known,
    )


class Stretch(NamedTuple):
    """`length_bytes` that their owner knows by `address`, and this process by `here`."""

    address: int
    length_bytes: int
    here: int
    device: int = HOST
    """The device of this process by which it is reached, for device memory."""


class Reachable:
    """Memory of one owner, looked up by the owner's addresses."""

    def __init__(self, whose: str, stretches: Iterable[Stretch]) -> None:
        """Raises InvalidInputError when two overlap."""
        ordered = sorted(stretches)
        self.extents = Extents(whose, [(each.address, each.length_bytes) for each in ordered])
        here = np.array([each.here for each in ordered], dtype=np.uint64)
        starts = np.array([each.address for each in ordered], dtype=np.uint64)
        self._shifts = here - starts  # wraps where memory lies below its owner's address; the sum wraps back
        self._devices = np.array([each.device for each in ordered], dtype=np.int32)
        self.places = frozenset(self._devices.tolist())
        """Every device with some of the memory, and HOST for the host."""

    def here(self, addresses: AddressArray) -> AddressArray:
        """Return addresses in this process of bytes that lie in it."""
        if not len(addresses):
            return addresses
        alike = (self._shifts == self._shifts[0]).all()
        here: AddressArray = addresses + (self._shifts[0] if alike else self._shifts[self.extents.find(addresses)])
        return here

    def places_of(self, addresses: AddressArray) -> frozenset[int]:
        """Return on which devices these lie, and HOST for the host."""
        if len(self.places) < 2 or not len(addresses):
            return self.places
        return frozenset(np.unique(self._devices[self.extents.find(addresses)]).tolist())


# ------------------------------------------------------------------------------------------- what this process has


class OwnMemory:
    """All registrations of one transport, on the host and on at most one device."""

    def __init__(self) -> None:
        self._parts: dict[Extent, SharedFile | None] = {}
        self._accesses: dict[DeviceAccess, tuple[Extent, ...]] = {}
        self._place()

    def _place(self) -> None:
        self.reachable = Reachable(
            "this process",
            (
                Stretch(part.address, part.length_bytes, part.address, _place_of(part, part.device))
                for part in self._parts
            ),
        )

    @property
    def device(self) -> int | None:
        """The device with registered memory, if there is one."""
        return next(iter(self.reachable.places - {HOST}), None)

    def add(self, memory: Sequence[Extent]) -> None:
        """Take in all or none; nothing overlaps. Raises RegistrationError."""
        found = {part: shared_file(part) for part in memory}
        devices = {_place_of(part, part.device) for part in (*self._parts, *memory)} - {HOST}
        if len(devices) > 1:
            raise RegistrationError(
                f"device memory of {', '.join(f'cuda:{device}' for device in sorted(devices))} cannot be registered with one "
                "local transport: it copies by one device; make a transport for each"
            )
        self._parts |= found
        self._place()

    def accesses(self, device: int) -> list[DeviceAccess]:
        """Make all host memory usable by a device; nothing is to be done for what its owner has registered with CUDA."""
        self._accesses = {access: parts for access, parts in self._accesses.items() if not access.error}
        there = {part for parts in self._accesses.values() for part in parts}
        fresh = tuple(part for part in self._parts if part.kind is MemoryKind.DRAM and part not in there)
        if fresh:
            label = fresh[0].label or f"memory at {fresh[0].address:#x}"
            label += f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
            self._accesses[device_access(fresh, device, fresh, label=label)] = fresh
        return list(self._accesses)

    def close(self) -> None:
        """Undo every registration with CUDA, and let go of every file. No device uses the memory any more."""
        for access in self._accesses:
            access.close()
        self._accesses.clear()
        self._parts.clear()
        self._place()

    def proof_directory(self, otherwise: str) -> Path | None:
        """Where the proof is to lie: beside the first shared file, or `otherwise`; None with nothing to share."""
        for file in self._parts.values():
            if file is not None:
                return Path(file.identity.path).parent
        return Path(otherwise) if any(part.origin is not None for part in self._parts) else None

    def describe(self, claim: HostClaim | None, epoch: int) -> LocalEndpoint:
        """Say what is registered. Makes the lock file of device memory, beside the proof."""
        files: dict[FileIdentity, int] = {}
        allocations: dict[CudaOrigin, int] = {}
        on_host: list[SharedExtent] = []
        on_device: list[SharedExtent] = []
        private: list[str] = []
        lock_file = None
        for part, file in self._parts.items():
            match part.origin:
                case FileOrigin() if file is not None:
                    on_host.append(_shared(part, files.setdefault(file.identity, len(files))))
                case CudaOrigin() as origin:
                    on_device.append(_shared(part, allocations.setdefault(origin, len(allocations))))
                    if lock_file is None and claim is not None:
                        directory = Path(claim.file.path).parent
                        lock_file = PROCESS_LOCK_FILES.to_name(part.device, part.address, directory).file
                case _:
                    private.append((part.label or "unnamed")[:200])
        return LocalEndpoint(
            claim=claim,
            files=tuple(files),
            extents=tuple(on_host),
            allocations=tuple(allocations),
            device_extents=tuple(on_device),
            lock_file=lock_file,
            epoch=epoch,
            private=tuple(private),
        )

    def lock_files(self) -> list[SharedFile | LockFile]:
        """Files whose locks show who may write to what is registered."""
        files = {file for file in self._parts.values() if file is not None}
        devices = ((part.device, part.address) for part in self._parts if part.kind is MemoryKind.VRAM)
        return [*files, *(lock_file for place in devices for lock_file in PROCESS_LOCK_FILES.known(*place))]


def _place_of(part: Extent, device: int) -> int:
    return device if part.kind is MemoryKind.VRAM else HOST


def _shared(memory: Extent, origin: int) -> SharedExtent:
    return SharedExtent(
        address=memory.address, length_bytes=memory.length_bytes, origin=origin, offset_bytes=memory.offset_bytes
    )
