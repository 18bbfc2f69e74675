"""Two processes and one host: the proof that they share it, and the mapping of one's shared files in the other.

Owns: files as the kernel knows them, the proof's form and its check, mapped files. Must not know: transfers, the
transport's state.

Proved, not guessed: two containers can have one address, and two hosts one path. A peer is believed when the
kernel's boot id is the same, a secret that the peer wrote beside its shared memory reads back alike, the peer still
holds the lock on that file (so it lives), and each shared file has the device, the inode and the owner that the
peer saw. The owner must be that of the proof, so nobody can have this process write into files that are not his
own.

A writer needs no help of the process that it writes to, so that process cannot shut it out. What it can do is know:
whoever maps a file under an endpoint of some epoch holds a shared lock on that epoch's byte of it, far behind its end,
and the kernel takes the lock away when the process ends, after its last store.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import secrets
import stat
import struct
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.plan.operations import AddressArray
from kvbridge.transport.base import Memory

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SECRET_BYTES = 32

EPOCH_BYTES_START = 1 << 61
"""Where the bytes lie whose locks say under which epochs a file is mapped."""
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, process (0, as open-file-description locks want it)."""

FilePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]


class FileIdentity(FrozenModel):
    """A file as the kernel knows it."""

    path: FilePath
    device: NonNegative
    inode: NonNegative
    owner: NonNegative
    """Numeric user id."""


class HostClaim(FrozenModel):
    """What a process says of the host that it is on."""

    pid: Positive
    boot_id: Annotated[str, Field(max_length=64)]
    file: FileIdentity
    secret: Annotated[str, Field(min_length=2 * SECRET_BYTES, max_length=2 * SECRET_BYTES)]
    """The file's content."""


class SharedExtent(FrozenModel):
    """`length_bytes` at `offset_bytes` of the `file`-th of a list of files, mapped at `address` by its owner."""

    address: Positive
    length_bytes: Positive
    file: NonNegative
    offset_bytes: NonNegative


PROOF_PREFIX = ".kvbridge-"
"""What the names of proof files begin with. A file of this kind that nobody has locked belongs to a dead process."""


class Proof:
    """A file with a secret, locked for as long as its writer lives; removed by `close`."""

    def __init__(self, directory: Path) -> None:
        path = directory / f"{PROOF_PREFIX}{secrets.token_hex(8)}"
        secret = secrets.token_hex(SECRET_BYTES)
        try:
            # It gets its name only when it is locked, so that a sweep for files of the dead cannot take it for one.
            self._descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.write(self._descriptor, secret.encode())
            source = f"/proc/self/fd/{self._descriptor}"
            os.link(source, path, src_dir_fd=self._descriptor, follow_symlinks=True)
        except OSError as error:
            raise RegistrationError(
                f"cannot write {path}, by which peers recognise that they share this host: {error}; make the "
                "directory of the "
                "shared memory writable for this process"
            ) from error
        self.claim = HostClaim(
            pid=os.getpid(), boot_id=_boot_id(), file=_identity(str(path), os.fstat(self._descriptor)), secret=secret
        )

    def close(self) -> None:
        """Remove the file. Peers that are connected stay connected; nobody else can connect any more."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.claim.file.path).unlink()
        os.close(self._descriptor)


def require_same_host(told: HostClaim) -> None:
    """Raise TransportError unless the process that says this shares our host and lives."""
    who = f"process {told.pid}"
    if told.boot_id != _boot_id():
        raise TransportError(f"{who} is not on this host: it runs on another kernel (boot id {told.boot_id})")
    with _opened(who, told.file, os.O_RDONLY) as descriptor:
        found = os.read(descriptor, 2 * SECRET_BYTES + 1)
        if not hmac.compare_digest(found, told.secret.encode()):
            raise TransportError(f"{who} is not on this host: {told.file.path} does not hold here what it wrote there")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise TransportError(f"{who} has ended: nobody holds the lock on {told.file.path}; remove that file")


class MappedFiles:
    """A peer's files, mapped here, and where each of its addresses is here. Unmapped when the last reference goes."""

    def __init__(
        self,
        told: HostClaim,
        files: Sequence[FileIdentity],
        extents: Sequence[SharedExtent],
        *,
        presence: Presence | None = None,
    ) -> None:
        """`presence` is kept for as long as the files are mapped."""
        who = f"process {told.pid}"
        self._presence = presence
        self._maps = [_map(who, told, identity) for identity in files]
        bases = [ctypes.addressof(ctypes.c_char.from_buffer(mapped)) for mapped in self._maps]
        ordered = sorted(extents, key=lambda extent: extent.address)
        for extent in ordered:
            if extent.file >= len(bases) or extent.offset_bytes + extent.length_bytes > len(self._maps[extent.file]):
                raise TransportError(f"{who} names {extent.length_bytes} bytes that its shared file does not have")
        self._starts = np.array([extent.address for extent in ordered], dtype=np.uint64)
        here = np.array([bases[extent.file] + extent.offset_bytes for extent in ordered], dtype=np.uint64)
        self._shift = here - self._starts  # wraps where a mapping lies below the peer's address; the sum wraps back
        self.resident = [
            (base, len(mapped))
            for base, mapped, identity in zip(bases, self._maps, files, strict=True)
            if _is_resident(identity.path, len(mapped))
        ]
        """(address, bytes) of the mappings whose file is allocated in full."""

    def here(self, addresses: AddressArray) -> AddressArray:
        """Translate addresses of the peer, each within one of its extents, to addresses of this process."""
        if not len(addresses):
            return addresses
        return addresses + self._shift[np.searchsorted(self._starts, addresses, side="right") - 1]


class Presence:
    """The lock by which a peer sees that its files are mapped here under an endpoint of some epoch.

    One file stands for all of an endpoint, since `writers_before` looks at each. It is taken before the peer's proof is
    looked at: a peer that revokes an endpoint first closes its transport, and with it the proof, and then looks for
    locks, so it finds either the lock or nobody. Let go with the last reference.
    """

    def __init__(self, told: HostClaim, identity: FileIdentity, epoch: int) -> None:
        who = f"process {told.pid}"
        with _opened(who, identity, os.O_RDONLY) as descriptor:
            kept = os.dup(descriptor)
        weakref.finalize(self, os.close, kept)
        if not _lock(kept, fcntl.F_RDLCK, EPOCH_BYTES_START + epoch, 1):
            raise TransportError(f"{who} has just revoked the endpoint that it gave out; ask it for its present one")


def writers_before(paths: Sequence[str], epoch: int) -> bool:
    """Whether some process may have one of these files mapped under an endpoint of an epoch earlier than `epoch`."""
    for path in paths:
        with Path(path).open("r+b") as file:
            if not _lock(file.fileno(), fcntl.F_WRLCK, EPOCH_BYTES_START, epoch):
                return True  # and whoever opens the file for less than a moment has taken no lock that lasts
    return False


def _lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Take an open-file-description lock (Linux, fcntl(2)) without waiting; whether it was free."""
    if not length:
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def identify(memory: Memory) -> FileIdentity | None:
    """The file behind some memory, None if it is private. Raises RegistrationError when the file does not hold it."""
    if memory.shared is None:
        return None
    path = memory.shared.path
    label = memory.label or f"memory at {memory.address:#x}"
    try:
        found = Path(path).stat()
    except OSError as error:
        raise RegistrationError(
            f"{label}: the shared file cannot be reached: {error}; keep it while it is used"
        ) from error
    if memory.shared.offset_bytes + memory.length_bytes > found.st_size:
        raise RegistrationError(
            f"{label}: {memory.length_bytes} bytes at offset {memory.shared.offset_bytes} do not fit into the "
            f"{found.st_size} "
            f"bytes of {path}"
        )
    return _identity(path, found)


def _identity(path: str, found: os.stat_result) -> FileIdentity:
    absolute = str(Path(path).absolute())
    return FileIdentity(path=absolute, device=found.st_dev, inode=found.st_ino, owner=found.st_uid)


@contextlib.contextmanager
def _opened(who: str, told: FileIdentity, flags: int) -> Iterator[int]:
    """Open a file that a peer named, provided that it is the file that the peer meant."""
    try:
        descriptor = os.open(told.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(
            f"{who} is not on this host, or has ended, or does not share its files with this user: {error}"
        ) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino, found.st_uid) != (
            told.device,
            told.inode,
            told.owner,
        ):
            raise TransportError(
                f"{who} is not on this host, or has replaced its file: {told.path} is another file here than it "
                "is there"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _map(who: str, told: HostClaim, identity: FileIdentity) -> mmap.mmap:
    if identity.owner != told.file.owner:
        raise TransportError(
            f"{who} names {identity.path}, which belongs to another user than the process; it was refused"
        )
    with _opened(who, identity, os.O_RDWR) as descriptor:
        try:
            return mmap.mmap(descriptor, 0)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map {identity.path} of {who}: {error}") from error


def _is_resident(path: str, length_bytes: int) -> bool:
    """Whether every page exists, so that touching all of them allocates nothing."""
    try:
        return Path(path).stat().st_blocks * 512 >= length_bytes
    except OSError:
        return False


def _boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()
