"""The processes of one node talk: the daemon with its rank workers and engines, over Unix sockets.

Within one connection nothing is lost or reordered, so there are no resends here: messages are numbered, and a client
whose numbers do not add up is dropped. A client joins with its first message and is gone when its connection is;
there is no second chance on either side, because memory was handed over on that connection. Whoever can connect is trusted to
be who it says, and a client believes nobody in a runtime directory that is not its user's own, or that of the user it was told.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import zmq

from kvbridge.control.envelopes import EnvelopeSocket
from kvbridge.control.link import Refusal
from kvbridge.control.processes import PeerProcess
from kvbridge.control.runtime_directory import open_socket, remove_socket, require_private_directory, require_unserved
from kvbridge.control.sockets import ACCEPTED, DISCONNECTED, NOBLOCK, SocketContext, frames_wait, read_event
from kvbridge.core.addresses import check_ipc_path
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, NotFoundError, NotReadyError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.core.wire.codec import Envelope, FrameError, MessageCodec

InboundT = TypeVar("InboundT", bound=FrozenModel)
OutboundT = TypeVar("OutboundT", bound=FrozenModel)

_LINK = 1
_DAEMON_ENDED = "the daemon has ended or closed the connection"
_LOOK_AGAIN_S = 0.02
"""Pause between two looks whether a runtime directory has been made."""


def _ignore(*_: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class LocalCallbacks(Generic[InboundT]):
    """Called in the loop, never concurrently. None may block."""

    on_message: Callable[[str, InboundT], None]
    """(client, message), in order. Raising a BridgeError refuses the message: it is counted under the error's code.
    With its first message a client joins, and one of the same name that was there before is gone."""
    on_gone: Callable[[str, PeerProcess], None] = _ignore
    """(client, process): its connection has ended, or it was dropped for breaking the protocol. Whether its process has
    ended as well only `process` says, which is closed after the call unless that asks to hear of it."""
    on_refused: Callable[[str, str], None] = _ignore
    """(kind, detail): a frame was refused."""


@dataclass(slots=True)
class _Client:
    name: str
    route: bytes
    descriptor: int
    process: PeerProcess
    received: int = 0
    sent: int = 0


class LocalServer(Generic[InboundT, OutboundT]):
    """The daemon's end: a ROUTER on a Unix socket. Built and used in one running loop; close it."""

    def __init__(
        self,
        name: str,
        path: Path,
        inbound: MessageCodec[InboundT],
        outbound: MessageCodec[OutboundT],
        callbacks: LocalCallbacks[InboundT],
        *,
        to_group: bool = False,
    ) -> None:
        """Listen on `path`, whose directory must have been prepared (`prepare_runtime_directory`).

        `to_group`: whoever may enter the directory may connect, too, instead of this user alone. Raises ConfigError when the path
        is unfit, ConflictError when another process serves it.
        """
        self._name = name
        self._outbound = outbound
        self._callbacks = callbacks
        self._by_name: dict[str, _Client] = {}
        self._by_route: dict[bytes, _Client] = {}
        self._connections: set[int] = set()
        check_ipc_path(str(path))
        require_unserved(path)
        with ExitStack() as opened:
            context = SocketContext()
            opened.callback(context.close)
            self._socket = EnvelopeSocket(
                context.open(zmq.ROUTER),
                inbound,
                self._on_envelope,
                on_refused=callbacks.on_refused,
                on_event=self._on_connection,
                events=ACCEPTED | DISCONNECTED,
            )
            opened.callback(self._socket.close)
            open_socket(path, lambda: self._socket.bind(f"ipc://{path}"), to_group=to_group)
            opened.callback(remove_socket, path, path.stat().st_ino)
            self._closing = opened.pop_all()

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of those who are joined."""
        return tuple(self._by_name)

    def send(self, client: str, message: OutboundT) -> None:
        """Send to a joined client.

        Raises NotFoundError when it is gone, CapacityError when it has not read thousands of messages,
        InvalidInputError when the message does not fit into a frame.
        """
        known = self._joined(client)
        envelope = Envelope(sender=self._name, recipient=client, link=_LINK, sequence=known.sent + 1, body=message)
        frame = self._outbound.encode(envelope)
        if not self._socket.send(known.route, frame):
            raise CapacityError(f"local client '{client}' does not read its messages, or is just going; it may hang")
        known.sent += 1

    def process(self, client: str) -> PeerProcess:
        """Return the process of a joined client. Raises NotFoundError when it is gone."""
        return self._joined(client).process

    def drop(self, client: str) -> None:
        """Forget a client (harmless when unknown, `on_gone` is not called); it is told with its next message."""
        known = self._by_name.get(client)
        if known is not None:
            self._forget(known)
            known.process.close()

    def close(self) -> None:
        """Stop listening; waits at most for the socket's linger (0.2 s). `on_gone` is not called any more."""
        for client in self.clients:
            self.drop(client)
        self._closing.close()

    def _joined(self, client: str) -> _Client:
        try:
            return self._by_name[client]
        except KeyError:
            raise NotFoundError(f"local client '{client}' is not joined; its process ended or never started") from None

    def _on_connection(self, event: int, descriptor: int) -> None:
        if event == ACCEPTED:
            self._connections.add(descriptor)
            return
        self._connections.discard(descriptor)
        for client in [known for known in self._by_name.values() if known.descriptor == descriptor]:
            self._lose(client)

    def _on_envelope(self, envelope: Envelope[InboundT], route: bytes, frame: zmq.Frame) -> None:
        client = self._admit(envelope, route, frame)
        if client is None or envelope.body is None:
            return
        try:
            self._callbacks.on_message(client.name, envelope.body)
        except BridgeError as error:
            detail = f"{type(envelope.body).__name__} of {client.name}: {error}"
            self._callbacks.on_refused(error.code, detail)
        finally:
            self._notice_vanished(client)

    def _admit(self, envelope: Envelope[InboundT], route: bytes, frame: zmq.Frame) -> _Client | None:
        client = self._by_route.get(route)
        if client is None and envelope.sequence == 1:
            client = self._join(envelope.sender, route, _descriptor(frame))
        if client is None:
            self._callbacks.on_refused(Refusal.STALE, f"'{envelope.sender}' is not joined here (any more)")
            self._disown(envelope, route)
            return None
        expected = client.received + 1
        if envelope.sequence == expected and envelope.sender == client.name:
            client.received = expected
            return client
        kind = Refusal.DUPLICATE if envelope.sequence < expected else Refusal.OUT_OF_ORDER
        detail = f"message {envelope.sequence} of '{envelope.sender}', expected {expected} of '{client.name}'"
        self._callbacks.on_refused(kind, detail)
        if envelope.sequence > expected:
            self._lose(client)
        return None

    def _join(self, name: str, route: bytes, descriptor: int) -> _Client:
        before = self._by_name.get(name)
        if before is not None:
            self._lose(before)
        # What happened to connections before this frame was read, so that a reused descriptor is not taken for the old.
        self._socket.catch_up()
        # Should the descriptor be another connection's after all, then nobody waits for the answer to this frame, and whoever
        # was never answered has none of our memory.
        client = _Client(name, route, descriptor, PeerProcess.of_connection(descriptor))
        self._by_name[name] = self._by_route[route] = client
        return client

    def _notice_vanished(self, client: _Client) -> None:
        """A client that ended right after its first message was already disconnected when it joined."""
        if client.received == 1 and client.descriptor >= 0 and client.descriptor not in self._connections:
            self._lose(client)

    def _lose(self, client: _Client) -> None:
        if self._by_name.get(client.name) is not client:
            return
        self._forget(client)
        try:
            self._callbacks.on_gone(client.name, client.process)
        finally:
            client.process.close()

    def _forget(self, client: _Client) -> None:
        del self._by_name[client.name]
        del self._by_route[client.route]

    def _disown(self, envelope: Envelope[InboundT], route: bytes) -> None:
        answer: Envelope[OutboundT] = Envelope(sender=self._name, recipient=envelope.sender, link=-_LINK)
        self._socket.send(route, self._outbound.encode(answer))


class LocalClient(Generic[InboundT, OutboundT]):
    """A worker's or an engine's end: a DEALER without asyncio, used by one thread.

    `inbound` is what this end receives. Once the daemon is gone every call raises PeerError; make a new client then.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        inbound: MessageCodec[InboundT],
        outbound: MessageCodec[OutboundT],
        *,
        on_refused: Callable[[str, str], None] = _ignore,
        daemon_user: int | None = None,
    ) -> None:
        """Begin to connect; returns at once, the first `send` waits.

        `daemon_user`: whose daemon it is, by number (default: this process's user). Raises ConfigError on an unfit path, and for
        a runtime directory of another user or one that others can write (when it is not there yet, the first `send` does).
        """
        self._name = name
        self._inbound = inbound
        self._outbound = outbound
        self._on_refused = on_refused
        self._path = path
        self._daemon_user = daemon_user
        self._sent = 0
        self._received = 0
        self._gone = ""
        self.daemon = ""
        """The incarnation of the daemon, once it has sent something."""
        check_ipc_path(str(path))
        self._context: SocketContext | None = SocketContext()
        self._socket = self._context.open(zmq.DEALER)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.MAXMSGSIZE, 2 * inbound.max_frame_bytes)
        self._monitor = self._socket.get_monitor_socket(DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._reaches = False
        try:
            self._reach(0.0)
        except BridgeError:
            self.close()
            raise

    @property
    def daemon_ended(self) -> bool:
        """Whether the daemon has ended, as far as was looked: not when it has only given this client up."""
        return self._gone == _DAEMON_ENDED

    def send(self, message: OutboundT, timeout_s: float = 1.0) -> None:
        """Hand a message over, waiting at most `timeout_s` for the connection or for the daemon to read.

        Raises NotReadyError after that, PeerError once the daemon is gone, InvalidInputError when it is too large.
        """
        socket = self._require_open()
        self._look_for_end()
        self._raise_if_gone()
        envelope = Envelope(sender=self._name, link=_LINK, sequence=self._sent + 1, body=message)
        frame = self._outbound.encode(envelope)
        deadline_s = time.monotonic() + timeout_s
        self._reach(deadline_s)
        try:
            socket.send(frame, NOBLOCK)
        except zmq.Again:
            if not socket.poll(max(0, int((deadline_s - time.monotonic()) * 1_000)), zmq.POLLOUT):
                why = "no daemon answers there yet" if not self._sent else "the daemon hangs or has ended"
                raise NotReadyError(
                    f"'{self._name}' could not send to {self._path} within {timeout_s} s: {why}"
                ) from None
            socket.send(frame, NOBLOCK)
        self._sent += 1

    def receive(self, timeout_s: float) -> InboundT | None:
        """Return the next message, or None when none came within `timeout_s` (0 only looks).

        Raises PeerError once the daemon is gone and its last message was read. Malformed frames are refused and
        counted.
        """
        socket = self._require_open()
        deadline_s = time.monotonic() + timeout_s
        while True:
            had_ended = self._gone
            while frames_wait(socket):
                message = self._open(socket.recv_multipart(NOBLOCK))
                if message is not None:
                    return message
            if had_ended:
                self._raise_if_gone()
            self._look_for_end()
            if self._gone:
                continue  # its last message may have come meanwhile
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return None
            self._poller.poll(max(1, int(remaining_s * 1_000)))

    def close(self) -> None:
        """Close; waits at most for the socket's linger (0.2 s). Harmless when closed."""
        if self._context is None:
            return
        self._gone = self._gone or "closed"
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.close()
        self._context = None

    def _reach(self, deadline_s: float) -> None:
        """Connect once the runtime directory is there, and only if nobody else can have put a socket into it."""
        while not self._reaches:
            if require_private_directory(self._path.parent, self._daemon_user):
                self._socket.connect(f"ipc://{self._path}")
                self._reaches = True
            elif time.monotonic() >= deadline_s:
                return
            else:
                time.sleep(_LOOK_AGAIN_S)

    def _require_open(self) -> zmq.Socket[bytes]:
        if self._context is None:
            raise ConflictError(f"local client '{self._name}' is not connected ({self._gone})")
        return self._socket

    def _open(self, parts: list[bytes]) -> InboundT | None:
        try:
            envelope = self._inbound.decode(b"".join(parts))
        except FrameError as error:
            self._on_refused(error.fault, str(error))
            return None
        if envelope.link == -_LINK:
            self._gone = "the daemon does not know this client (any more)"
            return None
        if envelope.sequence != self._received + 1 or envelope.recipient != self._name:
            self._on_refused(Refusal.DUPLICATE, f"message {envelope.sequence}, expected {self._received + 1}")
            return None
        self._received += 1
        self.daemon = envelope.sender
        return envelope.body

    def _look_for_end(self) -> None:
        while not self._gone and frames_wait(self._monitor):
            event, _ = read_event(self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            if event == DISCONNECTED:
                self._gone = _DAEMON_ENDED

    def _raise_if_gone(self) -> None:
        if self._gone:
            raise PeerError(f"'{self._name}' at {self._path}: {self._gone}; connect anew")


def _descriptor(frame: zmq.Frame) -> int:
    """The connection that a frame came over, as the monitor names it, or -1 when ZeroMQ does not say."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
