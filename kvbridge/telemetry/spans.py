"""Traces: the spans of a request, read from what has happened.

A span is told of when it has ended. Moments are this process's monotonic seconds, as all facts have them. Of a rank worker the node
knows when it was told, when it had ended, and how long each step took in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbridge.core.ids import Role
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.context import TraceContext
from kvbridge.telemetry.events import (
    EndReserved,
    OrderBegan,
    OrderEnded,
    PairingEnded,
    PhasesEnded,
    RequestAnswered,
    RoomBegun,
    RoomEntered,
    RoomFact,
    RoomFinished,
    RoomOffered,
)
from kvbridge.telemetry.recent import RoomKey
from kvbridge.telemetry.stream import Reader

MAX_ORDERS = 32
"""Orders of a room that are spans of their own, the first ones; a long prompt on many ranks has thousands."""

COMMIT, SEND = "commit", "send"
PARTS: Mapping[Role, Mapping[RoomState, str]] = {
    Role.DECODE: {
        RoomState.ADMITTED: "offer",
        RoomState.OFFERED: COMMIT,
        RoomState.TRANSFERRING: COMMIT,
        RoomState.COMMITTED: "claim",
        RoomState.CLAIMED: "use",
    },
    Role.PREFILL: {
        RoomState.ADMITTED: "offer",
        RoomState.OFFERED: SEND,
        RoomState.TRANSFERRING: SEND,
    },
}
"""By role: what a room waits for while it is in a state."""

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took from one moment to another."""

    name: str
    context: TraceContext
    begin_s: float
    end_s: float
    attributes: Attributes
    serves: bool = False
    """It answers a request of another process."""
    calls: bool = False
    """It waits for another process to answer."""
    error: str = ""
    """Why it went wrong; empty when it has not."""


Record = Callable[[Span], None]
"""Takes a span that has ended. Must not raise, nor wait."""


@dataclass(slots=True)
class _Room:
    """A room that is traced, as long as it is open."""

    trace: TraceContext | None
    """The room's own span; None where only what is sent is a part of a trace."""
    begin_s: float
    about: Attributes
    part: str = ""
    part_s: float = 0.0
    send: TraceContext | None = None
    engines: dict[str, float] = field(default_factory=dict)
    """When each engine has begun to compute it."""
    orders: int = 0


@dataclass(frozen=True, slots=True)
class _Order:
    context: TraceContext
    begin_s: float


class SpanReader:
    """A reader of facts that tells of spans. Used from the event loop's thread only."""

    def __init__(self, record: Record, *, parts: Mapping[RoomState, str]) -> None:
        """`parts`: those of the role's rooms, none where there are no rooms."""
        self._record = record
        self._parts = parts
        self._name = secrets.token_hex(4)
        """Tells what several prefill nodes send of one offer apart."""
        self._rooms: dict[RoomKey, _Room] = {}
        self._orders: dict[int, _Order] = {}
        self.table: Reader = {
            RequestAnswered: self._request_answered,
            RoomEntered: self._room_entered,
            RoomOffered: self._room_offered,
            RoomBegun: self._room_begun,
            RoomFinished: self._room_finished,
            OrderBegan: self._order_began,
            OrderEnded: self._order_ended,
            PhasesEnded: self._phases_ended,
            EndReserved: self._end_reserved,
            PairingEnded: self._pairing_ended,
        }

    # ------------------------------------------------------------------ bootstrap

    def _pairing_ended(self, now_s: float, fact: PairingEnded) -> None:
        if fact.trace is None or not fact.trace.recorded:
            return
        about: Attributes = {"kvbridge.outcome": fact.outcome}
        if fact.room is not None:
            about |= {"kvbridge.room": fact.room, "kvbridge.generation": fact.generation}
        error = "" if fact.room is not None else fact.outcome
        self._record(Span("pair", fact.trace, now_s - fact.seconds, now_s, about, serves=True, error=error))

    def _end_reserved(self, now_s: float, fact: EndReserved) -> None:
        if fact.trace is None or not fact.trace.recorded:
            return
        about: Attributes = {
            "kvbridge.room": fact.room,
            "kvbridge.generation": fact.generation,
            "kvbridge.role": fact.role,
            "url.full": fact.url,
        }
        self._record(Span("reserve", fact.trace, now_s - fact.seconds, now_s, about, calls=True, error=fact.code))

    # ------------------------------------------------------------------ a node's rooms

    def _request_answered(self, now_s: float, fact: RequestAnswered) -> None:
        """Of a room that was admitted this is a part; of one that was not it is all that there is."""
        if fact.trace is None or not fact.trace.recorded:
            return
        begin_s, room = now_s - fact.seconds, self._rooms.get((fact.room, fact.generation))
        about: Attributes = {"kvbridge.generation": fact.generation}
        if fact.code:
            self._record(Span("admission", fact.trace, begin_s, now_s, about, serves=True, error=fact.code))
            return
        about["kvbridge.room"] = fact.room
        if room is not None:  # else it has ended before its caller was told
            room.begin_s = min(room.begin_s, begin_s)
        self._record(Span("admission", fact.trace.child("admission"), begin_s, now_s, about))

    def _room_entered(self, now_s: float, fact: RoomEntered) -> None:
        key = (fact.room, fact.generation)
        room = self._rooms.get(key)
        if room is None:
            if fact.trace is None or not fact.trace.recorded or fact.state.final:
                return
            room = self._open(now_s, fact, fact.trace)
        about: Attributes = {"kvbridge.bytes": fact.bytes, "kvbridge.orders": room.orders} if room.part == SEND else {}
        error = fact.reason if fact.state is RoomState.FAILED else ""
        self._go_on(room, now_s, self._parts.get(fact.state, ""), about | _peer(fact), error=error)
        if not fact.state.final:
            return
        del self._rooms[key]
        for engine, begun_s in room.engines.items():
            self._published(room, engine, begun_s, now_s, error=fact.reason or fact.state.value)
        if room.trace is None:
            return
        about = {
            **room.about,
            "kvbridge.state": fact.state.value,
            "kvbridge.prompt_tokens": fact.prompt_tokens,
            "kvbridge.bytes": fact.bytes,
        }
        if fact.code:
            about |= {"kvbridge.code": fact.code, "kvbridge.reason": fact.reason}
        if fact.limit:
            about["kvbridge.limit"] = fact.limit
        self._record(Span("room", room.trace, room.begin_s, now_s, about, serves=True, error=error))

    def _room_offered(self, now_s: float, fact: RoomOffered) -> None:
        """What is sent is a part of the decode node's trace, whoever has admitted the room here."""
        if fact.trace is None or not fact.trace.sampled:
            return
        room = self._rooms.get((fact.room, fact.generation)) or self._open(now_s, fact, None)
        room.send = fact.trace.child(f"{SEND} {self._name}")
        self._go_on(room, now_s, SEND, _peer(fact))

    def _open(self, now_s: float, fact: RoomFact, trace: TraceContext | None) -> _Room:
        about: Attributes = {"kvbridge.room": fact.room, "kvbridge.generation": fact.generation}
        room = self._rooms[fact.room, fact.generation] = _Room(trace, now_s, about)
        return room

    def _go_on(self, room: _Room, now_s: float, part: str, about: Attributes, *, error: str = "") -> None:
        """The room waits for something else now; `about` and `error` say how the wait before has ended."""
        if part == room.part:
            return
        context = room.send if room.part == SEND else room.trace and room.trace.child(room.part)
        if room.part and context is not None:
            self._record(Span(room.part, context, room.part_s, now_s, room.about | about, error=error))
        room.part, room.part_s = part, now_s

    def _phases_ended(self, now_s: float, fact: PhasesEnded) -> None:
        """Only how long the comparison of checksums took is no state of a room; it ends with the wait that it is a part of."""
        room = self._rooms.get((fact.room, fact.generation))
        seconds = fact.phases_s.get("verify")
        if room is None or room.trace is None or seconds is None:
            return
        about: Attributes = {**room.about, "kvbridge.busy_s": fact.phases_s.get("verify_busy", 0.0)}
        context = room.trace.child(COMMIT).child("verify")
        self._record(Span("verify", context, now_s - seconds, now_s, about))

    # ------------------------------------------------------------------ what engines and rank workers do

    def _room_begun(self, now_s: float, fact: RoomBegun) -> None:
        room = self._rooms.get((fact.room, fact.generation))
        if room is not None:
            room.engines[fact.engine] = now_s

    def _room_finished(self, now_s: float, fact: RoomFinished) -> None:
        room = self._rooms.get((fact.room, fact.generation))
        begun_s = room.engines.pop(fact.engine, None) if room is not None else None
        if room is not None and begun_s is not None:
            self._published(room, fact.engine, begun_s, now_s)

    def _published(self, room: _Room, engine: str, begun_s: float, now_s: float, *, error: str = "") -> None:
        above = room.trace or room.send
        if above is not None:
            about: Attributes = {**room.about, "kvbridge.engine": engine}
            self._record(Span("publish", above.child(f"publish {engine}"), begun_s, now_s, about, error=error))

    def _order_began(self, now_s: float, fact: OrderBegan) -> None:
        room = self._rooms.get((fact.room, fact.generation))
        if room is None or room.send is None:
            return
        room.orders += 1
        if room.orders <= MAX_ORDERS:
            self._orders[fact.order] = _Order(room.send.child(f"order {fact.order}"), now_s)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        order = self._orders.pop(fact.order, None)
        if order is None:
            return
        about = _about(fact)
        self._record(
            Span(
                "order",
                order.context,
                order.begin_s,
                now_s,
                {
                    **about,
                    "kvbridge.transport": fact.transport,
                    "kvbridge.bytes": sum(amount.bytes for amount in fact.amounts.values()),
                },
                error=fact.code,
            )
        )
        seconds = fact.seconds
        # Its worker was told after it began and had ended before we knew: from the end backwards, all of it is inside.
        submitted_s = now_s - seconds.get("move", 0.0)
        planned_s = submitted_s - seconds.get("submit", 0.0)
        steps = (
            ("plan", planned_s - seconds.get("plan", 0.0), planned_s),
            ("submit", planned_s, submitted_s),
            ("wait", submitted_s, now_s),
        )
        for name, begin_s, end_s in steps:
            if name == "wait" or name in seconds:
                self._record(Span(name, order.context.child(name), max(begin_s, order.begin_s), end_s, about))


def _peer(fact: RoomFact) -> Attributes:
    return {"kvbridge.peer": fact.peer} if fact.peer else {}


def _about(fact: OrderEnded) -> Attributes:
    return {
        "kvbridge.room": fact.room,
        "kvbridge.generation": fact.generation,
        "kvbridge.rank": str(fact.rank),
        "kvbridge.peer": fact.peer,
    }
