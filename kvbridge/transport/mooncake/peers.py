"""Calls of the mooncake library that wait for a peer, ended from outside when the peer does not answer.

The library waits for up to 60 s for each part of a peer's answer and offers no way to give up; a peer that says nothing, or
drips, would keep a thread for as long as it likes. But the call waits for a socket of this process. Once the peer has had its
time, the connections that have come since the call began and lead to the peer's address and port are shut down, and the call
returns with an error within milliseconds (measured with 0.3.13). Nothing tells the library's sockets from others of the process but
where they lead, which no other part of kvbridge connects to.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar

from kvbridge.core.errors import TransportError
from kvbridge.transport.calls import start_thread

DESCRIPTORS = Path("/proc/self/fd")
AGAIN_S = 0.02
"""Between two looks for connections of a call that has had its time; it may open another one."""
GRACE_S = 2.0
"""For a call to return once its connections have been shut down; only the resolver of host names takes longer."""

T = TypeVar("T")

Address = tuple[IPv4Address | IPv6Address, int]


class PeerCall:
    """What watches over calls to one peer, made one after another by one thread."""

    def __init__(self, session: str) -> None:
        """`session` is the peer's host:port."""
        self._session = session
        self._known: set[str] = set()
        """Sockets that were there before the present call."""
        self._addresses: frozenset[Address] = frozenset()
        """Where the connections of a call lead to; empty until the host of the peer has been resolved."""
        self._late = False
        self._unwanted = False
        self._returned = threading.Event()
        self._returned.set()

    def ask(self, function: Callable[[], T], *, timeout_s: float, name: str, late: str) -> T:
        """Return what the library answers; the call is cut off when it has not ended after `timeout_s`.

        `name` says what is done, for messages. Raises TransportError: with `late` when the call was cut off.
        """
        self._late = False
        try:
            self._known = {inode for inode, _ in _sockets()}
        except OSError as error:
            raise TransportError(
                f"cannot {name}: {error}; raise the limit of open files of this rank worker (ulimit -n, LimitNOFILE)"
            ) from error
        self._returned.clear()
        try:
            # Not by the caller: while the library fetches what one peer has, writes to all others wait inside of it.
            start_thread(self._watch, timeout_s, name=f"watch: {name}")
            self._addresses = _addresses(self._session)
            self._late = self._unwanted
            found = None if self._late else function()
        except TransportError as error:
            raise TransportError(late if self._late else str(error)) from error
        finally:
            self._returned.set()
        if self._late or found is None:
            raise TransportError(late)
        return found

    def end(self, timeout_s: float) -> bool:
        """Cut the present call off, and those that follow. Returns whether none is under way, at the latest after `timeout_s`."""
        self._unwanted = True
        self._try_to_cut_off()
        return self._returned.wait(timeout_s)

    def cancel(self) -> None:
        """Cut everything off, and wait for nothing."""
        self.end(0.0)

    def _watch(self, timeout_s: float) -> None:
        ends_at_s = time.monotonic() + timeout_s
        while not self._unwanted and time.monotonic() < ends_at_s:
            if self._returned.wait(min(AGAIN_S, max(0.0, ends_at_s - time.monotonic()))):
                return
        self._late = True
        while not self._returned.wait(AGAIN_S):
            self._try_to_cut_off()

    def _try_to_cut_off(self) -> None:
        """Cut the call off, unless the process has no descriptor left to look for its sockets by: the watch tries again."""
        with contextlib.suppress(OSError):
            for inode, descriptor in _sockets():
                if inode not in self._known:
                    _shut_down(descriptor, self._addresses)


def _sockets() -> list[tuple[str, int]]:
    """Every socket of this process, by what the kernel calls it, with a descriptor of it."""
    found = []
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = entry.readlink().name
            if target.startswith("socket:"):
                found.append((target, int(entry.name)))
    return found


def _addresses(session: str) -> frozenset[Address]:
    """Every address of the host of a session, with its port. May wait for a resolver; raises TransportError when there is none."""
    host, _, port = session.rpartition(":")
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"mooncake peer {session} cannot be reached: '{host}' has no address here ({error}); let it say another one "
            "(transports.mooncake.host)"
        ) from error
    return frozenset((_plain(str(sockaddr[0])), int(port)) for *_, sockaddr in found)


def _plain(address: str) -> IPv4Address | IPv6Address:
    """An address without its zone; an IPv4 one as such, also where IPv6 sockets lead to it."""
    found = ip_address(address.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _shut_down(descriptor: int, addresses: frozenset[Address]) -> None:
    """Shut a connection down if it leads to one of these. The descriptor stays its owner's, who sees the end of the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.type is socket.SOCK_STREAM:
            host, port, *_ = connection.getpeername()
            if (_plain(host), port) in addresses:
                connection.shutdown(socket.SHUT_RDWR)
