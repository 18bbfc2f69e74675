"""A file in shared memory, mapped: memory that several processes of one host address as their own.

The process that creates a file owns the file and holds an advisory lock on it. The kernel drops the lock when the owner ends,
however it ends: a file that can be locked belongs to nobody (`leftovers.py`). A new file has no name (O_TMPFILE) until it is locked
and all of its memory is there. Nobody meets an unlocked or half-made file, and a creation that fails or is killed leaves nothing.

Python's mmap object keeps the descriptor that holds the lock, and closes it with the mapping, even when nobody calls `close`.
Memory is handed out as memoryviews only: Python counts them, so a mapping cannot be closed under one of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvbridge.core.errors import ConflictError, InvalidInputError, RegistrationError
from kvbridge.core.process import Closing
from kvbridge.core.wire.messages import FileOrigin
from kvbridge.pool.memory.layout import Extent, Progress, ignore_progress

DEFAULT_DIRECTORY = Path("/dev/shm")  # noqa: S108 - the kernel's shared memory, with files of mode 0600 made by O_EXCL
CHUNK_BYTES = 64 << 20
"""Memory that is populated between two reports of progress, at which a creation can be stopped."""
POPULATE_THREADS = 4

_LOOK_EVERY_S = 0.02
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


@contextlib.contextmanager
def opened(path: Path | str, flags: int, *, dir_fd: int | None = None) -> Iterator[int]:
    """Open a file, of mode 0600 if it is made, and close it again. Follows no link, and no child process inherits it."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=dir_fd)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class SharedMapping(Closing):
    """One mapped file. `create` makes it and owns it; `open` maps one that another process owns. Not thread-safe."""

    def __init__(self, path: Path, mapped: mmap.mmap, *, owner: bool) -> None:
        self.path = path
        self.owner = owner
        self.length_bytes = len(mapped)
        first = ctypes.c_char.from_buffer(mapped)
        self._address = ctypes.addressof(first)
        del first  # it pins the mapping, as every view does
        self._mapped = mapped
        self._linked = False

    @classmethod
    def create(
        cls, directory: Path | str, name: str, length_bytes: int, *, on_progress: Progress = ignore_progress
    ) -> Self:
        """Create `directory/name` of `length_bytes` zero bytes (mode 0600), with every page of it in memory.

        Takes about a second for each 1 to 8 GiB; `on_progress` is called after each chunk. Raises RegistrationError,
        and leaves no file, when it exists, when memory does not suffice or when the directory cannot be used.
        """
        path = Path(directory) / name
        if not name or "/" in name or name.startswith(".") or length_bytes < 1:
            raise InvalidInputError(f"a shared file needs a plain name and a length, got '{name}' and {length_bytes}")
        require_memory(path, length_bytes)
        taken = (
            f"shared memory {path} exists: another process uses the same name, or one has died and was not swept up; end it, "
            "remove the file, or configure another name"
        )
        if path.exists():
            raise RegistrationError(taken)
        try:
            with opened(path.parent.resolve(), os.O_RDWR | os.O_TMPFILE) as descriptor, contextlib.ExitStack() as undo:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, length_bytes)
                mapping = cls(path, mmap.mmap(descriptor, length_bytes), owner=True)
                undo.callback(mapping.close)
                mapping._populate(descriptor, on_progress)
                # Only with a directory descriptor does os.link follow the link in /proc, as linkat(2) has it for O_TMPFILE.
                os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
                mapping._linked = True
                undo.pop_all()
                return mapping
        except FileExistsError:
            raise RegistrationError(taken) from None
        except OSError as error:
            raise RegistrationError(
                f"cannot create shared memory {path} of {length_bytes} bytes: {error.strerror}; {path.parent} must be a writable "
                "tmpfs such as /dev/shm, and limits on file size and address space must allow it"
            ) from error

    @classmethod
    def take_over(cls, old: Path, path: Path, *, wait_s: float, on_progress: Progress = ignore_progress) -> Self:
        """Own a file that its owner has left, with its content, under another name.

        The kernel has to say first that nobody has the file open for writing, at the latest after `wait_s`. Nobody can come to the
        file by its old name meanwhile. Raises RegistrationError when somebody has it open, or it cannot be owned. The file stays
        then, as it does when `on_progress` raises.
        """
        try:
            old.rename(path)
            _await_no_writers(path, time.monotonic() + wait_s)
            with opened(path, os.O_RDWR) as descriptor, contextlib.ExitStack() as undo:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mapping = cls(path, mmap.mmap(descriptor, os.fstat(descriptor).st_size), owner=True)
                undo.callback(mapping.close)
                mapping._populate(descriptor, on_progress)
                mapping._linked = True
                undo.pop_all()
                return mapping
        except (OSError, ValueError) as error:
            raise RegistrationError(f"shared memory {old} cannot be taken over: {error}") from error

    def leave(self) -> None:
        """Let the file stay after `close`, for the next owner."""
        self._linked = False

    def share(self, group: int) -> None:
        """Let members of a group map the file, too. Raises RegistrationError when this user may not give it to that group."""
        try:
            os.chown(self.path, -1, group, follow_symlinks=False)
            self.path.chmod(0o660)
        except OSError as error:
            raise RegistrationError(
                f"shared memory {self.path} cannot be given to group {group}: {error.strerror}"
            ) from error

    @classmethod
    def open(cls, path: Path | str, owner: int | None = None) -> Self:
        """Map a file that another process has created, for reading and writing.

        `owner`: the user to whom it must belong (default: this one). Raises RegistrationError when the file is not there, is empty,
        or this process may not open it.
        """
        path, found, expected = Path(path), 0, os.geteuid() if owner is None else owner
        try:
            with opened(path, os.O_RDWR) as descriptor:
                facts = os.fstat(descriptor)
                found = facts.st_size
                if facts.st_uid != expected:
                    whose = "of this process" if owner is None else "of the daemon"
                    raise RegistrationError(
                        f"shared memory {path} belongs to user {facts.st_uid}, not to user {expected} {whose}: this process would "
                        "write into it"
                    )
                if found < 1:
                    raise RegistrationError(f"shared memory {path} is empty: it is no pool")
                return cls(path, mmap.mmap(descriptor, found), owner=False)
        except OSError as error:
            raise RegistrationError(
                f"cannot open shared memory {path} of {found} bytes: {error.strerror}; the process that owns it must be running on "
                f"this host, as the same user or in its runtime_group, and with the same {path.parent} (containers: share it)"
            ) from error

    @property
    def address(self) -> int:
        """Virtual address of the first byte in this process, valid until `close`. Raises ConflictError afterwards."""
        if self._mapped.closed:
            raise ConflictError(f"shared memory {self.path} is closed")
        return self._address

    @property
    def extent(self) -> Extent:
        """All of it."""
        origin = FileOrigin(path=str(self.path))
        return Extent(address=self.address, length_bytes=self.length_bytes, origin=origin, label=self.path.name)

    @property
    def buffer(self) -> memoryview:
        """A new writable view of all bytes. The mapping cannot be closed before it and its slices are gone."""
        return memoryview(self._mapped)

    @property
    def closed(self) -> bool:
        """True after the mapping is gone."""
        return self._mapped.closed

    def close(self) -> None:
        """Unmap, and as the owner remove the file first. Harmless when closed.

        Raises ConflictError while views are in use; the file is then gone, the memory stays mapped, and `close` can be
        called again. An address that was passed on by number is not counted: its user must have stopped before.
        """
        if self._linked:
            self._linked = False
            self.path.unlink(missing_ok=True)
        try:
            self._mapped.close()
        except BufferError:
            raise ConflictError(
                f"shared memory {self.path} cannot be unmapped while views of it are in use; release them and close it again"
            ) from None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "owner" if self.owner else "open"
        return f"<shared mapping {self.path}: {self.length_bytes} bytes, {state}>"

    def _populate(self, descriptor: int, on_progress: Progress) -> None:
        """Bring every page into memory, in parallel. Without this, the first write after memory ran out is a SIGBUS."""
        _libc.madvise(self._address, self.length_bytes, _MADV_HUGEPAGE)  # kernels may ignore it
        done = 0
        with ThreadPoolExecutor(max_workers=POPULATE_THREADS, thread_name_prefix="populate") as pool:
            futures = {
                pool.submit(self._populate_chunk, descriptor, start, length): length
                for start in range(0, self.length_bytes, CHUNK_BYTES)
                for length in (min(CHUNK_BYTES, self.length_bytes - start),)
            }
            try:
                for future in as_completed(futures):
                    future.result()
                    done += futures[future]
                    on_progress(done, self.length_bytes)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _populate_chunk(self, descriptor: int, start: int, length: int) -> None:
        # ctypes lets other threads run during the call; mmap.madvise would not.
        if _libc.madvise(self._address + start, length, _MADV_POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code == errno.EINVAL:  # Linux before 5.14: the file system reserves the memory
            try:
                os.posix_fallocate(descriptor, start, length)
            except OSError as error:
                code = error.errno or errno.EIO
            else:
                return
        limit = tightest_limit(self.path.parent)
        raise RegistrationError(
            f"no memory for {self.path} ({self.length_bytes} bytes) at byte {start}: {os.strerror(code)}; "
            f"{limit.name} has {limit.available_bytes} bytes left; {limit.cure}, or configure fewer pages"
        )


def close_all(mappings: Iterable[SharedMapping]) -> None:
    """Close every mapping that is not in use. Raises the ConflictError of one in use, after all others are closed."""
    with contextlib.ExitStack() as stack:
        for mapping in mappings:
            stack.callback(mapping.close)


def require_memory(path: Path | str, length_bytes: int) -> None:
    """Raise RegistrationError, with cause and cure, when there is no memory for a new file `path` of that length."""
    path = Path(path)
    if not path.parent.is_dir():
        raise RegistrationError(
            f"directory {path.parent} for shared memory does not exist; create it or configure another"
        )
    limit = tightest_limit(path.parent)
    if length_bytes > limit.available_bytes:
        raise RegistrationError(
            f"shared memory {path} needs {length_bytes} bytes, but {limit.name} has {limit.available_bytes} left; "
            f"{limit.cure}, or configure fewer pages"
        )


def _await_no_writers(path: Path, deadline_s: float) -> None:
    """Wait until nobody has a file open for writing: then only the kernel grants a lease on it (fcntl(2))."""
    with opened(path, os.O_RDONLY) as descriptor:
        while True:
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except BlockingIOError as error:
                if time.monotonic() >= deadline_s:
                    why = (
                        "a process of its former owner still has it open for writing; end that (engines: attach again)"
                    )
                    raise OSError(errno.EBUSY, why) from error
                time.sleep(_LOOK_EVERY_S)
            else:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                return


# ------------------------------------------------------------------------------------------- limits of memory

# The kernel charges pages of a shared-memory file to the control group of the process that touches them first. A process that goes
# over that limit gets no error, but meets the OOM killer. The limits are looked up before.

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
_IN_MEMORY = {0x0102_1994: "tmpfs", 0x9584_58F6: "hugetlbfs"}
"""`f_type` of statfs(2)."""
_STATFS_BYTES = 256
"""More than the length of `struct statfs`, which begins with `f_type`, a long."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of memory, the bytes that are left, and the cure for an operator."""

    name: str
    available_bytes: int
    cure: str


def why_not_memory(directory: Path) -> str:
    """Return why files in `directory` would not be shared memory; empty when they would be."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(directory), status) != 0:
        return f"{directory}: {os.strerror(ctypes.get_errno())}"
    if not directory.is_dir():
        return f"{directory} is not a directory"
    kind = ctypes.c_long.from_buffer(status).value & 0xFFFF_FFFF
    return "" if kind in _IN_MEMORY else f"{directory} is on a file system of type {kind:#x}, not in memory"


def tightest_limit(directory: Path) -> MemoryLimit:
    """Return the limit that a new file in `directory` would meet first."""
    status = os.statvfs(directory)
    own = MemoryLimit(
        name=f"file system of {directory}",
        available_bytes=status.f_bavail * status.f_frsize,
        cure=f"enlarge {directory} (docker: --shm-size; kubernetes: an emptyDir with medium Memory; "
        f"else: mount -o remount,size=... {directory}) or remove what fills it",
    )
    return min(
        [own, *machine_limits(PROC / "meminfo"), *control_group_limits()], key=lambda limit: limit.available_bytes
    )


def control_group_limits(proc: Path = PROC, root: Path = CGROUP_ROOT) -> list[MemoryLimit]:
    """Return the memory limits of this process's control groups and of all their parents, of version 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[MemoryLimit] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            found += _walk(
                root / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
    return found


def _walk(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[MemoryLimit]:
    """Read every group from the process's own up to the root. A container may not see its own group."""
    limit_name, usage_name, cache_name = names
    own = root / path.lstrip("/")
    for group in (own, *own.parents):
        limit, usage = _read_number(group / limit_name), _read_number(group / usage_name)
        if limit is not None and usage is not None and limit < 2**60:  # "no limit" of version 1 is close to 2^63
            yield MemoryLimit(
                name=f"memory limit of control group {group}",
                available_bytes=max(0, limit - usage + _read_statistic(group / "memory.stat", cache_name)),
                cure="raise the memory limit of the container or unit (it counts shared memory too)",
            )
        if group == root:
            return


def machine_limits(meminfo: Path = PROC / "meminfo") -> list[MemoryLimit]:
    """Return the limit that is this machine's memory."""
    kibibytes = _read_statistic(meminfo, "MemAvailable:")
    if not kibibytes:
        return []
    return [MemoryLimit("memory of this machine", kibibytes * 1024, "end other processes or use a larger machine")]


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None when there is no file or its content is "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_statistic(path: Path, name: str) -> int:
    """Return the number behind `name` in a file of "name number" lines; 0 when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if len(words := line.split()) > 1 and words[0] == name), 0)
