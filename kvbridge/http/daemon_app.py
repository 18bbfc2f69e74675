"""The endpoint of a prefill or decode daemon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Query, Request
from fastapi.responses import Response
from pydantic import Field

from kvbridge.api.rooms import AdmissionRequest, DroppedPrefixes, RoomPage, RoomQuery, RoomReport, RoomTimeline
from kvbridge.api.status import NodeStatus
from kvbridge.core.errors import InvalidInputError, StaleError
from kvbridge.core.ids import FrozenModel, Positive
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.states import RoomState
from kvbridge.http.operations import AppSettings, StatusPort, assemble_app
from kvbridge.http.page import Document
from kvbridge.http.requests import CREATED, LEFT, REQUESTS, RoomPath, create, plain_post, while_connected
from kvbridge.node.admission import AdmissionController
from kvbridge.node.rooms import Rooms
from kvbridge.telemetry.context import TRACE, BeginTrace, pass_on

GenerationQuery = Annotated[int | None, Query(ge=1, description="Of this attempt, not of the newest.")]


class Waiting(FrozenModel, defer_build=False):
    """Query of a report that may wait."""

    wait: Annotated[float, Field(ge=0, allow_inf_nan=False, description="Seconds to wait for a state.")] = 0.0
    until: Annotated[frozenset[RoomState], Field(description="States to wait for; none: a final one.")] = frozenset()


class Cancellation(FrozenModel, defer_build=False):
    """Query of a cancellation."""

    reason: Annotated[str, Field(max_length=1_000, description="Told to everybody who asks why the room ended.")] = (
        "cancelled by its client"
    )
    generation: Annotated[Positive | None, Field(description="Cancel this generation only.")] = None


class Dropping(FrozenModel, defer_build=False):
    """Query of a drop of prefixes, which drops those in memory in any case."""

    store: Annotated[Literal["drop", "keep"], Field(description="What to do about objects in the store.")] = "drop"


def create_daemon_app(  # noqa: C901, PLR0913 - one small function a route; each argument is a part of the node
    *,
    admission: AdmissionController,
    rooms: Rooms[Any],
    status: StatusPort,
    settings: AppSettings,
    timeline_of: Callable[[int, int | None], RoomTimeline],
    page: Callable[[], Document],
    begin_trace: BeginTrace = pass_on,
) -> FastAPI:
    """Build the application of a daemon; it holds no state of its own. `timeline_of` is given a room and a generation."""
    router = APIRouter(prefix=REQUESTS, tags=["requests"])
    prefixes = APIRouter(prefix="/v1/prefixes", tags=["operations"])

    async def admit(request: AdmissionRequest, may_name: Namespaces) -> RoomReport:
        TRACE.set(begin_trace(TRACE.get()))
        return await admission.admit(request, may_name)

    async def admit_room(request: Request) -> Response:
        """Reserve for a request, at once or within its `wait_s`.

        503 with Retry-After when it does not fit, 429 when its client has as much as it may, 403 for a namespace that its token
        may not name; nothing is kept then, nor when the caller closes the connection while it waits.
        """
        return await create(request, AdmissionRequest, admit, lambda late: rooms.cancel(late.room, LEFT))

    plain_post(router, "", admit_room, body=AdmissionRequest, answer=RoomReport, status_code=201, responses=CREATED)

    @router.get("")
    async def list_rooms(query: Annotated[RoomQuery, Query()]) -> RoomPage:
        """List rooms, the oldest first, a page at a time: those under way, and ended ones as long as they are remembered."""
        return rooms.book.page(query)

    @router.get("/{room}")
    async def get_room(room: RoomPath, waiting: Annotated[Waiting, Query()], connection: Request) -> RoomReport:
        """Return a room's report, at once or when it has reached a state; after `wait` seconds in any case."""
        if waiting.wait > settings.max_wait_s:
            raise InvalidInputError(
                f"wait is {waiting.wait:g} s, at most {settings.max_wait_s:g} s are served (http.max_wait_s)"
            )
        if waiting.wait == 0:
            return rooms.book.report(room)
        return await while_connected(connection, rooms.book.wait(room, waiting.wait, waiting.until))

    @router.delete("/{room}")
    async def cancel_room(room: RoomPath, asked: Annotated[Cancellation, Query()]) -> RoomReport:
        """Abort a room; harmless on a final one. 409 `stale` when the room is there in another generation."""
        present = rooms.book.report(room)
        if asked.generation is not None and present.generation != asked.generation:
            raise StaleError(
                f"room {room} is in generation {present.generation}, not {asked.generation}: it was not cancelled"
            )
        return await rooms.cancel(room, asked.reason)

    @router.get("/{room}/timeline")
    async def get_room_timeline(room: RoomPath, generation: GenerationQuery = None) -> RoomTimeline:
        """Return what happened to a room on this node, while it is open and for a while after its end."""
        return timeline_of(room, generation)

    @prefixes.delete("")
    async def drop_prefixes(asked: Annotated[Dropping, Query()]) -> DroppedPrefixes:
        """Forget every cached prefix, of all namespaces: keys do not tell whose they are.

        Requests find none from now on; rooms under way keep the pages that they read. 409 where no prefixes are kept. What the
        store below host memory has of this model is dropped, too, also what other nodes have put there; `store` in the answer
        says whether that was done. What other nodes have in memory is theirs: ask each of them first.
        """
        return await rooms.drop_prefixes(stored=asked.store == "drop")

    return assemble_app(
        f"kvbridge {rooms.role} daemon",
        [router, prefixes],
        (AdmissionRequest,),
        status=status,
        kind=NodeStatus,
        settings=settings,
        page=page,
    )
