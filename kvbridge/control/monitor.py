"""What happens to a socket's connections, as events in the loop.

Owns: parsing of ZeroMQ's monitor frames. Must not know: what an event means for a peer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import zmq

from kvbridge.control.sockets import LoopSocket, Parts

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
