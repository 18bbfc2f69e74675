"""A peer's shared files, mapped here: each file once a process, however many peers and epochs name it.

Owns: the mappings, their registration with CUDA, and where a peer's addresses are here. Must not know: transfers, the
transport's state.

The ranks of a decode node share one host pool, and a new epoch names the old files; a pool of hundreds of GiB is
mapped and pinned once all the same. A mapping lives as long as somebody holds its `MappedFile`.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvbridge.core.errors import TransportError
from kvbridge.pool.memory.extent import Progress
from kvbridge.pool.memory.host_registration import HostRegistration
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.local.access import DeviceAccess, Undo
from kvbridge.transport.local.host import FileIdentity, HostClaim, Presence, SharedExtent, opened
from kvbridge.transport.local.memory import ReachableExtent, reach

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
