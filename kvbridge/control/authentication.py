"""Who may connect: answers ZeroMQ's question about each CURVE handshake."""

from __future__ import annotations

from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvbridge.control.keys import AllowList, CurveKeys
from kvbridge.control.sockets import LoopSocket, Parts, SocketContext

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvbridge"
_VERSION = b"1.0"


class Gate:
    """Which keys may come in, and for which instances they may speak. Without keys of our own, anybody for any."""

    def __init__(self, keys: CurveKeys | None) -> None:
        self._own = keys.public if keys else ""
        self._allowed: AllowList = keys.allowed if keys else {}

    def allows(self, key: str) -> bool:
        """Whether the holder of a key may come in, and go on speaking. `key` is empty where there are no keys."""
        return key == self._own or key in self._allowed

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that a key may speak for; empty: any."""
        return self._allowed.get(key, frozenset())

    def replace(self, allowed: AllowList) -> None:
        """Put another list in force."""
        self._allowed = allowed


def user_of(frame: zmq.Frame) -> str:
    """The key that the sender of a frame proved to own, empty without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


class Authenticator:
    """Lets a handshake pass when the peer proved to own an allowed key.

    That key becomes the "User-Id" of the peer's frames. Must be open before the server socket of
    the same context is bound.
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
        public = self._public_key(fields)
        if public and self._gate.allows(public):
            self._socket.send([_VERSION, request, b"200", b"", public.encode(), b""])
            return
        self._socket.send([_VERSION, request, b"400", b"key not allowed", b"", b""])
        address = fields[3].decode(errors="replace") if len(fields) > 3 else "?"
        self._on_denied(
            f"{address} holds key {public or '(none)'}, which is not in the list of allowed keys; "
            "add it there if this peer belongs to the cluster"
        )

    @staticmethod
    def _public_key(fields: list[bytes]) -> str:
        correct = len(fields) == 7 and fields[0] == _VERSION and fields[5] == b"CURVE" and len(fields[6]) == 32
        return z85.encode(fields[6]).decode() if correct else ""
