"""The endpoint of a prefill or decode daemon.

Owns: /v1/requests, /v1/prefixes. Must not know: which role is behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response

from kvbridge.api.rooms import AdmissionRequest, DroppedPrefixes, RoomPage, RoomQuery, RoomReport
from kvbridge.api.status import NodeStatus, StatusPort
from kvbridge.core.errors import (
    CapacityError,
    ClientLimitError,
    ConflictError,
    InvalidInputError,
    NamespaceError,
    NotReadyError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.ids import MAX_ROOM, RoomId
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.states import RoomState
from kvbridge.http.callers import LEFT, MAY_NAME, while_connected
from kvbridge.http.description import LOCATION, problems
from kvbridge.http.direct import DirectRoute
from kvbridge.http.numbers import DESCRIBED_QUERY, NUMBER, as_described
from kvbridge.http.operations import AppSettings, assemble_app
from kvbridge.telemetry.context import TRACE, BeginTrace, pass_on

if TYPE_CHECKING:  # bootstrap's routes take paths and queries from here, and need no node
    from kvbridge.node.admission.controller import AdmissionController
    from kvbridge.node.room_book import RoomBook
    from kvbridge.node.rooms import RoomRequests

REQUESTS = "/v1/requests"
MAX_LISTED = 200
"""Rooms on one page of a listing."""

ADMISSION_ANSWERS = {
    201: {"headers": LOCATION},
    **problems(
        *(InvalidInputError, ConflictError, StaleError, ClientLimitError, CapacityError, NotReadyError, NamespaceError),
        body=True,
    ),
}

RoomPath = Annotated[RoomId, NUMBER, Path(description=f"The room's id, from 0 to {MAX_ROOM}.")]
StatesQuery = Annotated[tuple[RoomState, ...], Query(description="Only rooms in one of these states.")]
PeerQuery = Annotated[
    str, Query(max_length=400, description="Only rooms with this node at the other end: INSTANCE/NODE or INSTANCE.")
]
ClientQuery = Annotated[str | None, Query(max_length=200, description="Only rooms of this client.")]
AfterQuery = Annotated[int, NUMBER, Query(ge=0, le=2**62, description="`next` of the page before; 0: from the oldest.")]
LimitQuery = Annotated[int, NUMBER, Query(ge=1, le=MAX_LISTED, description="Rooms on a page at most.")]
WaitQuery = Annotated[float, NUMBER, Query(ge=0, allow_inf_nan=False, description="Seconds to wait for a state.")]
UntilQuery = Annotated[tuple[RoomState, ...], Query(description="States to wait for; none: a final one.")]
GenerationQuery = Annotated[int | None, NUMBER, Query(ge=1, description="Cancel this generation only.")]
StoreQuery = Annotated[Literal["drop", "keep"], Query(description="What to do about objects in the store.")]
ReasonQuery = Annotated[str, Query(max_length=1_000, description="Told to everybody who asks why the room ended.")]


def create_daemon_app(
    *,
    admission: AdmissionController,
    requests: RoomRequests[Any],
    rooms: RoomBook[Any],
    status: StatusPort[NodeStatus],
    settings: AppSettings,
    begin_trace: BeginTrace = pass_on,
) -> FastAPI:
    """Build the application of a daemon; it holds no state of its own."""

    async def admit(request: AdmissionRequest, may_name: Namespaces) -> RoomReport:
        TRACE.set(begin_trace(TRACE.get()))
        return await admission.admit(request, may_name)

    routers = [
        _admission_router(admission, requests, begin_trace),
        _rooms_router(requests, rooms, settings),
        _prefixes_router(requests),
    ]
    direct = DirectRoute(REQUESTS, AdmissionRequest, admit)
    title = f"kvbridge {rooms.role} daemon"
    return assemble_app(title, routers, direct=direct, status=status, kind=NodeStatus, settings=settings)


def _router() -> APIRouter:
    answers = problems(InvalidInputError)
    return APIRouter(prefix=REQUESTS, tags=["requests"], responses=answers, dependencies=[DESCRIBED_QUERY])


def _admission_router(
    admission: AdmissionController, requests: RoomRequests[Any], begin_trace: BeginTrace
) -> APIRouter:
    router = _router()

    @router.post("", status_code=201, dependencies=[as_described(AdmissionRequest)], responses=ADMISSION_ANSWERS)
    async def admit_room(
        request: AdmissionRequest, response: Response, connection: Request, may_name: Namespaces = MAY_NAME
    ) -> RoomReport:
        """Reserve for a request, at once or within its `wait_s`.

        503 with Retry-After when it does not fit, 429 when its client has as much as it may, 403 for a namespace that its token
        may not name; nothing is kept then, nor when the caller closes the connection while it waits.
        """
        TRACE.set(begin_trace(TRACE.get()))
        if request.wait_s:
            report = await while_connected(
                connection, admission.admit(request, may_name), lambda late: requests.cancel(late.room, LEFT)
            )
        else:
            report = await admission.admit(request, may_name)
        response.headers["Location"] = f"{REQUESTS}/{report.room}"
        return report

    return router


def _rooms_router(requests: RoomRequests[Any], rooms: RoomBook[Any], settings: AppSettings) -> APIRouter:
    router = _router()

    @router.get("")
    async def list_rooms(
        state: StatesQuery = (),
        peer: PeerQuery = "",
        client: ClientQuery = None,
        after: AfterQuery = 0,
        limit: LimitQuery = 100,
    ) -> RoomPage:
        """List rooms, the oldest first, a page at a time: those under way, and ended ones as long as they are remembered."""
        query = RoomQuery(states=frozenset(state), peer=peer, client=client, after=after, limit=limit)
        return rooms.page(query)

    @router.get("/{room}", responses=problems(UnknownRoomError))
    async def get_room(
        room: RoomPath, connection: Request, wait: WaitQuery = 0.0, until: UntilQuery = ()
    ) -> RoomReport:
        """Return a room's report, at once or when it has reached a state; after `wait` seconds in any case."""
        if wait > settings.max_wait_s:
            raise InvalidInputError(
                f"wait is {wait:g} s, at most {settings.max_wait_s:g} s are served (http.max_wait_s)"
            )
        if wait == 0:
            return rooms.report(room)
        return await while_connected(connection, rooms.wait(room, wait, frozenset(until)))

    @router.delete("/{room}", responses=problems(UnknownRoomError, StaleError))
    async def cancel_room(
        room: RoomPath,
        reason: ReasonQuery = "cancelled by its client",
        generation: GenerationQuery = None,
    ) -> RoomReport:
        """Abort a room; harmless on a final one. 409 `stale` when the room is there in another generation."""
        present = rooms.report(room)
        if generation is not None and present.generation != generation:
            raise StaleError(
                f"room {room} is in generation {present.generation}, not {generation}: it was not cancelled"
            )
        return await requests.cancel(room, reason)

    return router


def _prefixes_router(requests: RoomRequests[Any]) -> APIRouter:
    router = APIRouter(prefix="/v1/prefixes", tags=["operations"], responses=problems(ConflictError, InvalidInputError))

    @router.delete("")
    async def drop_prefixes(store: StoreQuery = "drop") -> DroppedPrefixes:
        """Forget every cached prefix, of all namespaces: keys do not tell whose they are.

        Requests find none from now on; rooms under way keep the pages that they read. 409 where no prefixes are kept. What the
        store below host memory has of this model is dropped, too, also what other nodes have put there; `store` in the answer
        says whether that was done. What other nodes have in memory is theirs: ask each of them first.
        """
        return await requests.drop_prefixes(stored=store == "drop")

    return router
