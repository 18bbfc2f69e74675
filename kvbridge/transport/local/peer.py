"""A peer of the local transport: its memory within reach, for as long as anything is written there.

The ranks of a decode node share one host pool, and a new epoch names the old files; a pool of hundreds of GiB is
mapped and pinned once all the same. A mapping lives as long as somebody holds its `MappedFile`.

While a peer has device memory open its owner must not free it: what happens then is not defined, though the driver keeps the
memory until the last process lets go of it. So an owner frees device memory only when `Transport.revoked` has said that
nobody can write to it, or leaves that to its own end.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.wire.shared_memory import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.allocations import allocation_of, device_by_uuid, device_uuid
from kvbridge.pool.memory.device_memory import OpenedAllocation
from kvbridge.pool.memory.extent import Progress
from kvbridge.pool.memory.host_registration import HostRegistration
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport import extents
from kvbridge.transport.base import Peer, Steps
from kvbridge.transport.local.host import FileIdentity, HostClaim, Presence, SharedExtent, opened, require_same_host
from kvbridge.transport.local.memory import DeviceAccess, ReachableExtent, ReachableExtents, Undo, apart, reach
from kvbridge.transport.local.own import LocalEndpoint

_Key = tuple[int, int, int]
"""Device, inode and length of a file. Its inode is not given to another one while it is mapped."""


class MappedFile:
    """One file, mapped; unmapped when nobody holds it any more. What only one thread does is in `_lock`'s keeping."""

    def __init__(self, mapping: SharedMapping, *, resident: bool) -> None:
        self.address = mapping.address
        self.length_bytes = mapping.length_bytes
        self.resident = resident
        """Whether the file is allocated in full, so that touching all of it allocates nothing."""
        self._mapping = mapping
        self._accesses: list[DeviceAccess] = []
        """At most one that has not failed."""
        self._lock = threading.Lock()
        weakref.finalize(self, _dispose, mapping, self._accesses).atexit = False

    def access(self, device: int) -> DeviceAccess:
        """Have the mapping registered with CUDA, in the background; a failed attempt is made again."""
        with self._lock:
            if not self._accesses or self._accesses[-1].error:
                label = f"shared memory {self._mapping.path}"
                register = partial(_register, self._mapping, device)
                self._accesses[:] = [DeviceAccess(self.address, self.length_bytes, register, label=label)]
            return self._accesses[-1]


def _register(mapping: SharedMapping, device: int, on_progress: Progress) -> Undo:
    return HostRegistration([mapping], device=device, on_progress=on_progress).close


def _dispose(mapping: SharedMapping, accesses: list[DeviceAccess]) -> None:
    """Unmap, after the registration has ended; that may take long, so it has a thread of its own."""
    if accesses:
        accesses[-1].close(then=mapping.close)
    else:
        mapping.close()


_files: weakref.WeakValueDictionary[_Key, MappedFile] = weakref.WeakValueDictionary()
_files_lock = threading.Lock()


class MappedFiles:
    """The files of one peer, and which of its addresses lie where. Held for as long as anything is written to them."""

    def __init__(
        self,
        told: HostClaim,
        files: Sequence[FileIdentity],
        extents: Sequence[SharedExtent],
        *,
        presence: Presence | None = None,
    ) -> None:
        """`presence` is kept for as long as the files are. Raises TransportError for a file that cannot be mapped."""
        who = f"process {told.pid}"
        self._presence = presence
        self.fresh: list[MappedFile] = []
        """Those that were not mapped here before."""
        self._files = [self._map(who, told, identity) for identity in files]
        here = [ReachableExtent(0, file.length_bytes, file.address, access=file.access) for file in self._files]
        self.reachable = reach(who, extents, here)

    def _map(self, who: str, told: HostClaim, identity: FileIdentity) -> MappedFile:
        if identity.owner != told.file.owner:
            raise TransportError(
                f"{who} names {identity.path}, which belongs to another user than the process; it was refused"
            )
        with opened(who, identity, os.O_RDWR) as descriptor, _files_lock:
            found = os.fstat(descriptor)
            key = found.st_dev, found.st_ino, found.st_size
            known = _files.get(key)
            if known is not None:
                return known
            try:
                mapping = SharedMapping(Path(identity.path), mmap.mmap(descriptor, 0), owner=False)
            except (OSError, ValueError) as error:
                raise TransportError(f"cannot map {identity.path} of {who}: {error}") from error
            made = MappedFile(mapping, resident=found.st_blocks * 512 >= found.st_size)
            _files[key] = made
            self.fresh.append(made)
            return made


log = structlog.get_logger(__name__)


class OpenedAllocations:
    """The device memory of one peer, usable by a device of this process until `close`."""

    def __init__(
        self,
        who: str,
        allocations: Sequence[CudaOrigin],
        extents: Sequence[SharedExtent],
        *,
        device: int | None,
        presence: Presence | None = None,
    ) -> None:
        """`device`: the one that will write there; None for the one that holds each allocation.

        `presence` is kept for as long as this is: without it the peer takes its memory for closed, and may free it.

        Raises TransportError, with the reason, when one cannot be reached from here or is shorter than it is said to be.
        """
        self._presence = presence
        self._stack = ExitStack()
        try:
            self.reachable = reach(who, extents, [self._open(origin, device) for origin in allocations])
        except BridgeError as error:
            self.close()
            raise TransportError(f"the device memory of {who} cannot be written from here: {error}") from error

    def _open(self, origin: CudaOrigin, device: int | None) -> ReachableExtent:
        """Open an allocation; what counts is what it has from its address on."""
        reason = runtime.reason_without_device()
        if reason:
            raise TransportError(f"this process has no device ({reason})")
        _require_reach(device, origin.device_uuid)
        opened = OpenedAllocation(origin.handle, device_uuid=origin.device_uuid, device=device)
        self._stack.callback(opened.close)
        found = allocation_of(opened.device, opened.address)
        return ReachableExtent(0, found.address + found.length_bytes - opened.address, opened.address, opened.device)

    def close(self) -> None:
        """Let go of the memory; no device writes there any more. Harmless when closed."""
        try:
            self._stack.close()
        except BridgeError as error:  # nobody is left who could do anything about it
            log.warning("device_memory_not_closed", reason=str(error))


def _require_reach(device: int | None, uuid: str) -> None:
    """Refuse early, and in words, what a device could only fault at.

    A device that this process does not see is left to CUDA, which can open memory of such, too.
    """
    if device is None or device_uuid(device) == uuid:
        return
    try:
        holder = device_by_uuid(uuid)
    except BridgeError:
        return
    runtime.reach(device, holder)


class PeerMemory:
    """Everything that a peer shares, reachable here until the last reference goes."""

    def __init__(self, content: LocalEndpoint, *, device: int | None) -> None:
        """`device` is ours that will write to the peer's device memory; None for the one that holds it.

        Raises TransportError, with the reason, when the peer is not to be believed or some of it is out of reach.
        """
        claim = content.claim
        if claim is None:
            raise TransportError(
                "the peer has registered no shared memory, so the local transport cannot reach any of it"
            )
        self.label = f"process {claim.pid}"
        lock_file = content.files[0] if content.files else content.lock_file
        presence = Presence(claim, lock_file, content.epoch) if lock_file is not None else None
        require_same_host(claim)
        if content.private:
            raise TransportError(
                f"{self.label} has registered memory that is not shared ({', '.join(sorted(set(content.private)))}), "
                "which the local transport cannot write; use another transport for this pair"
            )
        self.files = MappedFiles(claim, content.files, content.extents, presence=presence)
        opened = OpenedAllocations(
            self.label, content.allocations, content.device_extents, device=device, presence=presence
        )
        if content.allocations:
            weakref.finalize(self, apart, opened.close, name="kvbridge-close-memory").atexit = False
        self.reachable = ReachableExtents((*self.files.reachable, *opened.reachable))
        pairs = [(extent.address, extent.length_bytes) for extent in (*self.files.reachable, *opened.reachable)]
        self.extents = extents.Extents(self.label, pairs)

    def register(self, device: int, *, until_s: float, clock: Clock) -> Steps[None]:
        """Have the peer's host memory registered with CUDA, and wait until then for it.

        Raises TransportError when it has failed by then, so that another transport can be tried.
        """
        for access in dict.fromkeys(
            extent.access(device) for extent in self.files.reachable if extent.access is not None
        ):
            while not access.wait(0.0) and clock() < until_s:
                yield
            if access.error:
                raise TransportError(
                    f"the host memory of {self.label} cannot be written by cuda:{device}: {access.error}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class LocalPeer(Peer):
    """A process of this host whose memory is within reach here. Its transport holds that memory, so this handle keeps nothing."""

    transport_name: ClassVar[str] = "local"
    label: str
