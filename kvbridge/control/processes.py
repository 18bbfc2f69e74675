"""The process at the other end of a Unix socket, followed until it has ended.

The end of a connection is not the end of a process: a process that is being killed closes its sockets before its GPU
contexts, and one that lives may close its sockets at any time. A pidfd becomes readable when every thread of the process
has ended and all that the kernel did for it is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket as unix
import struct
from collections.abc import Callable

_SO_PEERPIDFD = 77
"""Linux 6.5; it also finds a process of another pid namespace, whose number this process cannot know."""
_CREDENTIALS = struct.Struct("iII")
_LACKING = {errno.ENOPROTOOPT, errno.EINVAL, errno.ENODATA}
"""How a kernel says that it does not know the option, or has nothing to say of this connection."""


class PeerProcess:
    """The process at the other end of a connection. Used in one running loop; `close` it unless `when_ended` was called."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        """Its number here; 0 for one of a pid namespace that this process does not see."""
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
        """Whether its end will be seen."""
        return self._pidfd is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call once, from the loop, when the process has ended; never for one that is not `followed`."""
        if self._pidfd is None or self._watched:
            return
        self._watched = True
        asyncio.get_running_loop().add_reader(self._pidfd, self._ended, self._pidfd, call)

    def close(self) -> None:
        """Follow it no longer. Harmless when somebody waits for its end, or when closed."""
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
    if _hung_up(connection):  # then the number may be another process's by now
        with contextlib.suppress(OSError):
            os.close(pidfd)
        return pid, None
    return pid, pidfd


def _hung_up(connection: unix.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))
