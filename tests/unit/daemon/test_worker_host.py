"""Rank workers: whose word about a rank is taken, when it is believed, and what is waited for until then."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvbridge.core.errors import InvalidInputError, NotFoundError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.engine_messages import Accepted, Pages, Refused
from kvbridge.core.wire.messages import Heartbeat, RankDescription
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    EndpointsRevoked,
    RoomClosed,
    Shutdown,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerReady,
)
from kvbridge.daemon.engine_socket import EngineSocket
from kvbridge.daemon.worker_host import WorkerHost
from kvbridge.node.workers import WorkerState
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.stream import EventStream, Fact, FrameRefused
from tests.helpers.node_bench import setup
from tests.helpers.rooms import R0, R1, manifest

LIMIT_S = 15.0
REVOKED = EndpointsRevoked(rank=R0, before_epoch=1)


class Process:
    """A process that ends when the test says so."""

    followed = True

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.calls: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def end(self) -> None:
        for call in self.calls:
            call()


class Server:
    """The socket of a node's workers (or engines); nobody is behind a link that is `gone`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.gone: set[str] = set()
        self.dropped: list[str] = []
        self.processes: dict[str, Process] = {}

    def send(self, client: str, message: object) -> None:
        if isinstance(message, Pages):
            raise InvalidInputError("4000000 bytes long, a frame takes at most 3145728")
        if client in self.gone:
            raise NotFoundError(f"{client} is gone")
        self.sent.append((client, message))

    def process(self, client: str) -> Process:
        return self.processes.setdefault(client, Process(len(self.processes) + 1))

    def drop(self, client: str) -> None:
        self.dropped.append(client)


class Listener:
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.up: list[Rank] = []
        self.down: list[str] = []
        self.said: list[object] = []
        self.refused: list[str] = []

    def worker_ready(self, rank: Rank) -> None:
        self.up.append(rank)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        self.down.append(reason)

    def fact(self, _now_s: float, fact: Fact) -> None:
        if isinstance(fact, FrameRefused):
            self.refused.append(fact.detail)


@pytest.fixture
def host() -> WorkerHost:
    """Two ranks, whose workers engines bring."""
    listener, events = Listener(), EventStream()
    events.add_reader({Fact: listener.fact})
    timeouts = SimpleNamespace(worker_start_s=LIMIT_S, worker_silence_s=LIMIT_S)
    made = WorkerHost(SimpleNamespace(timeouts=timeouts), {R0: (0,), R1: (1,)}, events, Seldom(lambda _event: None))
    made.serve(listener, dict.fromkeys((RoomClosed, EndpointsRevoked), listener.said.append))
    made._server = Server()
    made.workers.connect(made._post)
    made.start(setup, None)
    made.listener = listener
    return made


def hello(host: WorkerHost, link: str, rank: Rank = R0) -> None:
    host._on_message(link, WorkerHello(rank=rank, pid=1, adopted=True))


@pytest.fixture
def served(host: WorkerHost) -> WorkerHost:
    """Both ranks are there, behind the links `a` and `b`."""
    for link, rank in (("a", R0), ("b", R1)):
        hello(host, link, rank)
    host._server.sent.clear()
    return host


# ------------------------------------------------------------------------------------------- whose word is taken


@pytest.mark.parametrize("link", ["b", "a", "stranger"])
def test_a_worker_speaks_for_its_own_rank_and_for_no_other(served, link):
    """Else one rank's end of a room would count as another's, which may still write."""
    heard_s, listener = dict(served._heard_s), served.listener
    for message in (
        WorkerReady(rank=R1, pid=11, description=RankDescription(manifest=manifest(), endpoints=())),
        RoomClosed(room=1, generation=1, rank=R1, quiet=True),
    ):
        served._on_message(link, message)
    if link == "b":
        assert (listener.up, len(listener.said), listener.refused) == ([R1], 1, [])
        return
    served._on_message(link, WorkerFailed(rank=R1, code="transport_failed", message="no device"))
    assert len(listener.refused) == 3
    assert f"worker {link}, which does not serve that rank" in listener.refused[0]
    assert (listener.up, listener.said) == ([], [])
    assert served.workers.states()[R1] is WorkerState.STARTING
    assert served._heard_s == heard_s


def test_a_stranger_has_no_heartbeat(served):
    served._on_message("a", Heartbeat())
    assert served.listener.refused == []
    served._on_message("stranger", Heartbeat())
    assert len(served.listener.refused) == 1


# ------------------------------------------------------------------------------------------- what can wait

ALL_SENT = [CloseRoom(room=room, generation=1, all_sent=True) for room in (1, 2)]
STOPPED = CloseRoom(room=3, generation=1)


def test_that_rooms_are_over_is_told_ahead_of_the_next_message_to_that_worker(served):
    for message in ALL_SENT:
        served.workers.send(R0, message)
    sent = served._server.sent
    assert sent == []
    served.workers.send(R1, STOPPED)
    assert sent == [("b", STOPPED)]
    served.workers.send(R0, STOPPED)
    assert sent[1:] == [("a", ALL_SENT[0]), ("a", ALL_SENT[1]), ("a", STOPPED)]


def test_that_rooms_are_over_is_told_with_the_next_tick(served):
    for rank in (R0, R1):
        served.workers.send(rank, ALL_SENT[0])
    served._server.gone.add("a")
    served.watch()
    served.watch()
    assert served._server.sent == [("b", ALL_SENT[0])]
    served.workers.send(R1, Shutdown())
    assert served._server.sent[1:] == [("b", Shutdown())]


# ------------------------------------------------------------------------------------------- when it is believed


@pytest.mark.parametrize("how", ["its connection ends", "another takes its place"])
def test_a_successor_is_believed_when_the_process_of_its_predecessor_has_ended(host, how):
    hello(host, "first")
    process = host._server.process("first")
    if how == "its connection ends":
        host._on_link_gone("first", process)
        hello(host, "second")
    else:
        hello(host, "second")
        assert host._server.dropped == ["first"]
    assert len(host.listener.down) == 1, "rooms fail at once"
    host._on_message("second", REVOKED)
    assert host.listener.said == []
    process.end()
    assert host.listener.said == [REVOKED]
    host._on_message("second", REVOKED)
    assert host.listener.said == [REVOKED, REVOKED]


def silent(host: WorkerHost) -> None:
    """Its worker has said nothing for longer than it may, and the node was there."""
    host._looked_s = time.monotonic()
    host._heard_s[R0] = time.monotonic() - 2 * LIMIT_S
    host.watch()


def test_a_worker_that_says_nothing_is_given_up_and_its_process_is_left_alone(host):
    hello(host, "first")
    host.watch()
    assert host.listener.down == []
    silent(host)
    host.watch()
    [reason] = host.listener.down
    assert "said nothing for 30.0 s" in reason, "rooms fail, and whoever it may still write to shuts it out"
    assert host._server.dropped == ["first"], "when it goes on, it hears with its next message that it is not served"
    hello(host, "second")
    host._on_message("second", REVOKED)
    assert host.listener.said == [], "another process's word is no proof"
    host._server.process("first").end()
    assert host.listener.said == [REVOKED]


def test_a_process_that_serves_its_rank_again_has_closed_what_it_had(host):
    hello(host, "first")
    silent(host)
    host._server.processes["again"] = host._server.process("first")
    hello(host, "again")
    host._on_message("again", REVOKED)
    assert host.listener.said == [REVOKED]
    host._server.process("first").end()
    assert host.listener.said == [REVOKED]


def test_a_worker_that_has_closed_everything_is_not_waited_for(host):
    hello(host, "first")
    host._on_message("first", WorkerClosed(rank=R0))
    assert host._server.sent[-1] == ("first", Shutdown())
    assert (host._server.dropped, host.listener.down) == (["first"], ["its engine has closed it"])
    hello(host, "second")
    host._on_message("second", REVOKED)
    assert host.listener.said == [REVOKED]


def test_a_worker_that_leaves_before_its_memory_is_there_is_answered_too(host):
    host._early = {}
    hello(host, "first")
    host._on_message("first", WorkerClosed(rank=R0))
    assert (host._server.sent, host._early, host.listener.refused) == ([("first", Shutdown())], {}, [])


def test_an_engine_is_told_that_its_answer_does_not_fit_into_a_frame():
    engines = EngineSocket(0.0, EventStream())
    engines._server = Server()
    engines.send("engine", Pages(call=7, room=1, generation=1, prompt_tokens=1, tables=()))
    [(engine, refused)] = engines._server.sent
    assert isinstance(refused, Refused)
    assert (engine, refused.call, refused.code) == ("engine", 7, "invalid_input")
    assert "3145728" in refused.message
    engines.send("engine", Accepted(call=8))
    assert engines._server.sent[-1] == ("engine", Accepted(call=8))
