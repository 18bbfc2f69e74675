"""A ZeroMQ socket that speaks in envelopes: what the asynchronous ends of both kinds of connection have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import zmq

from kvbridge.control.addresses import bind_error
from kvbridge.control.sockets import LoopSocket, Monitor, Parts
from kvbridge.core.errors import ConfigError, ProtocolError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.wire.codec import Envelope, FrameError, MessageCodec

InboundT = TypeVar("InboundT", bound=FrozenModel)


class EnvelopeSocket(Generic[InboundT]):
    """A ROUTER or a DEALER in the running loop. Owns `socket`, whose further options are set before `bind` or `connect`."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        codec: MessageCodec[InboundT],
        on_envelope: Callable[[Envelope[InboundT], bytes, zmq.Frame], None],
        *,
        on_refused: Callable[[str, str], None],
        on_event: Callable[[int, int], None],
        events: int,
    ) -> None:
        """Begin to listen to the socket and to `events` of its connections.

        `on_envelope(envelope, route, frame)`: `route` is what `send` wants for an answer, empty on a DEALER; a ProtocolError
        refuses the envelope. `on_refused(kind, detail)`. `on_event(event, value)` as `Monitor` has it.
        """
        self._codec = codec
        self._on_envelope = on_envelope
        self._on_refused = on_refused
        self._raw = socket
        self._parts = 2 if socket.type == zmq.ROUTER else 1
        # Frames up to twice the limit are refused by the codec, and counted; beyond that the connection itself is cut.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * codec.max_frame_bytes)
        if socket.type == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._monitor = Monitor(socket, events, on_event)
        self._socket = LoopSocket(socket, self._on_parts)

    def bind(self, endpoint: str) -> str:
        """Listen, and return the real endpoint. Raises ConflictError, ConfigError (`bind_error`)."""
        try:
            self._raw.bind(endpoint)
        except zmq.ZMQError as error:
            raise bind_error(endpoint, error.errno or 0, str(error)) from error
        return str(self._raw.getsockopt_string(zmq.LAST_ENDPOINT))

    def connect(self, endpoint: str) -> None:
        """Begin to connect. Raises ConfigError for an endpoint that ZeroMQ does not take."""
        try:
            self._raw.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"control endpoint {endpoint} cannot be connected to: {error}") from error

    def send(self, *parts: bytes) -> bool:
        """Hand a frame to ZeroMQ, on a ROUTER behind its route; False when it was dropped (see `LoopSocket`)."""
        return self._socket.send(parts)

    def catch_up(self) -> None:
        """Handle the events that have already happened."""
        self._monitor.catch_up()

    def close(self) -> None:
        """Close the socket; harmless when closed."""
        self._monitor.close()
        self._socket.close()

    def _on_parts(self, parts: Parts) -> None:
        if len(parts) != self._parts:
            self._on_refused("malformed", f"a message of {len(parts)} parts, expected one frame")
            return
        route = parts[0].bytes if len(parts) > 1 else b""
        try:
            self._on_envelope(self._codec.decode(parts[-1].bytes), route, parts[-1])
        except FrameError as error:
            self._on_refused(error.fault, str(error))
        except ProtocolError as error:
            self._on_refused(error.code, str(error))
