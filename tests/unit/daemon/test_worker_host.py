"""Whose word about a rank is taken: that of the link which serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import NotFoundError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat, RankDescription
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    NodeToWorker,
    RoomClosed,
    Shutdown,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from kvbridge.daemon.worker_host import WorkerHost, WorkerReport
from kvbridge.node.workers import WorkerState
from kvbridge.telemetry.events import Fact, FrameRefused
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.stream import EventStream
from tests.helpers.rooms import R0, R1, manifest
from tests.helpers.worker_sets import setup


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.up: list[Rank] = []
        self.down: list[Rank] = []
        self.said: list[WorkerReport] = []
        self.refused: list[str] = []

    def worker_ready(self, rank: Rank) -> None:
        self.up.append(rank)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        self.down.append(rank)

    def fact(self, _now_s: float, fact: Fact) -> None:
        if isinstance(fact, FrameRefused):
            self.refused.append(fact.detail)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def host(listener: Listener, tmp_path: Path) -> WorkerHost:
    """Two ranks, served by the links `a` and `b`; engines bring the workers."""
    config = DecodeConfig.model_validate(
        {
            "instance": "d",
            "model": {"preset": "tiny-v4"},
            "pools": {"device": {"full": 4, "swa": 4, "request": 1}, "host": {"pages": 4}},
            "runtime_dir": "/tmp/kvbridge-test-host",  # short, as a path of sockets has to be; nothing is made there
        }
    )
    events = EventStream()
    events.add_reader({Fact: listener.fact})
    made = WorkerHost(config, {R0: (0, 1), R1: (0, 1)}, events, Seldom(lambda _event: None))
    made.serve(listener, {RoomClosed: listener.said.append})
    made.workers.connect(lambda _link, _message: None)
    made.start(setup, None)
    for link, rank in (("a", R0), ("b", R1)):
        made._on_message(link, WorkerHello(rank=rank, pid=11))
    return made


def messages_of(rank: Rank) -> list[object]:
    return [
        WorkerReady(rank=rank, pid=11, description=RankDescription(manifest=manifest(), endpoints=())),
        RoomClosed(room=1, generation=1, rank=rank, quiet=True),
        WorkerFailed(rank=rank, code="transport_failed", message="no device"),
    ]


def test_a_worker_speaks_for_its_own_rank(host: WorkerHost, listener: Listener) -> None:
    for message in messages_of(R0)[:2]:
        host._on_message("a", message)
    assert (listener.up, listener.refused) == ([R0], [])
    assert [type(message) for message in listener.said] == [RoomClosed]


@pytest.mark.parametrize("link", ["a", "stranger"])
def test_a_worker_does_not_speak_for_another_rank(host: WorkerHost, listener: Listener, link: str) -> None:
    """Else one rank's end of a room would count as another's, which may still write."""
    heard_s = dict(host._heard_s)
    for message in messages_of(R1):
        host._on_message(link, message)
    assert len(listener.refused) == 3
    assert f"worker {link}, which does not serve that rank" in listener.refused[0]
    assert (listener.up, listener.said) == ([], [])
    assert host.workers.states()[R1] is WorkerState.STARTING
    assert host._heard_s == heard_s


def test_a_stranger_has_no_heartbeat(host: WorkerHost, listener: Listener) -> None:
    host._on_message("a", Heartbeat())
    assert listener.refused == []
    host._on_message("stranger", Heartbeat())
    assert len(listener.refused) == 1


class Sockets:
    """What was handed to ZeroMQ; nobody is behind a link that is `gone`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, NodeToWorker]] = []
        self.gone: set[str] = set()

    def send(self, link: str, message: NodeToWorker) -> None:
        if link in self.gone:
            raise NotFoundError(f"{link} is gone")
        self.sent.append((link, message))


@pytest.fixture
def sockets(host: WorkerHost) -> Sockets:
    host._server = Sockets()
    host.workers.connect(host._post)
    return host._server


ALL_SENT = [CloseRoom(room=room, generation=1, all_sent=True) for room in (1, 2)]
STOPPED = CloseRoom(room=3, generation=1)


def test_that_rooms_are_over_is_told_ahead_of_the_next_message_to_that_worker(host: WorkerHost, sockets: Sockets):
    for message in ALL_SENT:
        host.workers.send(R0, message)
    assert sockets.sent == []
    host.workers.send(R1, STOPPED)
    assert sockets.sent == [("b", STOPPED)]
    host.workers.send(R0, STOPPED)
    assert sockets.sent[1:] == [("a", ALL_SENT[0]), ("a", ALL_SENT[1]), ("a", STOPPED)]


def test_that_rooms_are_over_is_told_with_the_next_tick(host: WorkerHost, sockets: Sockets):
    for rank in (R0, R1):
        host.workers.send(rank, ALL_SENT[0])
    sockets.gone.add("a")
    host.watch()
    host.watch()
    assert sockets.sent == [("b", ALL_SENT[0])]
    host.workers.send(R1, Shutdown())
    assert sockets.sent[1:] == [("b", Shutdown())]
