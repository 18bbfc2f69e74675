"""How many connections a listening ZeroMQ socket may hold.

ZeroMQ accepts by itself, in its own thread, whatever comes: there is no option that bounds it, and taking the address away
would end every connection that was accepted there. So its monitor tells us of each connection, with its descriptor, and
those beyond the limit are shut down, upon which ZeroMQ closes them. A descriptor that ZeroMQ has closed meanwhile may be
anybody's: what is shut down is a copy, once it has shown that it is a connection of this address. The copy takes the place of
one that we hold, so that this works in a process that has none left.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from kvbridge.control.sockets import ACCEPTED
from kvbridge.core.addresses import parse_tcp


class ConnectionLimit:
    """Fed by the monitor of one listening socket."""

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """`on_refused()` is called for each connection that is cut."""
        self._most = most
        self._on_refused = on_refused
        self._open: set[int] = set()
        self._name: object = None
        self._copy = socket.socket()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def bound(self, endpoint: str) -> None:
        """Say where the socket listens, with its real port."""
        address = parse_tcp(endpoint)
        self._name = address.port if address else endpoint.removeprefix("ipc://")

    def on_event(self, event: int, descriptor: int) -> None:
        """Take note of an ACCEPTED or DISCONNECTED event."""
        if event != ACCEPTED:
            self._open.discard(descriptor)
        elif len(self._open) < self._most:
            self._open.add(descriptor)
        else:
            self._cut(descriptor)
            self._on_refused()

    def close(self) -> None:
        """Give up the descriptors held in reserve."""
        self._copy.close()
        os.close(self._nothing)

    def _cut(self, descriptor: int) -> None:
        place = self._copy.fileno()
        try:
            os.dup2(descriptor, place, inheritable=False)
            name = self._copy.getsockname()
            if self._name == (name[1] if isinstance(name, tuple) else name):
                self._copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended by itself
        finally:
            os.dup2(self._nothing, place, inheritable=False)
