"""The recent past: problems, traffic, and the facts of each room, in order and bounded."""

import time

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry import facts
from kvbridge.telemetry.recent import KEPT_ENDED, MAX_FACTS_OF_KIND, RECENT_PEERS, RECENT_PROBLEMS, Recent
from tests.helpers.manual_clock import ManualClock

R0 = Rank(pp=0, tp=0)
ROOM = {"room": 1, "generation": 2, "peer": "dddd"}
AMOUNTS = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=584, operations=2)}
S = RoomState


class Node:
    """A stream of facts and the recent that read it; each fact comes a second after the one before."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = facts.EventStream(self.clock)
        self.recent = Recent()
        self.stream.add_reader(self.recent.table)

    def enter(self, room: int, *states: RoomState, generation: int = 1, peer: str = "", code: str = "") -> None:
        for state in states:
            self.clock.now_s += 1.0
            self.stream.emit(facts.RoomEntered(room=room, generation=generation, state=state, peer=peer, code=code))

    def shown(self, limit: int = 10) -> list[tuple[int, RoomState]]:
        return [(room, timeline.entered.state) for (room, _), timeline in self.recent.shown(limit)]


def test_open_rooms_are_shown_longest_in_their_state_first_and_ended_ones_latest_first():
    node = Node()
    for room in (1, 2, 3):
        node.enter(room, S.ADMITTED)
    node.enter(1, S.OFFERED)
    node.enter(2, S.FAILED)
    node.enter(4, S.ADMITTED, S.FAILED)
    assert node.shown() == [(3, S.ADMITTED), (1, S.OFFERED), (4, S.FAILED), (2, S.FAILED)]
    assert node.shown(1) == [(3, S.ADMITTED), (1, S.OFFERED), (4, S.FAILED)]
    assert node.recent.ended == {S.FAILED: 2}


def test_attempts_are_told_apart_and_the_newest_is_meant():
    node = Node()
    node.enter(5, S.ADMITTED, S.OFFERED, generation=1, peer="p")
    node.enter(5, S.FAILED, generation=1)
    assert node.recent.of(5)[1].peer == "p", "the peer that it had"
    node.enter(5, S.ADMITTED, generation=3)
    assert node.recent.of(5)[0] == 3
    assert node.recent.of(5, 1)[1].entered.state is S.FAILED
    assert node.recent.of(5, 2) is None
    assert node.recent.of(6) is None


def test_a_stranger_s_messages_are_no_rooms_and_do_not_fill_one():
    node = Node()
    node.enter(5, S.ADMITTED)
    for room in range(1000):
        node.stream.emit(facts.RoomMessageRefused(room=room, generation=1, peer="p", code="stale"))
    for _ in range(2 * MAX_FACTS_OF_KIND):
        node.stream.emit(facts.RoomMessageRefused(room=5, generation=1, peer="p", code="stale"))
    assert node.shown() == [(5, S.ADMITTED)]
    assert len(node.recent.of(5)[1].facts) == 1 + MAX_FACTS_OF_KIND


def test_ended_rooms_are_forgotten_the_oldest_first_and_completed_ones_do_not_displace_failures():
    node = Node()
    node.enter(1, S.ADMITTED, S.FAILED)
    for room in range(2, 2000):
        node.enter(room, S.ADMITTED, S.COMPLETED)
    assert node.recent.of(1) is not None
    assert node.recent.of(2) is None
    assert node.recent.of(1999) is not None
    assert len(node.recent._timelines) == 1 + KEPT_ENDED[S.COMPLETED]


def test_status_keeps_the_last_problems_with_their_time() -> None:
    began_at, node = time.time(), Node()
    stream, recent = node.stream, node.recent
    for number in range(RECENT_PROBLEMS):
        stream.emit(facts.RoomEntered(room=number, generation=1, state=RoomState.FAILED, code="c", reason="r"))
    stream.emit(facts.PeerLost(peer="dddd", reason="silent"))
    stream.emit(facts.WorkerLost(rank=R0, cause="killed", reason="killed by SIGKILL"))
    problems = recent.problems
    assert len(problems) == RECENT_PROBLEMS
    assert began_at - 0.001 <= problems[0].at <= problems[-1].at <= time.time() + 0.001
    assert (problems[0].what, problems[0].whom) == ("room failed", "2")
    assert [problem.reason for problem in list(problems)[-2:]] == ["silent", "killed by SIGKILL"]


def test_status_knows_the_traffic_with_each_peer_and_forgets_the_longest_unheard_of() -> None:
    node = Node()
    stream, recent = node.stream, node.recent
    stream.emit(facts.OrderEnded(**ROOM, rank=R0, order=1, transport="mooncake", amounts=AMOUNTS))
    stream.emit(facts.RankReceived(**ROOM, rank=R0, amounts=AMOUNTS, transport="local"))
    stream.emit(facts.RoomEntered(**ROOM, state=RoomState.COMPLETED))
    stream.emit(facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="c"))
    peer = recent.traffic["dddd"]
    assert (peer.sent_bytes, peer.received_bytes, peer.rooms_completed, peer.rooms_failed) == (584, 584, 1, 1)
    for number in range(RECENT_PEERS):
        stream.emit(facts.RoomEntered(room=number, generation=1, peer=str(number), state=RoomState.COMPLETED))
    assert len(recent.traffic) == RECENT_PEERS
    assert "dddd" not in recent.traffic
