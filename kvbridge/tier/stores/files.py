"""A store of files: each object is one file of a directory, whole or not there, and all of them take at most so many bytes.

    DIRECTORY/3f/NAME    an object, in one of 256 directories by the last digits of its name

An object is written to a file without a name (O_TMPFILE), which vanishes with its process however that ends. The file gets its name
when it is whole and there is room for it. Objects that are being written come on top of the bound, one for each thread. Several
daemons of a host may use a directory: each counts the objects there when it starts, then its own changes, and has a bound of its
own.

The longest unused objects go first, by the time of modification, which a use renews: the oldest eighth of at least a thousand
objects, which are a fair sample since names are hashes. Reading takes no lock: a file that is gone is a miss, and a file that is
removed meanwhile stays readable. Nothing is flushed to the disk: objects that a power failure has left are compared like all
others.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path

import structlog

from kvbridge.config.tier import FileStoreSettings
from kvbridge.core.errors import ConfigError, NotReadyError
from kvbridge.core.process import monotonic
from kvbridge.pool.memory.shared_mapping import opened
from kvbridge.tier.stores.objects import Answer, Outcome, StoredObject, Stretches, is_object_name

log = structlog.get_logger(__name__)

SAMPLE = 1_000
_VECTORS = 1024  # IOV_MAX
_libc = ctypes.CDLL(None, use_errno=True)
_preadv, _pwritev = _libc.preadv, _libc.pwritev
for _call in (_preadv, _pwritev):
    _call.argtypes, _call.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64), ctypes.c_ssize_t
_FOLDERS = [f"{number:02x}" for number in range(256)]
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class FileStore:
    """Objects in a directory. `MooncakeStore` does the same.

    Calls come from several threads, and never raise for the state of the store or of an object. Names in one request are distinct.
    The memory of a request stays valid as long as this process, and the store may use it until an answer that is settled. A call
    returns soon after `until_s` (`time.monotonic`) if it can. For a firm deadline, a process of its own uses the store (`client`).
    """

    kind, batch = "files", 4
    """`batch`: objects that the store moves together. It takes more, and moves one batch after the other."""

    def __init__(self, settings: FileStoreSettings) -> None:
        """Open the directory and count its objects. Raises ConfigError when it cannot be used."""
        self._max_bytes, self._directory = settings.max_bytes, settings.directory
        self._changing = threading.Lock()
        """Held while a thread adds or removes an object."""
        self.total_bytes = 0
        """Bytes of all objects, as far as this process knows."""
        self._turn = cycle(_FOLDERS)
        """The folders, in the order in which they are searched for old objects."""
        directory = self._directory
        with ExitStack() as stack:
            try:
                self._root = _open_private(directory)
                stack.callback(os.close, self._root)
                with opened(".", os.O_WRONLY | os.O_TMPFILE, dir_fd=self._root):
                    pass
                for folder in _FOLDERS:
                    with suppress(FileExistsError):
                        os.mkdir(folder, 0o700, dir_fd=self._root)
                self._count_anew()
            except OSError as error:
                raise ConfigError(
                    f"the store's directory {directory} cannot be used: {error}; it must be on a file system of this host that "
                    "this user may write and that knows files without a name (O_TMPFILE: ext4, xfs, btrfs, tmpfs)"
                ) from error
            self._closing = stack.pop_all()

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Keep objects whole, or not at all: STORED, or why not. An object of the same name may stay as it is.

        Raises NotReadyError when somebody has removed the directory.
        """
        return _each(objects, until_s, lambda each: self._put(each, until_s))

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Fill the stretches: HIT, which nobody has compared yet, or why not; the contents are then undefined."""
        return _each(objects, until_s, self._read)

    def present(self, names: Sequence[str], until_s: float) -> Answer:
        """Answer PRESENT or ABSENT."""
        return _each(names, until_s, lambda name: Outcome.ABSENT if self._length(name) is None else Outcome.PRESENT)

    def remove(self, names: Sequence[str], until_s: float) -> Answer:
        """Answer DROPPED, also for objects that were never there."""
        return _each(names, until_s, lambda name: self._remove(name, until_s))

    def clear(self, prefix: str, until_s: float) -> Answer:
        """Remove all objects whose names begin so: one outcome for all, DROPPED or why some may still be there."""
        cleared = 0

        def clear_folder(folder: str) -> Outcome:  # one at a time, so that other requests have their turn
            nonlocal cleared
            with self._alone(until_s):
                for _, name, _ in list(self._list(folder)):
                    if name.startswith(prefix):
                        self._unlink(name)
                        cleared += 1
            return Outcome.DROPPED

        answer = _each(_FOLDERS, until_s, clear_folder)
        worst = next((outcome for outcome in answer.outcomes if outcome is not Outcome.DROPPED), Outcome.DROPPED)
        return Answer(outcomes=(worst,), detail=answer.detail, cleared=cleared)

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Take the memory (address, length) of all later requests. Files are read into any memory."""

    def close(self) -> None:
        """Close the directory. Harmless when closed."""
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
        with opened(".", os.O_WRONLY | os.O_TMPFILE, dir_fd=self._root) as descriptor:
            if _move(_pwritev, descriptor, each.stretches) != length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _used(descriptor)
            with self._alone(until_s):
                self._make_room(self._max_bytes - length)
                while not self._name(descriptor, each.name):
                    self._unlink(each.name)
                self.total_bytes += length
        return Outcome.STORED

    def _read(self, each: StoredObject) -> Outcome:
        length = each.length_bytes
        try:
            with opened(_path(each.name), os.O_RDONLY, dir_fd=self._root) as descriptor:
                if os.fstat(descriptor).st_size != length or _move(_preadv, descriptor, each.stretches) != length:
                    return Outcome.SHORT
                _used(descriptor)
        except FileNotFoundError:
            return Outcome.ABSENT
        return Outcome.HIT

    def _remove(self, name: str, until_s: float) -> Outcome:
        with self._alone(until_s):
            self._unlink(name)
        return Outcome.DROPPED

    def _length(self, name: str) -> int | None:
        try:
            return os.stat(_path(name), dir_fd=self._root, follow_symlinks=False).st_size
        except FileNotFoundError:
            return None

    # ------------------------------------------------------------------ all of them; callers hold `_changing`

    @contextmanager
    def _alone(self, until_s: float) -> Iterator[None]:
        """Keep other threads from changing the directory. Raises _LateError when they do not let go in time."""
        if not self._changing.acquire(timeout=max(0.0, until_s - monotonic())):
            raise _LateError("other requests keep the store's directory busy")
        try:
            yield
        finally:
            self._changing.release()

    def _name(self, descriptor: int, name: str) -> bool:
        """Give a file its name, unless there is an object of that name."""
        try:
            # Only with `dst_dir_fd` does this follow the link to the file.
            os.link(f"/proc/self/fd/{descriptor}", _path(name), dst_dir_fd=self._root, follow_symlinks=True)
        except FileExistsError:
            return False
        return True

    def _unlink(self, name: str) -> None:
        """Remove an object if it is there."""
        length = self._length(name)
        if length is not None:
            with suppress(FileNotFoundError):
                os.unlink(_path(name), dir_fd=self._root)
            self.total_bytes -= length

    def _make_room(self, most_bytes: int) -> None:
        """Evict until all objects take at most so many bytes."""
        is_counted = False
        while self.total_bytes > most_bytes:
            found, expected_bytes = self._sample()
            if not is_counted and self.total_bytes > 2 * expected_bytes:  # somebody has removed files by hand, say
                self._count_anew()
                is_counted = True
                continue
            for _, name, _ in found[: max(1, len(found) // 8)]:
                if self.total_bytes > most_bytes or len(found) >= SAMPLE:
                    self._unlink(name)

    def _sample(self) -> tuple[list[tuple[int, str, int]], float]:
        """Return objects of the next folders, the longest unused first, and the bytes of all folders if all were like these."""
        found: list[tuple[int, str, int]] = []
        looked = 0
        while looked < len(_FOLDERS) and len(found) < SAMPLE:
            found += self._list(next(self._turn))
            looked += 1
        return sorted(found), sum(length for _, _, length in found) * len(_FOLDERS) / looked

    def _list(self, folder: str) -> Iterator[tuple[int, str, int]]:
        with opened(folder, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._root) as found, os.scandir(found) as files:
            for file in files:
                if is_object_name(file.name):
                    with suppress(FileNotFoundError):  # another daemon was faster
                        facts = file.stat(follow_symlinks=False)
                        yield facts.st_mtime_ns, file.name, facts.st_size

    def _count_anew(self) -> None:
        self.total_bytes = sum(length for folder in _FOLDERS for _, _, length in self._list(folder))


class _LateError(Exception):
    """The deadline has come before the turn."""


def _open_private(directory: Path) -> int:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = directory.stat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise ConfigError(
            f"the store's directory {directory} must belong to this user alone (chown {os.geteuid()}, chmod 0700): whoever can "
            "write there can put other bytes under every key"
        )
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _used(descriptor: int) -> None:
    """Note that an object was used now; the kernel's own notes are by a coarser clock."""
    now_ns = time.time_ns()
    os.utime(descriptor, ns=(now_ns, now_ns))


def _path(name: str) -> str:
    return f"{name[-2:]}/{name}"


def _each(items: Sequence[object], until_s: float, act: Callable[..., Outcome]) -> Answer:
    """Do something with each item until the deadline, and return the outcome of each."""
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
    return Answer(outcomes=tuple(outcomes), detail=detail)


def _move(call: Callable[..., int], descriptor: int, stretches: Stretches) -> int:
    """Read or write all stretches, one after the other from the file's beginning. Returns how many bytes were moved."""
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
