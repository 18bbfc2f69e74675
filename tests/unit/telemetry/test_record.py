"""Facts: how they reach their readers, what they become in metrics, in the log and in the recent past."""

import dataclasses

import pytest
from structlog.testing import capture_logs

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

R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)
ROOM = {"room": 1, "generation": 2, "peer": "dddd"}
AMOUNTS = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=584, operations=2)}


class Node:
    """A stream of facts, and the record that reads it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(role="prefill")
        self.stream = facts.EventStream(self.clock)
        self.recent = NodeRecord(self.stream, self.metrics, Seldom(self.metrics.line_left_out, clock=self.clock))

    def enter(self, room: int, *states: RoomState, generation: int = 1, peer: str = "", code: str = "") -> None:
        """Have a room enter these states, a second after each other."""
        for state in states:
            self.clock.now_s += 1.0
            self.stream.emit(facts.RoomEntered(room=room, generation=generation, state=state, peer=peer, code=code))

    def shown(self, limit: int = 10) -> list[tuple[int, RoomState]]:
        return [(room, timeline.entered.state) for (room, _), timeline in self.recent.shown(limit)]

    def sample(self, name: str, **labels: str) -> float:
        return sum(
            found.value
            for family in self.metrics.registry.collect()
            for found in family.samples
            if found.name == name and labels.items() <= found.labels.items()
        )


@pytest.fixture
def counted() -> Node:
    node = Node()
    node.stream.emit(facts.PeerAccepted(peer="dddd", name="decode-0/node-0", features=()))
    return node


def test_overlapping_orders_count_the_time_once_and_every_byte(counted: Node) -> None:
    for kind, order, amounts in (
        (facts.OrderBegan, 1, {}),
        (facts.OrderBegan, 2, {}),
        (facts.OrderEnded, 1, {"amounts": AMOUNTS}),
        (facts.OrderEnded, 2, {}),
    ):
        counted.stream.emit(kind(**ROOM, rank=R0, order=order, transport="mooncake", **amounts))
        counted.clock.advance(1)
    assert counted.sample("kvbridge_transferred_bytes_total", direction="sent", transport="mooncake") == 584
    whose = {"peer": "decode-0/node-0", "direction": "sent", "transport": "mooncake"}
    assert counted.sample("kvbridge_peer_busy_seconds_total", **whose) == 3
    assert counted.sample("kvbridge_peer_transferred_bytes_total", **whose) == 584


def test_time_on_the_receiving_side_is_what_the_writers_tell(counted: Node) -> None:
    counted.clock.advance(100)
    for under_way_ago_s in (((10.0, 8.0), (5.0, 4.0)), ((9.0, 7.0),)):
        fact = facts.RankReceived(
            **ROOM, rank=R0, amounts=AMOUNTS, transport="mooncake", under_way_ago_s=under_way_ago_s
        )
        counted.stream.emit(fact)
    received = {"direction": "received", "transport": "mooncake"}
    assert counted.sample("kvbridge_peer_busy_seconds_total", peer="decode-0/node-0", **received) == 4.0
    assert counted.sample("kvbridge_transferred_bytes_total", **received) == 2 * 584
    assert counted.sample("kvbridge_peer_transferred_bytes_total", peer="decode-0/node-0", **received) == 2 * 584


def test_a_peer_is_called_by_its_name_also_when_it_fails(counted: Node) -> None:
    counted.stream.emit(facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    counted.stream.emit(facts.RoomEntered(**ROOM, state=RoomState.ABORTED, code="aborted"))
    counted.stream.emit(facts.PeerLost(peer="dddd", reason="silent"))
    counted.stream.emit(facts.PeerRejected(peer="eeee", code="fingerprint_mismatch", reason="another model"))
    for peer, code in (
        ("decode-0/node-0", "peer_failed"),
        ("decode-0/node-0", "lost"),
        ("unknown", "fingerprint_mismatch"),
    ):
        assert counted.sample("kvbridge_peer_failures_total", peer=peer, code=code) == 1
    assert counted.sample("kvbridge_peer_failures_total") == 3


def test_an_ended_room_is_counted_with_the_code_of_its_first_cause(counted: Node) -> None:
    counted.stream.emit(facts.RoomEntered(**ROOM, state=RoomState.OFFERED))
    counted.stream.emit(facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    assert counted.sample("kvbridge_rooms_ended_total") == 1
    assert counted.sample("kvbridge_rooms_ended_total", state="failed", code="peer_failed") == 1
    fact = facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.offer_s")
    counted.stream.emit(fact)
    assert counted.sample("kvbridge_rooms_ended_by_limit_total") == 1
    assert counted.sample("kvbridge_rooms_ended_by_limit_total", limit="timeouts.offer_s") == 1


def test_a_node_is_registered_as_far_as_its_slowest_rank_and_cached_tokens_are_counted(counted: Node) -> None:
    for rank, share in ((R0, 0.5), (R1, 0.25), (R0, 1.0)):
        counted.stream.emit(facts.MemoryRegistered(rank=rank, share=share))
    assert counted.sample("kvbridge_registration_progress_ratio") == 0.25
    counted.stream.emit(facts.PrefixMatched(**ROOM, hit_tokens=512, miss_tokens=88))
    assert counted.sample("kvbridge_prefix_tokens_total", outcome="hit") == 512
    assert counted.sample("kvbridge_prefix_tokens_total", outcome="miss") == 88


def test_the_log_has_a_line_for_each_room_that_ended_and_says_why_it_failed(counted: Node) -> None:
    about = {"age_s": 0.25, "prompt_tokens": 5, "prefix_tokens": 4, "computed_tokens": 2, "bytes": 584}
    ids = {"request_id": "r-1", "trace_id": "4bf9"}
    with capture_logs() as lines:
        counted.stream.emit(facts.RoomEntered(**ROOM, state=RoomState.COMPLETED, **about, ids=ids))
        late = facts.RoomEntered(
            **ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.room_s", **about
        )
        counted.stream.emit(late)
        counted.stream.emit(facts.OrderBegan(**ROOM, rank=R0, order=1, transport="local"))
    told = {"event": "room_ended", **ROOM, "peer_name": "decode-0/node-0", **about}
    why = {"code": "deadline", "reason": "late", "limit": "timeouts.room_s"}
    assert lines == [
        {**told, "log_level": "info", "state": "completed", **ids},
        {**told, "log_level": "warning", "state": "failed", **why},
    ]


@pytest.mark.parametrize("kind", [kind for kind in facts.Fact.kinds if kind.line])
def test_every_field_that_a_line_shows_is_one_of_its_fact(kind: type[facts.Fact]) -> None:
    fields = {field.name for field in dataclasses.fields(kind)}
    level, _, *keys = kind.line.split()
    assert level in {"info", "warning", "error"}
    assert {key.rpartition("=")[2] for key in keys} <= fields
    assert kind.seldom in {None, "", *fields}


def test_every_reader_has_every_fact_in_order_with_its_time() -> None:
    clock = ManualClock(5.0)
    stream = facts.EventStream(clock)
    first: list[tuple[float, facts.Fact]] = []
    second: list[tuple[float, facts.Fact]] = []
    stream.add_reader({facts.Fact: lambda now_s, fact: first.append((now_s, fact))})
    one, two = facts.MessagesResent(count=2), facts.MemoryRegistered(rank=Rank(pp=0, tp=0), share=0.5)
    stream.emit(one)
    clock.advance(1)
    stream.add_reader({facts.Fact: lambda now_s, fact: second.append((now_s, fact))})
    stream.emit(two)
    assert first == [(5.0, one), (6.0, two)]
    assert second == [(6.0, two)]


def test_a_reader_has_the_facts_of_its_table_and_of_the_kinds_below() -> None:
    stream, heard = facts.EventStream(), []
    stream.emit(facts.MessagesResent(count=1))  # before anybody reads
    stream.add_reader({facts.MessagesResent: lambda _, fact: heard.append(fact.count)})
    stream.add_reader(
        {facts.PeerFact: lambda _, fact: heard.append(fact.peer), facts.MemoryRegistered: lambda *_: heard.append("m")}
    )
    for fact in (
        facts.MessagesResent(count=2),
        facts.PeerLost(peer="p", reason="r"),
        facts.WorkerStarted(rank=Rank(pp=0, tp=0), pid=1),
    ):
        stream.emit(fact)
    assert heard == [2, "p"]


def test_open_rooms_are_shown_longest_in_their_state_first_and_ended_ones_latest_first():
    node = Node()
    for room in (1, 2, 3):
        node.enter(room, RoomState.ADMITTED)
    node.enter(1, RoomState.OFFERED)
    node.enter(2, RoomState.FAILED)
    node.enter(4, RoomState.ADMITTED, RoomState.FAILED)
    assert node.shown() == [
        (3, RoomState.ADMITTED),
        (1, RoomState.OFFERED),
        (4, RoomState.FAILED),
        (2, RoomState.FAILED),
    ]
    assert node.shown(1) == [(3, RoomState.ADMITTED), (1, RoomState.OFFERED), (4, RoomState.FAILED)]
    assert node.recent.ended == {RoomState.FAILED: 2}


def test_attempts_are_told_apart_and_the_newest_is_meant():
    node = Node()
    node.enter(5, RoomState.ADMITTED, RoomState.OFFERED, generation=1, peer="p")
    node.enter(5, RoomState.FAILED, generation=1)
    assert node.recent.of(5)[1].peer == "p", "the peer that it had"
    node.enter(5, RoomState.ADMITTED, generation=3)
    assert node.recent.of(5)[0] == 3
    assert node.recent.of(5, 1)[1].entered.state is RoomState.FAILED
    assert node.recent.of(5, 2) is None
    assert node.recent.of(6) is None


def test_a_stranger_s_messages_are_no_rooms_and_do_not_fill_one():
    node = Node()
    node.enter(5, RoomState.ADMITTED)
    for room in range(1000):
        node.stream.emit(facts.RoomMessageRefused(room=room, generation=1, peer="p", code="stale"))
    for _ in range(2 * MAX_FACTS_OF_KIND):
        node.stream.emit(facts.RoomMessageRefused(room=5, generation=1, peer="p", code="stale"))
    assert node.shown() == [(5, RoomState.ADMITTED)]
    assert len(node.recent.of(5)[1].facts) == 1 + MAX_FACTS_OF_KIND


def test_ended_rooms_are_forgotten_the_oldest_first_and_completed_ones_do_not_displace_failures():
    node = Node()
    node.enter(1, RoomState.ADMITTED, RoomState.FAILED)
    for room in range(2, 2000):
        node.enter(room, RoomState.ADMITTED, RoomState.COMPLETED)
    assert node.recent.of(1) is not None
    assert node.recent.of(2) is None
    assert node.recent.of(1999) is not None
    assert len(node.recent._timelines) == 1 + KEPT_ENDED[RoomState.COMPLETED]


def test_status_keeps_failures_of_a_quarter_of_an_hour_by_their_cause() -> None:
    node, clock = Node(), ManualClock()
    stream, recent = node.stream, node.recent
    recent.problems = Problems(clock)
    rooms = [
        facts.RoomEntered(room=one, generation=1, state=RoomState.FAILED, code="c", reason=f"rank {one}")
        for one in range(9)
    ]
    for fact in rooms:
        stream.emit(fact)
        clock.advance(1.0)
    stream.emit(facts.RoomEntered(room=9, generation=1, state=RoomState.ABORTED, code="aborted", reason="not wanted"))
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
