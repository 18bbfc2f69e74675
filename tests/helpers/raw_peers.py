"""Both ends of the control conversation, made by hand: they number and acknowledge, and say whatever a test wants."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from kvbridge.control.keys import CurveKeys
from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import Heartbeat, Hello, NodeDescription, PeerMessage

MessageT = TypeVar("MessageT")
WAIT_S = 30.0


class RawPeer:
    def __init__(self, kind: int) -> None:
        self.codec = PEER
        self.incarnation = secrets.token_hex(8)
        self.recipient = ""
        self.link = time.monotonic_ns()
        self.sent = 0
        self.got = 0
        self.waiting: list[PeerMessage] = []
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDTIMEO, int(WAIT_S * 1_000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.socket.close()
        self._context.term()

    def frame(self, body: PeerMessage | None, **changed: Any) -> bytes:
        facts: dict[str, Any] = {
            "sender": self.incarnation,
            "recipient": self.recipient,
            "link": self.link,
            "sequence": self.sent + 1,
            "acknowledged": self.got,
            "body": body,
        }
        return self.codec.encode(Envelope(**(facts | changed)))

    def put(self, frame: bytes) -> None:
        self.socket.send(frame)

    def send(self, body: PeerMessage) -> None:
        self.put(self.frame(body))
        self.sent += 1

    def take(self, kind: type[MessageT], room: int | None = None, timeout_s: float = WAIT_S) -> MessageT:
        deadline_s = time.monotonic() + timeout_s
        while True:
            for message in self.waiting:
                if isinstance(message, kind) and room in {None, getattr(message, "room", None)}:
                    self.waiting.remove(message)
                    return message
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not self.socket.poll(int(left_s * 1_000) + 1):
                raise AssertionError(f"no {kind.__name__} within {timeout_s} s; got {self.waiting}")
            self._receive(self.socket.recv_multipart())

    def _receive(self, parts: list[bytes]) -> None:
        envelope = PEER.decode(parts[-1])
        if envelope.body is None:
            return
        if envelope.sequence:
            new = envelope.sequence == self.got + 1
            self.got = max(self.got, envelope.sequence)
            self.put(self.frame(None, sequence=0))
            if not new:
                return
        if not isinstance(envelope.body, Heartbeat):
            self.waiting.append(envelope.body)


class RawDecode(RawPeer):
    def __init__(self, endpoint: str, *, keys: CurveKeys | None = None, server_key: str = "") -> None:
        super().__init__(zmq.DEALER)
        if keys is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self.socket.connect(endpoint)

    def introduction(self, real: NodeDescription, **changed: Any) -> Hello:
        """A hello in our own name with somebody else's memory."""
        ours = {"instance": "raw", "incarnation": self.incarnation}
        return Hello(node=real.model_copy(update=ours | changed))


class RawPrefill(RawPeer):
    def __init__(self, *, keys: CurveKeys | None = None) -> None:
        super().__init__(zmq.ROUTER)
        self.public_key = keys.public if keys else ""
        if keys is not None:  # and lets everybody in
            self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self.endpoint = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._route = b""

    def put(self, frame: bytes) -> None:
        self.socket.send_multipart([self._route, frame])

    def _receive(self, parts: list[bytes]) -> None:
        envelope = PEER.decode(parts[-1])
        if envelope.link == 0:  # asks who is here
            answer: Envelope[PeerMessage] = Envelope(self.incarnation, recipient=envelope.sender, link=0)
            self.socket.send_multipart([parts[0], PEER.encode(answer)])
            return
        if envelope.link != self.link or envelope.sender != self.recipient:
            self.sent = self.got = 0
        self._route, self.link, self.recipient = parts[0], envelope.link, envelope.sender
        super()._receive(parts)


@contextmanager
def raw_prefill() -> Iterator[RawPrefill]:
    with RawPrefill() as peer:
        yield peer
