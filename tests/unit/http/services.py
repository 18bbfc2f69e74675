"""Services behind the endpoints, for tests."""

from __future__ import annotations

import asyncio
from typing import Any

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.api.status import Readiness
from kvbridge.core.errors import UnknownRoomError
from kvbridge.core.ids import Role
from kvbridge.core.session.states import RoomState
from kvbridge.http import AppSettings


class FakeRooms:
    """Rooms of one daemon; raises `error` when it is set."""

    def __init__(self) -> None:
        self.rooms: dict[int, RoomReport] = {}
        self.error: Exception | None = None
        self.waits: list[tuple[int, float, frozenset[RoomState]]] = []
        self.hold: asyncio.Event | None = None
        self.waiting = asyncio.Event()

    async def admit(self, request: AdmissionRequest) -> RoomReport:
        if self.error:
            raise self.error
        room = 1 if request.room is None else request.room
        self.rooms[room] = RoomReport(
            room=room,
            generation=request.generation,
            role=Role.PREFILL,
            state=RoomState.ADMITTED,
            prompt_tokens=request.prompt_tokens,
        )
        return self.rooms[room]

    def report(self, room: int) -> RoomReport:
        if self.error:
            raise self.error
        if room not in self.rooms:
            raise UnknownRoomError(f"no room {room} here")
        return self.rooms[room]

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        self.waits.append((room, timeout_s, until))
        self.waiting.set()
        if self.hold is not None:
            await self.hold.wait()
        return self.report(room)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        self.rooms[room] = self.report(room).model_copy(update={"state": RoomState.ABORTED, "reason": reason})
        return self.rooms[room]


class FakeStatus:
    """What an operator sees."""

    def __init__(self) -> None:
        self.ready = Readiness(ready=True)

    def readiness(self) -> Readiness:
        return self.ready

    def status(self) -> dict[str, Any]:
        return {"role": "prefill", "rooms": {"admitted": 1}}


def metrics() -> tuple[bytes, str]:
    return b"kvbridge_rooms 1\n", "text/plain; version=0.0.4"


def settings(**changes: Any) -> AppSettings:
    return AppSettings(**{"version": "9.9", "max_body_bytes": 4096, "max_wait_s": 5.0, **changes})
