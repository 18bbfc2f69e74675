"""The recent past: problems, traffic, and the facts of each room, in order and bounded."""

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry import facts
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.recent import LATELY_S, MOST_KINDS, Problems, Tally
from kvbridge.telemetry.record import KEPT_ENDED, MAX_FACTS_OF_KIND, RECENT_PEERS, NodeRecord
from kvbridge.telemetry.registry import Metrics
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
        self.recent = NodeRecord(self.stream, Metrics(role="prefill"), Seldom(lambda _: None))

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


def test_status_keeps_failures_of_a_quarter_of_an_hour_by_their_cause() -> None:
    node, clock = Node(), ManualClock()
    stream, recent = node.stream, node.recent
    recent.problems = Problems(clock)
    rooms = [
        facts.RoomEntered(room=one, generation=1, state=S.FAILED, code="c", reason=f"rank {one}") for one in range(9)
    ]
    for fact in rooms:
        stream.emit(fact)
        clock.advance(1.0)
    stream.emit(facts.RoomEntered(room=9, generation=1, state=S.ABORTED, code="aborted", reason="not wanted"))
    stream.emit(facts.PeerAccepted(peer="dddd", name="decode-0/node-0", features=()))
    stream.emit(facts.PeerLost(peer="dddd", reason="silent"))
    failed, lost = recent.problems.lately()
    assert (failed.what, failed.whom, failed.reason) == ("room failed", "8", "rank 8")
    assert (failed.count, failed.at - failed.first_at) == (9, 8.0)
    assert (lost.what, lost.whom, lost.reason) == ("peer lost", "decode-0/node-0", "silent")
    clock.advance(LATELY_S - 0.5)
    assert recent.problems.lately() == (lost,)
    stream.emit(rooms[0])
    assert recent.problems.lately()[-1].count == 1, "the former ones are too old to be counted"
    for number in range(2 * MOST_KINDS):
        recent.problems.add(chr(1000 + number), "", "")
    assert len(recent.problems.lately()) == MOST_KINDS


def test_a_tally_forgets_what_is_older_than_a_quarter_of_an_hour() -> None:
    clock = ManualClock()
    tally = Tally(clock)
    for word in ("a", "a", "b"):
        tally.add(word)
        clock.advance(LATELY_S / 2)
    assert tally.lately() == {"a": 1, "b": 1}
    clock.advance(LATELY_S)
    assert tally.lately() == {}


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
