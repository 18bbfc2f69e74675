"""How routes read requests and answer them, and what becomes of work whose caller hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.ids import MAX_ROOM, RoomId
from kvbridge.core.prefixes import Namespaces
from kvbridge.http.problems import FORESEEN, answer_error

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")

REQUESTS = "/v1/requests"
LEFT = "its client left before it was told"
"""Reason of a room that is undone because nobody waits for it any more."""
CREATED: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The path of what was made.", "schema": {"type": "string"}}}}
}
RoomPath = Annotated[RoomId, Path(description=f"The room's id, from 0 to {MAX_ROOM}.")]


class PlainRoute(APIRoute):
    """A route that is called as a plain Starlette endpoint: the request, and what the path names as strings.

    FastAPI only describes the route. Reading the arguments of a room's request would cost most of the time of the request.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what is called with each request."""

        async def handle(request: Request) -> Response:
            made: Response = await self.endpoint(request, **request.path_params)
            return made

        return handle


class Shortcut:
    """The innermost middleware: a POST to a plain route without parameters passes no routing, which costs as much as admission."""

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {route.path: route for route in routes if isinstance(route, PlainRoute)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the route's function, or pass the request on."""
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["route"] = route
        request = Request(scope, receive)
        try:
            response = await route.endpoint(request)
        except tuple(FORESEEN) as error:
            response = await answer_error(request, error)
        await response(scope, receive, send)


def plain_post(
    router: APIRouter,
    path: str,
    endpoint: Callable[..., Any],
    *,
    body: type[BaseModel],
    answer: type[BaseModel],
    **more: Any,  # noqa: ANN401 - as of FastAPI
) -> None:
    """Add a plain route for POST to a router. `more` is as of `add_api_route`."""
    router.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        response_model=answer,
        openapi_extra=describes(body),
        route_class_override=PlainRoute,
        **more,
    )


def json_response(answer: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Answer with a document."""
    return Response(answer.model_dump_json(), status, headers, "application/json")


def describes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what a route says of a body that `read_body` reads; the application names the model among its `bodies`."""
    reference = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": reference}}}


async def read_body(
    request: Request, kind: type[ModelT], *, extra: Literal["ignore", "forbid"] | None = None
) -> ModelT:
    """Return a JSON body as a `kind`, without turning texts into numbers. `extra`: what becomes of unknown fields."""
    if "json" not in request.headers.get("content-type", ""):
        raise InvalidInputError("send the body as JSON with Content-Type: application/json")
    try:
        return kind.model_validate_json(await request.body(), strict=True, extra=extra)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None
    except ClientDisconnect:
        raise _left() from None


async def create(
    request: Request,
    kind: type[Any],
    make: Callable[[Any, Namespaces], Coroutine[Any, Any, Any]],
    undo: Callable[[Any], Awaitable[object]],
) -> Response:
    """Answer a request for a room with 201 and what `make` returned.

    `make` is given the body and the namespaces that the caller may name. `undo` is given what was made, when the caller has left.
    """
    if request.scope["query_string"]:
        name = next(iter(request.query_params), "")
        raise InvalidInputError(f"query.{name[:80]}: unknown parameter; there are none here")
    asked = await read_body(request, kind)
    work = make(asked, request.scope["state"]["namespaces"])
    made = await (while_connected(request, work, undo) if asked.wait_s else work)
    return json_response(made, 201, {"Location": f"{REQUESTS}/{made.room}"})


async def while_connected(
    connection: Request,
    work: Coroutine[Any, Any, ResultT],
    undo: Callable[[ResultT], Awaitable[object]] | None = None,
) -> ResultT:
    """Return what `work` returns. When the caller closes the connection first, cancel the work, or `undo` its result."""
    working = asyncio.ensure_future(work)
    closed = asyncio.ensure_future(_closed(connection))
    try:
        await asyncio.wait({working, closed}, return_when=asyncio.FIRST_COMPLETED)
        left = closed.done()
    finally:
        closed.cancel()
        working.cancel()
        await asyncio.gather(working, closed, return_exceptions=True)
    if left:
        if undo is not None and not working.cancelled() and working.exception() is None:
            await undo(working.result())
        raise _left()
    return working.result()


def _left() -> ConflictError:
    return ConflictError("the caller closed the connection while it waited")


async def _closed(connection: Request) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass
