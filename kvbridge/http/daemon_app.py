"""The HTTP API of a prefill or decode daemon."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import Field

from kvbridge.api.rooms import AdmissionRequest, DroppedPrefixes, RoomPage, RoomQuery, RoomReport, RoomTimeline
from kvbridge.api.status import NodeStatus
from kvbridge.core.errors import InvalidInputError, StaleError
from kvbridge.core.ids import FrozenModel, Positive
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.tables import RoomState
from kvbridge.http.app import AppSettings, StatusPort, assemble_app
from kvbridge.http.requests import CREATED, LEFT, REQUESTS, RoomPath, create, plain_post, while_connected
from kvbridge.node.admission import AdmissionController
from kvbridge.node.rooms import Rooms
from kvbridge.telemetry.context import TRACE

GenerationQuery = Annotated[int | None, Query(ge=1, description="Of this attempt, not of the newest.")]
ReasonQuery = Annotated[str, Field(max_length=1_000, description="Told to everybody who asks why the room ended.")]


class Waiting(FrozenModel, defer_build=False):
    """Query of a report that may wait."""

    wait: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Seconds to wait for a state.")] = 0.0
    until: Annotated[frozenset[RoomState], Field(description="States to wait for; none: a final one.")] = frozenset()


class Cancellation(FrozenModel, defer_build=False):
    """Query of a cancellation."""

    reason: ReasonQuery = "cancelled by its client"
    generation: Annotated[Positive | None, Field(description="Cancel this generation only.")] = None


class Dropping(FrozenModel, defer_build=False):
    """Query of a drop of prefixes. Prefixes in memory are dropped in any case."""

    store: Annotated[Literal["drop", "keep"], Field(description="What to do about objects in the store.")] = "drop"


class NodePort(StatusPort, Protocol):
    """A node, as its operators see it."""

    def timeline(self, room: int, generation: int | None) -> RoomTimeline:
        """Return the timeline of a room, by default of the newest attempt. Raises UnknownRoomError."""


def create_daemon_app(
    admission: AdmissionController, rooms: Rooms[Any], status: NodePort, settings: AppSettings
) -> FastAPI:
    """Build the application of a prefill or decode daemon; it holds no state of its own."""
    routers = [_rooms_router(admission, rooms, status, settings), _prefixes_router(rooms)]
    title, bodies = f"kvbridge {rooms.role} daemon", (AdmissionRequest,)
    return assemble_app(title, routers, bodies, status=status, kind=NodeStatus, settings=settings)


def _rooms_router(
    admission: AdmissionController, rooms: Rooms[Any], status: NodePort, settings: AppSettings
) -> APIRouter:
    router = APIRouter(prefix=REQUESTS, tags=["requests"])

    async def admit(request: AdmissionRequest, may_name: Namespaces) -> RoomReport:
        TRACE.set(settings.begin_trace(TRACE.get()))
        return await admission.admit(request, may_name)

    async def admit_room(request: Request) -> Response:
        """Reserve pages for a request, at once or within its `wait_s`.

        503 with Retry-After when it does not fit, 429 when its client has its limit, 403 for a namespace that its token may not
        name. The daemon keeps nothing in these cases, nor when the caller closes the connection during the wait.
        """
        return await create(request, AdmissionRequest, admit, lambda late: rooms.cancel(late.room, LEFT))

    plain_post(router, "", admit_room, body=AdmissionRequest, answer=RoomReport, status_code=201, responses=CREATED)

    @router.get("")
    async def list_rooms(query: Annotated[RoomQuery, Query()]) -> RoomPage:
        """List open rooms and the ended rooms that are still known, the oldest first, a page at a time."""
        return rooms.book.page(query)

    @router.get("/{room}")
    async def get_room(room: RoomPath, waiting: Annotated[Waiting, Query()], connection: Request) -> RoomReport:
        """Return a room's report, at once or in a state; after `wait` seconds in any case."""
        if waiting.wait > (most_s := settings.http.max_wait_s):
            raise InvalidInputError(f"wait is {waiting.wait:g} s, at most {most_s:g} s are served (http.max_wait_s)")
        if waiting.wait == 0:
            return rooms.book.report(room)
        return await while_connected(connection, rooms.book.wait(room, waiting.wait, waiting.until))

    @router.delete("/{room}")
    async def cancel_room(room: RoomPath, asked: Annotated[Cancellation, Query()]) -> RoomReport:
        """Abort a room; harmless on a final room. 409 `stale` when the room is there in another generation."""
        present = rooms.book.report(room)
        if asked.generation is not None and present.generation != asked.generation:
            raise StaleError(
                f"room {room} is in generation {present.generation}, not {asked.generation}: it was not cancelled"
            )
        return await rooms.cancel(room, asked.reason)

    @router.get("/{room}/timeline")
    async def get_room_timeline(room: RoomPath, generation: GenerationQuery = None) -> RoomTimeline:
        """Return the events of a room on this node, during its life and for a while after its end."""
        return status.timeline(room, generation)

    return router


def _prefixes_router(rooms: Rooms[Any]) -> APIRouter:
    router = APIRouter(prefix="/v1/prefixes", tags=["operations"])

    @router.delete("")
    async def drop_prefixes(asked: Annotated[Dropping, Query()]) -> DroppedPrefixes:
        """Forget every cached prefix, of all namespaces: keys do not tell whose they are.

        Requests find none from now on; open rooms keep the pages that they read. 409 where no prefixes are kept. Objects of this
        model in the store below host memory are dropped as well, also those from other nodes; `store` in the answer tells the
        result. Other nodes keep the prefixes in their memory: ask each of them first.
        """
        return await rooms.drop_prefixes(stored=asked.store == "drop")

    return router
