"""Connections between the daemons of different nodes: one a pair, messages both ways, each delivered once or reported.

The client (a decode node) opens the connection, asks which incarnation answers (link 0, which leaves no trace), and begins a
numbered link. The server (a prefill node) learns the client's incarnation from the first frame of a link. Two incarnations have one
link. A client that meets a server to which there is a link already, by another address, is closed before it begins a link, since a
later link would end the former one. A new connection of the same link continues where the old one broke off. When either side has
lost its memory of a link (a restart, `forget`), the server answers frames of the link with its negative number. The client then
reports open messages as undelivered and begins the next link.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import zmq

from kvbridge.control.keys import CurveKeys, Gate, check_key
from kvbridge.control.link import Link, PeerCallbacks, PeerSettings, Refusal
from kvbridge.control.sockets import (
    ACCEPTED,
    CONNECT_FAILED,
    DISCONNECTED,
    HANDSHAKE_FAILED,
    HANDSHAKE_FAILED_AUTH,
    HANDSHAKE_SUCCEEDED,
    Authenticator,
    ConnectionLimit,
    LoopSocket,
    Parts,
    SocketContext,
    bind,
    read_event,
    show_keys,
)
from kvbridge.core.addresses import is_loopback, parse_tcp
from kvbridge.core.errors import ConfigError, ConflictError, NotFoundError, ProtocolError
from kvbridge.core.process import monotonic
from kvbridge.core.wire.codec import PEER, Envelope, FrameError
from kvbridge.core.wire.messages import PeerMessage

MAX_PEERS = 4_096
"""Peers that a server knows at once."""
_FLUSH_POLL_S = 0.005
_RECONNECT_FIRST_MS = 50
_RECONNECT_MOST_MS = 2_000
_ZMTP_PING_MS = 5_000
_ZMTP_TIMEOUT_MS = 15_000


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The identity of this process to its peers. Without keys it talks in the clear, and on loopback only unless `insecure`."""

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


class PeerEnd(ABC):
    """A socket between nodes with its conversations. Built and used in one running loop; close it."""

    events: ClassVar[int]
    """The events of connections that `_on_event` is told of."""

    def __init__(self, identity: PeerIdentity, callbacks: PeerCallbacks, settings: PeerSettings | None) -> None:
        self.identity, self.callbacks, self.settings = identity, callbacks, settings or PeerSettings()
        self._links: dict[str, Link] = {}
        """By the peer's incarnation; a client has one, under no name."""

    @abstractmethod
    def put(self, link: Link, frame: bytes) -> bool:
        """Hand a frame of a link to the socket; return False when the frame was dropped."""

    @abstractmethod
    def on_over(self, link: Link) -> None:
        """Close and forget a link whose peer has acknowledged nothing in time."""

    @abstractmethod
    def _on_event(self, event: int, value: int) -> None: ...

    @abstractmethod
    def _on_envelope(self, envelope: Envelope[PeerMessage], route: bytes, frame: zmq.Frame) -> None: ...

    async def flush(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until everything is acknowledged; return whether it is."""
        deadline_s = monotonic() + timeout_s
        while any(link.unacknowledged for link in self._links.values()):
            if monotonic() >= deadline_s:
                return False
            await asyncio.sleep(_FLUSH_POLL_S)
        return True

    def _open(self, raw: zmq.Socket[bytes], endpoint: str) -> str:
        """Listen with a ROUTER, whose real endpoint is returned, or begin to connect with a DEALER. The keys are set.

        Raises as `bind_error` says, and ConfigError for an endpoint that cannot be connected to.
        """
        self._raw = raw
        raw.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(self.settings.handshake_s * 1_000)))
        raw.setsockopt(zmq.HEARTBEAT_IVL, _ZMTP_PING_MS)
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, _ZMTP_TIMEOUT_MS)
        # Not for IPv4: an IPv6 socket would report an IPv4 address that it was bound to as ::ffff:a.b.c.d.
        raw.setsockopt(zmq.IPV6, int("[" in endpoint))
        # Frames up to twice the limit are refused by the codec, and counted; beyond that the connection itself is cut.
        raw.setsockopt(zmq.MAXMSGSIZE, 2 * PEER.max_frame_bytes)
        monitor = raw.get_monitor_socket(self.events)
        self._monitor = LoopSocket(monitor, lambda parts: self._on_event(*read_event(parts[0].bytes)))
        self._socket = LoopSocket(raw, self._on_parts)
        try:
            if raw.type == zmq.ROUTER:
                raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
                return bind(raw, endpoint)
            raw.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_socket()
            raise ConfigError(f"control endpoint {endpoint} cannot be connected to: {error}") from error
        except BaseException:
            self._close_socket()
            raise
        return endpoint

    def _close_socket(self) -> None:
        if not self._raw.closed:
            self._raw.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _refuse(self, kind: str, detail: str) -> None:
        self.callbacks.on_refused(kind, detail)

    def _on_parts(self, parts: Parts) -> None:
        *routes, frame = parts
        if len(routes) != (self._raw.type == zmq.ROUTER):
            self._refuse("malformed", f"a message of {len(parts)} parts, expected one frame")
            return
        try:
            self._on_envelope(PEER.decode(frame.bytes), routes[0].bytes if routes else b"", frame)
        except FrameError as error:
            self._refuse(error.fault, str(error))
        except ProtocolError as error:
            self._refuse(error.code, str(error))


class PeerServer(PeerEnd):
    """The control socket of a node: a ROUTER that clients connect to."""

    events = HANDSHAKE_FAILED | ACCEPTED | DISCONNECTED

    def __init__(
        self,
        identity: PeerIdentity,
        callbacks: PeerCallbacks,
        endpoint: str,
        *,
        settings: PeerSettings | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Listen; `self.endpoint` is the real one (port 0 picks a port). `gate`: of `identity.keys` unless given.

        Raises ConflictError for a taken address, ConfigError for one that does not exist here, is malformed, or leaves this machine
        without keys.
        """
        identity.require_keys(endpoint, "listen on")
        super().__init__(identity, callbacks, settings)
        self.gate = gate or Gate(identity.keys)
        most = self.settings.max_connections
        too_many = f"{most} connections stand, the most (control.max_connections)"
        with ExitStack() as opened:
            context = SocketContext()
            opened.callback(context.close)
            raw = context.open(zmq.ROUTER)
            if identity.keys is not None:
                deny = lambda detail: callbacks.on_refused(Refusal.UNAUTHENTICATED, detail)  # noqa: E731
                opened.callback(Authenticator(context, self.gate, deny).close)
                show_keys(raw, identity.keys)
            refuse = lambda: callbacks.on_refused(Refusal.TOO_MANY_CONNECTIONS, too_many)  # noqa: E731
            self._connections = ConnectionLimit(most, refuse)
            opened.callback(self._connections.close)
            self.endpoint = self._open(raw, endpoint)
            opened.callback(self._close_socket)
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
        """Return the conversation with a known peer. Raises NotFoundError."""
        link = self._links.get(peer)
        if link is None:
            raise NotFoundError(f"no peer of incarnation '{peer}' is known; it never connected, or was forgotten")
        return link

    def barred(self) -> tuple[str, ...]:
        """Return known peers whose key `gate` does not accept any more. Their frames are refused; the caller forgets the peers."""
        return tuple(peer for peer, link in self._links.items() if not self.gate.allows(link.user))

    def forget(self, peer: str) -> None:
        """Drop a peer, and report its unacknowledged messages. A peer that is still there learns it and begins a new link."""
        link = self._links.pop(peer, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Stop listening, within the sockets' linger (0.2 s). Reports nothing as undelivered.

        A client loses the messages that it has not read by then: `flush` first.
        """
        for link in self._links.values():
            link.close(report=False)
        self._links.clear()
        self._closing.close()

    def on_over(self, link: Link) -> None:
        if self._links.get(link.peer) is link:
            self.forget(link.peer)

    def put(self, link: Link, frame: bytes) -> bool:
        return self._socket.send([link.route, frame])

    def _on_event(self, event: int, value: int) -> None:
        if event in {ACCEPTED, DISCONNECTED}:
            self._connections.on_event(event, value)
        elif event != HANDSHAKE_FAILED_AUTH:  # the authenticator has counted that one, with its address and key
            kind = Refusal.UNAUTHENTICATED if self.identity.keys else Refusal.HANDSHAKE
            self._refuse(
                kind, "a connection did not complete its handshake: wrong server key, no key, or no peer of ours"
            )

    def _on_envelope(self, envelope: Envelope[PeerMessage], route: bytes, frame: zmq.Frame) -> None:
        # The key that the sender of the frame proved to own; ZeroMQ knows none of a sender without one.
        user = str(frame.get("User-Id")) if self.identity.keys else ""
        link = self._find(envelope, route, user)
        if link is not None and not link.closed:
            link.take(envelope)

    def _find(self, envelope: Envelope[PeerMessage], route: bytes, user: str) -> Link | None:
        """Return the link that an envelope belongs to, made now if it is a new one, or None after refusing it."""
        sender, refuse = envelope.sender, self._refuse
        link = self._links.get(sender)
        if envelope.link == 0 and envelope.body is None and self.gate.allows(user):
            self._answer_without_link(envelope, route)
            return None
        if envelope.link < 1 or (link is not None and envelope.link < link.number):
            refuse(Refusal.STALE, f"link {envelope.link} of {sender}: an earlier one")
            return None
        if not self.gate.allows(user):
            refuse(Refusal.UNAUTHENTICATED, f"the key {user} of {sender} is not allowed any more")
            return None
        if link is not None and user != link.user:
            refuse(Refusal.UNAUTHENTICATED, f"incarnation {sender} belongs to another key than {user}")
            return None
        known = link is not None and envelope.link == link.number
        if envelope.recipient not in {"", self.identity.incarnation} or (envelope.recipient and not known):
            # The client remembers a link that we do not know; our answer makes it begin the next one.
            refuse(Refusal.STALE, f"link {envelope.link} of {sender} is not known here (any more)")
            self._answer_without_link(envelope, route)
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
        anew = envelope.sender in self._links
        if not anew and len(self._links) >= MAX_PEERS:
            self._refuse(Refusal.TOO_MANY_PEERS, f"{len(self._links)} peers are known; forget the dead ones")
            return None
        self.forget(envelope.sender)
        link = self._links[envelope.sender] = Link(self, envelope.link, envelope.sender, user)
        if anew:
            self.callbacks.on_reset(envelope.sender)
        return link

    def _answer_without_link(self, envelope: Envelope[PeerMessage], route: bytes) -> None:
        answer: Envelope[PeerMessage] = Envelope(self.identity.incarnation, envelope.sender, -envelope.link)
        self._socket.send([route, PEER.encode(answer)])


class PeerClient(PeerEnd):
    """The connection to one node's control socket: a DEALER that reconnects by itself. Messages wait for the first connection.

    All clients of a process share `context`, whose owner closes it after them.
    """

    events = HANDSHAKE_FAILED | HANDSHAKE_SUCCEEDED | DISCONNECTED | CONNECT_FAILED

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
        """Begin to connect. `server_key`: the server's public key in Z85, required when we have keys.

        Raises ConfigError for a malformed endpoint or key, and for a connection that would leave this machine in the clear.
        """
        super().__init__(identity, callbacks, settings)
        self._endpoint = endpoint
        self._check(server_key)
        self.server = ""
        """The incarnation that answers there; empty before its first answer."""
        # The number grows with every client of this incarnation, so a server tells a new conversation from an old one.
        self._links[""] = Link(self, time.monotonic_ns())
        raw = context.open(zmq.DEALER)
        raw.setsockopt(zmq.IMMEDIATE, 1)  # nothing queues before a connection is made: delivery resends
        raw.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_FIRST_MS)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MOST_MS)
        if identity.keys is not None and server_key:
            show_keys(raw, identity.keys, server_key)
        self._open(raw, endpoint)

    @property
    def link(self) -> Link:
        """The present conversation with the server."""
        return self._links[""]

    def send(self, message: PeerMessage) -> None:
        """Deliver to the server. Raises CapacityError (it acknowledges nothing), InvalidInputError, ConflictError."""
        if self.link.closed:
            raise ConflictError(f"the connection to {self._endpoint} was closed")
        self.link.send(message)

    def close(self) -> None:
        """Close the connection. Reports nothing as undelivered."""
        self.link.close(report=False)
        self._close_socket()

    def _check(self, server_key: str) -> None:
        endpoint = self._endpoint
        if server_key:
            check_key(server_key, f"public key of {endpoint}")
        if server_key and self.identity.keys is None:
            raise ConfigError(f"{endpoint} asks for CURVE, but this process has no keys; configure them")
        if not server_key:
            if self.identity.keys is not None and not self.identity.insecure:
                raise ConfigError(f"no public key is known of {endpoint}; give it beside the endpoint")
            self.identity.require_keys(endpoint, "connect to")

    def put(self, link: Link, frame: bytes) -> bool:  # noqa: ARG002 - there is one link
        if not self.server:  # first ask who answers; the link sends the frame again until it is acknowledged
            question: Envelope[PeerMessage] = Envelope(self.identity.incarnation)
            frame = PEER.encode(question)
        return self._socket.send([frame])

    def _refuse(self, kind: str, detail: str) -> None:
        self.callbacks.on_refused(kind, f"{detail} (server {self._endpoint})")

    def _on_event(self, event: int, _value: int) -> None:
        if event == HANDSHAKE_SUCCEEDED:
            self.link.retry()  # frames that were handed to a former connection may be lost
        elif event == CONNECT_FAILED:
            self.link.cut()
        elif event == DISCONNECTED:
            if self.link.peer:  # otherwise it is a failed handshake, which has an event of its own
                self.link.cut()
        else:
            kind = Refusal.UNAUTHENTICATED if self.identity.keys else Refusal.HANDSHAKE
            self._refuse(kind, "the handshake failed: our key is not allowed there, or its public key is another one")

    def _on_envelope(self, envelope: Envelope[PeerMessage], _route: bytes, _frame: zmq.Frame) -> None:
        """Handle an envelope of the present link; begin the next link when the server does not know this one."""
        link, ours = self.link, self.identity.incarnation
        if envelope.link == 0 and envelope.recipient == ours:
            if not self.server:
                self.server = envelope.sender
                self.callbacks.on_met(envelope.sender)
                if not link.closed:
                    link.retry()
        elif envelope.recipient != ours or abs(envelope.link) != link.number:
            self._refuse(Refusal.STALE, f"link {envelope.link} to {envelope.recipient}, ours is {link.number}")
        elif envelope.link > 0 and link.peer in {"", envelope.sender}:
            link.peer = envelope.sender
            link.take(envelope)
        elif link.peer:
            self._begin_anew(envelope.sender)

    def on_over(self, link: Link) -> None:
        if link is self.link:
            self._begin_anew(self.server)

    def _begin_anew(self, server: str) -> None:
        former, self._links[""] = self.link, Link(self, self.link.number + 1)
        former.close()
        self.server = server
        if not self.link.closed:  # a callback for an undelivered message may have closed this client
            self.callbacks.on_reset(server)
