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
from collections.abc import Callable
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Generic, TypeVar

from kvbridge.core.clock import Clock
from kvbridge.core.errors import TransportError
from kvbridge.transport.background import Call, give_turn_back, start_thread
from kvbridge.transport.base import Steps

DESCRIPTORS = Path("/proc/self/fd")
AGAIN_S = 0.02
"""Between two looks for connections of a call that has had its time; it may open another one."""
GRACE_S = 2.0
"""For a call to return once its connections have been shut down; only the resolver of host names takes longer."""


T = TypeVar("T")

Address = tuple[IPv4Address | IPv6Address, int]


class PeerCall(Generic[T]):
    """A call on a thread of its own, which is cut off when it has not ended after `timeout_s`. Begins at once (`take_turn`)."""

    def __init__(self, ask: Callable[[], T], session: str, *, timeout_s: float, name: str) -> None:
        """`session` is the peer's host:port; `name` says what is done, for messages. Raises TransportError if it cannot begin."""
        self._timeout_s = timeout_s
        self._addresses: frozenset[Address] = frozenset()
        """Where the connections of the call lead to; empty until the host of the peer has been resolved."""
        self._late = False
        self._ended = threading.Event()
        self._watch_name = f"watch: {name}"
        try:
            self._known = {inode for inode, _ in _sockets()}
        except OSError as error:
            give_turn_back()
            raise TransportError(
                f"cannot {name}: {error}; raise the limit of open files of this rank worker (ulimit -n, LimitNOFILE)"
            ) from error
        self._call = Call(partial(self._watched, ask, session), name=name)

    def answer(self, *, clock: Clock, late: str) -> Steps[T]:
        """Return what the library answers. Raises TransportError with `late` when the call was cut off."""
        try:
            found = yield from self._call.result(until_s=clock() + self._timeout_s + GRACE_S, clock=clock, late=late)
        except GeneratorExit:
            self._try_to_cut_off()
            raise
        except TransportError as error:
            raise TransportError(late if self._late else str(error)) from error
        if self._late:
            raise TransportError(late)
        return found

    def end(self, timeout_s: float) -> bool:
        """Cut the call off now. Returns whether it has ended, at the latest after `timeout_s`."""
        self._try_to_cut_off()
        return self._call.wait(timeout_s)

    def _watched(self, ask: Callable[[], T], session: str) -> T:
        """Ask, once somebody is there to cut that off."""
        # Not the caller's thread: while the library fetches what one peer has, writes to all others wait inside of it.
        start_thread(self._watch, name=self._watch_name)
        try:
            self._addresses = _addresses(session)
            return ask()
        finally:
            self._ended.set()

    def _watch(self) -> None:
        if self._ended.wait(self._timeout_s):
            return
        self._late = True
        while not self._ended.wait(AGAIN_S):
            self._try_to_cut_off()

    def _try_to_cut_off(self) -> None:
        """Cut the call off, unless the process has no descriptor left to look for its sockets by: the watch tries again."""
        with contextlib.suppress(OSError):
            self._cut_off()

    def _cut_off(self) -> None:
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
