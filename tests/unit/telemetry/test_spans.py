"""Spans that follow from facts."""

from typing import Any

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank, Role
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.context import TraceContext, begin_with
from kvbridge.telemetry.facts import (
    EventStream,
    OrderBegan,
    OrderEnded,
    PairingEnded,
    PhasesEnded,
    RequestAnswered,
    RoomBegun,
    RoomEntered,
    RoomFinished,
    RoomOffered,
)
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.record import NodeRecord
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.spans import MAX_ORDERS, PARTS, Span, SpanReader
from tests.helpers.manual_clock import ManualClock

RANK = Rank(pp=0, tp=0)
ROUTER = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True)
UNRECORDED = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=False)


class Bench:
    """A reader at one stream, and what it has told of."""

    def __init__(self, role: Role) -> None:
        self.clock = ManualClock(100.0)
        self.spans: list[Span] = []
        self.stream = EventStream(self.clock)
        record = NodeRecord(self.stream, Metrics(role=role.value), Seldom(lambda _: None))
        self.stream.add_reader(SpanReader(self.spans.append, PARTS[role], record).table)
        self.trace: TraceContext | None = begin_with(1.0)(ROUTER)

    def happens(self, kind: Any, after_s: float = 1.0, **facts: Any) -> None:
        self.clock.advance(after_s)
        self.stream.emit(kind(room=7, generation=2, peer="peer", **facts))

    def enters(self, state: RoomState, after_s: float = 1.0, **facts: Any) -> None:
        self.happens(RoomEntered, after_s, state=state, trace=self.trace, **facts)

    def answered(self, seconds: float, code: str = "") -> None:
        self.stream.emit(RequestAnswered(room=7, generation=2, seconds=seconds, code=code, trace=self.trace))

    def told(self) -> list[tuple[str, float, float]]:
        """Return the recorded spans in the order of their ends."""
        told = [(span.name, span.begin_s - 100, span.end_s - 100) for span in self.spans]
        return sorted(told, key=lambda span: (span[2], -span[1]))


def test_a_room_on_decode_is_one_span_with_a_part_for_each_wait():
    bench = Bench(Role.DECODE)
    bench.clock.advance(3)
    bench.enters(RoomState.ADMITTED, 0)
    bench.answered(3.0)
    bench.enters(RoomState.OFFERED)
    bench.enters(RoomState.TRANSFERRING)
    bench.happens(PhasesEnded, 4.0, phases_s={"verify": 1.5, "verify_busy": 0.5, "admit_to_commit": 6.0})
    bench.enters(RoomState.COMMITTED, 0)
    bench.enters(RoomState.CLAIMED)
    bench.enters(RoomState.COMPLETED, 2.0, bytes=5)
    assert bench.told() == [
        ("admission", 0.0, 3.0),
        ("offer", 3.0, 4.0),
        ("verify", 7.5, 9.0),
        ("commit", 4.0, 9.0),
        ("claim", 9.0, 10.0),
        ("use", 10.0, 12.0),
        ("room", 0.0, 12.0),
    ]
    by_name = {span.name: span for span in bench.spans}
    room = by_name.pop("room")
    assert (room.context, room.attributes["kvbridge.bytes"], room.error) == (bench.trace, 5, "")
    verify = by_name.pop("verify")
    assert verify.context.parent_id == by_name["commit"].context.span_id == bench.trace.part("commit").span_id
    assert all(span.context.parent_id == room.context.span_id for span in by_name.values())
    assert all(span.attributes["kvbridge.room"] == 7 for span in bench.spans)


def test_what_prefill_sends_is_a_part_of_what_decode_waits_for():
    bench = Bench(Role.PREFILL)
    decode = begin_with(1.0)(ROUTER).part("commit")
    bench.enters(RoomState.ADMITTED, 0)
    bench.happens(RoomBegun, engine="e")
    bench.happens(RoomOffered, trace=decode)
    bench.happens(OrderBegan, 0, rank=RANK, order=1, transport="local")
    bench.enters(RoomState.TRANSFERRING, 0)
    bench.happens(RoomFinished, engine="e")
    seconds = {"plan": 0.5, "submit": 0.25, "first_byte": 1.0, "move": 2.0}
    amounts = {ComponentKind.C4_KV: Amount(bytes=10)}
    bench.happens(OrderEnded, 3.0, rank=RANK, order=1, transport="local", seconds=seconds, amounts=amounts)
    bench.enters(RoomState.COMPLETED, 0, bytes=10)
    assert bench.told() == [
        ("offer", 0.0, 2.0),
        ("publish", 1.0, 3.0),
        ("plan", 3.25, 3.75),
        ("submit", 3.75, 4.0),
        ("wait", 4.0, 6.0),
        ("send", 2.0, 6.0),
        ("order", 2.0, 6.0),
        ("room", 0.0, 6.0),
    ]
    by_name = {span.name: span for span in bench.spans}
    assert by_name["send"].context.parent_id == decode.span_id
    assert by_name["order"].context.parent_id == by_name["send"].context.span_id
    assert {by_name[name].context.parent_id for name in ("plan", "submit", "wait")} == {
        by_name["order"].context.span_id
    }
    assert by_name["send"].attributes["kvbridge.bytes"] == by_name["order"].attributes["kvbridge.bytes"] == 10


def test_rooms_that_engines_have_admitted_send_as_parts_of_decode_s_trace_apart_from_each_other():
    decode, ids = begin_with(1.0)(ROUTER).part("commit"), set()
    for _ in range(2):
        bench = Bench(Role.PREFILL)
        bench.trace = None
        bench.enters(RoomState.ADMITTED)
        bench.happens(RoomOffered, trace=decode)
        bench.happens(RoomBegun, engine="e")
        bench.happens(RoomFinished, engine="e")
        bench.enters(RoomState.COMPLETED)
        send, publish = bench.spans
        assert (send.name, publish.name) == ("send", "publish")
        assert publish.context.parent_id == send.context.span_id
        ids.add(send.context.span_id)
    assert len(ids) == 2, "two prefill nodes"


def test_a_room_that_fails_says_why_where_it_was():
    bench = Bench(Role.PREFILL)
    bench.enters(RoomState.ADMITTED)
    bench.happens(RoomBegun, engine="e")
    bench.happens(RoomOffered, trace=begin_with(1.0)(ROUTER))
    bench.happens(OrderBegan, rank=RANK, order=1, transport="local")
    bench.enters(RoomState.FAILED, code="peer_failed", reason="the peer is gone", limit="timeouts.room_s")
    bench.happens(OrderEnded, rank=RANK, order=1, transport="local", code="not_finished")
    errors = {span.name: span.error for span in bench.spans}
    assert errors == {
        "offer": "",
        "send": "the peer is gone",
        "publish": "the peer is gone",
        "room": "the peer is gone",
        "order": "not_finished",
        "wait": "",
    }
    room = next(span for span in bench.spans if span.name == "room")
    assert (room.attributes["kvbridge.code"], room.attributes["kvbridge.limit"]) == ("peer_failed", "timeouts.room_s")


def test_only_so_many_orders_of_a_room_are_told_of():
    bench = Bench(Role.PREFILL)
    bench.enters(RoomState.ADMITTED)
    bench.happens(RoomOffered, trace=begin_with(1.0)(ROUTER))
    orders = 3 * MAX_ORDERS
    for order in range(orders):
        bench.happens(OrderBegan, rank=RANK, order=order, transport="local")
        bench.happens(OrderEnded, rank=RANK, order=order, transport="local")
    bench.enters(RoomState.COMPLETED)
    assert sum(span.name == "order" for span in bench.spans) == MAX_ORDERS
    send = next(span for span in bench.spans if span.name == "send")
    assert send.attributes["kvbridge.orders"] == orders, "the span of all of them says how many there were"


def test_what_nobody_records_is_not_kept():
    for trace in (None, ROUTER, UNRECORDED):
        bench = Bench(Role.PREFILL)
        bench.trace = trace
        bench.enters(RoomState.ADMITTED)
        bench.answered(1.0)
        bench.happens(RoomOffered, trace=UNRECORDED)
        bench.happens(RoomBegun, engine="e")
        bench.happens(OrderBegan, rank=RANK, order=1, transport="local")
        bench.happens(OrderEnded, rank=RANK, order=1, transport="local")
        bench.enters(RoomState.COMPLETED)
        bench.stream.emit(PairingEnded(room=7, generation=1, seconds=1.0, outcome="paired", trace=trace))
        assert not bench.spans
