"""Daemons of different nodes talk: one connection a pair, messages both ways, each delivered once or reported. The server's end.

The client (a decode node) opens the connection, asks who answers there (link 0, which leaves no trace), and begins a numbered
link; the server (a prefill node) learns the client's incarnation from its first frame of a link. An incarnation has one link to
another, so a client that meets one to which there is a link already, by another address, is closed before it begins its own: a
later link would end the former one. A new connection of the same link continues where the old one broke
off. When either side has lost its memory of a link (a restart, `forget`), the server answers its frames with the
link's negative number; the client then reports what is open as undelivered and begins the next link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import zmq

from kvbridge.control.authentication import ZAP_DOMAIN, Authenticator, Gate, user_of
from kvbridge.control.connections import ConnectionLimit
from kvbridge.control.envelopes import EnvelopeSocket
from kvbridge.control.keys import CurveKeys
from kvbridge.control.link import Link, LinkContext, PeerCallbacks, PeerSettings, Refusal
from kvbridge.control.sockets import (
    ACCEPTED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    HANDSHAKE_FAILED_AUTH,
    SocketContext,
    set_limits,
)
from kvbridge.core.addresses import is_loopback, parse_tcp
from kvbridge.core.clock import monotonic
from kvbridge.core.errors import ConfigError, NotFoundError
from kvbridge.core.wire.codec import Envelope
from kvbridge.core.wire.messages import PeerMessage

MAX_PEERS = 4_096
"""Peers that a server knows at once."""
_FLUSH_POLL_S = 0.005


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
        self._shared = LinkContext(identity.incarnation, callbacks, self._put, settings, self._on_over)
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
            self._closing = opened.pop_all()
        self._connections.bound(self.endpoint)

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

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged, at most `timeout_s`; whether it is."""
        return await flush_links(self._links.values, timeout_s)

    def close(self) -> None:
        """Stop listening; waits at most for the sockets' linger (0.2 s). Nothing is reported undelivered any more.

        A client that has not read its last messages by then loses them: `flush` first.
        """
        for link in self._links.values():
            link.drop()
        self._links.clear()
        self._closing.close()

    def _on_over(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            self.forget(link.peer)

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
        if link is not None and not link.closed:
            link.take(envelope)

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
        if link is not None and user != link.user:
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


async def flush_links(links: Callable[[], Iterable[Link]], timeout_s: float) -> bool:
    """Wait until everything on these links is acknowledged, at most `timeout_s`; whether it is."""
    deadline_s = monotonic() + timeout_s
    while any(link.unacknowledged for link in links()):
        if monotonic() >= deadline_s:
            return False
        await asyncio.sleep(_FLUSH_POLL_S)
    return True
