"""The transport within one host: copies from this process's memory into memory that peers share.

Writing needs nothing of the peer: its memory stays mapped here when the peer is frozen or dies. A copy has arrived or not and is
never on its way, so every failure is quiet, except on a device that does not finish its copies.

A peer is refused as a whole when some of its memory is private or out of reach (another IPC namespace, no path between the
devices), because a pair of ranks that could exchange half its pages is of no use. A peer that shrinks a mapped file ends this
process with the next copy into it (SIGBUS). For device copies, so does a peer that frees device memory before its writers are gone
(`local.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import ClassVar

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import BridgeError, RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import CudaOrigin, FileOrigin
from kvbridge.kernels.copies import copy_operations
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.runtime import has_accelerator
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Backend, Endpoint, Peer, Transfer, read_endpoint
from kvbridge.transport.local.gpu import HOST, CopyStream, DeviceAccess, DeviceCopier, Route, Way, device_access
from kvbridge.transport.local.host import (
    PROCESS_LOCK_FILES,
    FileIdentity,
    HostFile,
    Proof,
    SharedExtent,
    shared_file,
    writers_before,
)
from kvbridge.transport.local.memory import LocalEndpoint, PeerMemory, populate
from kvbridge.transport.threads import Call, Pump
from kvbridge.transport.windowed import DONE, Check, Submitter, Window, WindowedTransfer, WindowLimits

NAME = "local"
SLICE_OPERATIONS = 4096
"""Most in a slice that the processor copies, so that a slice of very short operations takes about a millisecond, too."""


class LocalTransport(Backend[PeerMemory]):
    """One thread, which starts with the first copy, copies host memory; this process's device copies device memory."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: LocalSettings, *, epoch: int = 0, clock: Clock = monotonic) -> None:
        """`epoch` is that of the endpoints that this transport gives out."""
        # A slice is copied as a whole, so longer operations would hold up other transfers.
        super().__init__(clock, max_operation_bytes=settings.slice_bytes)
        self._settings = settings
        self._epoch = epoch
        self._parts: dict[Extent, HostFile | None] = {}
        """All registered memory, with the file behind it."""
        self._accesses: dict[DeviceAccess, tuple[Extent, ...]] = {}
        self._proof: Proof | None = None
        self._pump = Pump(NAME)
        self._devices = DeviceCopier(
            lambda route: CopyStream(route, kernel_blocks=settings.copy_kernel_blocks),
            slice_bytes=settings.device_slice_bytes,
            quiet_timeout_s=settings.quiet_timeout_s,
            clock=clock,
        )
        self._alone_since_s: dict[int, float] = {}
        """By epoch: since when no writer of an earlier one was seen."""

    def _require_open(self) -> None:
        self._pump.require_open()

    def _out_of_reach(self, part: Extent) -> str:
        reason = runtime.reason_without_device() if part.kind is MemoryKind.VRAM else ""
        return reason and f"it is device memory, and this process cannot use a GPU: {reason}"

    def _place(self, part: Extent) -> int:
        return part.device if part.kind is MemoryKind.VRAM else HOST

    def _register(self, memory: Sequence[Extent]) -> None:
        """Memory without a shared file or allocation can only be a source."""
        found = {part: shared_file(part) for part in memory}
        devices = (self._memory.places | {self._place(part) for part in memory}) - {HOST}
        if len(devices) > 1:
            raise RegistrationError(
                f"device memory of {', '.join(f'cuda:{device}' for device in sorted(devices))} cannot be registered with one "
                "local transport: it copies by one device; make a transport for each"
            )
        self._parts |= found

    @property
    def _device(self) -> int | None:
        """The device with registered memory, if there is one."""
        return next(iter(self._memory.places - {HOST}), None)

    def endpoint(self) -> Endpoint:
        """The first call after shared memory was registered writes the proof, and the lock file of device memory beside it."""
        self._require_open()
        if self._proof is None and (directory := self._proof_directory()) is not None:
            self._proof = Proof(directory)
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
                    if lock_file is None and self._proof is not None:
                        beside = Path(self._proof.claim.file.path).parent
                        lock_file = PROCESS_LOCK_FILES.to_name(part.device, part.address, beside).identity
                case _:
                    private.append((part.label or "unnamed")[:200])
        content = LocalEndpoint(
            claim=self._proof.claim if self._proof else None,
            files=tuple(files),
            extents=tuple(on_host),
            allocations=tuple(allocations),
            device_extents=tuple(on_device),
            lock_file=lock_file,
            epoch=self._epoch,
            private=tuple(private),
        )
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def _proof_directory(self) -> Path | None:
        """Return the directory of the first shared file, or the configured one; None with nothing to share."""
        for file in self._parts.values():
            if file is not None:
                return Path(file.identity.path).parent
        return Path(self._settings.proof_directory) if any(part.origin for part in self._parts) else None

    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        """Open the peer's files on a thread, since the peer names them, and a file system may not answer."""
        self._require_open()
        content, timeout_s = read_endpoint(endpoint, NAME, LocalEndpoint), self._settings.connect_timeout_s
        return Call(
            partial(self._opened, content),
            name="open the memory of a local peer",
            timeout_s=timeout_s + (0.0 if self._device is None else self._settings.registration_wait_s),
            late=f"the files of a local peer could not be opened in {timeout_s:g} s (transports.local.connect_timeout_s); "
            "look for a file system of this host that does not answer",
            clock=self._clock,
            then=self._take,
        )

    def _opened(self, content: LocalEndpoint) -> PeerMemory:
        """Open a peer's memory. It is registered now because registering would hold up the first transfer."""
        own = self._device
        memory = PeerMemory(content, device=own)
        if own is not None:
            memory.register(own, timeout_s=self._settings.registration_wait_s)
        return memory

    def _take(self, known: PeerMemory) -> Peer:
        peer = super()._take(known)
        own = self._device
        devices = known.extents.places - {HOST} if own is None else {own}
        links = (True,) if own is None else (True, False)
        try:
            for device, way, link in product(devices, Way, links):  # before the first transfer
                self._devices.stream(Route(way, device, over_host_link=link))
        except BridgeError as error:
            self.disconnect(peer)
            raise TransportError(f"this process's device cannot copy: {error}") from error
        for file in known.fresh:
            if file.resident and own is None:
                populate(file)
        return peer

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """Have the processor copy when both ends are host memory, else the device; one way for all operations of a submission."""
        memory = self._checked(peer, operations)
        here = Operations(operations.source, memory.extents.here(operations.destination), operations.length)
        sources = self._memory.places_of(operations.source)
        places = sources | memory.extents.places_of(operations.destination)
        transfer: Transfer
        if places <= {HOST}:
            slice_bytes = self._settings.slice_bytes
            transfer = copy_transfer(
                here, memory.label, deadline_s, slice_bytes=slice_bytes, keep_alive=memory, clock=self._clock
            )
            self._pump.add(transfer)
        else:
            device = max(places) if self._device is None else self._device
            mean_bytes = operations.total_bytes / max(1, len(operations))
            way = Way.KERNEL if mean_bytes < self._settings.copy_kernel_below_bytes else Way.ENGINES
            accesses = self._host_accesses(device) if HOST in sources else []
            if HOST in memory.extents.places:
                accesses += memory.accesses(device)
            transfer = self._devices.begin(
                Route(way, device, over_host_link=HOST in places),
                here,
                peer=memory.label,
                deadline_s=deadline_s,
                accesses=accesses,
                keep_alive=memory,
            )
        self._transfers[transfer] = peer
        transfer.poll()  # starts the first slices
        return transfer

    def _host_accesses(self, device: int) -> list[DeviceAccess]:
        """Make our host memory usable by a device."""
        self._accesses = {access: parts for access, parts in self._accesses.items() if not access.error}
        there = {part for parts in self._accesses.values() for part in parts}
        fresh = tuple(part for part in self._parts if part.kind is MemoryKind.DRAM and part not in there)
        if fresh:
            label = fresh[0].label or f"memory at {fresh[0].address:#x}"
            label += f" and {len(fresh) - 1} more" if len(fresh) > 1 else ""
            self._accesses[device_access(fresh, device, fresh, label=label)] = fresh
        return list(self._accesses)

    def close(self) -> None:
        """Wait for the slices that are being copied. Harmless when closed already."""
        timeout_s = self._settings.close_timeout_s
        try:
            for transfer in self._pump.close(timeout_s=timeout_s):
                transfer.cut_off("the transport was closed")
        finally:
            try:
                self._devices.close(timeout_s=timeout_s)
                for access in self._accesses:  # not while a device may still read the memory
                    access.close()
                self._accesses.clear()
                self._parts.clear()
            finally:
                self._peers.clear()
                if self._proof is not None:
                    self._proof.close()
                    self._proof = None

    def revoked(self, before_epoch: int) -> bool:
        """Each writer has a mapping of its own, so each must have let go of its mapping, or ended."""
        devices = {(part.device, part.address) for part in self._parts if part.kind is MemoryKind.VRAM}
        files = {file for file in self._parts.values() if file is not None}
        files.update(*(PROCESS_LOCK_FILES.known(*place) for place in devices))
        if writers_before(files, before_epoch):
            self._alone_since_s.pop(before_epoch, None)
            return False
        if not has_accelerator():
            return True
        alone_since_s = self._alone_since_s.setdefault(before_epoch, self._clock())
        return self._clock() - alone_since_s >= self._settings.settle_s


class _Copies(Submitter[None]):
    """The processor copies one slice a call, which is done when the call returns."""

    def __init__(self, operations: Operations, keep_alive: object) -> None:
        self._operations = operations
        self._keep_alive = keep_alive

    def start(self, first: int, stop: int) -> None:
        part = self._operations[first:stop]
        copy_operations(part.source, part.destination, part.length)

    def check(self, _: None) -> Check:
        return DONE


def copy_transfer(
    operations: Operations,
    peer: str,
    deadline_s: float,
    *,
    slice_bytes: int,
    keep_alive: object = None,
    clock: Clock = monotonic,
) -> WindowedTransfer[None]:
    """Return a transfer between addresses of this process; until its end it holds `keep_alive`, which keeps them mapped."""
    # A window of its own, since a small transfer never waits for a large one; nothing is ever in flight.
    window = Window(WindowLimits(SLICE_OPERATIONS, slice_bytes, 1.0, SLICE_OPERATIONS, slice_bytes))
    copies = _Copies(operations, keep_alive)
    return WindowedTransfer(operations, copies, window, peer=peer, deadline_s=deadline_s, clock=clock)


def _shared(memory: Extent, origin: int) -> SharedExtent:
    return SharedExtent(
        address=memory.address, length_bytes=memory.length_bytes, origin=origin, offset_bytes=memory.offset_bytes
    )
