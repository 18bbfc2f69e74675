"""All rooms of a node, for everybody who has to do with rooms of either side.

Owns: what users, admission, engines and time may do to rooms, and how, where both sides do it alike. Must not know: which side it
is on, sockets, HTTP, what a transition leads to (`driver`).

An engine names a room without its generation. It means the attempt that it uses, else the newest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.core.clock import Clock
from kvbridge.core.errors import NotReadyError, PeerError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.states import RoomState
from kvbridge.node.admission.pressure import Reservation
from kvbridge.node.driver import Driver, RankWorkers
from kvbridge.node.room import Room
from kvbridge.node.room_book import RoomBook


class Rooms(ABC):
    """The rooms of one role. Called from the event loop's thread only."""

    def __init__(
        self, rooms: RoomBook[Any], driver: Driver[Any, Any, Any], workers: RankWorkers, *, clock: Clock
    ) -> None:
        self.rooms = rooms
        self._driver = driver
        self._workers = workers
        self._clock = clock

    # ------------------------------------------------------------------ admission

    def missing(self) -> str:
        """Why no room can be admitted now whatever is free, or an empty text."""
        return self._workers.missing()

    def _require_ready(self) -> None:
        missing = self.missing()
        if missing:
            raise NotReadyError(f"this {self._driver.role} daemon cannot admit a room now: {missing}")

    @abstractmethod
    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Pages that a request takes of the spaces that this node gives out.

        Raises all that `admit` does, but CapacityError for pages that are not free.
        """

    @abstractmethod
    def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve all or nothing. Raises CapacityError, NotReadyError, ConflictError, InvalidInputError."""

    def in_use(self) -> Mapping[str, int]:
        """Rooms that have not ended, or have not given everything back, by client."""
        return self.rooms.in_use

    def not_begun(self) -> list[Reservation]:
        """What rooms have that end unless a prefill engine begins them, those that end first in front."""
        return self.rooms.not_begun()

    # ------------------------------------------------------------------ users and operators

    def report(self, room: int) -> RoomReport:
        """Describe the newest attempt. Raises UnknownRoomError."""
        return self.rooms.report(self.rooms.get(room))

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return when the room is in one of the states or final, or with its present state after `timeout_s`."""
        return await self.rooms.wait(room, timeout_s, until)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""
        found = self.rooms.get(room)
        self._driver.abort(found, reason)
        return self.rooms.report(found)

    def open(self) -> list[int]:
        """Rooms that have not ended."""
        return [room.room for room in self.rooms.open()]

    def states(self) -> dict[str, int]:
        """Count rooms by what users see."""
        return self.rooms.states()

    def quarantined(self) -> dict[str, int]:
        """Count rooms whose pages are quarantined, by cause."""
        return self.rooms.quarantined()

    # ------------------------------------------------------------------ engines

    def abort(self, engine: str, room_id: int, reason: str) -> None:
        """An engine gives a room up, and does not use its pages any more. Harmless on an ended room."""
        room = self.rooms.used_by(engine, room_id)
        room.let_go(engine)
        self._driver.abort(room, f"by the {self._driver.role} engine: {reason}")

    def engine_gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """An engine's connection has ended: rooms that need it fail.

        Returns whether pages wait for `engine_ended`; `followed`: whether that will come.
        """
        waits = False
        for room in self.rooms:
            uses = engine in room.users
            if room.lose(engine):
                why = f"the {self._driver.role} engine {engine} is gone: {reason}"
                self._driver.fail(room, PeerError.code, why)
            if uses:
                waits = True
                self._driver.await_process(room, engine, followed=followed)
            self._driver.advance(room)
        return waits

    def engine_ended(self, engine: str) -> None:
        """Nothing of an engine that is gone uses a page any more: its process has ended, or it said so before it left."""
        for room in self.rooms:
            if engine in room.departed:
                room.departed.discard(engine)
                self._let_go(room, engine)

    def _let_go(self, room: Room[Any], engine: str) -> None:
        room.let_go(engine)
        self._driver.advance(room)

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Fail what has waited too long, forget what has been kept long enough."""
        now_s = self._clock()
        for room in self.rooms:
            limit = room.late(now_s)
            if limit:
                self._driver.late(room, limit)
        self.rooms.sweep()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rooms.states()}>"
