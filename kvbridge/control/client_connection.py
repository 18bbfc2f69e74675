"""A client's connection to a control socket, and the one that takes its place when keys change.

Owns: the DEALER in use and its successor. Must not know: conversations, whose keys are accepted.

ZeroMQ connects again with the keys that a socket was first connected with, so other keys take another socket. The former one
serves until the server has answered on the new one: where the server does not accept our new key (yet), nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvbridge.control.envelopes import EnvelopeSocket
from kvbridge.control.keys import CurveKeys
from kvbridge.control.monitor import DISCONNECTED, HANDSHAKE_FAILED, HANDSHAKE_SUCCEEDED, REFUSED
from kvbridge.control.sockets import SocketContext, set_limits
from kvbridge.core.errors import ConfigError
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import PeerMessage

_RECONNECT_FIRST_MS = 50
_RECONNECT_MOST_MS = 2_000


@dataclass(frozen=True, slots=True)
class ConnectionCallbacks:
    """Called in the loop, never concurrently."""

    on_envelope: Callable[[Envelope[PeerMessage], bytes, zmq.Frame], None]
    on_stands: Callable[[], None]
    """The connection is new: frames that were handed to a former one may be lost."""
    on_lost: Callable[[], None]
    """The connection has ended."""
    on_nobody: Callable[[], None]
    """An attempt to connect has failed; another one follows."""
    on_refused: Callable[[str, str], None]
    on_handshake_failed: Callable[[], None]
    probe: Callable[[], bytes]
    """A frame that the server answers if it takes us for who we were; empty while there is no conversation."""


class ClientConnection:
    """Connects at once, and again by itself. Used in one running loop; close it before `context`."""

    def __init__(
        self,
        context: SocketContext,
        endpoint: str,
        *,
        keys: CurveKeys | None,
        server_key: str,
        handshake_s: float,
        callbacks: ConnectionCallbacks,
    ) -> None:
        """`server_key` is the server's public key; without it nothing is encrypted. Raises ConfigError for an endpoint."""
        self._context = context
        self._endpoint = endpoint
        self._keys = keys
        self._server_key = server_key
        self._handshake_s = handshake_s
        self._callbacks = callbacks
        self._next_server_key = server_key
        """What the server said that its key will be when it ends this connection."""
        self._successor: EnvelopeSocket[PeerMessage] | None = None
        self._successor_server_key = ""
        self._successor_stands = self._successor_denied = False
        self._socket = self._open(server_key)
        self.own_key = keys.public if keys else ""
        """The public key of ours that the server knows us by."""

    def send(self, frame: bytes) -> bool:
        """Hand a frame to ZeroMQ; False when it was dropped."""
        return self._socket.send(frame)

    def change_keys(self, keys: CurveKeys) -> None:
        """Take other keys of ours, as soon as the server accepts them."""
        self._keys = keys
        if self._server_key:
            self._succeed(self._successor_server_key or self._server_key)

    def expect_server_key(self, key: str) -> None:
        """The server will have this key when it has ended the connection."""
        self._next_server_key = key

    def ask_again(self) -> None:
        """Ask the server whether it takes the successor, if there is one. To be called now and then."""
        if self._successor_denied:
            self._succeed(self._successor_server_key)  # ZeroMQ does not try again by itself what was denied
        if self._successor is None or not self._successor_stands:
            return
        frame = self._callbacks.probe()
        if frame:
            self._successor.send(frame)
        else:
            self._take_over()

    def close(self) -> None:
        """Close both; harmless when closed."""
        self._drop_successor()
        self._socket.close()

    def _open(self, server_key: str) -> EnvelopeSocket[PeerMessage]:
        raw = self._context.open(zmq.DEALER)
        raw.setsockopt(zmq.IMMEDIATE, 1)  # Nothing queues for a connection that does not stand: delivery resends.
        raw.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS)
        # A server that changes its key listens again within milliseconds: every attempt as soon as the first.
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS if server_key == self._server_key else 0)
        set_limits(raw, self._endpoint, handshake_s=self._handshake_s)
        if self._keys is not None and server_key:
            raw.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            raw.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret.encode())
        opened: EnvelopeSocket[PeerMessage] = EnvelopeSocket(
            raw,
            PEER,
            lambda envelope, route, frame: self._on_envelope(opened, envelope, route, frame),
            on_refused=self._callbacks.on_refused,
            on_event=lambda event, _value: self._on_event(opened, event),
            events=HANDSHAKE_FAILED | HANDSHAKE_SUCCEEDED | DISCONNECTED | REFUSED,
        )
        try:
            opened.connect(self._endpoint)
        except ConfigError:
            opened.close()
            raise
        return opened

    def _on_event(self, socket: EnvelopeSocket[PeerMessage], event: int) -> None:
        present = socket is self._socket
        if event == REFUSED:
            if present:
                self._callbacks.on_nobody()
        elif event == DISCONNECTED:
            expected = self._next_server_key
            if present:
                self._callbacks.on_lost()
            if present and expected not in {self._server_key, self._successor_server_key}:
                self._succeed(expected)
        elif event != HANDSHAKE_SUCCEEDED:
            self._successor_denied = self._successor_denied or socket is self._successor
            self._callbacks.on_handshake_failed()
        elif present:
            self._callbacks.on_stands()
        elif socket is self._successor:
            self._successor_stands = True
            self.ask_again()

    def _on_envelope(
        self, socket: EnvelopeSocket[PeerMessage], envelope: Envelope[PeerMessage], route: bytes, frame: zmq.Frame
    ) -> None:
        if socket is self._successor:
            self._take_over()
        self._callbacks.on_envelope(envelope, route, frame)

    def _succeed(self, server_key: str) -> None:
        self._drop_successor()
        self._successor_server_key = server_key
        self._successor = self._open(server_key)

    def _take_over(self) -> None:
        assert self._successor is not None
        former, self._socket, self._successor = self._socket, self._successor, None
        self._server_key, self._successor_server_key = self._successor_server_key, ""
        self._successor_stands = self._successor_denied = False
        self.own_key = self._keys.public if self._keys else ""
        former.close()
        self._callbacks.on_stands()

    def _drop_successor(self) -> None:
        former, self._successor = self._successor, None
        self._successor_server_key = ""
        self._successor_stands = self._successor_denied = False
        if former is not None:
            former.close()
