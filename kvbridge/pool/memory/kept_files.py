"""The files in shared memory that a node's processes pass on, one after the other.

One process at a time has them: it holds the lock of their lock file, which the kernel takes from the dead. It writes there,
again and again, the time until which the others are kept if it ends now; a sweep reads that time (`leftovers.py`).

Any user of the host can make files in shared memory, and these names follow from those of instance and node. So a name counts only
where it is a regular file of this user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from pathlib import Path

import structlog

from kvbridge.core.closing import Closing
from kvbridge.core.errors import RegistrationError

log = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.02
_RENEWALS, _RENEW_EVERY_S = 10, 5.0
"""The expiry is written anew so many times within the time for which files are kept, and at least so often."""


class ForeignFilesError(RegistrationError):
    """A name of kept files is taken by something that is no file of this user."""


class KeptFiles(Closing):
    """The right to the kept files of one node."""

    def __init__(self, lock: Path, descriptor: int, keep_s: float) -> None:
        """Use `lock_files` instead."""
        self.directory = lock.parent
        self._lock = lock
        self._prefix = lock.name.removesuffix(".lock")
        self._descriptor = descriptor
        self._keep_s = keep_s
        self._renew_at_s = 0.0
        self.journal = lock.with_suffix(".journal")
        """Where the journal of these files lies."""

    @classmethod
    def lock_files(cls, directory: Path, prefix: str, *, keep_s: float, wait_s: float) -> KeptFiles:
        """Get the right to the files whose names begin with `prefix`, which ends in `-keep`, at the latest after `wait_s`.

        Raises RegistrationError while another process of this user has it, ForeignFilesError where a name is taken.
        """
        lock, deadline_s = directory / f"{prefix}.lock", time.monotonic() + wait_s
        while True:
            _require_own_names(directory, prefix)
            try:
                descriptor = _locked(lock)
            except OSError as error:
                _require_own_names(directory, prefix)  # one may have been taken just now
                raise RegistrationError(f"{lock} cannot be locked: {error}") from error
            if descriptor is not None:
                found = cls(lock, descriptor, keep_s)
                found.renew()
                return found
            if time.monotonic() >= deadline_s:
                raise RegistrationError(
                    f"{lock}: another daemon of the same instance and node name uses the kept pools (pools.keep_s); end it, or "
                    "give this one another name"
                )
            time.sleep(_LOOK_EVERY_S)

    def read_journal(self) -> bytes:
        """Return the journal's bytes. Raises OSError, and waits for nobody, where it is no file of this user."""
        descriptor = os.open(self.journal, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if _why_foreign(os.fstat(descriptor)):
                raise PermissionError(f"{self.journal} is not this user's file")
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    def new_path(self, incarnation: str) -> Path:
        """Return the beginning of the names of this process's pools: nobody who knew earlier names finds these files."""
        return self.directory / f"{self._prefix}-{incarnation}"

    def pools(self) -> dict[str, list[Path]]:
        """Return the pools' files by what their names have after the incarnation, as `twins.0`."""
        found: dict[str, list[Path]] = {}
        for path in filter(_is_own, sorted(self.directory.glob(f"{self._prefix}-*"))):
            found.setdefault(path.name.removeprefix(f"{self._prefix}-").partition(".")[2], []).append(path)
        return found

    def remove_pools(self, *, besides: str = "") -> None:
        """Remove every file but the lock, and but the pools of an incarnation."""
        pools = [path for paths in self.pools().values() for path in paths]
        kept = [path for path in pools if besides and path.name.startswith(self.new_path(besides).name)]
        for path in (self.journal, *pools):
            if path not in kept and _is_own(path):
                path.unlink(missing_ok=True)

    def renew(self) -> None:
        """Keep the files for the whole time again, should this process end now. Call it often."""
        if time.monotonic() >= self._renew_at_s:
            self._renew_at_s = time.monotonic() + min(_RENEW_EVERY_S, self._keep_s / _RENEWALS)
            self._write_expiry()

    def close(self, *, keep: bool = False) -> None:
        """Give the right up; the files are kept for the next one, or removed. Harmless when closed."""
        if self._descriptor < 0:
            return
        if keep:
            self._write_expiry()
        else:
            self.remove_pools()
            self._lock.unlink(missing_ok=True)
        os.close(self._descriptor)
        self._descriptor = -1

    def _write_expiry(self) -> None:
        os.pwrite(self._descriptor, f"{time.time() + self._keep_s:032.6f}".encode(), 0)


def discard_files(directory: Path, prefix: str) -> None:
    """Remove kept files whose names begin with `prefix`, unless another process has them."""
    if (directory / f"{prefix}.lock").exists():
        with contextlib.suppress(RegistrationError), KeptFiles.lock_files(directory, prefix, keep_s=0.0, wait_s=0.0):
            log.info("kept_pools_removed", directory=str(directory), reason="pools.keep_s is 0")


def _require_own_names(directory: Path, prefix: str) -> None:
    for path in sorted(directory.glob(f"{prefix}[.-]*")):
        with contextlib.suppress(FileNotFoundError):
            if why := _why_foreign(path.lstat()):
                raise ForeignFilesError(
                    f"the pools cannot be kept (pools.keep_s): {path} {why}; have it removed, by that user or by root, and start "
                    "this daemon again"
                )


def _why_foreign(found: os.stat_result) -> str:
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, and this daemon is user {os.geteuid()}"
    return "" if stat.S_ISREG(found.st_mode) else "is no regular file"


def _is_own(path: Path) -> bool:
    try:
        return not _why_foreign(path.lstat())
    except FileNotFoundError:
        return False


def _locked(path: Path) -> int | None:
    """Return a descriptor that holds the lock of a file, made if there is none; None while another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(descriptor)
        if found.st_uid == os.geteuid() and os.path.samestat(found, path.lstat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):  # or a sweep was faster
        pass
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None
