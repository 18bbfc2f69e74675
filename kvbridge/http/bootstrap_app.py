"""The HTTP API of bootstrap."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response

from kvbridge.api.directory import (
    InstanceView,
    NodeHeartbeat,
    NodeRegistration,
    NodeView,
    PairReport,
    PairRequest,
    Registered,
    Ticket,
)
from kvbridge.api.status import BootstrapStatus
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.prefixes import Namespaces
from kvbridge.http.app import AppSettings, StatusPort, assemble_app
from kvbridge.http.requests import (
    CREATED,
    LEFT,
    REQUESTS,
    RoomPath,
    create,
    describes,
    json_response,
    plain_post,
    read_body,
    while_connected,
)
from kvbridge.telemetry.context import TRACE

NamePath = Annotated[str, Path(min_length=1, max_length=200)]
ReasonQuery = Annotated[str, Query(max_length=1_000, description="Told to everybody who asks why the room ended.")]
NODE = "/{instance}/nodes/{node}"


def create_bootstrap_app(
    directory: Directory, pairing: PairingService, status: StatusPort, settings: AppSettings
) -> FastAPI:
    """Build the application of bootstrap; it holds no state of its own."""
    routers = [_pairs_router(pairing, settings), _directory_router(directory)]
    bodies = (PairRequest, NodeRegistration, NodeHeartbeat)
    return assemble_app("kvbridge bootstrap", routers, bodies, status=status, kind=BootstrapStatus, settings=settings)


def _pairs_router(pairing: PairingService, settings: AppSettings) -> APIRouter:
    router = APIRouter(prefix=REQUESTS, tags=["requests"])

    async def pair(request: PairRequest, may_name: Namespaces) -> Ticket:
        TRACE.set(settings.begin_trace(TRACE.get()))
        return await pairing.pair(request, may_name)

    async def pair_request(request: Request) -> Response:
        """Pair a request and reserve both ends, at once or within its `wait_s`.

        503 with Retry-After when no pair has place. A room ends again in this case, and when the caller hangs up during the wait.
        """
        return await create(request, PairRequest, pair, lambda late: pairing.cancel(late.room, LEFT))

    plain_post(router, "", pair_request, body=PairRequest, answer=Ticket, status_code=201, responses=CREATED)

    @router.get("/{room}")
    async def get_pair(room: RoomPath, connection: Request) -> PairReport:
        """Return a paired room as its daemons see it now."""
        return await while_connected(connection, pairing.report(room))

    @router.delete("/{room}")
    async def cancel_pair(room: RoomPath, reason: ReasonQuery = "cancelled by its client") -> PairReport:
        """Abort a room on both ends."""
        return await pairing.cancel(room, reason)

    return router


def _directory_router(directory: Directory) -> APIRouter:
    router = APIRouter(prefix="/v1/instances", tags=["directory"])

    @router.get("")
    async def list_instances() -> tuple[InstanceView, ...]:
        """Return every instance with its nodes, and why it is not ready."""
        return await directory.listing()

    @router.put(NODE, openapi_extra=describes(NodeRegistration))
    async def register_node(instance: NamePath, node: NamePath, request: Request) -> Registered:
        """Add a node, or replace its former incarnation."""
        registration = await read_body(request, NodeRegistration, extra="ignore")
        if (instance, node) != (registration.instance, registration.node):
            raise InvalidInputError(
                f"the path names node '{node}' of '{instance}', the body node '{registration.node}' "
                f"of '{registration.instance}'"
            )
        return await directory.register(registration)

    @router.delete(NODE, status_code=204)
    async def deregister_node(
        instance: NamePath, node: NamePath, incarnation: Annotated[str, Query(min_length=1, max_length=200)]
    ) -> None:
        """Take a node off, at its own wish."""
        await directory.deregister(instance, node, incarnation)

    async def send_heartbeat(request: Request, instance: NamePath, node: NamePath) -> Response:
        """Take a heartbeat. 404: register again. 409 `stale`: another process has taken the node's place."""
        heartbeat = await read_body(request, NodeHeartbeat, extra="ignore")
        return json_response(await directory.heartbeat(instance, node, heartbeat))

    plain_post(router, f"{NODE}/heartbeat", send_heartbeat, body=NodeHeartbeat, answer=NodeView)

    return router
