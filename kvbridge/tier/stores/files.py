"""A store of files: each object one file of a directory, whole or not there, and all of them together no more than so many bytes.

Owns: the directory, what it may take, who goes first. Must not know: pages, trailers, digests.

    DIRECTORY/usage      the bytes of all objects, and the lock of all who add or remove one
    DIRECTORY/3f/NAME    an object, in one of 256 directories by the last digits of its name

Several processes of one host may use a directory. An object is written to a file without a name (O_TMPFILE), which goes with its
process however that ends, and gets its name when it is whole: under the lock of `usage`, when there is room for it. So the bound
holds for all processes together, if all say the same; what is just being written comes on top, an object for each thread. Whoever
is killed between a name and the number leaves it wrong by a file, until it is counted anew: at each start, and before anybody is
told `full`.

Who was used longest ago goes first, by the time of modification, which a use renews: the oldest eighth of at least a thousand
objects, which are a fair sample since names are hashes. To read takes no lock: a file that is gone is a miss, one that goes
meanwhile stays readable. Nothing is flushed to the disk: what a power failure leaves is compared like everything else. A process
that is stopped while it holds the lock makes the others' puts time out until it goes on or ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path

import structlog

from kvbridge.config.stores import FileStoreSettings
from kvbridge.core.clock import monotonic
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.tier.stores.base import Answer, Capabilities, Outcome, StoredObject, Stretches
from kvbridge.tier.stores.objects import is_object_name

log = structlog.get_logger(__name__)

OPEN_TIMEOUT_S = 30.0
"""For the lock while a store is opened, which others hold for as long as they list the directory."""
LOOK_AGAIN_S = 0.0005
SAMPLE = 1_000
_VECTORS = 1024
"""IOV_MAX."""
_libc = ctypes.CDLL(None, use_errno=True)
_preadv, _pwritev = _libc.preadv, _libc.pwritev
for _call in (_preadv, _pwritev):
    _call.argtypes, _call.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64), ctypes.c_ssize_t
_FOLDERS = [f"{number:02x}" for number in range(256)]
_USAGE = struct.Struct("<q")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileStore:
    """See `base.ObjectStore`. Close it, or end the process."""

    capabilities = Capabilities(kind="files", batch=4)

    def __init__(self, settings: FileStoreSettings) -> None:
        """Open the directory and count what is in it. Raises ConfigError when it cannot be used."""
        self._max_bytes, self._directory = settings.max_bytes, settings.directory
        self._changing = threading.Lock()
        """Taken before the lock of `usage`, which only keeps other processes out."""
        self._turn = cycle(_FOLDERS)
        """The folders in the order in which they are looked through for what is old."""
        directory = self._directory
        with ExitStack() as opened:
            try:
                self._root = _open_private(directory)
                opened.callback(os.close, self._root)
                self._usage = self._open("usage", os.O_RDWR | os.O_CREAT)
                opened.callback(os.close, self._usage)
                os.close(self._open(".", os.O_WRONLY | os.O_TMPFILE))
                with self._alone(monotonic() + OPEN_TIMEOUT_S):
                    for folder in _FOLDERS:
                        with suppress(FileExistsError):
                            os.mkdir(folder, 0o700, dir_fd=self._root)
                    self._count_anew()
            except (OSError, _LateError) as error:
                raise ConfigError(
                    f"the store's directory {directory} cannot be used: {error}; it must be on a file system of this host that "
                    "this user may write and that knows locks and files without a name (flock, O_TMPFILE: ext4, xfs, btrfs, tmpfs)"
                ) from error
            self._closing = opened.pop_all()

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """See `ObjectStore.write`. Raises NotReadyError when the directory is not what was opened any more."""
        return _each(objects, until_s, lambda each: self._put(each, until_s))

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """See `ObjectStore.read`."""
        return _each(objects, until_s, self._read)

    def present(self, names: Sequence[str], until_s: float) -> Answer:
        """See `ObjectStore.present`."""
        return _each(names, until_s, lambda name: Outcome.ABSENT if self._length(name) is None else Outcome.PRESENT)

    def remove(self, names: Sequence[str], until_s: float) -> Answer:
        """See `ObjectStore.remove`."""
        return _each(names, until_s, lambda name: self._remove(name, until_s))

    def clear(self, prefix: str, until_s: float) -> Answer:
        """See `ObjectStore.clear`. A folder at a time, so that others' requests have their turn."""
        cleared = 0

        def clear_folder(folder: str) -> Outcome:
            nonlocal cleared
            with self._alone(until_s):
                total = self._total()
                for _, name, _ in list(self._list(folder)):
                    if name.startswith(prefix):
                        total -= self._unlink(name)
                        cleared += 1
                self._set_total(total)
            return Outcome.DROPPED

        answer = _each(_FOLDERS, until_s, clear_folder)
        worst = next((outcome for outcome in answer.outcomes if outcome is not Outcome.DROPPED), Outcome.DROPPED)
        return Answer((worst,), detail=answer.detail, cleared=cleared)

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Files are read into any memory."""

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._closing.close()

    # ------------------------------------------------------------------ one object

    def _put(self, each: StoredObject, until_s: float) -> Outcome:
        try:
            return self._write(each, until_s)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and os.fstat(self._root).st_nlink:
                raise
            raise NotReadyError(
                f"somebody has removed the store's directory {self._directory}, or folders in it; it is opened anew"
            ) from error

    def _write(self, each: StoredObject, until_s: float) -> Outcome:
        length = each.length_bytes
        if length > self._max_bytes:
            return Outcome.FULL
        with _closing(self._open(".", os.O_WRONLY | os.O_TMPFILE)) as descriptor:
            if _move(_pwritev, descriptor, each.stretches) != length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _used(descriptor)
            with self._alone(until_s):
                total = self._make_room(self._total(), self._max_bytes - length)
                try:
                    self._name(descriptor, each.name)
                except FileExistsError:
                    total -= self._unlink(each.name)
                    self._name(descriptor, each.name)
                self._set_total(total + length)
        return Outcome.STORED

    def _read(self, each: StoredObject) -> Outcome:
        try:
            descriptor = self._open(_path(each.name), os.O_RDONLY)
        except FileNotFoundError:
            return Outcome.ABSENT
        with _closing(descriptor):
            length = each.length_bytes
            if os.fstat(descriptor).st_size != length or _move(_preadv, descriptor, each.stretches) != length:
                return Outcome.SHORT
            _used(descriptor)
        return Outcome.HIT

    def _remove(self, name: str, until_s: float) -> Outcome:
        with self._alone(until_s):
            self._set_total(self._total() - self._unlink(name))
        return Outcome.DROPPED

    def _open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=self._root)

    def _length(self, name: str) -> int | None:
        try:
            return os.stat(_path(name), dir_fd=self._root, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ all of them; the callers are alone

    @contextmanager
    def _alone(self, until_s: float) -> Iterator[None]:
        """Keep other threads and processes from changing the directory. Raises _LateError when others hold the lock too long."""
        if not self._changing.acquire(timeout=max(0.0, until_s - monotonic())):
            raise _LateError("other requests keep the store's directory busy")
        try:
            while not _flocked(self._usage):
                if monotonic() >= until_s:
                    raise _LateError("another process holds the lock of the store's directory")
                time.sleep(LOOK_AGAIN_S)
            try:
                yield
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)
        finally:
            self._changing.release()

    def _name(self, descriptor: int, name: str) -> None:
        """Give a file without a name one. `dst_dir_fd` is what makes this follow the link to it."""
        os.link(f"/proc/self/fd/{descriptor}", _path(name), dst_dir_fd=self._root, follow_symlinks=True)

    def _unlink(self, name: str) -> int:
        """Remove an object if it is there. Returns the bytes that it took."""
        length = self._length(name)
        if length is None:
            return 0
        with suppress(FileNotFoundError):
            os.unlink(_path(name), dir_fd=self._root)
        return length

    def _make_room(self, total: int, most: int) -> int:
        """Evict until all objects take at most so many bytes, and return how many they take."""
        counted = False
        while total > most:
            found, expected = self._sample()
            if not counted and total > 2 * expected:  # somebody has removed files by hand, say
                total, counted = self._count_anew(), True
                continue
            for _, name, _ in found[: max(1, len(found) // 8)]:
                if total > most or len(found) >= SAMPLE:
                    total -= self._unlink(name)
            self._set_total(total)
        return total

    def _sample(self) -> tuple[list[tuple[int, str, int]], float]:
        """Objects of the next folders, the one first that was used longest ago, and what so many would make in all folders."""
        found: list[tuple[int, str, int]] = []
        looked = 0
        while looked < len(_FOLDERS) and len(found) < SAMPLE:
            found += self._list(next(self._turn))
            looked += 1
        return sorted(found), sum(length for _, _, length in found) * len(_FOLDERS) / looked

    def _list(self, folder: str) -> Iterator[tuple[int, str, int]]:
        with _closing(self._open(folder, os.O_RDONLY | os.O_DIRECTORY)) as descriptor, os.scandir(descriptor) as files:
            for file in files:
                if is_object_name(file.name):
                    facts = file.stat(follow_symlinks=False)
                    yield facts.st_mtime_ns, file.name, facts.st_size

    def _count_anew(self) -> int:
        total = sum(length for folder in _FOLDERS for _, _, length in self._list(folder))
        self._set_total(total)
        return total

    def _total(self) -> int:
        data = os.pread(self._usage, _USAGE.size, 0)
        return int(_USAGE.unpack(data)[0]) if len(data) == _USAGE.size else self._count_anew()

    def _set_total(self, total: int) -> None:
        os.pwrite(self._usage, _USAGE.pack(total), 0)


class _LateError(Exception):
    """The deadline came before the lock."""


def _open_private(directory: Path) -> int:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(
            f"the store's directory {directory} must belong to this user alone (chown {os.geteuid()}, chmod 0700): who can write "
            "there can put other bytes under every key"
        )
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _used(descriptor: int) -> None:
    """Note that an object was used now, by a finer clock than that of the kernel's own notes."""
    now_ns = time.time_ns()
    os.utime(descriptor, ns=(now_ns, now_ns))


def _path(name: str) -> str:
    return f"{name[-2:]}/{name}"


def _each(items: Sequence[object], until_s: float, act: Callable[..., Outcome]) -> Answer:
    """Do something with each item until the deadline, and say what has become of each."""
    outcomes, detail = [], ""
    for item in items:
        try:
            outcome = act(item) if monotonic() < until_s else Outcome.TIMED_OUT
        except _LateError as error:
            outcome, detail = Outcome.TIMED_OUT, str(error)
        except OSError as error:
            outcome = Outcome.FULL if error.errno in _NO_ROOM else Outcome.UNREACHABLE
            detail = f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
            log.warning("store_file_failed", outcome=outcome.value, reason=detail)
        outcomes.append(outcome)
    return Answer(tuple(outcomes), detail=detail)


def _move(call: Callable[..., int], descriptor: int, stretches: Stretches) -> int:
    """Read or write all stretches, one after the other from the file's beginning. Returns how many bytes were there, or fitted."""
    offset = 0
    for start in range(0, len(stretches), _VECTORS):
        some = stretches[start : start + _VECTORS]
        moved = call(descriptor, some.ctypes.data, len(some), offset)
        if moved < 0:
            raise OSError(code := ctypes.get_errno(), os.strerror(code))
        offset += moved
        if moved != some[:, 1].sum():
            break
    return offset


@contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _flocked(descriptor: int) -> bool:
    """Take the lock of a file if nobody has it. Returns whether it is ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
