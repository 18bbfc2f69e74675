"""Facts: how they reach their readers, what they become in metrics and in the log."""

import dataclasses

import pytest
from structlog.testing import capture_logs

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry import facts
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.record import NodeRecord
from kvbridge.telemetry.registry import Metrics
from tests.helpers.manual_clock import ManualClock

R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)
ROOM = {"room": 1, "generation": 2, "peer": "dddd"}
AMOUNTS = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=584, operations=2)}


class Counted:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.metrics = Metrics(role="prefill")
        self.events = facts.EventStream(self.clock)
        NodeRecord(self.events, self.metrics, Seldom(self.metrics.line_left_out, clock=self.clock))
        self.events.emit(facts.PeerAccepted(peer="dddd", name="decode-0/node-0", features=()))

    def sample(self, name: str, **labels: str) -> float:
        return sum(
            found.value
            for family in self.metrics.registry.collect()
            for found in family.samples
            if found.name == name and labels.items() <= found.labels.items()
        )


@pytest.fixture
def counted() -> Counted:
    return Counted()


def test_overlapping_orders_count_the_time_once_and_every_byte(counted: Counted) -> None:
    for kind, order, amounts in (
        (facts.OrderBegan, 1, {}),
        (facts.OrderBegan, 2, {}),
        (facts.OrderEnded, 1, {"amounts": AMOUNTS}),
        (facts.OrderEnded, 2, {}),
    ):
        counted.events.emit(kind(**ROOM, rank=R0, order=order, transport="mooncake", **amounts))
        counted.clock.advance(1)
    assert counted.sample("kvbridge_transferred_bytes_total", direction="sent", transport="mooncake") == 584
    whose = {"peer": "decode-0/node-0", "direction": "sent", "transport": "mooncake"}
    assert counted.sample("kvbridge_peer_busy_seconds_total", **whose) == 3
    assert counted.sample("kvbridge_peer_transferred_bytes_total", **whose) == 584


def test_time_on_the_receiving_side_is_what_the_writers_tell(counted: Counted) -> None:
    counted.clock.advance(100)
    for under_way_ago_s in (((10.0, 8.0), (5.0, 4.0)), ((9.0, 7.0),)):
        fact = facts.RankReceived(
            **ROOM, rank=R0, amounts=AMOUNTS, transport="mooncake", under_way_ago_s=under_way_ago_s
        )
        counted.events.emit(fact)
    received = {"direction": "received", "transport": "mooncake"}
    assert counted.sample("kvbridge_peer_busy_seconds_total", peer="decode-0/node-0", **received) == 4.0
    assert counted.sample("kvbridge_transferred_bytes_total", **received) == 2 * 584
    assert counted.sample("kvbridge_peer_transferred_bytes_total", peer="decode-0/node-0", **received) == 2 * 584


def test_a_peer_is_called_by_its_name_also_when_it_fails(counted: Counted) -> None:
    counted.events.emit(facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    counted.events.emit(facts.RoomEntered(**ROOM, state=RoomState.ABORTED, code="aborted"))
    counted.events.emit(facts.PeerLost(peer="dddd", reason="silent"))
    counted.events.emit(facts.PeerRejected(peer="eeee", code="fingerprint_mismatch", reason="another model"))
    for peer, code in (
        ("decode-0/node-0", "peer_failed"),
        ("decode-0/node-0", "lost"),
        ("unknown", "fingerprint_mismatch"),
    ):
        assert counted.sample("kvbridge_peer_failures_total", peer=peer, code=code) == 1
    assert counted.sample("kvbridge_peer_failures_total") == 3


def test_an_ended_room_is_counted_with_the_code_of_its_first_cause(counted: Counted) -> None:
    counted.events.emit(facts.RoomEntered(**ROOM, state=RoomState.OFFERED))
    counted.events.emit(facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="peer_failed", reason="gone"))
    assert counted.sample("kvbridge_rooms_ended_total") == 1
    assert counted.sample("kvbridge_rooms_ended_total", state="failed", code="peer_failed") == 1
    fact = facts.RoomEntered(**ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.offer_s")
    counted.events.emit(fact)
    assert counted.sample("kvbridge_rooms_ended_by_limit_total") == 1
    assert counted.sample("kvbridge_rooms_ended_by_limit_total", limit="timeouts.offer_s") == 1


def test_a_node_is_registered_as_far_as_its_slowest_rank_and_cached_tokens_are_counted(counted: Counted) -> None:
    for rank, share in ((R0, 0.5), (R1, 0.25), (R0, 1.0)):
        counted.events.emit(facts.MemoryRegistered(rank=rank, share=share))
    assert counted.sample("kvbridge_registration_progress_ratio") == 0.25
    counted.events.emit(facts.PrefixMatched(**ROOM, hit_tokens=512, miss_tokens=88))
    assert counted.sample("kvbridge_prefix_tokens_total", outcome="hit") == 512
    assert counted.sample("kvbridge_prefix_tokens_total", outcome="miss") == 88


def test_the_log_has_a_line_for_each_room_that_ended_and_says_why_it_failed(counted: Counted) -> None:
    about = {"age_s": 0.25, "prompt_tokens": 5, "prefix_tokens": 4, "computed_tokens": 2, "bytes": 584}
    ids = {"request_id": "r-1", "trace_id": "4bf9"}
    with capture_logs() as lines:
        counted.events.emit(facts.RoomEntered(**ROOM, state=RoomState.COMPLETED, **about, ids=ids))
        late = facts.RoomEntered(
            **ROOM, state=RoomState.FAILED, code="deadline", reason="late", limit="timeouts.room_s", **about
        )
        counted.events.emit(late)
        counted.events.emit(facts.OrderBegan(**ROOM, rank=R0, order=1, transport="local"))
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
