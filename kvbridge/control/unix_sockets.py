"""Unix sockets of a daemon: the directory in which they lie, and the process at the other end of a connection.

Only the daemon's user and a configured group may enter the directory, and one process serves each socket.

The end of a connection is not the end of a process: a process that is being killed closes its sockets before its GPU contexts, and
a process that lives may close its sockets at any time. A pidfd becomes readable when every thread of the process has ended and all
that the kernel did for it is undone.
"""

from __future__ import annotations

import asyncio
import errno
import grp
import os
import select
import socket as unix
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvbridge.core.addresses import check_ipc_path
from kvbridge.core.errors import ConflictError, UnavailableError

ENGINE_SOCKET = "engine.sock"
WORKER_SOCKET = "worker.sock"
"""The sockets of a daemon for its engines and for its rank workers."""
_PROBE_S = 1.0
_BACKLOG = 128
_SO_PEERPIDFD = 77
"""Linux 6.5; it also finds a process of another pid namespace, whose number this process cannot know."""
_CREDENTIALS = struct.Struct("iII")
_LACKING = {errno.ENOPROTOOPT, errno.EINVAL, errno.ENODATA}
"""The errors of a kernel that does not know the option, or knows no process of this connection."""


def prepare_runtime_directory(path: Path, group: int | None = None) -> Path:
    """Make `path` if needed and return it: mode 0700, or 0750 for a group.

    Raises UnavailableError when another user owns it or others can enter it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnavailableError(f"runtime directory {path} cannot be made: {error.strerror}") from error
    require_private_directory(path, forbidden=0o077 if group is None else 0o007)
    if group is not None:
        try:
            os.chown(path, -1, group)
            path.chmod(0o750)
        except OSError as error:
            raise UnavailableError(
                f"runtime_group: runtime directory {path} cannot be given to group {group}: {error.strerror}; user "
                f"{os.geteuid()} of this daemon must be a member of it (supplementary groups)"
            ) from error
    return path


def group_number(group: int | str) -> int:
    """Return the number of a group. Raises UnavailableError for a name that this system does not know."""
    if isinstance(group, int) or group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UnavailableError(f"runtime_group: there is no group '{group}' here; give its number") from None


def listen_at(path: Path, *, to_group: bool) -> unix.socket:
    """Return a socket that listens at `path` for this user and, with `to_group`, for the group of its directory.

    Raises ConfigError when the path is unfit, ConflictError when another process serves it.
    """
    check_ipc_path(str(path))
    require_unserved(path)
    path.unlink(missing_ok=True)  # left by a process that was killed
    listening = unix.socket(unix.AF_UNIX, unix.SOCK_STREAM)
    before = os.umask(0o177)  # for the whole process: files of other threads are more private than usual meanwhile
    try:
        listening.setblocking(False)
        listening.bind(str(path))
    except OSError as error:
        listening.close()
        raise UnavailableError(f"{path} cannot be listened at: {error.strerror}") from error
    finally:
        os.umask(before)
    facts = path.parent.stat()
    if to_group and facts.st_mode & 0o010:
        os.chown(path, -1, facts.st_gid)
        path.chmod(0o660)
    listening.listen(_BACKLOG)
    return listening


def remove_socket(path: Path, inode: int) -> None:
    """Remove the file of a socket that this process has closed. Another process's socket stays."""
    with suppress(OSError):
        if path.stat().st_ino == inode:
            path.unlink()


def require_private_directory(path: Path, user: int | None = None, *, forbidden: int = 0o027) -> bool:
    """Return whether the directory `path`, whose sockets a client trusts, is there.

    Raises UnavailableError unless `path` is a directory of that user (default: this one) without any of the rights `forbidden`. By
    default these are the rights by which somebody else could put a socket there; the daemon decides who may connect.
    """
    expected = os.geteuid() if user is None else user
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UnavailableError(f"runtime directory {path} cannot be looked at: {error.strerror}") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != expected:
        whose = "this user" if user is None else f"user {user}"
        raise UnavailableError(
            f"runtime directory {path} is not a directory of {whose}; choose another, or name its user (daemon_user)"
        )
    if stat.S_IMODE(facts.st_mode) & forbidden:
        raise UnavailableError(f"runtime directory {path} can be entered by others; run: chmod 700 {path}")
    if not os.access(path, os.X_OK):
        raise UnavailableError(
            f"runtime directory {path} may not be entered by user {os.geteuid()} of this process, who is not in its group "
            f"{facts.st_gid}; make it a member (containers: supplementalGroups), or set the daemon's runtime_group"
        )
    return True


def require_unserved(path: Path) -> None:
    """Raise ConflictError when a process serves this Unix socket."""
    if not path.exists():
        return
    with unix.socket(unix.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return
    raise ConflictError(f"another process serves {path}; stop it, or configure another runtime directory")


# ------------------------------------------------------------------------------------------- processes


class PeerProcess:
    """The process at the other end of a connection. Use it in one running loop, and `close` it unless `when_ended` was called."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        """The number of the process; 0: the process is in a pid namespace that this process does not see."""
        self._pidfd = pidfd
        self._watched = False

    @classmethod
    def of_connection(cls, connection: unix.socket) -> PeerProcess:
        """Ask the kernel who made a connection. A process that the kernel does not name is not `followed`."""
        try:
            return cls(*_ask(connection))
        except OSError:  # the connection is gone: nobody has been answered on it
            return cls(0, None)

    @property
    def followed(self) -> bool:
        """Whether this process will learn of the end."""
        return self._pidfd is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once, in the loop, when the process has ended. For a process that is not `followed` the call never comes."""
        if self._pidfd is None or self._watched:
            return
        self._watched = True
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended, self._pidfd, call)

    def close(self) -> None:
        """Stop following the process, unless somebody waits for its end. Harmless when closed."""
        if self._pidfd is not None and not self._watched:
            os.close(self._pidfd)
            self._pidfd = None

    def _ended(self, pidfd: int, call: Callable[[], None]) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        call()


def _ask(connection: unix.socket) -> tuple[int, int | None]:
    pid = _CREDENTIALS.unpack(connection.getsockopt(unix.SOL_SOCKET, unix.SO_PEERCRED, _CREDENTIALS.size))[0]
    try:
        return pid, struct.unpack("i", connection.getsockopt(unix.SOL_SOCKET, _SO_PEERPIDFD, 4))[0]
    except OSError as error:
        if error.errno not in _LACKING:
            raise
    if not pid:
        return pid, None
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):  # it has hung up, and the number may be another process's by now
        with suppress(OSError):
            os.close(pidfd)
        return pid, None
    return pid, pidfd
