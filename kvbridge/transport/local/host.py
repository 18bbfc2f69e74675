"""Two processes of one host: the proof that they share it, and the locks by which a process sees who can write to its memory.

A shared host is proved, not guessed: two containers can have one address, and two hosts one path. A peer is believed when the
kernel's boot id is the same, a secret that the peer wrote beside its shared memory reads back alike, the peer still holds the lock
on that file (so it lives), and each shared file has the device, the inode and the owner that the peer saw. The owner must be that
of the proof, so no peer can have this process write into files of another user.

A process cannot shut out a writer that maps its file, but it can know about the writer. A process that maps a file under an
endpoint of some epoch holds a shared lock on that epoch's byte, far behind the file's end. The kernel takes the lock away when the
process ends, after its last store. For each device allocation an empty lock file (`LockFiles`) takes these locks. A lock file
belongs to the process, not to a transport, because an earlier transport gave out the endpoints of earlier epochs. The lock file
ends with the process, and so does the memory.

The life of an endpoint, with R who gives it out and W who writes by it:

1. R makes a transport of epoch 3. R's endpoint names the proof, the files and the epoch.
2. W takes a shared lock on byte 3 of the first file, and then looks whether R still holds the lock of the proof.
3. R wants nobody to write by epoch 3 any more (a fence). R makes a transport of epoch 4 and closes that of epoch 3 with its proof.
4. R tries to lock the bytes before 4 of each file. While R cannot, some W may still write.
5. W lets go of the peer, or ends: W's lock goes. R's next look finds the bytes free, and epoch 3 is revoked.

A killed writer's locks go a little before its CUDA context, so copies that its device has still arrive. Their bytes are bounded
(`local.gpu`), and on a host with a GPU the locks have to be gone for `transports.local.settle_s` before they count.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import os
import secrets
import stat
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.wire.messages import FileOrigin
from kvbridge.pool.memory.layout import Extent
from kvbridge.pool.memory.leftovers import PROOF_PREFIX

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SECRET_BYTES = 32

EPOCH_BYTES_START = 1 << 61
"""Where the byte of epoch 0 is in a file. A lock on an epoch's byte says that the file is mapped under that epoch."""
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock`: type, whence, start, length, process (0, as open-file-description locks want it)."""

FilePath = Annotated[str, Field(pattern=r"^/[^\x00]*$", max_length=4096)]


class FileIdentity(FrozenModel):
    """A file, with the kernel's numbers for it."""

    path: FilePath
    device: NonNegative
    inode: NonNegative
    owner: NonNegative
    """Numeric user id."""


class HostClaim(FrozenModel):
    """A process's claim to be on this host."""

    pid: Positive
    boot_id: Annotated[str, Field(max_length=64)]
    file: FileIdentity
    secret: Annotated[str, Field(min_length=2 * SECRET_BYTES, max_length=2 * SECRET_BYTES)]
    """The file's content."""


class SharedExtent(FrozenModel):
    """Memory at `address` of its owner's process: a part of the file or allocation that is number `origin` in a list."""

    address: Positive
    length_bytes: Positive
    origin: NonNegative
    offset_bytes: NonNegative


class HostFile:
    """A file of this host, held open until the last reference goes: its name can be removed, or lead to another file."""

    def __init__(self, descriptor: int, path: str) -> None:
        """Owns the descriptor from now on."""
        self.descriptor = descriptor
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False  # locks are held until the process has ended
        found = os.fstat(descriptor)
        absolute = str(Path(path).absolute())
        self.identity = FileIdentity(path=absolute, device=found.st_dev, inode=found.st_ino, owner=found.st_uid)

    @classmethod
    def locked(cls, directory: Path, content: str = "") -> HostFile:
        """Make a file that this process has locked. Raises RegistrationError."""
        path = directory / f"{PROOF_PREFIX}{secrets.token_hex(8)}"
        descriptor = -1
        try:
            # The file gets its name only when it is locked, because a sweep removes named files without a lock.
            descriptor = os.open(directory, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.write(descriptor, content.encode())
            os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise RegistrationError(
                f"cannot write {path}, by which peers recognise that they share this host: {error}; make the directory of the "
                "shared memory (transports.local.proof_directory where there is none) writable for this process"
            ) from error
        return cls(descriptor, str(path))

    @property
    def has_name(self) -> bool:
        """Whether others can still open the file by its path."""
        try:
            return os.path.samestat(Path(self.identity.path).stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def remove_name(self) -> None:
        """Remove the name. Harmless when there is none."""
        with contextlib.suppress(OSError):
            Path(self.identity.path).unlink()

    def close(self) -> None:
        """Close the descriptor, which gives up the locks. Harmless when closed."""
        self._closing()


class Proof:
    """A file with a secret, locked as long as its writer lives; `close` removes it."""

    def __init__(self, directory: Path) -> None:
        secret = secrets.token_hex(SECRET_BYTES)
        self._file = HostFile.locked(directory, secret)
        self.claim = HostClaim(pid=os.getpid(), boot_id=_boot_id(), file=self._file.identity, secret=secret)

    def close(self) -> None:
        """Remove the file. Connected peers stay connected; nobody else can connect any more."""
        self._file.remove_name()
        self._file.close()


class LockFiles:
    """Lock files for the device allocations of one process, by device and address of the allocation. Any thread may ask."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], list[HostFile]] = {}
        self._lock = threading.Lock()

    def to_name(self, device: int, address: int, directory: Path) -> HostFile:
        """Return the lock file for the device memory at an address; make it in `directory` when peers could open none."""
        with self._lock:
            made = self._files.setdefault((device, address), [])
            if not made or not made[-1].has_name:
                made.append(HostFile.locked(directory))
            return made[-1]

    def known(self, device: int, address: int) -> tuple[HostFile, ...]:
        """Return every lock file of the device memory at an address that peers may know."""
        with self._lock:
            return tuple(self._files.get((device, address), ()))

    def remove_names(self) -> None:
        """Remove all names, at the end of the process. Where exit handlers do not run, somebody has to call this."""
        with self._lock:
            for file in (file for made in self._files.values() for file in made):
                file.remove_name()


PROCESS_LOCK_FILES = LockFiles()
"""Lock files of this process: its memory, and the locks of its writers, outlive the transports that name the memory."""
atexit.register(PROCESS_LOCK_FILES.remove_names)


def require_same_host(told: HostClaim) -> None:
    """Raise TransportError unless the process that makes this claim lives and shares our host."""
    who = f"process {told.pid}"
    if told.boot_id != _boot_id():
        raise TransportError(f"{who} is not on this host: it runs on another kernel (boot id {told.boot_id})")
    with opened(who, told.file, os.O_RDONLY) as descriptor:
        found = os.read(descriptor, 2 * SECRET_BYTES + 1)
        if not hmac.compare_digest(found, told.secret.encode()):
            raise TransportError(f"{who} is not on this host: {told.file.path} does not hold here what it wrote there")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
    raise TransportError(f"{who} has ended: nobody holds the lock on {told.file.path}; remove that file")


class Presence:
    """The lock by which a peer sees that its files are mapped here under an endpoint of some epoch.

    One file stands for all files of an endpoint, since `writers_before` looks at each. Take the lock before looking at the peer's
    proof. A peer that revokes an endpoint first closes its transport and the proof, and then looks for locks: it finds the lock, or
    the writer finds no proof. The lock goes with the last reference.
    """

    def __init__(self, told: HostClaim, identity: FileIdentity, epoch: int) -> None:
        who = f"process {told.pid}"
        with opened(who, identity, os.O_RDONLY) as descriptor:
            kept = os.dup(descriptor)
        weakref.finalize(self, os.close, kept)
        if not _lock(kept, fcntl.F_RDLCK, EPOCH_BYTES_START + epoch, 1):
            raise TransportError(f"{who} has just revoked the endpoint that it gave out; ask it for its present one")


def writers_before(files: Iterable[HostFile], epoch: int) -> bool:
    """Whether some process may have one of these files mapped under an endpoint of an epoch earlier than `epoch`."""
    for file in files:
        if not _lock(file.descriptor, fcntl.F_WRLCK, EPOCH_BYTES_START, epoch):
            return True
        _lock(file.descriptor, fcntl.F_UNLCK, EPOCH_BYTES_START, epoch)
    return False


def _lock(descriptor: int, kind: int, start: int, length: int) -> bool:
    """Take an open-file-description lock (Linux, fcntl(2)) without waiting. Returns whether it was free."""
    if not length:
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


_shared_files: weakref.WeakValueDictionary[tuple[str, int], HostFile] = weakref.WeakValueDictionary()
"""Files of registered memory, by path and address of the mapping. A transport's successor registers the same memory while the
transport is still open, and takes the file from here."""


def shared_file(memory: Extent) -> HostFile | None:
    """Return the file behind some memory, if there is one. Raises RegistrationError when the file does not hold the memory."""
    if not isinstance(memory.origin, FileOrigin):
        return None
    path = memory.origin.path
    label, key = memory.label or f"memory at {memory.address:#x}", (path, memory.address - memory.offset_bytes)
    file = _shared_files.get(key)
    if file is None:
        try:
            file = _shared_files[key] = HostFile(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)
        except OSError as error:
            raise RegistrationError(
                f"{label}: the shared file cannot be reached: {error}; keep it while it is used"
            ) from error
    file_bytes = os.fstat(file.descriptor).st_size
    if memory.offset_bytes + memory.length_bytes > file_bytes:
        raise RegistrationError(
            f"{label}: {memory.length_bytes} bytes at offset {memory.offset_bytes} do not fit into the "
            f"{file_bytes} bytes of {path}"
        )
    return file


@contextlib.contextmanager
def opened(who: str, told: FileIdentity, flags: int) -> Iterator[int]:
    """Open a file that a peer named. Raises TransportError unless it is the file that the peer meant."""
    try:
        descriptor = os.open(told.path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransportError(
            f"{who} is not on this host, or has ended, or does not share its files with this user: {error}"
        ) from error
    try:
        found = os.fstat(descriptor)
        numbers = found.st_dev, found.st_ino, found.st_uid
        if not stat.S_ISREG(found.st_mode) or numbers != (told.device, told.inode, told.owner):
            raise TransportError(
                f"{who} is not on this host, or has replaced its file: {told.path} is another file here"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()
