"""The memory of this process that the local transport has registered, and what peers are told of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvbridge.core.errors import RegistrationError
from kvbridge.core.ids import FrozenModel, MemoryKind
from kvbridge.core.wire.shared_memory import CudaOrigin, FileOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Extent, Progress
from kvbridge.pool.memory.holding import HeldThings
from kvbridge.pool.memory.host_registration import registered_ranges
from kvbridge.transport.local.host import (
    PROCESS_LOCK_FILES,
    FileIdentity,
    HostClaim,
    LockFile,
    SharedExtent,
    SharedFile,
    shared_file,
)
from kvbridge.transport.local.memory import HOST, DeviceAccess, ReachableExtent, ReachableExtents, Undo

_registered: HeldThings[tuple[int, int], None] = HeldThings()
"""Private memory, by (address, bytes), that transports of this process have registered with CUDA."""


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


class _Part:
    """One registration. Host memory becomes usable by a device when that is first asked for."""

    def __init__(self, memory: Extent) -> None:
        self.memory = memory
        self.file = shared_file(memory)
        self._access: DeviceAccess | None = None

    def reachable(self) -> ReachableExtent:
        """Where it is."""
        memory = self.memory
        if memory.kind is MemoryKind.VRAM:
            return ReachableExtent(memory.address, memory.length_bytes, memory.address, device=memory.device)
        return ReachableExtent(memory.address, memory.length_bytes, memory.address, access=self.access)

    def access(self, device: int) -> DeviceAccess:
        """Make it usable by a device: nothing is to be done for a pool that its owner has registered with CUDA."""
        if self._access is None or self._access.error:
            start, length_bytes = self.memory.address, self.memory.length_bytes
            for base, span in registered_ranges():
                if base <= start and start + length_bytes <= base + span:
                    self._access = DeviceAccess(base, span, None, label=self._label)
                    return self._access
            self._access = DeviceAccess(
                start, length_bytes, lambda report: self._register(device, report), label=self._label
            )
        return self._access

    def close(self) -> None:
        """Undo what `access` has done. No device uses it any more."""
        if self._access is not None:
            self._access.close()
            self._access = None

    @property
    def _label(self) -> str:
        return self.memory.label or f"memory at {self.memory.address:#x}"

    def _register(self, device: int, on_progress: Progress) -> Undo:
        address, length_bytes = self.memory.address, self.memory.length_bytes
        span = address, length_bytes

        def register() -> None:
            runtime.register_host(address, length_bytes, device=device, on_progress=on_progress, label=self._label)

        _registered.hold(span, register)
        return lambda: _registered.let_go(span, lambda _: runtime.unregister_host(address, length_bytes))


class OwnMemory:
    """All registrations of one transport, on the host and on at most one device."""

    def __init__(self) -> None:
        self.reachable = ReachableExtents(())
        self._parts: dict[int, _Part] = {}

    @property
    def device(self) -> int | None:
        """The device with registered memory, if there is one."""
        return next(iter(self.reachable.devices), None)

    def add(self, memory: Sequence[Extent]) -> None:
        """Take in all or none; nothing overlaps. Raises RegistrationError."""
        found = {part.address: _Part(part) for part in memory}
        devices = {part.device for part in memory if part.kind is MemoryKind.VRAM} | self.reachable.devices
        if len(devices) > 1:
            raise RegistrationError(
                f"device memory of {', '.join(f'cuda:{device}' for device in sorted(devices))} cannot be registered with one "
                "local transport: it copies by one device; make a transport for each"
            )
        self._parts |= found
        self.reachable = ReachableExtents(part.reachable() for part in self._parts.values())

    def close(self) -> None:
        """Undo every registration with CUDA, and let go of every file. No device uses the memory any more."""
        for part in self._parts.values():
            part.close()
        self._parts.clear()
        self.reachable = ReachableExtents(())

    def proof_directory(self, otherwise: str) -> Path | None:
        """Where the proof is to lie: beside the first shared file, or `otherwise`; None with nothing to share."""
        for part in self._parts.values():
            if part.file is not None:
                return Path(part.file.identity.path).parent
        return Path(otherwise) if any(part.memory.origin is not None for part in self._parts.values()) else None

    def describe(self, claim: HostClaim | None, epoch: int) -> LocalEndpoint:
        """Say what is registered. Makes the lock file of device memory, beside the proof."""
        files: dict[FileIdentity, int] = {}
        allocations: dict[CudaOrigin, int] = {}
        on_host: list[SharedExtent] = []
        on_device: list[SharedExtent] = []
        private: list[str] = []
        for part in self._parts.values():
            match part.memory.origin:
                case FileOrigin() if part.file is not None:
                    on_host.append(_shared(part.memory, files.setdefault(part.file.identity, len(files))))
                case CudaOrigin() as origin:
                    on_device.append(_shared(part.memory, allocations.setdefault(origin, len(allocations))))
                case _:
                    private.append((part.memory.label or "unnamed")[:200])
        lock_file = self._lock_file(on_device, claim)
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
        files = {part.file for part in self._parts.values() if part.file is not None}
        devices = (
            (part.memory.device, address) for address, part in self._parts.items() if part.reachable().device != HOST
        )
        return [*files, *(lock_file for place in devices for lock_file in PROCESS_LOCK_FILES.known(*place))]

    def _lock_file(self, on_device: Sequence[SharedExtent], claim: HostClaim | None) -> FileIdentity | None:
        if not on_device or claim is None:
            return None
        first = self._parts[on_device[0].address].memory
        return PROCESS_LOCK_FILES.to_name(first.device, first.address, Path(claim.file.path).parent).file


def _shared(memory: Extent, origin: int) -> SharedExtent:
    return SharedExtent(
        address=memory.address, length_bytes=memory.length_bytes, origin=origin, offset_bytes=memory.offset_bytes
    )
