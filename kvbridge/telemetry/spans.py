"""Traces: the spans of a request, computed from facts; the spans of a room are computed from its timeline when the room has ended.

Times are this process's monotonic seconds. The node knows of an order when the rank worker was told, when it had ended, and how
long each step took in between.
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
from kvbridge.telemetry.recent import Recent, Timeline

MAX_ORDERS = 32
"""The first orders of a room are spans of their own; a long prompt on many ranks has thousands."""

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
"""By role and state of a room, the name of the span of the wait in that state."""

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
    """The span answers a request of another process."""
    calls: bool = False
    """The span waits for the answer of another process."""
    error: str = ""
    """Why it failed; empty when it did not."""


Record = Callable[[Span], None]
"""Takes a span that has ended. Must not raise, nor wait."""


class SpanReader:
    """A reader of facts that records spans. Used from the event loop's thread only."""

    def __init__(
        self, record: Record, parts: Mapping[RoomState, str] | None = None, recent: Recent | None = None
    ) -> None:
        """`parts` and `recent` of the role's rooms are None where there are none. `recent` reads each fact before this reader."""
        self._record = record
        self._parts = parts or {}
        self._recent = recent or Recent()
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
        """The admission is a part of the room's span, or a span of its own when the room was not admitted."""
        if fact.trace is None or not fact.trace.recorded:
            return
        begin_s = now_s - fact.seconds
        if fact.code:
            about: Attributes = {"kvbridge.generation": fact.generation}
            self._record(Span("admission", fact.trace, begin_s, now_s, about, serves=True, error=fact.code))
        else:
            self._record(Span("admission", fact.trace.child("admission"), begin_s, now_s, _named(fact)))

    def _room_entered(self, _now_s: float, fact: RoomEntered) -> None:
        if fact.state.final and (found := self._recent.of(fact.room, fact.generation)) is not None:
            for span in _RoomSpans(found[1], self._parts, self._sender).all():
                self._record(span)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        """Record an order that ends after its room: the others are among the room's spans."""
        found = self._recent.of(fact.room, fact.generation)
        if found is not None and found[1].entered.state.final:
            for span in _RoomSpans(found[1], self._parts, self._sender).late(now_s, fact):
                self._record(span)


class _RoomSpans:
    """Computes the spans of a room from its timeline."""

    def __init__(self, timeline: Timeline, parts: Mapping[RoomState, str], sender: str) -> None:
        self._timeline = timeline
        self._parts = parts
        first = timeline.facts[0][1]
        own = first.trace if isinstance(first, RoomEntered) and not first.state.final else None
        self._room = own if own is not None and own.recorded else None
        """The room's own span; None where only the sending is a part of a trace."""
        self._send: TraceContext | None = None
        for _, fact in timeline.facts:
            # Sending is a part of the decode node's trace, whoever has admitted the room here.
            if isinstance(fact, RoomOffered) and fact.trace is not None and fact.trace.sampled:
                self._send = fact.trace.child(f"{SEND} {sender}")
        self._about = _named(timeline.entered)

    def all(self) -> Iterator[Span]:
        """Return every span of a room that has ended."""
        if self._room is not None or self._send is not None:
            yield from self._waits()
            yield from self._publications()
            yield from self._orders()
        if self._room is not None:
            yield from self._verification(self._room)
            yield self._whole(self._room)

    def late(self, now_s: float, ended: OrderEnded) -> Iterator[Span]:
        """Return the spans of an order that has ended after its room."""
        for began_s, began in self._began():
            if began.order == ended.order:
                yield from self._order(began_s, now_s, ended)

    def _whole(self, room: TraceContext) -> Span:
        last = self._timeline.entered
        about: Attributes = {
            **self._about,
            "kvbridge.state": last.state.value,
            "kvbridge.prompt_tokens": last.prompt_tokens,
            "kvbridge.bytes": last.bytes,
        }
        if last.code:
            about |= {"kvbridge.code": last.code, "kvbridge.reason": last.reason}
        if last.limit:
            about["kvbridge.limit"] = last.limit
        begin_s, end_s = self._timeline.asked_s, self._timeline.entered_s
        return Span("room", room, begin_s, end_s, about, serves=True, error=_error(last))

    def _waits(self) -> Iterator[Span]:
        """Return a span for each wait of the room; a wait may cover several states."""
        part, part_s = "", 0.0
        for at_s, fact in self._timeline.facts:
            following = part
            if isinstance(fact, RoomEntered):
                following = self._parts.get(fact.state, "")
            elif isinstance(fact, RoomOffered) and self._send is not None:
                following = SEND
            if following == part:
                continue
            context = self._send if part == SEND else self._room and self._room.child(part)
            if part and context is not None:
                about = self._about | ({"kvbridge.peer": fact.peer} if fact.peer else {})
                if part == SEND and isinstance(fact, RoomEntered):
                    orders = self._timeline.counts[OrderBegan]
                    about |= {"kvbridge.bytes": fact.bytes, "kvbridge.orders": orders}
                yield Span(part, context, part_s, at_s, about, error=_error(fact))
            part, part_s = following, at_s

    def _publications(self) -> Iterator[Span]:
        """Return a span for each engine that has begun to compute the room, until it has published everything or the room ends."""
        begun_s: dict[str, float] = {}
        ended: list[tuple[str, float, float, str]] = []
        last, above = self._timeline.entered, self._room or self._send
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, RoomBegun):
                begun_s[fact.engine] = at_s
            elif isinstance(fact, RoomFinished) and fact.engine in begun_s:
                ended.append((fact.engine, begun_s.pop(fact.engine), at_s, ""))
        error = last.reason or last.state.value
        ended += [(engine, at_s, self._timeline.entered_s, error) for engine, at_s in begun_s.items()]
        for engine, begin_s, end_s, why in ended:
            if above is not None:
                about = self._about | {"kvbridge.engine": engine}
                yield Span("publish", above.child(f"publish {engine}"), begin_s, end_s, about, error=why)

    def _verification(self, room: TraceContext) -> Iterator[Span]:
        """Return the comparison of checksums: no state of a room, but a part of the wait for the commit."""
        context = room.child(COMMIT).child("verify")
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, PhasesEnded) and "verify" in fact.phases_s:
                about = self._about | {"kvbridge.busy_s": fact.phases_s.get("verify_busy", 0.0)}
                yield Span("verify", context, at_s - fact.phases_s["verify"], at_s, about)

    def _began(self) -> list[tuple[float, OrderBegan]]:
        began = [(at_s, fact) for at_s, fact in self._timeline.facts if isinstance(fact, OrderBegan)]
        return began[:MAX_ORDERS]

    def _orders(self) -> Iterator[Span]:
        began_s = {fact.order: at_s for at_s, fact in self._began()}
        for at_s, fact in self._timeline.facts:
            if isinstance(fact, OrderEnded) and fact.order in began_s:
                yield from self._order(began_s[fact.order], at_s, fact)

    def _order(self, began_s: float, ended_s: float, fact: OrderEnded) -> Iterator[Span]:
        if self._send is None:
            return
        context = self._send.child(f"order {fact.order}")
        about: Attributes = {**self._about, "kvbridge.rank": str(fact.rank), "kvbridge.peer": fact.peer}
        moved_bytes = sum(part.bytes for part in fact.amounts.values())
        moved: Attributes = {**about, "kvbridge.transport": fact.transport, "kvbridge.bytes": moved_bytes}
        yield Span("order", context, began_s, ended_s, moved, error=fact.code)
        # The worker was told after the order began, and had ended before we knew: from the end backwards, all of it is inside.
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
