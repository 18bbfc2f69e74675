"""The state machine of a room on either side: look an event up, carry its actions out, derive the next event from the facts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from kvbridge.core.clock import Clock
from kvbridge.core.errors import DeadlineError
from kvbridge.core.session.machine import Table
from kvbridge.node.room import Room
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_facts import RoomFacts

ABORTED = "aborted"
"""Code of rooms that somebody wanted stopped."""
WORKER_GONE = "worker_gone"

RoomT = TypeVar("RoomT", bound=Room[Any])
RoomT_contra = TypeVar("RoomT_contra", bound=Room[Any], contravariant=True)


class RoomRules(Protocol[RoomT_contra]):
    """What a role makes of its table."""

    table: Table[Any, Any, Any]
    ABORT: Any
    FAULT: Any
    OTHER_PROMPT: Any
    """The events by which others end a room."""

    def next_event(self, room: RoomT_contra) -> StrEnum | None:
        """What the facts about a room amount to in its present state. Changes nothing."""

    def entered(self, room: RoomT_contra) -> None:
        """A room has come into another state: another wait begins."""

    def act(self, room: RoomT_contra, action: StrEnum) -> None:
        """Carry an action of the table out."""

    def at_rest(self, room: RoomT_contra) -> None:
        """Nothing follows from the facts now: see to what the room waits for."""

    def late(self, driver: RoomDriver[Any], room: RoomT_contra, limit: str) -> None:
        """The present wait of a room is over; `limit` is its name."""


@dataclass(frozen=True, slots=True)
class RoomDriver(Generic[RoomT]):
    """Moves the rooms of one role forward. Called from the event loop's thread only."""

    rules: RoomRules[RoomT]
    facts: RoomFacts

    def stop(self, room: RoomT, reason: str, code: str = ABORTED) -> None:
        """Somebody wants the room stopped. Harmless on one that is over."""
        self.advance(room, self.rules.ABORT, code, reason)

    def fail(self, room: RoomT, code: str, reason: str) -> None:
        """The room cannot be completed. Harmless on one that is over."""
        self.advance(room, self.rules.FAULT, code, reason)

    def refuse_prompt(self, room: RoomT, code: str, reason: str) -> None:
        """An engine has other tokens than the room's: it fails, and both sides are to know. For a room that is not over."""
        self.advance(room, self.rules.OTHER_PROMPT, code, reason)

    def miss(self, room: RoomT, limit: str) -> None:
        """The room cannot be completed, because nothing happened within `limit`."""
        room.missed = room.missed or limit
        self.fail(room, DeadlineError.code, room.why_late(limit))

    def let_go(self, room: RoomT, engine: str) -> None:
        """An engine does not use the pages of a room any more. Harmless for one that did not."""
        room.let_go(engine)
        self.advance(room)

    def advance(self, room: RoomT, event: StrEnum | None = None, code: str = "", reason: str = "") -> None:
        """Do what an event leads to, if any, and then what the room's facts do, until nothing more follows from them.

        `code` and `reason` say why, for ABORT, FAULT and OTHER_PROMPT. Raises ConflictError when the event is not possible now.
        """
        event = event or self.rules.next_event(room)
        while event is not None:
            self._step(room, event, code, reason)
            event = self.rules.next_event(room)
        self.rules.at_rest(room)

    def _step(self, room: RoomT, event: StrEnum, code: str, reason: str) -> None:
        rules = self.rules
        state, actions = rules.table.step(room.state, event)
        entered = state is not room.state
        room.state = state
        if entered:
            if event in {rules.ABORT, rules.FAULT, rules.OTHER_PROMPT}:
                room.blame(code, reason)
            rules.entered(room)
        for action in actions:
            rules.act(room, action)
        self.facts.show(room)


@dataclass(frozen=True, slots=True)
class Deadlines(Generic[RoomT]):
    """The waits of all rooms."""

    rooms: RoomBook[RoomT]
    driver: RoomDriver[RoomT]
    clock: Clock

    def tick(self) -> None:
        """Act on what has waited too long, forget what has been kept long enough."""
        now_s = self.clock()
        for room in self.rooms.due(now_s):
            limit = room.late(now_s)
            if limit:
                if limit == room.begin_limit:
                    room.begin_by_s = None
                self.driver.rules.late(self.driver, room, limit)
        self.rooms.sweep()
