"""Other processes of this host, as the kernel shows them: the one at the other end of a Unix socket, and those that listen on TCP.

The end of a connection is not the end of a process: a process that is being killed closes its sockets before its GPU
contexts, and one that lives may close its sockets at any time. A pidfd becomes readable when every thread of the process
has ended and all that the kernel did for it is undone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import select
import socket as unix
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

_SO_PEERPIDFD = 77
"""Linux 6.5; it also finds a process of another pid namespace, whose number this process cannot know."""
_CREDENTIALS = struct.Struct("iII")
_LACKING = {errno.ENOPROTOOPT, errno.EINVAL, errno.ENODATA}
"""The errors of a kernel that does not know the option, or knows no process of this connection."""


class PeerProcess:
    """The process at the other end of a connection. Used in one running loop; `close` it unless `when_ended` was called."""

    def __init__(self, pid: int, pidfd: int | None) -> None:
        self.pid = pid
        """Its number here; 0 for a process of a pid namespace that this process does not see."""
        self._pidfd = pidfd
        self._watched = False

    @classmethod
    def of_connection(cls, connection: unix.socket) -> PeerProcess:
        """Ask the kernel which process made a connection. A process that the kernel does not name is not `followed`."""
        try:
            return cls(*_ask(connection))
        except OSError:  # the connection is gone: nobody has been answered on it
            return cls(0, None)

    @property
    def followed(self) -> bool:
        """Whether this process will see its end."""
        return self._pidfd is not None

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call once, from the loop, when the process has ended; never for a process that is not `followed`."""
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
        with contextlib.suppress(OSError):
            os.close(pidfd)
        return pid, None
    return pid, pidfd


# ------------------------------------------------------------------ holders of TCP ports

PROC = Path("/proc")
_LISTENS = "0A"


class TcpListener(NamedTuple):
    """A listening socket; `pid` is 0 and the command empty when this process may not look into the socket's process."""

    host: str
    port: int
    pid: int
    command: str


def tcp_listeners(proc: Path = PROC) -> list[TcpListener]:
    """Return every listening TCP socket of this network namespace."""
    found = [
        (host, port, inode) for table in ("tcp", "tcp6") for host, port, inode in _read_table(proc / "net" / table)
    ]
    holders = _holders(proc, {inode for _, _, inode in found})
    return [TcpListener(host, port, *holders.get(inode, (0, ""))) for host, port, inode in found]


def _read_table(path: Path) -> Iterator[tuple[str, int, str]]:
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return
    for fields in map(str.split, lines):
        if fields[3] == _LISTENS:
            address, _, port = fields[1].rpartition(":")
            yield _readable(address), int(port, 16), f"socket:[{fields[9]}]"


def _readable(address: str) -> str:
    """The kernel prints 32-bit words in the machine's own order."""
    words = [int(address[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _holders(proc: Path, inodes: set[str]) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for process in proc.glob("[0-9]*") if inodes else ():
        try:
            held = set[str]()
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile, as the one that lists our own directory
                    held |= {str(link.readlink())} & inodes
            if held:
                words = (process / "cmdline").read_text(errors="replace").replace("\0", " ").split()
                command = " ".join(words)[:100] or (process / "comm").read_text().strip()
                found |= dict.fromkeys(held, (int(process.name), command))
        except OSError:
            continue  # it has ended meanwhile, or belongs to another user
    return found
