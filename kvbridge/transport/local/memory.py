"""Memory that a peer on this host shares, in reach of this process as long as anything is written there.

The ranks of a decode node share one host pool, and a new epoch names the old files. A pool of hundreds of GiB is mapped and pinned
once all the same: the mapping lives as long as somebody holds its `MappedFile`.

While a peer has device memory open its owner must not free it: what happens then is not defined, though the driver keeps the memory
until the last process lets go of it. Therefore an owner frees device memory only when `Transport.revoked` has said that nobody can
write to it, or leaves that to its own end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import structlog
from pydantic import Field

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.wire.messages import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import OpenedAllocation, allocation_of, device_by_uuid, device_uuid
from kvbridge.pool.memory.layout import Extent
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.base import Extents, Stretch
from kvbridge.transport.local.gpu import HOST, DeviceAccess, device_access
from kvbridge.transport.local.host import FileIdentity, HostClaim, Presence, SharedExtent, opened, require_same_host
from kvbridge.transport.threads import apart

log = structlog.get_logger(__name__)


class LocalEndpoint(FrozenModel):
    """A transport's description of itself for peers, as JSON in `Endpoint.data`."""

    claim: HostClaim | None
    """None while no shared memory is registered."""
    files: tuple[FileIdentity, ...]
    extents: tuple[SharedExtent, ...]
    allocations: tuple[CudaOrigin, ...] = ()
    device_extents: tuple[SharedExtent, ...] = ()
    lock_file: FileIdentity | None = None
    """Where writers of the device memory take their locks."""
    epoch: Annotated[int, Field(ge=0, lt=1 << 60)]
    private: tuple[Annotated[str, Field(max_length=200)], ...]
    """Labels of registered memory that is not shared."""


class MappedFile:
    """One mapped file; unmapped when nobody holds it any more."""

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

    def access(self, device: int, offsets: Iterable[int]) -> DeviceAccess:
        """Have the mapping registered with CUDA in the background, again after a failure. Extents begin at `offsets`."""
        with self._lock:
            if not self._accesses or self._accesses[-1].error:
                extents = [Extent(address=self.address + offset, length_bytes=1) for offset in offsets]
                label = f"shared memory {self._mapping.path}"
                self._accesses[:] = [device_access([self._mapping], device, extents, label=label)]
            return self._accesses[-1]


def _dispose(mapping: SharedMapping, accesses: list[DeviceAccess]) -> None:
    """Unmap after the end of the registration, on a thread of its own because that may take long."""
    if accesses:
        accesses[-1].close(then=mapping.close)
    else:
        mapping.close()


_files: weakref.WeakValueDictionary[tuple[int, int, int], MappedFile] = weakref.WeakValueDictionary()
"""By device, inode and length of a file. No other file gets the inode while the file is mapped."""
_files_lock = threading.Lock()


class _Opened(NamedTuple):
    """A file or an allocation of a peer, in this process."""

    address: int
    length_bytes: int
    place: int


class PeerMemory:
    """Everything that a peer shares, reachable here until the last reference goes."""

    def __init__(self, content: LocalEndpoint, *, device: int | None) -> None:
        """`device` of this process will write to the peer's device memory; None: the device that holds the memory.

        Raises TransportError when the peer is not to be believed or some of its memory is out of reach.
        """
        claim = content.claim
        if claim is None:
            raise TransportError("the peer has registered no shared memory, so the local transport cannot reach any")
        self.label = f"process {claim.pid}"
        self.fresh: list[MappedFile] = []
        """Files that were not mapped here before."""
        lock_file = content.files[0] if content.files else content.lock_file
        presence = Presence(claim, lock_file, content.epoch) if lock_file is not None else None
        require_same_host(claim)
        if content.private:
            raise TransportError(
                f"{self.label} has registered memory that is not shared ({', '.join(sorted(set(content.private)))}), "
                "which the local transport cannot write; use another transport for this pair"
            )
        self._presence = presence
        self._files = [self._map(claim, identity) for identity in content.files]
        self._content = content
        files = [_Opened(file.address, file.length_bytes, HOST) for file in self._files]
        stretches = [*self._reach(content.extents, files)]
        allocations = ExitStack()
        close = partial(_close_allocations, allocations, presence)
        try:
            opened_here = [_opened_allocation(origin, device, allocations) for origin in content.allocations]
            stretches += self._reach(content.device_extents, opened_here)
        except BridgeError as error:
            close()
            raise TransportError(f"the device memory of {self.label} cannot be written from here: {error}") from error
        if content.allocations:
            weakref.finalize(self, apart, close, name="kvbridge-close-memory").atexit = False
        self.extents = Extents(self.label, stretches)
        """The peer's memory, as announced. A place is a device of this process, or `HOST`."""

    def accesses(self, device: int) -> list[DeviceAccess]:
        """Have the peer's host memory registered with CUDA, in the background."""
        offsets: dict[int, list[int]] = {}
        for extent in self._content.extents:
            offsets.setdefault(extent.origin, []).append(extent.offset_bytes)
        return [file.access(device, offsets.get(number, ())) for number, file in enumerate(self._files)]

    def register(self, device: int, *, timeout_s: float) -> None:
        """Have the host memory registered, and wait up to `timeout_s`. Raises TransportError when that has failed by then."""
        ends_at_s = time.monotonic() + timeout_s
        for access in self.accesses(device):
            access.wait(max(0.0, ends_at_s - time.monotonic()))
            if access.error:
                raise TransportError(
                    f"the host memory of {self.label} cannot be written by cuda:{device}: {access.error}"
                )

    def _map(self, claim: HostClaim, identity: FileIdentity) -> MappedFile:
        if identity.owner != claim.file.owner:
            raise TransportError(
                f"{self.label} names {identity.path}, which belongs to another user than the process; it was refused"
            )
        with opened(self.label, identity, os.O_RDWR) as descriptor, _files_lock:
            found = os.fstat(descriptor)
            key = found.st_dev, found.st_ino, found.st_size
            known = _files.get(key)
            if known is not None:
                return known
            try:
                mapping = SharedMapping(Path(identity.path), mmap.mmap(descriptor, 0), owner=False)
            except (OSError, ValueError) as error:
                raise TransportError(f"cannot map {identity.path} of {self.label}: {error}") from error
            made = _files[key] = MappedFile(mapping, resident=found.st_blocks * 512 >= found.st_size)
            self.fresh.append(made)
            return made

    def _reach(self, extents: Iterable[SharedExtent], origins: Sequence[_Opened]) -> Iterator[Stretch]:
        """Find what a peer shares in its opened files or allocations. Raises TransportError for bytes that are not there."""
        for extent in extents:
            origin = origins[extent.origin] if extent.origin < len(origins) else None
            if origin is None or extent.offset_bytes + extent.length_bytes > origin.length_bytes:
                raise TransportError(
                    f"{self.label} names {extent.length_bytes} bytes that its file or allocation does not have"
                )
            here = origin.address + extent.offset_bytes
            yield Stretch(extent.address, extent.length_bytes, origin.place, here - extent.address)


def _opened_allocation(origin: CudaOrigin, device: int | None, stack: ExitStack) -> _Opened:
    """Open an allocation; it counts from its address on."""
    reason = runtime.reason_without_device()
    if reason:
        raise TransportError(f"this process has no device ({reason})")
    _require_reach(device, origin.device_uuid)
    made = OpenedAllocation(origin, device=device)
    stack.callback(made.close)
    extent = made.extent
    found = allocation_of(extent.device, extent.address)
    return _Opened(extent.address, sum(found) - extent.address, extent.device)


def _require_reach(device: int | None, uuid: str) -> None:
    """Refuse memory at which a device could only fault. CUDA decides about devices that this process does not see."""
    if device is None or device_uuid(device) == uuid:
        return
    try:
        holder = device_by_uuid(uuid)
    except BridgeError:
        return
    runtime.reach(device, holder)


def _close_allocations(stack: ExitStack, presence: Presence | None) -> None:
    """Let go of device memory, and then of the presence: without a presence the peer may free its memory."""
    try:
        stack.close()
    except BridgeError as error:  # nobody is left who could do anything about it
        log.warning("device_memory_not_closed", reason=str(error))
    del presence


# ------------------------------------------------------------------------------------------- pages of fresh mappings

POPULATE_STEP_BYTES = 16 << 20
MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(file: MappedFile) -> None:
    """Enter the pages of a fresh mapping into this process's page table, on a thread, until nobody keeps the pages mapped.

    Otherwise the first write through a mapping is three times slower than later ones. Only for a resident file: in another file
    this would allocate pages.
    """
    apart(partial(_populate, weakref.ref(file), file.address, file.length_bytes), name="kvbridge-populate")


def _populate(kept: weakref.ref[MappedFile], address: int, left_bytes: int) -> None:
    while left_bytes:
        file = kept()  # held while the kernel works on its pages
        if file is None:
            return
        step = min(left_bytes, POPULATE_STEP_BYTES)
        if _libc.madvise(address, step, MADV_POPULATE_WRITE):
            return  # an older kernel knows no such advice; then first writes are slow
        address, left_bytes = address + step, left_bytes - step
        del file
