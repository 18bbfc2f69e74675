"""A ZeroMQ socket inside an asyncio loop.

A ZeroMQ socket's file descriptor signals edges: it becomes readable when *something* changed, once, and any call on the
socket may consume the signal. So after every wake and after every send we ask the socket itself whether frames wait.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence

import zmq

SENDS_QUEUED = 10_000
"""High-water mark of every socket: frames that wait for one connection before a send is refused or dropped."""
CLOSE_LINGER_MS = 200
FRAMES_PER_TURN = 128
TURN_S = 0.02
"""After so many frames, or so long, a socket lets the rest of the loop run before it goes on."""
_ZMTP_PING_MS = 5_000
_ZMTP_TIMEOUT_MS = 15_000

# As plain numbers: whatever is done with ZeroMQ's own enumerations is done by Python, several times for each frame.
_READABLE = int(zmq.POLLIN)
NOBLOCK = int(zmq.NOBLOCK)
_MORE_FOLLOWS = int(zmq.NOBLOCK | zmq.SNDMORE)

Parts = list[zmq.Frame]

# Events of connections.
HANDSHAKE_FAILED = int(
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
HANDSHAKE_FAILED_AUTH = int(zmq.Event.HANDSHAKE_FAILED_AUTH)
HANDSHAKE_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
ACCEPTED = int(zmq.Event.ACCEPTED)
DISCONNECTED = int(zmq.Event.DISCONNECTED)
REFUSED = int(zmq.Event.CLOSED)
"""On a socket that connects: an attempt has failed, as a rule since nobody listens there. It is made again by itself."""

_HEAD = struct.Struct("=HI")


def set_limits(socket: zmq.Socket[bytes], endpoint: str, *, handshake_s: float) -> None:
    """Set what connections between nodes have to keep to, before `socket` is bound or connected."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(handshake_s * 1_000)))
    socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMTP_PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ZMTP_TIMEOUT_MS)
    # Only where it is meant: an IPv6 socket would report an IPv4 address that it was bound to as ::ffff:a.b.c.d.
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


class SocketContext:
    """The ZeroMQ thread that sockets of one process share. Close it after its sockets; closing is bounded."""

    def __init__(self) -> None:
        self.zmq = zmq.Context(1)
        self.zmq.set(zmq.MAX_SOCKETS, 16_384)

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket with the house's limits set."""
        socket = self.zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SENDS_QUEUED)
        socket.setsockopt(zmq.RCVHWM, SENDS_QUEUED)
        return socket

    def close(self) -> None:
        """Close what was left open and end the thread; waits at most for the linger of the sockets."""
        self.zmq.destroy()


def frames_wait(socket: zmq.Socket[bytes]) -> bool:
    """Whether a receive would return at once."""
    # Polling takes a third less time, but lets go of the interpreter's lock: beside a thread that computes, as in an engine's
    # process, it is had back up to 5 ms later.
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


def _receive(socket: zmq.Socket[bytes]) -> Parts:
    """Return the parts of the message that waits."""
    parts = [socket.recv(NOBLOCK, copy=False)]
    while parts[-1].more:
        parts.append(socket.recv(NOBLOCK, copy=False))
    return parts


class LoopSocket:
    """Feeds what arrives on `socket` to `on_parts`, in the loop that is running. Owns the socket from then on.

    An exception of `on_parts` reaches the loop's exception handler and costs that one message only.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_parts: Callable[[Parts], None]) -> None:
        self._socket = socket
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._draining = False
        self._scheduled: asyncio.Handle | None = None
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self.drain)
        self._look_again()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self._socket.closed)

    def send(self, parts: Sequence[bytes]) -> bool:
        """Hand parts to ZeroMQ; False when no connection can take them now (they are dropped) or after `close`."""
        if self._socket.closed:
            return False
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE_FOLLOWS)
            self._socket.send(parts[-1], NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                return False
            raise
        finally:
            self._look_again()
        return True

    def drain(self) -> None:
        """Handle what has arrived, without waiting for the loop's turn."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        if self._draining or self._socket.closed:
            return
        self._draining, empty = True, False
        try:
            empty = self._take_turn()
        finally:
            self._draining = False
            if not empty:
                self._look_again()

    def close(self) -> None:
        """Stop listening and close the socket; harmless when closed."""
        if self._socket.closed:
            return
        if self._scheduled is not None:
            self._scheduled.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._descriptor)
        self._socket.close()

    def _look_again(self) -> None:
        if self._draining or self._scheduled is not None or self._socket.closed:
            return
        if frames_wait(self._socket):
            self._scheduled = self._loop.call_soon(self.drain)

    def _take_turn(self) -> bool:
        """Handle what waits; whether the last look at the socket has found nothing more."""
        end_s = time.monotonic() + TURN_S
        for _ in range(FRAMES_PER_TURN):
            if self._socket.closed or time.monotonic() > end_s:
                return False
            if not frames_wait(self._socket):
                return True
            self._on_parts(_receive(self._socket))
        return False


def read_event(head: bytes) -> tuple[int, int]:
    """Return (event, value); the value of ACCEPTED and DISCONNECTED is the connection's file descriptor."""
    event, value = _HEAD.unpack(head)
    return event, value


class Monitor:
    """Calls `on_event(event, value)` for the chosen events of `socket`. Make it before the socket binds or connects."""

    def __init__(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int, int], None]) -> None:
        self._watched = socket
        self._on_event = on_event
        self._socket = LoopSocket(socket.get_monitor_socket(events), self._on_parts)

    def catch_up(self) -> None:
        """Handle the events that have already happened."""
        self._socket.drain()

    def close(self) -> None:
        """Stop watching; to be called before the watched socket is closed."""
        if not self._socket.closed:
            self._watched.disable_monitor()
            self._socket.close()

    def _on_parts(self, parts: Parts) -> None:
        self._on_event(*read_event(parts[0].bytes))
