"""ZeroMQ sockets inside an asyncio loop.

The descriptor of a ZeroMQ socket signals edges: it becomes readable when *something* has changed, once, and any call on the socket
may consume the signal. So after every wake and after every send we ask the socket itself whether frames wait.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Sequence

import zmq

from kvbridge.control.listeners import bind_error
from kvbridge.core.errors import ConfigError, ProtocolError
from kvbridge.core.wire.codec import PEER, Envelope, FrameError
from kvbridge.core.wire.messages import PeerMessage

SENDS_QUEUED = 10_000
"""High-water mark of every socket: frames that wait for one connection before a send is refused or dropped."""
CLOSE_LINGER_MS = 200
FRAMES_PER_TURN = 128
TURN_S = 0.02
"""After so many frames, or so long, a socket lets the rest of the loop run before it goes on."""
_ZMTP_PING_MS = 5_000
_ZMTP_TIMEOUT_MS = 15_000

# As plain numbers: Python computes with ZeroMQ's own enumerations in Python, several times for each frame.
_READABLE = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
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
CONNECT_FAILED = int(zmq.Event.CLOSED)
"""An attempt to connect has failed, as a rule since nobody listens there. ZeroMQ makes the next one."""

_EVENTS = {
    int(zmq.ROUTER): HANDSHAKE_FAILED | ACCEPTED | DISCONNECTED,
    int(zmq.DEALER): HANDSHAKE_FAILED | HANDSHAKE_SUCCEEDED | DISCONNECTED | CONNECT_FAILED,
}
_EVENT = struct.Struct("=HI")


def read_event(head: bytes) -> tuple[int, int]:
    """Return (event, value) of a monitor's frame; the value of ACCEPTED and DISCONNECTED is the connection's descriptor."""
    event, value = _EVENT.unpack(head)
    return event, value


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


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen, and return the real endpoint. Raises as `bind_error` says."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise bind_error(endpoint, error.errno or 0, str(error)) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


class LoopSocket:
    """Feeds what arrives on `socket` to `on_parts`, in the loop that is running. Owns the socket from then on.

    An exception of `on_parts` reaches the loop's exception handler and costs that one message only.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_parts: Callable[[Parts], None]) -> None:
        self._socket = socket
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._in_turn = self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._turn)
        self._look_again()

    def send(self, parts: Sequence[bytes]) -> bool:
        """Hand parts to ZeroMQ; False when no connection can take them now (they are dropped) or after `close`."""
        if self._socket.closed:
            return False
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE_FOLLOWS)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                return False
            raise
        finally:
            self._look_again()
        return True

    def close(self) -> None:
        """Stop listening and close the socket; harmless when closed."""
        if not self._socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _frames_wait(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _look_again(self) -> None:
        if not (self._in_turn or self._scheduled or self._socket.closed) and self._frames_wait():
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self._in_turn = False, True
        try:
            end_s = time.monotonic() + TURN_S
            for _ in range(FRAMES_PER_TURN):
                if self._socket.closed or not self._frames_wait():
                    return
                parts = [self._socket.recv(_NOBLOCK, copy=False)]
                while parts[-1].more:
                    parts.append(self._socket.recv(_NOBLOCK, copy=False))
                self._on_parts(parts)
                if time.monotonic() > end_s:
                    return
        finally:
            self._in_turn = False
            self._look_again()


class EnvelopeSocket:
    """A ROUTER or a DEALER between nodes that speaks in envelopes. Owns `socket`, whose keys are set before."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        on_envelope: Callable[[Envelope[PeerMessage], bytes, zmq.Frame], None],
        *,
        handshake_s: float,
        on_refused: Callable[[str, str], None],
        on_event: Callable[[int, int], None],
    ) -> None:
        """Listen at `endpoint` (a ROUTER; `self.endpoint` is the real one) or begin to connect to it.

        `on_envelope(envelope, route, frame)`: `route` is what `send` wants for an answer, empty on a DEALER; a ProtocolError
        refuses the envelope. `on_refused(kind, detail)`. `on_event(event, value)` of connections, as `read_event` has it. Raises
        as `bind_error` says, and ConfigError for an endpoint that cannot be connected to.
        """
        self._on_envelope = on_envelope
        self._on_refused = on_refused
        self._raw = socket
        self._part_count = 2 if socket.type == zmq.ROUTER else 1
        socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(handshake_s * 1_000)))
        socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMTP_PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ZMTP_TIMEOUT_MS)
        # Only where it is meant: an IPv6 socket would report an IPv4 address that it was bound to as ::ffff:a.b.c.d.
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        # Frames up to twice the limit are refused by the codec, and counted; beyond that the connection itself is cut.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * PEER.max_frame_bytes)
        monitor = socket.get_monitor_socket(_EVENTS[int(socket.getsockopt(zmq.TYPE))])
        self._monitor = LoopSocket(monitor, lambda parts: on_event(*read_event(parts[0].bytes)))
        self._socket = LoopSocket(socket, self._on_parts)
        self.endpoint = endpoint
        try:
            if socket.type == zmq.ROUTER:
                socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self.endpoint = bind(socket, endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"control endpoint {endpoint} cannot be connected to: {error}") from error
        except BaseException:
            self.close()
            raise

    def send(self, *parts: bytes) -> bool:
        """Hand a frame to ZeroMQ, on a ROUTER behind its route; False when it was dropped (see `LoopSocket`)."""
        return self._socket.send(parts)

    def close(self) -> None:
        """Close the socket; harmless when closed."""
        if not self._raw.closed:
            self._raw.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _on_parts(self, parts: Parts) -> None:
        if len(parts) != self._part_count:
            self._on_refused("malformed", f"a message of {len(parts)} parts, expected one frame")
            return
        route = parts[0].bytes if len(parts) > 1 else b""
        try:
            self._on_envelope(PEER.decode(parts[-1].bytes), route, parts[-1])
        except FrameError as error:
            self._on_refused(error.fault, str(error))
        except ProtocolError as error:
            self._on_refused(error.code, str(error))
