"""A bad network between decode and prefill daemons: every control frame passes here, and may be lost, doubled or late.

A `Weather` decides for each frame from its direction and the type of its message. Without CURVE only.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import zmq

from kvbridge.core.wire.codec import PEER

TO_PREFILL, TO_DECODE = "to_prefill", "to_decode"
ACKS = "acks"
"""The type of a frame that carries acknowledgements only."""

Weather = Callable[[str, str], "list[float]"]
"""(direction, message type) -> after how many seconds each copy of the frame is delivered; no copy: it is lost."""


def calm(_direction: str, _kind: str) -> list[float]:
    """Everything passes at once."""
    return [0.0]


def partition(_direction: str, _kind: str) -> list[float]:
    """Nothing passes."""
    return []


def lose_first(kind: str, times: int) -> Weather:
    """Lose the first `times` frames with that message, resent ones included."""
    left = itertools.count(times, -1)
    return lambda _direction, found: [] if found == kind and next(left) > 0 else [0.0]


def storm(seed: int, *, loss: float = 0.0, doubled: float = 0.0, longest_delay_s: float = 0.0) -> Weather:
    """Each frame is lost or doubled with that probability, and late by up to that much, with all that are behind it."""
    chance = random.Random(seed)

    def decide(_direction: str, _kind: str) -> list[float]:
        if chance.random() < loss:
            return []
        copies = 2 if chance.random() < doubled else 1
        return [chance.uniform(0.0, longest_delay_s) for _ in range(copies)]

    return decide


class FrameProxy:
    """A ROUTER that decode daemons connect to, and for each of their connections a DEALER to the prefill daemon."""

    def __init__(self, target: str) -> None:
        self.target = target
        """The prefill daemon's control endpoint; read for each new connection."""
        self.weather: Weather = calm
        self.lost: Counter[tuple[str, str]] = Counter()
        """Frames, by direction and message type."""
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.setsockopt(zmq.LINGER, 0)
        port = self._front.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._due_s = {TO_PREFILL: 0.0, TO_DECODE: 0.0}
        """When the last frame of each direction arrives: a connection keeps their order."""
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="frame proxy")
        self._thread.start()

    def close(self) -> None:
        """End the thread; raises what it died of."""
        self._stop.set()
        self._thread.join(5)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
        except BaseException as error:  # noqa: BLE001 - told by `close`
            self._error = error
        finally:
            for socket in (self._front, *self._backs.values()):
                socket.close()
            self._context.term()

    def _step(self) -> None:
        poller = zmq.Poller()
        for socket in (self._front, *self._backs.values()):
            poller.register(socket, zmq.POLLIN)
        wait_s = min(0.02, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 0.02
        ready = dict(poller.poll(wait_s * 1_000))
        if self._front in ready:
            client, frame = self._front.recv_multipart()
            self._pass(TO_PREFILL, frame, lambda: self._send(self._back(client), [frame]))
        for client, back in list(self._backs.items()):
            if back in ready:
                (frame,) = back.recv_multipart()
                answer = [client, frame]
                self._pass(TO_DECODE, frame, lambda answer=answer: self._send(self._front, answer))
        while self._late and self._late[0][0] <= time.monotonic():
            heapq.heappop(self._late)[2]()

    def _back(self, client: bytes) -> zmq.Socket[bytes]:
        if client not in self._backs:
            back = self._backs[client] = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.LINGER, 0)
            back.connect(self.target)
        return self._backs[client]

    def _pass(self, direction: str, frame: bytes, deliver: Callable[[], None]) -> None:
        body = PEER.decode(frame).body
        kind = ACKS if body is None else str(body.type)
        delays_s = self.weather(direction, kind)
        self.lost[direction, kind] += not delays_s
        now_s = time.monotonic()
        for delay_s in delays_s:
            due_s = self._due_s[direction] = max(now_s + delay_s, self._due_s[direction])
            if due_s <= now_s:
                deliver()
            else:
                heapq.heappush(self._late, (due_s, next(self._numbers), deliver))

    @staticmethod
    def _send(socket: Any, parts: list[bytes]) -> None:
        # Whoever it was for may be gone, or take nothing: a network says nothing of that either.
        with suppress(zmq.ZMQError):
            socket.send_multipart(parts, zmq.NOBLOCK)


@contextmanager
def frame_proxy(target: str) -> Iterator[FrameProxy]:
    """A proxy for the length of a test."""
    proxy = FrameProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()
