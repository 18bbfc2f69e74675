"""The endpoint of bootstrap.

Owns: /v1/requests (pairs) and /v1/instances (the directory). Must not know: how pairs are chosen.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from pydantic import BaseModel, BeforeValidator

from kvbridge.api.directory import (
    InstanceView,
    NodeHeartbeat,
    NodeRegistration,
    NodeView,
    PairRequest,
    Registered,
    Ticket,
)
from kvbridge.api.status import BootstrapStatus, StatusPort
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.ends import PairReport
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.core.errors import (
    CapacityError,
    ClientLimitError,
    ConflictError,
    DeadlineError,
    FeatureError,
    FingerprintMismatchError,
    InvalidInputError,
    NamespaceError,
    NotFoundError,
    NotReadyError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.prefixes import Namespaces
from kvbridge.http.callers import LEFT, MAY_NAME, while_connected
from kvbridge.http.daemon_app import REQUESTS, ReasonQuery, RoomPath
from kvbridge.http.description import LOCATION, problems
from kvbridge.http.direct import DirectRoute
from kvbridge.http.numbers import DESCRIBED_QUERY, as_described
from kvbridge.http.operations import AppSettings, assemble_app
from kvbridge.telemetry.context import TRACE, BeginTrace, pass_on

NamePath = Annotated[str, Path(min_length=1, max_length=200)]
NODE = "/{instance}/nodes/{node}"

PAIRING_ANSWERS = {
    201: {"headers": LOCATION},
    **problems(
        *(InvalidInputError, FingerprintMismatchError, ConflictError, StaleError),
        *(ClientLimitError, CapacityError, NotReadyError, DeadlineError, NamespaceError),
        body=True,
    ),
}
REGISTRATION_ANSWERS = problems(
    InvalidInputError, FingerprintMismatchError, ConflictError, StaleError, FeatureError, body=True
)
HEARTBEAT_ANSWERS = problems(InvalidInputError, NotFoundError, StaleError, body=True)


def _of_any_release(kind: type[BaseModel]) -> BeforeValidator:
    """For the body that a node sends by itself: what a later release adds to it is ignored."""
    return BeforeValidator(lambda body: kind.model_validate(body, extra="ignore"), json_schema_input_type=kind)


Registration = Annotated[NodeRegistration, _of_any_release(NodeRegistration)]
Heartbeat = Annotated[NodeHeartbeat, _of_any_release(NodeHeartbeat)]


def create_bootstrap_app(
    *,
    directory: Directory,
    pairing: PairingService,
    status: StatusPort[BootstrapStatus],
    settings: AppSettings,
    begin_trace: BeginTrace = pass_on,
) -> FastAPI:
    """Build the application of bootstrap; it holds no state of its own."""

    async def pair(request: PairRequest, may_name: Namespaces) -> Ticket:
        TRACE.set(begin_trace(TRACE.get()))
        return await pairing.pair(request, may_name)

    routers = [_pairs_router(pairing, begin_trace), _directory_router(directory)]
    direct = DirectRoute(REQUESTS, PairRequest, pair)
    return assemble_app(
        "kvbridge bootstrap", routers, direct=direct, status=status, kind=BootstrapStatus, settings=settings
    )


def _pairs_router(pairing: PairingService, begin_trace: BeginTrace) -> APIRouter:
    answers = problems(InvalidInputError, NotReadyError)
    router = APIRouter(prefix=REQUESTS, tags=["requests"], responses=answers, dependencies=[DESCRIBED_QUERY])

    @router.post("", status_code=201, dependencies=[as_described(PairRequest)], responses=PAIRING_ANSWERS)
    async def pair_request(
        request: PairRequest, response: Response, connection: Request, may_name: Namespaces = MAY_NAME
    ) -> Ticket:
        """Pair a request and reserve both ends, at once or within its `wait_s`.

        503 with Retry-After when no pair can take it; nothing is kept then, nor when the caller closes the connection while it
        waits.
        """
        TRACE.set(begin_trace(TRACE.get()))
        if request.wait_s:
            ticket = await while_connected(
                connection, pairing.pair(request, may_name), lambda late: pairing.cancel(late.room, LEFT)
            )
        else:
            ticket = await pairing.pair(request, may_name)
        response.headers["Location"] = f"{REQUESTS}/{ticket.room}"
        return ticket

    @router.get("/{room}", responses=problems(UnknownRoomError))
    async def get_pair(room: RoomPath, connection: Request) -> PairReport:
        """Return a paired room as its daemons see it now."""
        return await while_connected(connection, pairing.report(room))

    @router.delete("/{room}", responses=problems(UnknownRoomError))
    async def cancel_pair(room: RoomPath, reason: ReasonQuery = "cancelled by its client") -> PairReport:
        """Abort a room on both ends."""
        return await pairing.cancel(room, reason)

    return router


def _directory_router(directory: Directory) -> APIRouter:
    router = APIRouter(prefix="/v1/instances", tags=["directory"], responses=problems(NotReadyError))

    @router.get("")
    async def list_instances() -> tuple[InstanceView, ...]:
        """Return every instance with its nodes, and why it is not ready."""
        return await directory.listing()

    @router.put(NODE, dependencies=[as_described(NodeRegistration)], responses=REGISTRATION_ANSWERS)
    async def register_node(instance: NamePath, node: NamePath, registration: Registration) -> Registered:
        """Add a node, or replace its former incarnation."""
        if (instance, node) != (registration.instance, registration.node):
            raise InvalidInputError(
                f"the path names node '{node}' of '{instance}', the body node '{registration.node}' "
                f"of '{registration.instance}'"
            )
        return await directory.register(registration)

    @router.post(f"{NODE}/heartbeat", dependencies=[as_described(NodeHeartbeat)], responses=HEARTBEAT_ANSWERS)
    async def send_heartbeat(instance: NamePath, node: NamePath, heartbeat: Heartbeat) -> NodeView:
        """Note that a node lives. 404: register again. 409 `stale`: another process has taken its place."""
        return await directory.heartbeat(instance, node, heartbeat)

    @router.delete(NODE, status_code=204, responses=problems(InvalidInputError, NotFoundError, StaleError))
    async def deregister_node(
        instance: NamePath, node: NamePath, incarnation: Annotated[str, Query(min_length=1, max_length=200)]
    ) -> None:
        """Take a node off, at its own wish."""
        await directory.deregister(instance, node, incarnation)

    return router
