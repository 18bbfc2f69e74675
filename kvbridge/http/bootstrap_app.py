"""The endpoint of bootstrap.

Owns: /v1/requests (pairs) and /v1/instances (the directory). Must not know: how pairs are chosen.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, FastAPI, Path, Query, Response
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
from kvbridge.bootstrap.pairing import PairingService, PairReport
from kvbridge.core.errors import InvalidInputError
from kvbridge.http.daemon_app import ReasonQuery, RoomPath
from kvbridge.http.numbers import as_described
from kvbridge.http.operations import PROBLEM_RESPONSES, AppSettings, assemble_app

NamePath = Annotated[str, Path(min_length=1, max_length=200)]


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
) -> FastAPI:
    """Build the application of bootstrap; it holds no state of its own."""
    routers = [_pairs_router(pairing), _directory_router(directory)]
    return assemble_app("kvbridge bootstrap", routers, status=status, kind=BootstrapStatus, settings=settings)


def _pairs_router(pairing: PairingService) -> APIRouter:
    router = APIRouter(prefix="/v1/requests", tags=["requests"], responses=PROBLEM_RESPONSES)

    @router.post("", status_code=201, dependencies=[as_described(PairRequest)])
    async def pair(request: PairRequest, response: Response) -> Ticket:
        """Pair a request and reserve both ends. 503 with Retry-After when no pair can take it now."""
        ticket = await pairing.pair(request)
        response.headers["Location"] = f"/v1/requests/{ticket.room}"
        return ticket

    @router.get("/{room}")
    async def report(room: RoomPath) -> PairReport:
        """Return a paired room as its daemons see it now."""
        return await pairing.report(room)

    @router.delete("/{room}")
    async def cancel(room: RoomPath, reason: ReasonQuery = "cancelled by its client") -> PairReport:
        """Abort a room on both ends."""
        return await pairing.cancel(room, reason)

    return router


def _directory_router(directory: Directory) -> APIRouter:
    router = APIRouter(prefix="/v1/instances", tags=["directory"], responses=PROBLEM_RESPONSES)

    @router.get("")
    async def listing() -> tuple[InstanceView, ...]:
        """Return every instance with its nodes, and why it is not ready."""
        return await directory.listing()

    @router.put("/{instance}/nodes/{node}", dependencies=[as_described(NodeRegistration)])
    async def register(instance: NamePath, node: NamePath, registration: Registration) -> Registered:
        """Add a node, or replace its former incarnation."""
        if (instance, node) != (registration.instance, registration.node):
            raise InvalidInputError(
                f"the path names node '{node}' of '{instance}', the body node '{registration.node}' "
                f"of '{registration.instance}'"
            )
        return await directory.register(registration)

    @router.post("/{instance}/nodes/{node}/heartbeat", dependencies=[as_described(NodeHeartbeat)])
    async def beat(instance: NamePath, node: NamePath, heartbeat: Heartbeat) -> NodeView:
        """Note that a node lives. 404: register again. 409 `stale`: another process has taken its place."""
        return await directory.heartbeat(instance, node, heartbeat)

    @router.delete("/{instance}/nodes/{node}", status_code=204)
    async def deregister(
        instance: NamePath, node: NamePath, incarnation: Annotated[str, Query(min_length=1, max_length=200)]
    ) -> None:
        """Take a node off, at its own wish."""
        await directory.deregister(instance, node, incarnation)

    return router
