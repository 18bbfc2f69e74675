"""Traces: the spans of a request, computed from facts, and the spans of a room, computed from its timeline when the room has ended.

Times are this process's monotonic seconds.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.context import TraceContext
from kvbridge.telemetry.facts import (
    EndReserved,
    OrderBegan,
    OrderEnded,
    PairingEnded,
    PhasesEnded,
    Reader,
    RequestAnswered,
    RoomBegun,
    RoomEntered,
    RoomFact,
    RoomFinished,
    RoomOffered,
)
from kvbridge.telemetry.recent import Timeline
from kvbridge.telemetry.record import NodeRecord

MAX_ORDERS = 32
"""Orders of a room with spans of their own; a long prompt on many ranks has thousands of orders."""

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
"""Name of the span of a wait, by role and by the room's state."""

Attributes = dict[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trace, from `begin_s` to `end_s`."""

    name: str
    context: TraceContext
    begin_s: float
    end_s: float
    attributes: Attributes
    serves: bool = False
    """Whether the span answers a request of another process."""
    calls: bool = False
    """Whether the span waits for the answer of another process."""
    error: str = ""
    """Why it failed; empty after success."""


Record = Callable[[Span], None]
"""Takes a span that has ended. Must not raise, nor wait."""


class SpanReader:
    """A reader of facts that records spans. Used from the event loop's thread only."""

    def __init__(
        self, record: Record, parts: Mapping[RoomState, str] | None = None, rooms: NodeRecord | None = None
    ) -> None:
        """`parts`: the names for the role's waits. `rooms` reads each fact before this reader. Both are None without rooms."""
        self._record = record
        self._parts = parts or {}
        self._rooms = rooms
        self._sender = secrets.token_hex(4)
        """Distinguishes the `send` spans of several prefill nodes below one offer."""
        self.table: Reader = {
            RequestAnswered: self._request_answered,
            RoomEntered: self._room_entered,
            OrderEnded: self._order_ended,
            EndReserved: self._end_reserved,
            PairingEnded: self._pairing_ended,
        }

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
        about = {**_named(fact), "kvbridge.role": fact.role, "url.full": fact.url}
        self._record(Span("reserve", fact.trace, now_s - fact.seconds, now_s, about, calls=True, error=fact.code))

    def _request_answered(self, now_s: float, fact: RequestAnswered) -> None:
        """Record the admission: a part of the room's span, or a span of its own when the room was not admitted."""
        if fact.trace is None or not fact.trace.recorded:
            return
        begin_s = now_s - fact.seconds
        if fact.code:
            about: Attributes = {"kvbridge.generation": fact.generation}
            self._record(Span("admission", fact.trace, begin_s, now_s, about, serves=True, error=fact.code))
        else:
            self._record(Span("admission", fact.trace.child("admission"), begin_s, now_s, _named(fact)))

    def _room_entered(self, _now_s: float, fact: RoomEntered) -> None:
        if fact.state.final and (room := self._room(fact)) is not None:
            for span in room.all():
                self._record(span)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        """Record an order that ends after its room. The room's spans have the other orders."""
        room = self._room(fact)
        if room is not None and room.last.state.final:
            began_s = next((at_s for at_s, began in room.began() if began.order == fact.order), None)
            for span in () if began_s is None else room.order(began_s, now_s, fact):
                self._record(span)

    def _room(self, fact: RoomFact) -> _RoomSpans | None:
        found = self._rooms.of(fact.room, fact.generation) if self._rooms is not None else None
        return None if found is None else _RoomSpans(found[1], self._parts, self._sender)


class _RoomSpans:
    """Computes the spans of a room from its timeline."""

    def __init__(self, timeline: Timeline, parts: Mapping[RoomState, str], sender: str) -> None:
        self._timeline = timeline
        self._parts = parts
        self.last = timeline.entered
        first = timeline.facts[0][1]
        own = first.trace if isinstance(first, RoomEntered) and not first.state.final else None
        self._whole = own if own is not None and own.recorded else None
        """The room's own span; None where a trace has the sending alone."""
        self._send: TraceContext | None = None
        for _, fact in timeline.facts:
            # Sending is a part of the decode node's trace, whoever has admitted the room here.
            if isinstance(fact, RoomOffered) and fact.trace is not None and fact.trace.sampled:
                self._send = fact.trace.child(f"{SEND} {sender}")
        self._about = _named(timeline.entered)

    def all(self) -> Iterator[Span]:
        """Yield every span of a room that has ended."""
        if (above := self._whole or self._send) is None:
            return
        yield from self._waits()
        yield from self._publications(above)
        began_s = {fact.order: at_s for at_s, fact in self.began()}
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, OrderEnded) and fact.order in began_s:
                yield from self.order(began_s[fact.order], at_s, fact)
        if self._whole is not None:
            yield from self._room(self._whole)

    def _room(self, room: TraceContext) -> Iterator[Span]:
        """Yield the room itself, and the comparison of checksums: no state, but a part of the wait for the commit."""
        last, about = self.last, dict(self._about)
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, PhasesEnded) and "verify" in fact.phases_s:
                busy = about | {"kvbridge.busy_s": fact.phases_s.get("verify_busy", 0.0)}
                yield Span("verify", room.child(COMMIT).child("verify"), at_s - fact.phases_s["verify"], at_s, busy)
        about["kvbridge.state"] = last.state.value
        about |= {"kvbridge.prompt_tokens": last.prompt_tokens, "kvbridge.bytes": last.bytes}
        if last.code:
            about |= {"kvbridge.code": last.code, "kvbridge.reason": last.reason}
        if last.limit:
            about["kvbridge.limit"] = last.limit
        begin_s, end_s = self._timeline.asked_s, self._timeline.entered_s
        yield Span("room", room, begin_s, end_s, about, serves=True, error=_error(last))

    def _waits(self) -> Iterator[Span]:
        """Yield a span for each wait of the room; a wait may cover several states."""
        part, part_s = "", 0.0
        for at_s, fact in self._timeline.facts:
            following = part
            if isinstance(fact, RoomEntered):
                following = self._parts.get(fact.state, "")
            elif isinstance(fact, RoomOffered) and self._send is not None:
                following = SEND
            if following == part:
                continue
            context = self._send if part == SEND else self._whole and self._whole.child(part)
            if part and context is not None:
                about = self._about | ({"kvbridge.peer": fact.peer} if fact.peer else {})
                if part == SEND and isinstance(fact, RoomEntered):
                    orders = self._timeline.counts[OrderBegan]
                    about |= {"kvbridge.bytes": fact.bytes, "kvbridge.orders": orders}
                yield Span(part, context, part_s, at_s, about, error=_error(fact))
            part, part_s = following, at_s

    def _publications(self, above: TraceContext) -> Iterator[Span]:
        """Yield a span for each engine that has begun the room, until it has published everything or the room ends."""
        begun_s: dict[str, float] = {}
        ended: list[tuple[str, float, float, str]] = []
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, RoomBegun):
                begun_s[fact.engine] = at_s
            elif isinstance(fact, RoomFinished) and fact.engine in begun_s:
                ended.append((fact.engine, begun_s.pop(fact.engine), at_s, ""))
        error = self.last.reason or self.last.state.value
        ended += [(engine, at_s, self._timeline.entered_s, error) for engine, at_s in begun_s.items()]
        for engine, begin_s, end_s, why in ended:
            about = self._about | {"kvbridge.engine": engine}
            yield Span("publish", above.child(f"publish {engine}"), begin_s, end_s, about, error=why)

    def began(self) -> list[tuple[float, OrderBegan]]:
        """Return the orders that have spans, with their beginnings."""
        began = [(at_s, fact) for at_s, fact in self._timeline.facts if isinstance(fact, OrderBegan)]
        return began[:MAX_ORDERS]

    def order(self, began_s: float, ended_s: float, fact: OrderEnded) -> Iterator[Span]:
        """Yield an order and its steps.

        The node knows when it told the rank worker, when it heard of the end, and how long each step took. The worker began and
        ended within these two moments, so the steps are laid out backwards from the end.
        """
        if self._send is None:
            return
        context = self._send.child(f"order {fact.order}")
        about: Attributes = {**self._about, "kvbridge.rank": str(fact.rank), "kvbridge.peer": fact.peer}
        moved_bytes = sum(part.bytes for part in fact.amounts.values())
        moved: Attributes = {**about, "kvbridge.transport": fact.transport, "kvbridge.bytes": moved_bytes}
        yield Span("order", context, began_s, ended_s, moved, error=fact.code)
        submitted_s = ended_s - fact.seconds.get("move", 0.0)
        planned_s = submitted_s - fact.seconds.get("submit", 0.0)
        steps = (
            ("plan", planned_s - fact.seconds.get("plan", 0.0), planned_s),
            ("submit", planned_s, submitted_s),
            ("wait", submitted_s, ended_s),
        )
        for name, begin_s, end_s in steps:
            if name == "wait" or name in fact.seconds:
                yield Span(name, context.child(name), max(begin_s, began_s), end_s, about)


def _named(fact: RoomFact | RequestAnswered | EndReserved) -> Attributes:
    return {"kvbridge.room": fact.room, "kvbridge.generation": fact.generation}


def _error(fact: RoomFact) -> str:
    return fact.reason if isinstance(fact, RoomEntered) and fact.state is RoomState.FAILED else ""
