"""What others are told of a node's rooms: facts for metrics and logs, events for engines, and whoever waits for a room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbridge.core.clock import Clock
from kvbridge.core.wire.engine_messages import Pages, RoomEvent
from kvbridge.core.wire.messages import RoomMessage, to_wire
from kvbridge.node.engines import AttachedEngines
from kvbridge.node.room import Room
from kvbridge.node.room_book import RoomBook
from kvbridge.telemetry.context import exemplar
from kvbridge.telemetry.events import PhasesEnded, RoomEntered, RoomMessageRefused
from kvbridge.telemetry.stream import EventStream


@dataclass(frozen=True, slots=True)
class RoomFacts:
    """Called from the event loop's thread only."""

    rooms: RoomBook[Any]
    engines: AttachedEngines
    events: EventStream
    engine_words: Mapping[Any, str]
    """What engines are told, by the state that the room is in."""
    clock: Clock

    def show(self, room: Room[Any]) -> None:
        """Wake who waits for the room, and tell of a state that users see for the first time."""
        state = self.rooms.changed(room)
        if state is not None:
            self.events.emit(
                RoomEntered(
                    **room.identity,
                    state=state,
                    code=room.reason_code,
                    reason=room.reason,
                    limit=room.missed,
                    age_s=self.clock() - room.created_s,
                    prompt_tokens=room.prompt_tokens,
                    prefix_tokens=room.prefix_tokens,
                    computed_tokens=room.computed_tokens,
                    bytes=sum(amount.bytes for amount in room.amounts.values()),
                    ids=room.ids,
                    trace=room.trace,
                )
            )

    def phases_ended(self, room: Room[Any], phases_s: Mapping[str, float]) -> None:
        """Say how long phases of a room took that are over."""
        self.events.emit(PhasesEnded(**room.identity, phases_s=phases_s, trace_id=exemplar(room.trace)))

    def tell_engine(self, room: Room[Any]) -> None:
        """Tell every engine where the room stands."""
        self.engines.push(self.event(room))

    def event(self, room: Room[Any]) -> RoomEvent:
        """What engines are told of a room in its present state."""
        return RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=self.engine_words[room.state],
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            computed_tokens=room.computed_tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )

    @staticmethod
    def pages(call: int, room: Room[Any]) -> Pages:
        """Answer a call with a room's tables."""
        return Pages(
            call=call,
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            computed_tokens=room.computed_tokens,
            host_tokens=room.host_tokens,
            tables=to_wire(room.tables),
            traceparent=room.trace.traceparent if room.trace is not None else "",
        )

    def refuse_message(self, peer: str, message: RoomMessage, code: str) -> None:
        """Say that what a peer, or a rank worker of this node (`peer` is empty), says of a room is ignored."""
        rank = "" if peer else str(getattr(message, "rank", ""))
        fact = RoomMessageRefused(room=message.room, generation=message.generation, peer=peer, code=code, rank=rank)
        self.events.emit(fact)
