"""The client's end of a connection between nodes (`peers` has the server's, and says how both go on with each other)."""

from __future__ import annotations

import time

import zmq

from kvbridge.control.envelopes import EnvelopeSocket
from kvbridge.control.keys import check_key
from kvbridge.control.link import Link, LinkContext, PeerCallbacks, PeerSettings, Refusal
from kvbridge.control.peers import PeerIdentity, flush_links
from kvbridge.control.sockets import (
    DISCONNECTED,
    HANDSHAKE_FAILED,
    HANDSHAKE_SUCCEEDED,
    REFUSED,
    SocketContext,
    set_limits,
)
from kvbridge.core.errors import ConfigError, ConflictError
from kvbridge.core.wire.codec import Envelope
from kvbridge.core.wire.messages import PeerMessage

_RECONNECT_FIRST_MS = 50
_RECONNECT_MOST_MS = 2_000


class PeerClient:
    """The connection to one node's control socket: a DEALER that reconnects by itself. Built and used in one running loop.

    Messages sent before the connection stands wait for it. `context` is shared by all clients of the process and is
    closed by its owner after them.
    """

    def __init__(
        self,
        identity: PeerIdentity,
        callbacks: PeerCallbacks,
        endpoint: str,
        *,
        server_key: str = "",
        context: SocketContext,
        settings: PeerSettings | None = None,
    ) -> None:
        """Begin to connect; returns at once.

        `server_key` is the server's public key in Z85, required when we have keys. Raises ConfigError on a malformed
        endpoint or key, or when the connection would leave this machine in the clear.
        """
        self._identity = identity
        self._callbacks = callbacks
        self._endpoint = endpoint
        self._check(server_key)
        self.server = ""
        """The incarnation that answers there; empty before it has said so."""
        shared = self._shared = LinkContext(identity.incarnation, callbacks, self._put, settings, self._on_over)
        # Grows with every client of this incarnation, so that a server tells a new conversation from an old one.
        self._link = Link(shared, time.monotonic_ns())
        raw = context.open(zmq.DEALER)
        raw.setsockopt(zmq.IMMEDIATE, 1)  # Nothing queues for a connection that does not stand: delivery resends.
        raw.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
        set_limits(raw, endpoint, handshake_s=shared.settings.handshake_s)
        if identity.keys is not None and server_key:
            raw.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            raw.setsockopt(zmq.CURVE_PUBLICKEY, identity.keys.public.encode())
            raw.setsockopt(zmq.CURVE_SECRETKEY, identity.keys.secret.encode())
        self._socket = EnvelopeSocket(
            raw,
            shared.codec,
            self._on_envelope,
            on_refused=self._refuse,
            on_event=self._on_event,
            events=HANDSHAKE_FAILED | HANDSHAKE_SUCCEEDED | DISCONNECTED | REFUSED,
        )
        try:
            self._socket.connect(endpoint)
        except ConfigError:
            self._socket.close()
            raise

    @property
    def link(self) -> Link:
        """The present conversation with the server, to look at."""
        return self._link

    def send(self, message: PeerMessage) -> None:
        """Deliver to the server. Raises CapacityError (it acknowledges nothing), InvalidInputError, ConflictError."""
        if self._link.closed:
            raise ConflictError(f"the connection to {self._endpoint} was closed")
        self._link.send(message)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged, at most `timeout_s`; whether it is."""
        return await flush_links(lambda: (self._link,), timeout_s)

    def close(self) -> None:
        """Close the connection. Nothing is reported undelivered any more."""
        self._link.drop()
        self._socket.close()

    def _check(self, server_key: str) -> None:
        endpoint = self._endpoint
        if server_key:
            check_key(server_key, f"public key of {endpoint}")
        if server_key and self._identity.keys is None:
            raise ConfigError(f"{endpoint} asks for CURVE, but this process has no keys; configure them")
        if not server_key:
            if self._identity.keys is not None and not self._identity.insecure:
                raise ConfigError(f"no public key is known of {endpoint}; give it beside the endpoint")
            self._identity.require_keys(endpoint, "connect to")

    def _put(self, _link: Link, frame: bytes) -> bool:
        """Send a frame, or the question who is there in its place: the link sends it again until it is acknowledged."""
        return self._socket.send(frame if self.server else self._shared.codec.encode(self._question))

    @property
    def _question(self) -> Envelope[PeerMessage]:
        return Envelope(sender=self._identity.incarnation, recipient="", link=0)

    def _met(self, server: str) -> None:
        self.server = server
        self._callbacks.on_met(server)
        if not self._link.closed:
            self._link.retry()

    def _refuse(self, kind: str, detail: str) -> None:
        self._callbacks.on_refused(kind, f"{detail} (server {self._endpoint})")

    def _on_event(self, event: int, _value: int) -> None:
        if event == HANDSHAKE_SUCCEEDED:
            self._link.retry()  # frames that were handed to a former connection may be lost
        elif event == REFUSED:
            self._link.cut()
        elif event == DISCONNECTED:
            if self._link.peer:  # else it is a handshake that fails, and said as that
                self._link.cut()
        else:
            kind = Refusal.UNAUTHENTICATED if self._identity.keys else Refusal.HANDSHAKE
            self._refuse(kind, "the handshake failed: our key is not allowed there, or its public key is another one")

    def _on_envelope(self, envelope: Envelope[PeerMessage], _route: bytes, _frame: zmq.Frame) -> None:
        if self._accepts(envelope):
            self._link.take(envelope)

    def _accepts(self, envelope: Envelope[PeerMessage]) -> bool:
        """Whether an envelope belongs to the present link; begins the next one when the server does not know it."""
        link = self._link
        if envelope.link == 0 and envelope.recipient == self._identity.incarnation:
            if not self.server:
                self._met(envelope.sender)
            return False
        if envelope.recipient != self._identity.incarnation or abs(envelope.link) != link.number:
            self._refuse(Refusal.STALE, f"link {envelope.link} to {envelope.recipient}, ours is {link.number}")
            return False
        if envelope.link > 0 and link.peer in {"", envelope.sender}:
            link.peer = envelope.sender
            return True
        if link.peer:
            self._begin_anew(envelope.sender)
        return False

    def _on_over(self, link: Link) -> None:
        if link is self._link:
            self._begin_anew(self.server)

    def _begin_anew(self, server: str) -> None:
        former, self._link = self._link, Link(self._shared, self._link.number + 1)
        former.close()
        self.server = server
        if not self._link.closed:  # whoever heard of what is undelivered may have closed this client
            self._callbacks.on_reset(server)
