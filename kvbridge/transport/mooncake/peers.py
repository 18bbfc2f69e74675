"""Calls of the mooncake library that wait for a peer, ended from outside when the peer does not answer.

Owns: the thread of such a call, its deadline, and the end of its connections. Must not know: what the peer is asked.

The library waits for up to 60 s for each part of a peer's answer and offers no way to give up; a peer that says nothing, or
drips, would keep a thread for as long as it likes. But the call waits for a socket of this process. Once the peer has had its
time, the sockets that have come since the call began and lead to the peer's port are shut down, and the call returns with an
error within milliseconds (measured with 0.3.13).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from kvbridge.core.clock import Clock
from kvbridge.core.errors import TransportError
from kvbridge.transport.background import Call
from kvbridge.transport.base import Steps

DESCRIPTORS = Path("/proc/self/fd")
AGAIN_S = 0.02
"""Between two looks for connections of a call that has had its time; it may open another one."""
GRACE_S = 2.0
"""For a call to return once its connections have been shut down; only the resolver of host names takes longer."""


T = TypeVar("T")


class PeerCall(Generic[T]):
    """A call on a thread of its own, which is cut off when it has not ended after `timeout_s`. Begins at once (`take_turn`)."""

    def __init__(self, ask: Callable[[], T], session: str, *, timeout_s: float, name: str) -> None:
        """`session` is the peer's host:port; `name` says what is done, for messages."""
        self._timeout_s = timeout_s
        self._port = int(session.rpartition(":")[2])
        self._known = {inode for inode, _ in _sockets()}
        self._late = False
        self._call = Call(ask, name=name)
        # Not the caller's thread: while the library fetches what one peer has, writes to all others wait inside of it.
        threading.Thread(target=self._watch, name=f"watch: {name}", daemon=True).start()

    def answer(self, *, clock: Clock, late: str) -> Steps[T]:
        """Return what the library answers. Raises TransportError with `late` when the call was cut off."""
        try:
            found = yield from self._call.result(until_s=clock() + self._timeout_s + GRACE_S, clock=clock, late=late)
        except GeneratorExit:
            self._cut_off()
            raise
        except TransportError as error:
            raise TransportError(late if self._late else str(error)) from error
        if self._late:
            raise TransportError(late)
        return found

    def end(self, timeout_s: float) -> bool:
        """Cut the call off now. Returns whether it has ended, at the latest after `timeout_s`."""
        self._cut_off()
        return self._call.wait(timeout_s)

    def _watch(self) -> None:
        if self._call.wait(self._timeout_s):
            return
        self._late = True
        while not self._call.wait(AGAIN_S):
            self._cut_off()

    def _cut_off(self) -> None:
        for inode, descriptor in _sockets():
            if inode not in self._known:
                _shut_down(descriptor, self._port)


def _sockets() -> list[tuple[str, int]]:
    """Every socket of this process, by what the kernel calls it, with a descriptor of it."""
    found = []
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = entry.readlink().name
            if target.startswith("socket:"):
                found.append((target, int(entry.name)))
    return found


def _shut_down(descriptor: int, port: int) -> None:
    """Shut a connection down if it leads to this port. The descriptor stays its owner's, who sees the end of the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.getpeername()[1] == port:
            connection.shutdown(socket.SHUT_RDWR)
