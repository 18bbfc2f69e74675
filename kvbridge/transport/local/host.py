"""Two processes and one host: the proof that they share it, and the locks by which one sees who can write to it.

Proved, not guessed: two containers can have one address, and two hosts one path. A peer is believed when the
kernel's boot id is the same, a secret that the peer wrote beside its shared memory reads back alike, the peer still
holds the lock on that file (so it lives), and each shared file has the device, the inode and the owner that the
peer saw. The owner must be that of the proof, so nobody can have this process write into files that are not his
own.

A process cannot shut out a writer that maps its file, but it can know: whoever maps a file under an endpoint of some epoch holds a
shared lock on that epoch's byte of it, far behind its end, and the kernel takes the lock away when the process ends, after its last
store. For each device allocation an empty `LockFile` takes those locks. It belongs to the process, not to one of its transports: an
endpoint of an earlier epoch was given out by an earlier transport. It ends with the process, and so does the memory.

The life of an endpoint, with R who gives it out and W who writes by it:

1. R makes a transport of epoch 3. R's endpoint names the proof, the files and the epoch.
2. W takes a shared lock on byte 3 of the first file, and then looks whether R still holds the lock of the proof.
3. R wants nobody to write by epoch 3 any more (a fence). R makes a transport of epoch 4 and closes that of epoch 3 with its proof.
4. R tries to lock the bytes before 4 of each file. While R cannot, some W may still write.
5. W lets go of the peer, or ends: W's lock goes. R's next look finds the bytes free, and epoch 3 is revoked.

A killed writer's locks go a little before its CUDA context, so what the device was given still arrives. It is bounded by bytes
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
from kvbridge.core.wire.shared_memory import FileOrigin
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.leftovers import PROOF_PREFIX

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
    """`length_bytes` at `offset_bytes` of the `origin`-th file or allocation of a list, at `address` in its owner's process."""

    address: Positive
    length_bytes: Positive
    origin: NonNegative
    offset_bytes: NonNegative


class Proof:
    """A file with a secret, locked for as long as its writer lives; removed by `close`."""

    def __init__(self, directory: Path) -> None:
        secret = secrets.token_hex(SECRET_BYTES)
        self._descriptor, file = _locked_file(directory, secret)
        self.claim = HostClaim(pid=os.getpid(), boot_id=_boot_id(), file=file, secret=secret)

    def close(self) -> None:
        """Remove the file. Peers that are connected stay connected; nobody else can connect any more."""
        with contextlib.suppress(FileNotFoundError):
            Path(self.claim.file.path).unlink()
        os.close(self._descriptor)


class LockFile:
    """The file on which writers to one device allocation of this process hold their locks; removed at its end."""

    def __init__(self, directory: Path) -> None:
        self.descriptor, self.file = _locked_file(directory, "")

    @property
    def has_name(self) -> bool:
        """Whether others can still open it by its path."""
        try:
            return os.path.samestat(Path(self.file.path).stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def remove_name(self) -> None:
        """Nobody opens it by its path any more. Harmless when it has none."""
        with contextlib.suppress(OSError):
            Path(self.file.path).unlink()


class LockFiles:
    """The lock files of one process, by device and address. Any thread may ask."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], list[LockFile]] = {}
        self._lock = threading.Lock()

    def to_name(self, device: int, address: int, directory: Path) -> LockFile:
        """The lock file that peers of the device memory at an address are told of; made in `directory` when there is none.

        So too when the last one's name is gone, with the folder that it was in: peers could not open it.
        """
        with self._lock:
            made = self._files.setdefault((device, address), [])
            if not made or not made[-1].has_name:
                made.append(LockFile(directory))
            return made[-1]

    def known(self, device: int, address: int) -> tuple[LockFile, ...]:
        """Every lock file of the device memory at an address that was ever named to a peer."""
        with self._lock:
            return tuple(self._files.get((device, address), ()))

    def remove_names(self) -> None:
        """Remove the names of all, at the end of the process; called where exit handlers do not run, too."""
        with self._lock:
            for lock_file in (lock_file for made in self._files.values() for lock_file in made):
                lock_file.remove_name()


PROCESS_LOCK_FILES = LockFiles()
"""Those of this process: its memory, and with it who may write there, outlives the transports that name it."""
atexit.register(PROCESS_LOCK_FILES.remove_names)


def _locked_file(directory: Path, content: str) -> tuple[int, FileIdentity]:
    """Make a file that this process holds the lock of, and return its descriptor and itself."""
    path = directory / f"{PROOF_PREFIX}{secrets.token_hex(8)}"
    descriptor = -1
    try:
        # It gets its name only when it is locked, so that a sweep for files of the dead cannot take it for one.
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
    return descriptor, identity_of(str(path), os.fstat(descriptor))


def require_same_host(told: HostClaim) -> None:
    """Raise TransportError unless the process that says this shares our host and lives."""
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

    One file stands for all of an endpoint, since `writers_before` looks at each. It is taken before the peer's proof is
    looked at: a peer that revokes an endpoint first closes its transport, and with it the proof, and then looks for
    locks, so it finds either the lock or nobody. Let go with the last reference.
    """

    def __init__(self, told: HostClaim, identity: FileIdentity, epoch: int) -> None:
        who = f"process {told.pid}"
        with opened(who, identity, os.O_RDONLY) as descriptor:
            kept = os.dup(descriptor)
        weakref.finalize(self, os.close, kept)
        if not _lock(kept, fcntl.F_RDLCK, EPOCH_BYTES_START + epoch, 1):
            raise TransportError(f"{who} has just revoked the endpoint that it gave out; ask it for its present one")


def writers_before(files: Iterable[SharedFile | LockFile], epoch: int) -> bool:
    """Whether some process may have one of these files mapped under an endpoint of an epoch earlier than `epoch`.

    The look is a lock that is taken and given back at once, by a descriptor that is open anyway.
    """
    for file in files:
        if not _lock(file.descriptor, fcntl.F_WRLCK, EPOCH_BYTES_START, epoch):
            return True
        _lock(file.descriptor, fcntl.F_UNLCK, EPOCH_BYTES_START, epoch)
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


class SharedFile:
    """A shared file that this process has mapped, held open: its name can be removed, or lead to another file, at any time."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        self.identity = identity_of(path, os.fstat(self.descriptor))

    @property
    def length_bytes(self) -> int:
        """Return the present length of the file."""
        return os.fstat(self.descriptor).st_size


_shared_files: weakref.WeakValueDictionary[tuple[str, int], SharedFile] = weakref.WeakValueDictionary()
"""Those that some transport of this process holds, by path and address of the mapping: its successor registers the same memory
while it is still open, and takes the file from here."""


def shared_file(memory: Extent) -> SharedFile | None:
    """The file behind some memory, None if there is none. Raises RegistrationError when the file does not hold it."""
    if not isinstance(memory.origin, FileOrigin):
        return None
    path = memory.origin.path
    label = memory.label or f"memory at {memory.address:#x}"
    key = path, memory.address - memory.offset_bytes
    file = _shared_files.get(key)
    if file is None:
        try:
            file = _shared_files[key] = SharedFile(path)
        except OSError as error:
            raise RegistrationError(
                f"{label}: the shared file cannot be reached: {error}; keep it while it is used"
            ) from error
    if memory.offset_bytes + memory.length_bytes > file.length_bytes:
        raise RegistrationError(
            f"{label}: {memory.length_bytes} bytes at offset {memory.offset_bytes} do not fit into the "
            f"{file.length_bytes} bytes of {path}"
        )
    return file


def identity_of(path: str, found: os.stat_result) -> FileIdentity:
    """The file that a path led to."""
    absolute = str(Path(path).absolute())
    return FileIdentity(path=absolute, device=found.st_dev, inode=found.st_ino, owner=found.st_uid)


@contextlib.contextmanager
def opened(who: str, told: FileIdentity, flags: int) -> Iterator[int]:
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


def _boot_id() -> str:
    return BOOT_ID.read_text(encoding="ascii").strip()
