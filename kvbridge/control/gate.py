"""Who may connect to a control socket, and how many at once."""

from __future__ import annotations

import os
import socket as unix
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
import zmq
from zmq.utils import z85

from kvbridge.control.keys import CurveKeys, read_allowed
from kvbridge.control.sockets import ACCEPTED, LoopSocket, Parts, SocketContext
from kvbridge.core.addresses import PeerAddress, parse_tcp
from kvbridge.core.errors import BridgeError, UnauthorizedError

log = structlog.get_logger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"kvbridge"
_ZAP_VERSION = b"1.0"


class Gate:
    """Whose keys a node accepts, and for which instances they may speak. Without keys of its own a node accepts everybody."""

    def __init__(self, keys: CurveKeys | None, entries: Iterable[str] = (), path: Path | None = None) -> None:
        """Begin with `keys.allowed`, or with the list of `entries` and the file `path`. Raises as `read_allowed`."""
        self._own = keys.public if keys else ""
        self._entries, self._path = tuple(entries), path if keys else None
        self._stamp = self._look()
        self.allowed = read_allowed(self._entries, path) if self._path else keys.allowed if keys else {}

    def allows(self, key: str) -> bool:
        """Whether the holder of a key may come in, and go on speaking. `key` is empty where there are no keys."""
        return key == self._own or key in self.allowed

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that a key may speak for; empty: any."""
        return self.allowed.get(key, frozenset())

    def check_server(self, address: PeerAddress) -> None:
        """Raise UnauthorizedError for a prefill node that this decode node is not to write its memory.

        An empty list leaves the choice to whoever may admit requests here: they name the node and its key.
        """
        if self.allowed and not self.allows(address.public_key):
            raise UnauthorizedError(
                f"the prefill node at {address.endpoint} has key {address.public_key or '(none)'}, which this decode node "
                "does not accept: list it in control.curve.allowed_keys_file, or leave the list empty to accept every "
                "node that a request names"
            )

    def follow(self) -> bool:
        """Look at the file; whether another list is in force now. A list that cannot be read leaves the former one in force."""
        stamp = self._look()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            fresh = read_allowed(self._entries, self._path)
        except BridgeError as error:
            log.error("allowed_keys_unreadable", effect="the former list stays in force", reason=str(error))
            return False
        changed, self.allowed = fresh != self.allowed, fresh
        if changed:
            log.info("allowed_keys_changed", keys=len(fresh))
        return changed

    def _look(self) -> tuple[int, ...]:
        try:
            found = self._path.stat() if self._path else None
        except OSError:
            return (0,)
        return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, found.st_mode) if found else ()


def user_of(frame: zmq.Frame) -> str:
    """The key that the sender of a frame proved to own, empty without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def show_keys(socket: zmq.Socket[bytes], keys: CurveKeys, server_key: str = "") -> None:
    """Have a socket take part in CURVE: as a server, or as the client of the server with that public key."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    if server_key:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


class Authenticator:
    """Answers ZeroMQ's question about each CURVE handshake: the peer must have proved to own an allowed key.

    That key becomes the "User-Id" of the peer's frames. Open it before the server socket of the same context is bound.
    """

    def __init__(self, context: SocketContext, gate: Gate, on_denied: Callable[[str], None]) -> None:
        self._gate = gate
        self._on_denied = on_denied
        socket = context.open(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        self._socket = LoopSocket(socket, self._answer)

    def close(self) -> None:
        """Stop answering: from now on nobody gets in."""
        self._socket.close()

    def _answer(self, parts: Parts) -> None:
        fields = [part.bytes for part in parts]
        request = fields[1] if len(fields) > 1 else b""
        correct = len(fields) == 7 and fields[0] == _ZAP_VERSION and fields[5] == b"CURVE" and len(fields[6]) == 32
        public = z85.encode(fields[6]).decode() if correct else ""
        if public and self._gate.allows(public):
            self._socket.send([_ZAP_VERSION, request, b"200", b"", public.encode(), b""])
            return
        self._socket.send([_ZAP_VERSION, request, b"400", b"key not allowed", b"", b""])
        address = fields[3].decode(errors="replace") if len(fields) > 3 else "?"
        self._on_denied(
            f"{address} holds key {public or '(none)'}, which is not in the list of allowed keys; "
            "add it there if this peer belongs to the cluster"
        )


class ConnectionLimit:
    """Bounds the connections of one listening ZeroMQ socket, told of them by its monitor.

    ZeroMQ accepts whatever comes, in a thread of its own. No option bounds that, and taking the address away would end every
    connection that was accepted there. So we shut down each connection beyond the limit, upon which ZeroMQ closes it. A descriptor
    that ZeroMQ has closed meanwhile may be anybody's: what is shut down is a copy, once it has shown that it is a connection of
    this address. The copy takes the place of a descriptor that we hold, so that this works in a process that has none left.
    """

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """`on_refused()` is called for each connection that is cut."""
        self._most = most
        self._on_refused = on_refused
        self._open: set[int] = set()
        self._name: object = None
        self._copy = unix.socket()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def bound(self, endpoint: str) -> None:
        """Say where the socket listens, with its real port."""
        address = parse_tcp(endpoint)
        self._name = address.port if address else endpoint.removeprefix("ipc://")

    def on_event(self, event: int, descriptor: int) -> None:
        """Take note of an ACCEPTED or DISCONNECTED event."""
        if event != ACCEPTED:
            self._open.discard(descriptor)
        elif len(self._open) < self._most:
            self._open.add(descriptor)
        else:
            self._cut(descriptor)
            self._on_refused()

    def close(self) -> None:
        """Give up the descriptors held in reserve."""
        self._copy.close()
        os.close(self._nothing)

    def _cut(self, descriptor: int) -> None:
        place = self._copy.fileno()
        try:
            os.dup2(descriptor, place, inheritable=False)
            name = self._copy.getsockname()
            if self._name == (name[1] if isinstance(name, tuple) else name):
                self._copy.shutdown(unix.SHUT_RDWR)
        except OSError:
            return  # it has ended by itself
        finally:
            os.dup2(self._nothing, place, inheritable=False)
