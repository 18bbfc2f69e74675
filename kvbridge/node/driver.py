"""How a room of either side moves forward: an event is looked up, its actions are carried out, the facts amount to the next event.

Owns: that loop, and what both sides do alike on the way (the first cause, what users and engines are told, quarantine). Must not
know: which side it is on, who raised an event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from kvbridge.core.clock import Clock
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import Rank, Role
from kvbridge.core.session.machine import Table
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.worker_messages import NodeToWorker
from kvbridge.node.room import Quarantine, Room, quarantine
from kvbridge.node.room_book import RoomBook
from kvbridge.pool.accounts.book import PageBook
from kvbridge.telemetry.events import EventStream, RoomEntered, RoomQuarantined

ABORTED = "aborted"
"""Code of rooms that somebody wanted stopped."""
WORKER_GONE = "worker_gone"

RoomT = TypeVar("RoomT", bound=Room[Any])
EventT = TypeVar("EventT", bound=StrEnum)
ActionT = TypeVar("ActionT", bound=StrEnum)


class RankWorkers(Protocol):
    """The rank workers of the node."""

    def missing(self) -> str:
        """Why not every rank can work now, or an empty text."""

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order; dropped when the worker is gone (its end is reported separately). Never raises."""


class EngineEvents(Protocol):
    """The engines attached to this node."""

    def push(self, event: RoomEvent) -> None:
        """Tell every attached engine. Never raises."""

    def serving(self) -> frozenset[str]:
        """Names of the engines attached now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPorts:
    """What a room of either side touches."""

    book: PageBook
    workers: RankWorkers
    engines: EngineEvents
    events: EventStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSettings:
    """What is the same for all rooms of a node."""

    geometry: ModelGeometry
    keep_s: float
    """`timeouts.room_keep_s`: how long the receipt of an ended room is kept."""
    adopted: bool = False
    """Engines bring the device memory and name its pages; otherwise pages are reserved at admission."""


class Driver(ABC, Generic[RoomT, EventT, ActionT]):
    """Moves the rooms of one node forward."""

    role: ClassVar[Role]
    table: ClassVar[Table[Any, Any, Any]]
    ABORT: ClassVar[Any]
    FAULT: ClassVar[Any]
    """The events by which others end a room."""
    engine_words: ClassVar[Mapping[Any, str]]
    """What engines are told, by the state that the room is in."""

    def __init__(self, ports: RoomPorts, rooms: RoomBook[RoomT], *, clock: Clock) -> None:
        self._ports = ports
        self._rooms = rooms
        self._clock = clock

    def abort(self, room: RoomT, reason: str, code: str = ABORTED) -> None:
        """Somebody wants the room stopped. Harmless on one that is over."""
        self.advance(room, self.ABORT, code, reason)

    def fail(self, room: RoomT, code: str, reason: str) -> None:
        """The room cannot be completed. Harmless on one that is over."""
        self.advance(room, self.FAULT, code, reason)

    def advance(self, room: RoomT, event: EventT | None = None, code: str = "", reason: str = "") -> None:
        """Do what an event leads to, if any, and then what the room's facts do, until nothing more follows from them.

        `code` and `reason` say why, for ABORT and FAULT. Raises ConflictError when the event is not possible now.
        """
        event = event or self._next_event(room)
        while event is not None:
            self._step(room, event, code, reason)
            event = self._next_event(room)
        self._at_rest(room)

    def _step(self, room: RoomT, event: EventT, code: str, reason: str) -> None:
        state, actions = self.table.step(room.state, event)
        entered = state is not room.state
        room.state = state
        if entered:
            if event in {self.ABORT, self.FAULT}:
                room.blame(code, reason)
            self._entered(room)
        for action in actions:
            self._act(room, action)
        self.show(room)

    @staticmethod
    @abstractmethod
    def _next_event(room: RoomT) -> EventT | None:
        """What the facts about a room amount to in its present state. Changes nothing."""

    @abstractmethod
    def _entered(self, room: RoomT) -> None:
        """A room has come into another state: another wait begins."""

    @abstractmethod
    def _act(self, room: RoomT, action: ActionT) -> None:
        """Carry an action of the table out."""

    @abstractmethod
    def _at_rest(self, room: RoomT) -> None:
        """Nothing follows from the facts now: see to what the room waits for."""

    @abstractmethod
    def late(self, room: RoomT, limit: str) -> None:
        """The present wait of a room is over; `limit` is its name."""

    def show(self, room: RoomT) -> None:
        """Wake who waits for the room, and tell of a state that users see for the first time."""
        state = self._rooms.changed(room)
        if state is not None:
            self._ports.events.emit(
                RoomEntered(**room.identity, state=state, code=room.reason_code, reason=room.reason)
            )

    def tell_engine(self, room: RoomT) -> None:
        """Tell every engine where the room stands."""
        self._ports.engines.push(self.event(room))

    def event(self, room: RoomT) -> RoomEvent:
        """What engines are told of a room in its present state."""
        return RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=self.engine_words[room.state],
            prompt_tokens=room.prompt_tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )

    def quarantine(self, room: RoomT, cause: Quarantine, why: str) -> None:
        """Keep the pages of a room from everybody, and say why. Harmless when that was said before."""
        if quarantine(self._ports.book, room, cause, why):
            self._ports.events.emit(RoomQuarantined(**room.identity, cause=cause, reason=why))

    def await_process(self, room: RoomT, engine: str, *, followed: bool) -> None:
        """Note that only the end of an engine's process proves that it uses no page any more: its connection has ended.

        `followed`: that end will be seen. Otherwise the pages are quarantined at once, since nobody will say when they are free.
        """
        room.departed.add(engine)
        if not followed:
            why = (
                f"engine {engine} has left without letting go of it, and the end of its process cannot be seen from here (it is "
                "in another pid namespace); when you know that it has ended, restart this daemon to have the pages back"
            )
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)

    def quarantine_used(self, room: RoomT, limit: str) -> None:
        """Keep pages that engines have not let go of in time from everybody, and say whether they could."""
        departed = sorted(room.users & room.departed)
        if departed:
            why = f"engines {', '.join(departed)} have left, and their processes have not ended (limit: {limit}); end them"
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)
        else:
            why = f"engines {', '.join(sorted(room.users))} have not let go of it (limit: {limit})"
            self.quarantine(room, Quarantine.NOT_RELEASED, why)
