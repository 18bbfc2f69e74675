"""Control messages lost, doubled, late and out of order: rooms end as they would have, and everything is given back."""

import heapq
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq

from kvbridge.core.wire.codec import PEER
from tests.faults.cells import HEARTBEAT_S, PEER_SILENCE_S, SLACK_S
from tests.faults.fault_cluster import TOKENS, FaultCluster
from tests.faults.stages import scene
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import all_free, http, status

TO_PREFILL, TO_DECODE = "to_prefill", "to_decode"
ACKS = "acks"
"""The type of a frame that carries acknowledgements only."""

Weather = Callable[[str, str], "list[float]"]
"""(direction, message type) -> after how many seconds each copy of the frame is delivered; no copy: it is lost."""


def calm(_direction: str, _kind: str) -> list[float]:
    return [0.0]


def partition(_direction: str, _kind: str) -> list[float]:
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
    proxy = FrameProxy(target)
    try:
        yield proxy
    finally:
        proxy.close()


short = pytest.mark.faults_short
ROOMS = 6
"""Crossing rooms of a storm; as many again are cancelled on either side."""


class ProxiedCluster(FaultCluster):
    proxy: FrameProxy

    @property
    def address(self) -> dict[str, str]:
        return {"endpoint": self.proxy.endpoint} if hasattr(self, "proxy") else super().address


@pytest.fixture(scope="module")
def stage() -> Iterator[ProxiedCluster]:
    with scene() as opened:
        proxied = ProxiedCluster(opened.cluster, opened.engines)
        with frame_proxy(opened.address["endpoint"]) as proxied.proxy:
            yield proxied


@pytest.fixture(autouse=True)
def _whole_again(stage: ProxiedCluster) -> Iterator[None]:
    yield
    stage.proxy.weather = calm
    for daemon in stage.nodes:
        all_free(daemon)
        assert not http("GET", daemon, "/ready").json()["reasons"]
    stage.cross()
    for daemon in stage.nodes:
        all_free(daemon)
        stage.accounted(daemon)
        assert "Traceback" not in daemon.log_path.read_text()


def begun(stage: FaultCluster) -> int:
    room = stage.pair()
    stage.sender.call("begin", room, TOKENS)
    stage.sender.call("write", room, TOKENS, 0, TOKENS // 2)
    stage.taken([room])
    return room


@pytest.mark.parametrize("kind", ["hello", "welcome", *(pytest.param(kind, marks=short) for kind in ("offer", "done"))])
def test_a_message_of_a_crossing_room_is_lost(stage: ProxiedCluster, kind: str) -> None:
    if kind in {"hello", "welcome"}:  # the nodes lose each other, and every room begins with Hello
        stage.proxy.weather = partition
        for daemon in stage.nodes:
            eventually("lost", lambda daemon=daemon: not status(daemon)["peers"])
    stage.proxy.lost.clear()
    stage.proxy.weather = lose_first(kind, 3)
    stage.cross()
    assert sum(stage.proxy.lost.values()) == 3


@short
@pytest.mark.parametrize("kind", ["abort", "drained"])
def test_a_message_of_an_ending_is_lost(stage: ProxiedCluster, kind: str) -> None:
    room = begun(stage)
    stage.proxy.lost.clear()
    stage.proxy.weather = lose_first(kind, 4)
    stage.cancel(stage.decode, room)
    for daemon in stage.nodes:
        state, code, reason = stage.end(daemon, room)
        assert (state, code) == ("aborted", "aborted"), reason
    stage.sender.call("abort", room)
    # The rooms are over for users before the last of these messages has been sent again.
    eventually("four messages lost", lambda: sum(stage.proxy.lost.values()) == 4)
    all_free(stage.decode)


@pytest.mark.parametrize(
    ("seed", "loss", "doubled", "longest_delay_s"),
    [
        pytest.param(3, 0.3, 0.2, 0.1, id="all of it", marks=short),
        pytest.param(5, 0.6, 0.1, 0.05, id="hardly anything passes"),
    ],
)
def test_a_storm(stage: ProxiedCluster, seed: int, loss: float, doubled: float, longest_delay_s: float) -> None:
    """Rooms that cross and rooms that are cancelled on either side, all at once."""
    stage.proxy.weather = storm(seed, loss=loss, doubled=doubled, longest_delay_s=longest_delay_s)
    sender, reader = stage.sender, stage.reader
    crossing, cancelled_here, cancelled_there = ([stage.pair() for _ in range(ROOMS)] for _ in range(3))
    for room in (*crossing, *cancelled_here, *cancelled_there):
        sender.call("begin", room, TOKENS)
        sender.call("write", room, TOKENS, 0, TOKENS)
    for room in cancelled_here:
        stage.cancel(stage.prefill, room)
    for room in cancelled_there:
        stage.cancel(stage.decode, room)
    for room in crossing:
        sender.call("finish", room)
    for room in (*cancelled_here, *cancelled_there):
        sender.call("abort", room)
    for room in crossing:
        reader.call("claim", room, TOKENS)
        reader.call("release", room)
        assert stage.end(stage.prefill, room)[0] == stage.end(stage.decode, room)[0] == "completed"
    for room in (*cancelled_here, *cancelled_there):
        for daemon in stage.nodes:
            state, code, reason = stage.end(daemon, room)
            assert state in {"aborted", "failed"}, reason
            assert code == "aborted", reason


@short
def test_a_short_partition_is_not_noticed(stage: ProxiedCluster) -> None:
    room = begun(stage)
    before = [status(daemon)["peers"] for daemon in stage.nodes]
    stage.proxy.weather = partition
    stage.sender.call("write", room, TOKENS, TOKENS // 2, TOKENS)
    stage.sender.call("finish", room)
    time.sleep(PEER_SILENCE_S / 2)
    stage.proxy.weather = calm
    stage.reader.call("claim", room, TOKENS)
    stage.reader.call("release", room)
    assert [status(daemon)["peers"] for daemon in stage.nodes] == before


def test_a_long_partition_fails_rooms_and_heals(stage: ProxiedCluster) -> None:
    """Both sides give each other up, pages wait for proof, and get it from the same lives once the network is back."""
    room, draining = begun(stage), begun(stage)
    lives = [status(daemon)["incarnation"] for daemon in stage.nodes]
    began_s = time.monotonic()
    stage.proxy.weather = partition
    stage.cancel(stage.decode, draining)
    for daemon in stage.nodes:
        state, code, reason = stage.end(daemon, room)
        assert (state, code) == ("failed", "peer_failed"), reason
        assert "timeouts.peer_silence_s" in reason
    assert time.monotonic() - began_s < PEER_SILENCE_S + HEARTBEAT_S + SLACK_S
    shown = status(stage.decode)["quarantine"]
    assert len(shown) == 2, shown  # not a page is free without proof
    assert all(stage.prefill.config["instance"] in reason for reason in shown), shown
    stage.accounted(stage.decode)
    for each in (room, draining):
        stage.sender.call("abort", each)
    all_free(stage.prefill)
    stage.proxy.weather = calm
    all_free(stage.decode)
    assert stage.end(stage.decode, draining)[0] == "aborted"
    assert [status(daemon)["incarnation"] for daemon in stage.nodes] == lives


@pytest.mark.parametrize("deaf", [TO_DECODE, TO_PREFILL])
def test_one_deaf_direction(stage: ProxiedCluster, deaf: str) -> None:
    """One of both hears nothing: decode gives up, and is told the truth when both can hear again."""
    room = begun(stage)
    stage.proxy.weather = lambda direction, _kind: [] if direction == deaf else [0.0]
    state, code, reason = stage.end(stage.decode, room)
    assert (state, code) == ("failed", "peer_failed"), reason
    stage.proxy.weather = calm
    all_free(stage.decode)
    assert stage.end(stage.prefill, room)[0] in {"failed", "aborted"}
    stage.sender.call("abort", room)
