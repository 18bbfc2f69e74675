"""Daemons of different nodes talk: one connection a pair, messages both ways, each delivered once or reported.

Owns: the sockets between nodes, who is who on them, and which frames are refused. Must not know: what a message means,
when a silent peer counts as dead.

The client (a decode node) opens the connection, asks who answers there (link 0, which leaves no trace), and begins a numbered
link; the server (a prefill node) learns the client's incarnation from its first frame of a link. An incarnation has one link to
another, so a client that meets one to which there is a link already, by another address, is closed before it begins its own: a
later link would end the former one. A new connection of the same link continues where the old one broke
off. When either side has lost its memory of a link (a restart, `forget`), the server answers its frames with the
link's negative number; the client then reports what is open as undelivered and begins the next link.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from contextvars import Context
from dataclasses import dataclass, replace

import structlog
import zmq

from kvbridge.control.authentication import ZAP_DOMAIN, Authenticator, Gate, user_of
from kvbridge.control.client_connection import ClientConnection, ConnectionCallbacks
from kvbridge.control.connections import ConnectionLimit
from kvbridge.control.envelopes import EnvelopeSocket
from kvbridge.control.keys import CurveKeys, check_key
from kvbridge.control.link import Link, LinkContext, PeerCallbacks, PeerSettings, Refusal
from kvbridge.control.monitor import (
    ACCEPTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    HANDSHAKE_FAILED_AUTH,
)
from kvbridge.control.sockets import SocketContext, set_limits
from kvbridge.core.addresses import is_loopback, parse_tcp
from kvbridge.core.clock import monotonic
from kvbridge.core.errors import ConfigError, ConflictError, NotFoundError, UnauthorizedError
from kvbridge.core.wire.codec import Envelope
from kvbridge.core.wire.messages import PeerMessage

log = structlog.get_logger(__name__)

MAX_PEERS = 4_096
"""Peers that a server knows at once."""
_FLUSH_POLL_S = 0.005
_LISTEN_AGAIN_S = 0.002
_DEAF_TOLD_EVERY_S = 5.0
"""How often the log says that a server cannot listen where it did."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who this process is to its peers. Without keys it speaks in the clear, on loopback only unless `insecure`."""

    incarnation: str
    keys: CurveKeys | None = None
    insecure: bool = False

    def require_keys(self, endpoint: str, verb: str) -> None:
        """Raise ConfigError when `endpoint` leaves this machine and there is no key to protect it."""
        address = parse_tcp(endpoint)
        if self.keys or self.insecure or address is None or is_loopback(address.host):
            return
        raise ConfigError(
            f"refusing to {verb} {endpoint} without CURVE keys: anyone on the network could take part; configure keys "
            "(kvbridge can generate them), use a loopback address, or say --insecure on a network that you trust"
        )


class PeerServer:
    """The control socket of a node: a ROUTER that clients connect to. Built and used in one running loop; close it."""

    def __init__(
        self, identity: PeerIdentity, callbacks: PeerCallbacks, endpoint: str, *, settings: PeerSettings | None = None
    ) -> None:
        """Listen; `endpoint` is the real one afterwards (port 0 picks a port).

        Raises ConflictError when the address is taken, ConfigError when it does not exist here, is malformed, or leaves
        this machine without keys.
        """
        identity.require_keys(endpoint, "listen on")
        self._identity = identity
        self._callbacks = callbacks
        self._shared = LinkContext(identity.incarnation, callbacks, self._put, settings)
        self._links: dict[str, Link] = {}
        self.gate = Gate(identity.keys)
        shared, keys = self._shared, identity.keys
        with ExitStack() as opened:
            context = SocketContext()
            opened.callback(context.close)
            raw = context.open(zmq.ROUTER)
            if keys is not None:
                keeper = Authenticator(context, self.gate, lambda detail: self._refuse(Refusal.UNAUTHENTICATED, detail))
                opened.callback(keeper.close)
                raw.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
                raw.setsockopt(zmq.CURVE_SERVER, 1)
                raw.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            set_limits(raw, endpoint, handshake_s=shared.settings.handshake_s)
            self._connections = ConnectionLimit(shared.settings.max_connections, self._on_too_many)
            opened.callback(self._connections.close)
            self._socket = EnvelopeSocket(
                raw,
                shared.codec,
                self._on_envelope,
                on_refused=self._refuse,
                on_event=self._on_event,
                events=HANDSHAKE_FAILED | ACCEPTED | DISCONNECTED,
            )
            opened.callback(self._socket.close)
            self.endpoint = self._socket.bind(endpoint)
            self._listens, self._deaf_since_s = True, 0.0
            self._closing = opened.pop_all()
        self._connections.bound(self.endpoint)

    def __repr__(self) -> str:
        waiting = sum(link.unacknowledged for link in self._links.values())
        return f"<PeerServer {self._identity.incarnation}: {len(self._links)} peers, {waiting} messages unacknowledged>"

    @property
    def peers(self) -> tuple[str, ...]:
        """The incarnations that are known now."""
        return tuple(self._links)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Deliver to a known peer. Raises NotFoundError, CapacityError (it acknowledges nothing), InvalidInputError."""
        self.link(peer).send(message)

    def link(self, peer: str) -> Link:
        """Return the conversation with a known peer, to look at. Raises NotFoundError."""
        link = self._links.get(peer)
        if link is None:
            raise NotFoundError(f"no peer of incarnation '{peer}' is known; it never connected, or was forgotten")
        return link

    def barred(self) -> tuple[str, ...]:
        """Known peers whose key `gate` does not let in any more: nothing of them is heard, and they are to be ended."""
        return tuple(peer for peer, link in self._links.items() if not self.gate.allows(link.user))

    def forget(self, peer: str) -> None:
        """Drop a peer, reporting what it has not acknowledged. If it is still there, it learns of it and begins a new link."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def announces(self, peer: str, key: str) -> None:
        """A known peer says that a key is its own too, as one that changes its key does. Raises UnauthorizedError."""
        link = self.link(peer)
        if key == link.user:
            return
        if not self.gate.allows(key):
            raise UnauthorizedError(
                f"{peer} is about to take the key {key}, which is not in the list of allowed keys; add it there, or its "
                "connection goes on with the former one"
            )
        link.other_user = key

    def change_keys(self, keys: CurveKeys) -> None:
        """Listen with other keys from now on. Connections end, and peers that know the new key connect again: links go on."""
        self._identity = replace(self._identity, keys=keys)
        self.gate.own = frozenset({keys.public})
        if not self._listens:
            return  # it will, with these
        self._socket.catch_up()
        self._socket.unbind(self.endpoint)
        self._connections.all_gone()
        self._deaf_since_s = monotonic()
        self._listen_again()

    def _listen_again(self) -> None:
        """ZeroMQ gives an address free in a thread of its own, milliseconds after it was told to; another process may get it."""
        keys = self._identity.keys
        if self._socket.closed or keys is None:
            return
        self._listens = self._socket.bind_again(self.endpoint, keys)
        if not self._listens:
            if monotonic() - self._deaf_since_s >= _DEAF_TOLD_EVERY_S:
                self._deaf_since_s = monotonic()
                log.error(
                    "cannot_listen_again",
                    endpoint=self.endpoint,
                    effect="no peer can connect",
                    cure="our key was changed, and another process has taken this address meanwhile: end it",
                )
            self._shared.loop.call_later(_LISTEN_AGAIN_S, self._listen_again, context=Context())

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged, at most `timeout_s`; whether it is."""
        return await _flush(self._links.values, timeout_s)

    def close(self) -> None:
        """Stop listening; waits at most for the sockets' linger (0.2 s). Nothing is reported undelivered any more.

        A client that has not read its last messages by then loses them: `flush` first.
        """
        for link in self._links.values():
            link.drop()
        self._links.clear()
        self._closing.close()

    def _put(self, link: Link, frame: bytes) -> bool:
        return self._socket.send(link.route, frame)

    def _refuse(self, kind: str, detail: str) -> None:
        self._callbacks.on_refused(kind, detail)

    def _on_too_many(self) -> None:
        most = self._shared.settings.max_connections
        self._refuse(Refusal.TOO_MANY_CONNECTIONS, f"{most} connections stand, the most (control.max_connections)")

    def _on_event(self, event: int, value: int) -> None:
        if event in {ACCEPTED, DISCONNECTED}:
            self._connections.on_event(event, value)
            return
        if event == HANDSHAKE_FAILED_AUTH:
            return  # The authenticator has counted it, with its address and key.
        kind = Refusal.UNAUTHENTICATED if self._identity.keys else Refusal.HANDSHAKE
        self._refuse(kind, "a connection did not complete its handshake: wrong server key, no key, or no peer of ours")

    def _on_envelope(self, envelope: Envelope[PeerMessage], route: bytes, frame: zmq.Frame) -> None:
        link = self._find(envelope, route, user_of(frame) if self._identity.keys else "")
        if link is not None:
            link.take(envelope, len(frame))

    def _find(self, envelope: Envelope[PeerMessage], route: bytes, user: str) -> Link | None:
        """Return the link that an envelope belongs to, made now if it is a new one, or None after refusing it."""
        sender, link = envelope.sender, self._links.get(envelope.sender)
        if envelope.link == 0 and envelope.body is None and self.gate.allows(user):
            self._answer_without_link(envelope, route)
            return None
        if envelope.link < 1 or (link is not None and envelope.link < link.number):
            self._refuse(Refusal.STALE, f"link {envelope.link} of {sender}: an earlier one")
            return None
        if not self.gate.allows(user):
            self._refuse(Refusal.UNAUTHENTICATED, f"the key {user} of {sender} is not allowed any more")
            return None
        if link is not None and user not in {link.user, link.other_user}:
            self._refuse(Refusal.UNAUTHENTICATED, f"incarnation {sender} belongs to another key than {user}")
            return None
        known = link is not None and envelope.link == link.number
        if envelope.recipient not in {"", self._identity.incarnation} or (envelope.recipient and not known):
            self._disown(envelope, route)
            return None
        if not known:
            link = self._begin(envelope, user)
        if link is not None and link.route != route:
            came_back = link.route != b""
            link.route = route
            if link.user != user:
                link.user, link.other_user = user, link.user
            if came_back:
                link.retry()
        return link

    def _begin(self, envelope: Envelope[PeerMessage], user: str) -> Link | None:
        if envelope.sender not in self._links and len(self._links) >= MAX_PEERS:
            self._refuse(Refusal.TOO_MANY_PEERS, f"{len(self._links)} peers are known; forget the dead ones")
            return None
        anew = envelope.sender in self._links
        self.forget(envelope.sender)
        link = Link(self._shared, envelope.link, envelope.sender)
        link.user = user
        self._links[envelope.sender] = link
        if anew:
            self._callbacks.on_reset(envelope.sender)
        return link

    def _disown(self, envelope: Envelope[PeerMessage], route: bytes) -> None:
        """Tell a client that we remember nothing of its link; it begins the next one."""
        self._refuse(Refusal.STALE, f"link {envelope.link} of {envelope.sender} is not known here (any more)")
        self._answer_without_link(envelope, route)

    def _answer_without_link(self, envelope: Envelope[PeerMessage], route: bytes) -> None:
        answer: Envelope[PeerMessage] = Envelope(
            sender=self._identity.incarnation, recipient=envelope.sender, link=-envelope.link
        )
        self._socket.send(route, self._shared.codec.encode(answer))


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
        shared = self._shared = LinkContext(identity.incarnation, callbacks, self._put, settings)
        # Grows with every client of this incarnation, so that a server tells a new conversation from an old one.
        self._link = Link(shared, time.monotonic_ns())
        self.connection = ClientConnection(
            context,
            endpoint,
            keys=identity.keys,
            server_key=server_key,
            handshake_s=shared.settings.handshake_s,
            callbacks=ConnectionCallbacks(
                on_envelope=self._on_envelope,
                on_stands=self._on_stands,
                on_lost=self._on_lost,
                on_nobody=self._on_nobody,
                on_refused=self._refuse,
                on_handshake_failed=self._on_handshake_failed,
                probe=lambda: self._link.probe() if self._link.peer else b"",
            ),
        )

    def __repr__(self) -> str:
        return f"<PeerClient to {self._endpoint}: {self._link!r}>"

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
        return await _flush(lambda: (self._link,), timeout_s)

    def close(self) -> None:
        """Close the connection. Nothing is reported undelivered any more."""
        self._link.drop()
        self.connection.close()

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
        return self.connection.send(frame if self.server else self._shared.codec.encode(self._question))

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

    def _on_stands(self) -> None:
        self._link.retry()

    def _on_lost(self) -> None:
        if self._link.peer:  # else it is a handshake that fails, and said as that
            self._link.cut()

    def _on_nobody(self) -> None:
        self._link.cut()

    def _on_handshake_failed(self) -> None:
        kind = Refusal.UNAUTHENTICATED if self._identity.keys else Refusal.HANDSHAKE
        self._refuse(kind, "the handshake failed: our key is not allowed there, or its public key is another one")

    def _on_envelope(self, envelope: Envelope[PeerMessage], _route: bytes, frame: zmq.Frame) -> None:
        if self._accepts(envelope):
            self._link.take(envelope, len(frame))

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
            self._link = Link(self._shared, link.number + 1)
            link.close()
            self.server = envelope.sender
            self._callbacks.on_reset(envelope.sender)
        return False


async def _flush(links: Callable[[], Iterable[Link]], timeout_s: float) -> bool:
    deadline_s = monotonic() + timeout_s
    while any(link.unacknowledged for link in links()):
        if monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_FLUSH_POLL_S)
    return True
