"""Files of dead processes in shared memory: found by the form of their names, proved by their locks, removed.

A file of this form is locked before it gets its name, for as long as its owner lives (see `shared_mapping`), so a named file
without a lock has no owner. Kept files are different: they share one lock file, whose lock means that they have an owner, and whose
content is the time at which they expire (`kept_files.py`).
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

POOL_PREFIX = "kvbridge-"
"""The beginning of the names of pools: then the node's digest, the incarnation's number and the part of the pool."""
PROOF_PREFIX = ".kvbridge-"
"""The beginning of the names of proofs and lock files (`transport/local/host.py`): then a random number."""

_POOL_NAME = re.compile(re.escape(POOL_PREFIX) + r"[0-9a-f]{12}-[0-9a-f]{16}\..+")
KEPT_NAME = re.compile(rf"({re.escape(POOL_PREFIX)}[0-9a-f]{{12}}-keep)[.-].+")
"""Names of kept files; its group is what those of one node begin with."""
_PROOF_NAME = re.compile(re.escape(PROOF_PREFIX) + r"[0-9a-f]{16}")
_PROC_LOCKS = Path("/proc/locks")


class Verdict(StrEnum):
    """The outcome for a file."""

    REMOVED = "removed"
    IN_USE = "in use"
    KEPT = "kept"
    FOREIGN = "foreign"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of kvbridge in shared memory, and what became of it (or would become of it, in a dry run)."""

    path: Path
    kind: str
    """`pool`, `kept` or `proof`."""
    size_bytes: int
    """Memory that it takes."""
    user_id: int
    holder: int | None
    """The living process that owns it, if it can be seen from here."""
    verdict: Verdict
    why: str


def kept_lock(path: Path) -> Path:
    """Return the file that is locked for a kept file."""
    found = KEPT_NAME.fullmatch(path.name)
    return path.with_name(f"{found[1] if found else path.name}.lock")


def kept_until(descriptor: int) -> float:
    """Return until when, in seconds of the clock that all processes share, the files of an open lock file are kept."""
    try:
        return float(os.pread(descriptor, 32, 0))
    except ValueError:
        return 0.0


def sweep(directories: Iterable[Path], *, dry_run: bool = False) -> list[Leftover]:
    """Remove this user's files of kvbridge that belong to no living process, and return all that there are.

    `dry_run`: remove nothing; `removed` then means that the sweep would. Safe in several processes at once and beside
    processes that are starting. A directory that does not exist has none. Raises OSError when one cannot be read.
    """
    holders = _lock_holders()
    found = [each for directory in dict.fromkeys(directories) for each in _candidates(directory)]
    return [swept for path, kind in found if (swept := _sweep_one(path, kind, holders, dry_run=dry_run)) is not None]


def remove_leftovers(directories: Iterable[Path]) -> None:
    """Sweep when a daemon starts, and log what was removed. What cannot be swept is logged and stays."""
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


def _candidates(directory: Path) -> Iterator[tuple[Path, str]]:
    if not directory.is_dir():
        return
    for path in sorted(directory.iterdir()):
        if _POOL_NAME.fullmatch(path.name):
            yield path, "pool"
        elif KEPT_NAME.fullmatch(path.name):
            yield path, "kept"  # the one that is locked comes last, by its name
        elif _PROOF_NAME.fullmatch(path.name):
            yield path, "proof"


def _sweep_one(path: Path, kind: str, holders: dict[_Inode, int], *, dry_run: bool) -> Leftover | None:
    """None: not a regular file, or it has gone meanwhile."""
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return None
        verdict, why = _remove_unowned(path, found.st_uid, kind, dry_run=dry_run)
    except FileNotFoundError:
        return None
    except OSError as error:
        verdict, why = Verdict.FAILED, error.strerror or str(error)
    return Leftover(path, kind, found.st_blocks * 512, found.st_uid, holders.get(_inode(found)), verdict, why)


def _remove_unowned(path: Path, user_id: int, kind: str, *, dry_run: bool) -> tuple[Verdict, str]:
    if user_id != os.geteuid():
        return Verdict.FOREIGN, "it belongs to another user"
    locked = kept_lock(path) if kind == "kept" and _is_own(kept_lock(path)) else path
    descriptor = os.open(locked, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), locked.lstat()):
            return Verdict.IN_USE, "another sweep was faster, and a new owner has taken the name"
        left_s = kept_until(descriptor) - time.time() if kind == "kept" and locked == kept_lock(path) else 0.0
        if left_s > 0:
            return Verdict.KEPT, f"a daemon of the same name can go on with it for {left_s:.0f} s more (pools.keep_s)"
        if not dry_run:
            path.unlink()
    except BlockingIOError:
        return Verdict.IN_USE, "a living process holds its lock"
    finally:
        os.close(descriptor)
    return Verdict.REMOVED, "no living process holds its lock"


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


_Inode = tuple[int, int, int]


def _inode(found: os.stat_result) -> _Inode:
    return os.major(found.st_dev), os.minor(found.st_dev), found.st_ino


def _lock_holders() -> dict[_Inode, int]:
    """Which process holds the lock on which file, as far as the kernel shows it: for display, never for a decision."""
    try:
        lines = _PROC_LOCKS.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    holders = {}
    for line in lines:  # "3: FLOCK  ADVISORY  WRITE 4242 00:19:77 0 EOF"; "->" instead of FLOCK is somebody who waits
        words = line.split()
        if len(words) >= 6 and words[1] == "FLOCK":
            major, minor, inode = words[5].split(":")
            holders[int(major, 16), int(minor, 16), int(inode)] = int(words[4])
    return holders
