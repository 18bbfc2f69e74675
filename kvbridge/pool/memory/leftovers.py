"""Files in shared memory whose owner has gone: removed, or kept for the next owner for a while.

A file of this form is locked before it gets its name and while its owner lives (see `shared_mapping`), so a named file without a
lock has no owner. Kept files share one lock file instead: its lock means that they have an owner, and its content is the time at
which they expire (`KeptFiles`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

from kvbridge.core.errors import RegistrationError
from kvbridge.core.process import Closing
from kvbridge.pool.memory.shared_mapping import opened

log = structlog.get_logger(__name__)

POOL_PREFIX = "kvbridge-"
"""The beginning of the names of pools: then the node's digest, the incarnation's number and the part of the pool."""
PROOF_PREFIX = ".kvbridge-"
"""The beginning of the names of proofs and lock files (`transport/local/host.py`): then a random number."""

_KEPT_NAME = re.compile(rf"({re.escape(POOL_PREFIX)}[0-9a-f]{{12}}-keep)[.-].+")
"""Names of kept files; the group is the beginning of the names of one node's files."""
_NAMES = {
    "pool": re.compile(re.escape(POOL_PREFIX) + r"[0-9a-f]{12}-[0-9a-f]{16}\..+"),
    "kept": _KEPT_NAME,
    "proof": re.compile(re.escape(PROOF_PREFIX) + r"[0-9a-f]{16}"),
}
_READ = os.O_RDONLY | os.O_NONBLOCK
_Inode = tuple[int, int, int]


class Verdict(StrEnum):
    """The outcome for a file."""

    REMOVED = "removed"
    IN_USE = "in use"
    KEPT = "kept"
    FOREIGN = "foreign"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of kvbridge in shared memory, and the verdict on it, in a dry run as well."""

    path: Path
    kind: str
    """`pool`, `kept` or `proof`."""
    size_bytes: int
    """Memory that the file takes."""
    user_id: int
    holder: int | None
    """The living process that owns the file, if this process can see it."""
    verdict: Verdict
    why: str


def sweep(directories: Iterable[Path], *, dry_run: bool = False) -> list[Leftover]:
    """Remove this user's files of kvbridge that belong to no living process, and return all files of kvbridge.

    `dry_run`: remove nothing; `removed` then means that the sweep would. Safe in several processes at once and beside processes
    that are starting. A directory that does not exist has no files. Raises OSError when a directory cannot be read.
    """
    holders, found = _lock_holders(), list[Leftover]()
    # In the order of names, so the lock of kept files comes behind them.
    paths = [path for each in dict.fromkeys(directories) if each.is_dir() for path in sorted(each.iterdir())]
    for path in paths:
        kind = next((kind for kind, form in _NAMES.items() if form.fullmatch(path.name)), "")
        try:
            facts = path.lstat()
            if not kind or not stat.S_ISREG(facts.st_mode):
                continue
            verdict, why = _remove_unowned(path, facts.st_uid, kind, dry_run=dry_run)
        except FileNotFoundError:
            continue  # it has gone meanwhile
        except OSError as error:
            verdict, why = Verdict.FAILED, error.strerror or str(error)
        holder = holders.get((os.major(facts.st_dev), os.minor(facts.st_dev), facts.st_ino))
        found.append(Leftover(path, kind, facts.st_blocks * 512, facts.st_uid, holder, verdict, why))
    return found


def remove_leftovers(directories: Iterable[Path]) -> None:
    """Sweep when a daemon starts, and log the removed files and those that cannot be removed."""
    try:
        found = sweep(directories)
    except OSError as error:
        log.warning("leftovers_not_removed", reason=str(error))
        return
    removed = [each for each in found if each.verdict is Verdict.REMOVED]
    if removed:
        log.info("leftovers_removed", files=len(removed), bytes=sum(each.size_bytes for each in removed))
    for each in found:
        if each.verdict is Verdict.FAILED:
            log.warning("leftovers_not_removed", file=str(each.path), reason=each.why)


def _remove_unowned(path: Path, user_id: int, kind: str, *, dry_run: bool) -> tuple[Verdict, str]:
    if user_id != os.geteuid():
        return Verdict.FOREIGN, "it belongs to another user"
    locked = path
    if kind == "kept" and (name := _KEPT_NAME.fullmatch(path.name)):
        lock = path.with_name(f"{name[1]}.lock")
        locked = lock if _is_own(lock) else path
    try:
        with opened(locked, _READ) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), locked.lstat()):
                return Verdict.IN_USE, "another sweep was faster, and a new owner has taken the name"
            left_s = 0.0
            if kind == "kept" and locked.suffix == ".lock":
                with contextlib.suppress(ValueError):
                    left_s = float(os.pread(descriptor, 32, 0)) - time.time()
            if left_s > 0:
                return Verdict.KEPT, f"a daemon of the same name can reuse it for {left_s:.0f} s more (pools.keep_s)"
            if not dry_run:
                path.unlink()
    except BlockingIOError:
        return Verdict.IN_USE, "a living process holds its lock"
    return Verdict.REMOVED, "no living process holds its lock"


def _lock_holders() -> dict[_Inode, int]:
    """Return the process that holds the lock of each file, as far as the kernel shows it: for display, never for a decision."""
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    holders = {}
    for line in lines:  # "3: FLOCK  ADVISORY  WRITE 4242 00:19:77 0 EOF"; "->" instead of FLOCK is a process that waits
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK":
            major, minor, inode = words[5].split(":")
            holders[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return holders


# ------------------------------------------------------------------------------------------- kept files

_LOOK_EVERY_S = 0.02
_RENEWALS, _RENEW_EVERY_S = 10, 5.0
"""The expiry is renewed this many times within the time for which files are kept, and at least so often."""


class ForeignFilesError(RegistrationError):
    """A name of kept files is taken, and not by a file of this user."""


class KeptFiles(Closing):
    """The right to the files that a node's processes pass on, one after the other.

    The process that holds the lock of their lock file has the right; the kernel takes the lock from a dead process. The holder
    writes the expiry of the files into the lock file again and again, and a sweep reads it. Any user of the host can make files in
    shared memory, and these names follow from those of instance and node. Therefore only regular files of this user count.
    """

    def __init__(self, directory: Path, prefix: str, *, keep_s: float, wait_s: float) -> None:
        """Get the right to the files whose names begin with `prefix`, which ends in `-keep`, at the latest after `wait_s`.

        Raises RegistrationError when another process of this user keeps it, ForeignFilesError where a name is taken.
        """
        self._directory, self._prefix, self._keep_s = directory, prefix, keep_s
        self._lock, self.journal = directory / f"{prefix}.lock", directory / f"{prefix}.journal"
        self._renew_at_s, deadline_s = 0.0, time.monotonic() + wait_s
        while True:
            self._require_own_names()
            try:
                descriptor = _locked(self._lock)
            except OSError as error:
                self._require_own_names()  # a name may have been taken just now
                raise RegistrationError(f"{self._lock} cannot be locked: {error}") from error
            if descriptor is not None:
                break
            if time.monotonic() >= deadline_s:
                raise RegistrationError(
                    f"{self._lock}: another daemon of the same instance and node name uses the kept pools (pools.keep_s); end it, "
                    "or give this one another name"
                )
            time.sleep(_LOOK_EVERY_S)
        self._descriptor = descriptor
        self.renew()

    def _require_own_names(self) -> None:
        for path in sorted(self._directory.glob(f"{self._prefix}[.-]*")):
            with contextlib.suppress(FileNotFoundError):
                if why := _why_foreign(path.lstat()):
                    raise ForeignFilesError(
                        f"the pools cannot be kept (pools.keep_s): {path} {why}; have it removed, by that user or by root, and "
                        "start this daemon again"
                    )

    def read_journal(self) -> bytes:
        """Return the journal's bytes. Raises OSError, without waiting, where the journal is no file of this user."""
        with opened(self.journal, _READ) as descriptor:
            if _why_foreign(os.fstat(descriptor)):
                raise PermissionError(f"{self.journal} is not this user's file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()

    def new_path(self, incarnation: str) -> Path:
        """Return the beginning of the names of this process's pools: a process that knows earlier names does not find them."""
        return self._directory / f"{self._prefix}-{incarnation}"

    def pools(self) -> dict[str, list[Path]]:
        """Return the pools' files by the end of their names after the incarnation, as `twins.0`."""
        found: dict[str, list[Path]] = {}
        for path in filter(_is_own, sorted(self._directory.glob(f"{self._prefix}-*"))):
            found.setdefault(path.name.removeprefix(f"{self._prefix}-").partition(".")[2], []).append(path)
        return found

    def remove_pools(self, *, besides: str = "") -> None:
        """Remove every file except the lock and the pools of the incarnation `besides`."""
        for path in (self.journal, *(path for paths in self.pools().values() for path in paths)):
            if not (besides and path.name.startswith(self.new_path(besides).name)) and _is_own(path):
                path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Renew the expiry, for the case that this process ends now. Call it often."""
        if time.monotonic() >= self._renew_at_s:
            self._renew_at_s = time.monotonic() + min(_RENEW_EVERY_S, self._keep_s / _RENEWALS)
            os.pwrite(self._descriptor, f"{time.time() + self._keep_s:032.6f}".encode(), 0)

    def close(self, *, keep: bool = False) -> None:
        """Give the right up; keep the files for the next process, or remove them. Harmless when closed."""
        if self._descriptor < 0:
            return
        if keep:
            self._renew_at_s = 0.0
            self.renew()
        else:
            self.remove_pools()
            self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1


def discard_files(directory: Path, prefix: str) -> None:
    """Remove kept files whose names begin with `prefix`, unless another process has the right to them."""
    if (directory / f"{prefix}.lock").exists():
        with contextlib.suppress(RegistrationError), KeptFiles(directory, prefix, keep_s=0.0, wait_s=0.0):
            log.info("kept_pools_removed", directory=str(directory), reason="pools.keep_s is 0")


def _is_own(path: Path) -> bool:
    try:
        return not _why_foreign(path.lstat())
    except FileNotFoundError:
        return False


def _why_foreign(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this daemon is user {os.geteuid()}"
    return "" if stat.S_ISREG(found.st_mode) else "is no regular file"


def _locked(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a file, made if there is none; None while another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):  # or a sweep was faster
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(descriptor)
            if found.st_uid == os.geteuid() and os.path.samestat(found, path.lstat()):
                stack.pop_all()
                return descriptor
    return None
