"""A store of files: each object one file of a directory, whole or not there, and all of them together no more than so many bytes.

Owns: the directory, what it may take, who goes first. Must not know: pages, headers, digests.

    DIRECTORY/usage           two numbers, and the lock of all who change the directory
    DIRECTORY/3f/NAME         an object, in one of 256 directories by the last digits of its name
    DIRECTORY/writing-RANDOM  what one process is writing, locked as long as it lives

Several processes of one host may use a directory. What they agree on: whoever begins, ends or removes a file holds the lock of
`usage` for that moment and keeps its first number right: the bytes of all files, with those of files that are being written
counted at their full length from the start. So the bound holds for all of them together, if all say the same. The second number
counts changes, by which a process sees that others have changed the directory, and lists it anew before it evicts. A process that
was killed may leave the first number too large by a file; listing corrects it, at each start and before anybody is told `full`.

Who was used longest ago goes first. A use is noted in memory and as the file's time of modification, from which the order is
rebuilt. To read takes no lock: a file that is gone is a miss, one that goes meanwhile stays readable. Nothing is flushed to the
disk: what a power failure leaves is compared like everything else. A process that is stopped while it holds the lock (which it does
for microseconds, but for listing) makes the others' puts time out until it goes on or ends.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import os
import secrets
import shutil
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import structlog

from kvbridge.config.stores import FileStoreSettings
from kvbridge.core.clock import monotonic
from kvbridge.core.errors import ConfigError
from kvbridge.tier.stores.base import Answer, Capabilities, Outcome, Pieces, StoredObject
from kvbridge.tier.stores.objects import is_object_name

log = structlog.get_logger(__name__)

WRITING = "writing-"
OPEN_TIMEOUT_S = 30.0
"""For the lock while a store is opened, which others hold for as long as they list the directory."""
LOOK_AGAIN_S = 0.0005
EVICT_TO = 15 / 16
"""Of the bound, so that a full store does not evict with each put."""
_VECTORS = 1024
"""IOV_MAX."""
_USAGE = struct.Struct("<qq")
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.preadv, _libc.pwritev):
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    _call.restype = ctypes.c_ssize_t


class FileStore:
    """See `base.ObjectStore`. Close it, or end the process."""

    capabilities = Capabilities(kind="files", batch=16, across_hosts=False)

    def __init__(self, settings: FileStoreSettings) -> None:
        """Open the directory, list it, and remove what dead processes were writing. Raises ConfigError when it cannot be used."""
        self._directory = settings.directory
        self._max_bytes = settings.max_bytes
        self._folders = {f"{number:02x}": self._directory / f"{number:02x}" for number in range(256)}
        self._known: OrderedDict[str, int] = OrderedDict()
        """Objects with their lengths, the one that was used longest ago first."""
        self._order = threading.Lock()
        """Over `_known`; held for moments, so that reading never waits for another process."""
        self._changing = threading.Lock()
        """Taken before the lock of `usage`, which only keeps other processes out."""
        self._changes = -1
        """The second number of `usage`, when nobody but us has changed anything since it was listed."""
        self._numbers = itertools.count()
        with ExitStack() as opened:
            try:
                _make_private(self._directory)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._usage = os.open(self._directory / "usage", flags, 0o600)
                opened.callback(os.close, self._usage)
                self._writing, lock = _make_writing(self._directory)
                opened.callback(os.close, lock)
                opened.callback(shutil.rmtree, self._writing, ignore_errors=True)
                with self._alone(monotonic() + OPEN_TIMEOUT_S):
                    self._list()
            except (OSError, _LateError) as error:
                raise ConfigError(
                    f"the store's directory {self._directory} cannot be used: {error}; it must be on a file system of this host "
                    "that this user may write and that knows locks (flock)"
                ) from error
            self._closing = opened.pop_all()

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """See `ObjectStore.write`."""
        return _each(objects, until_s, lambda each: self._write(each, until_s))

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """See `ObjectStore.read`."""
        return _each(objects, until_s, self._read)

    def present(self, names: Sequence[str], until_s: float) -> Answer:
        """See `ObjectStore.present`."""
        return _each(names, until_s, lambda name: _PRESENCE[self._path(name).exists()])

    def remove(self, names: Sequence[str], until_s: float) -> Answer:
        """See `ObjectStore.remove`."""
        return _each(names, until_s, lambda name: self._remove(name, until_s))

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Files are read into any memory."""

    def close(self) -> None:
        """See `ObjectStore.close`."""
        self._closing.close()

    # ------------------------------------------------------------------ one object

    def _write(self, each: StoredObject, until_s: float) -> Outcome:
        length, path = each.length_bytes, self._path(each.name)
        with suppress(FileNotFoundError):
            if path.stat().st_size == length:
                self._used(each.name, length, path)
                return Outcome.STORED
        written = self._writing / f"{each.name}.{next(self._numbers)}"
        with self._alone(until_s):
            if not self._make_room(length):
                return Outcome.FULL
            descriptor = self._begin(written, length)
        try:
            with _closing(descriptor):
                _move(_libc.pwritev, descriptor, each.pieces)
            with self._alone(until_s):
                self._count(-_remove_file(path))
                written.rename(path)
                self._used(each.name, length, path)
        except (OSError, _LateError):
            self._give_up(written)
            raise
        return Outcome.STORED

    def _begin(self, written: Path, length: int) -> int:
        """Make a file to write to, counted as it will be; we are alone, so whoever lists sees both or neither."""
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, length)
        except OSError:
            os.close(descriptor)
            written.unlink(missing_ok=True)
            raise
        self._count(length)
        return descriptor

    def _give_up(self, written: Path) -> None:
        """Take back what was begun. When others hold the lock, the number stays too large until somebody lists the directory."""
        with suppress(OSError, _LateError), self._alone(monotonic()):
            self._count(-_remove_file(written))
        written.unlink(missing_ok=True)

    def _read(self, each: StoredObject) -> Outcome:
        path = self._path(each.name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            self._note(each.name, None)
            return Outcome.ABSENT
        with _closing(descriptor):
            length = each.length_bytes
            if os.fstat(descriptor).st_size != length or _move(_libc.preadv, descriptor, each.pieces) != length:
                return Outcome.SHORT
            self._used(each.name, length, descriptor)
        return Outcome.HIT

    def _remove(self, name: str, until_s: float) -> Outcome:
        with self._alone(until_s):
            self._note(name, None)
            self._count(-_remove_file(self._path(name)))
        return Outcome.DROPPED

    def _used(self, name: str, length: int, file: Path | int) -> None:
        now_ns = time.time_ns()
        with suppress(OSError):  # it was removed meanwhile, which the next who wants it will see
            os.utime(file, ns=(now_ns, now_ns))
        self._note(name, length)

    def _note(self, name: str, length: int | None) -> None:
        """An object was used just now, or is not there any more (None)."""
        with self._order:
            self._known.pop(name, None)
            if length is not None:
                self._known[name] = length

    def _path(self, name: str) -> Path:
        return self._folders[name[-2:]] / name

    # ------------------------------------------------------------------ all of them; the callers are alone

    @contextmanager
    def _alone(self, until_s: float) -> Iterator[None]:
        """Keep other threads and processes from changing the directory. Raises _LateError when others hold the lock too long."""
        if not self._changing.acquire(timeout=max(0.0, until_s - monotonic())):
            raise _LateError("other requests keep it busy")
        try:
            while not _flocked(self._usage):
                if monotonic() >= until_s:
                    raise _LateError("another process holds its lock")
                time.sleep(LOOK_AGAIN_S)
            try:
                yield
            finally:
                fcntl.flock(self._usage, fcntl.LOCK_UN)
        finally:
            self._changing.release()

    def _make_room(self, length: int) -> bool:
        """Evict until there is room for so many bytes more. Returns whether there is."""
        most = self._max_bytes - length
        if most < 0:
            return False
        total, changes = self._read_usage()
        if total <= most:
            return True
        if changes != self._changes:
            total = self._list()
        total = self._evict(total, max(0, int(EVICT_TO * self._max_bytes) - length))
        if total > most:  # what is counted and not known
            total = self._evict(self._list(), most)
        return total <= most

    def _evict(self, total: int, most: int) -> int:
        before = total
        while total > most:
            with self._order:
                if not self._known:
                    break
                name, _ = self._known.popitem(last=False)
            total -= _remove_file(self._path(name))
        self._count(total - before)
        return total

    def _list(self) -> int:
        """Take stock of the directory, and remove what dead processes were writing. Returns the bytes of all that is left."""
        found, writing_bytes = [], 0
        for path in self._directory.glob(f"{WRITING}*"):
            writing_bytes += _tend_writing(path, self._writing)
        for folder in self._folders.values():
            folder.mkdir(mode=0o700, exist_ok=True)
            for file in os.scandir(folder):
                with suppress(FileNotFoundError):
                    if is_object_name(file.name):
                        facts = file.stat(follow_symlinks=False)
                        found.append((facts.st_mtime_ns, file.name, facts.st_size))
        with self._order:
            self._known = OrderedDict((name, length) for _, name, length in sorted(found))
        total = sum(length for _, _, length in found) + writing_bytes
        self._changes = self._read_usage()[1]
        os.pwrite(self._usage, _USAGE.pack(total, self._changes), 0)
        return total

    def _count(self, more_bytes: int) -> None:
        total, changes = self._read_usage()
        if changes == self._changes:
            self._changes += 1
        os.pwrite(self._usage, _USAGE.pack(total + more_bytes, changes + 1), 0)

    def _read_usage(self) -> tuple[int, int]:
        data = os.pread(self._usage, _USAGE.size, 0)
        return _USAGE.unpack(data) if len(data) == _USAGE.size else (0, 0)


_PRESENCE = {True: Outcome.PRESENT, False: Outcome.ABSENT}


class _LateError(Exception):
    """The deadline came before the lock."""


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
            log.warning("store_disk_full" if outcome is Outcome.FULL else "store_file_failed", reason=detail)
        outcomes.append(outcome)
    return Answer(tuple(outcomes), detail=detail)


def _move(call: Callable[..., int], descriptor: int, pieces: Pieces) -> int:
    """Read or write all pieces, one after the other from the file's beginning. Returns how many bytes were there."""
    left, offset = pieces.copy(), 0
    while len(left):
        vectors = left[:_VECTORS]
        moved = call(descriptor, vectors.ctypes.data, len(vectors), offset)
        if moved < 0:
            code = ctypes.get_errno()
            if code == errno.EINTR:
                continue
            raise OSError(code, os.strerror(code))
        if moved == 0:
            break
        offset += moved
        ends = np.cumsum(vectors[:, 1])
        whole = int(np.searchsorted(ends, moved, side="right"))
        rest = moved - int(ends[whole - 1]) if whole else moved
        left = left[whole:]
        if rest:
            left[0] += np.array([rest, -rest], dtype=np.int64).astype(np.uint64)
    return offset


@contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


def _remove_file(path: Path) -> int:
    """Remove a file if it is there. Returns its length."""
    try:
        length = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return length


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(
            f"the store's directory {directory} must belong to this user alone (chown {os.geteuid()}, chmod 0700): who can write "
            "there can put other bytes under every key"
        )


def _make_writing(directory: Path) -> tuple[Path, int]:
    """Make a directory for what this process writes. Returns it with the descriptor that holds its lock."""
    while True:
        path = directory / f"{WRITING}{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # another process has taken it for a dead one's before it was locked
            descriptor = _lock_directory(path)
            if descriptor is not None:
                if path.exists():
                    return path, descriptor
                os.close(descriptor)


def _lock_directory(path: Path) -> int | None:
    """Lock a directory. Returns the descriptor that holds the lock, or None when another one does."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    if _flocked(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _flocked(descriptor: int) -> bool:
    """Take the lock of a file or directory if nobody has it. Returns whether it is ours."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tend_writing(path: Path, ours: Path) -> int:
    """Return the bytes of what a process is writing; remove what a dead one was."""
    with suppress(FileNotFoundError):
        descriptor = None if path == ours else _lock_directory(path)
        if descriptor is None:
            return sum(_length(Path(file.path)) for file in os.scandir(path))
        with _closing(descriptor):
            shutil.rmtree(path, ignore_errors=True)
    return 0


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
