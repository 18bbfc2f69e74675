"""Reading of requests, answers and errors of routes, and the end of work whose caller hangs up.

An error is a problem (RFC 9457). The answer to a malformed request is 400 `invalid_input` with each fault, never 422.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import structlog
from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from kvbridge.api.problems import PROBLEM_TYPE, Problem, make_problem, problem_of
from kvbridge.core.errors import BridgeError, ConflictError, InvalidInputError
from kvbridge.core.ids import MAX_ROOM, RoomId
from kvbridge.core.prefixes import Namespaces

log = structlog.get_logger(__name__)

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")

REQUESTS = "/v1/requests"
LEFT = "its client left before it was told"
"""Reason of a room that ends because nobody waits for it any more."""
CREATED: dict[int | str, dict[str, Any]] = {
    201: {"headers": {"Location": {"description": "The path of what was made.", "schema": {"type": "string"}}}}
}
RoomPath = Annotated[RoomId, Path(description=f"The room's id, from 0 to {MAX_ROOM}.")]
MAX_FAULTS = 20
FORESEEN = (BridgeError, RequestValidationError, HTTPException)
"""Errors that are problems; `Entrance` answers the others."""
METHODS = ("DELETE", "GET", "HEAD", "POST", "PUT")
_STATUS_CODES = {
    400: InvalidInputError.code,
    404: "not_found",
    405: "method_not_allowed",
    413: "body_too_large",
    415: "unsupported_media_type",
}


def problem_response(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Turn a problem into a response, with Retry-After where it has one."""
    all_headers = dict(headers or {})
    if problem.retry_after_s is not None:
        all_headers["Retry-After"] = str(max(1, math.ceil(problem.retry_after_s)))
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status, headers=all_headers, media_type=PROBLEM_TYPE)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the problem response of an error that is one of `FORESEEN`."""
    path, headers = request.url.path, None
    if isinstance(error, BridgeError):
        if error.http_status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("request_failed", path=path, code=error.code, exc_info=error)
        return problem_response(problem_of(error, path))
    if isinstance(error, RequestValidationError):
        faults = [_fault(found) for found in error.errors()]
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        return problem_response(problem_of(InvalidInputError("; ".join([*faults[:MAX_FAULTS], *more])), path))
    assert isinstance(error, HTTPException)
    code, detail, headers = _STATUS_CODES.get(error.status_code, "http_error"), str(error.detail), error.headers
    if code == "not_found":
        detail = f"no route {path}; see /openapi.json"
    if code == "method_not_allowed":
        detail = f"{request.method} is not allowed on {path}"
        headers = {"Allow": ", ".join(method for method in METHODS if _takes(request, method))}
    return problem_response(make_problem(code, error.status_code, detail, path=path), headers)


def _fault(found: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in found["loc"])
    if found["type"] == "json_invalid":
        return f"body: not valid JSON: {found['ctx']['error']}"
    if found["type"] == "extra_forbidden" and found["loc"][-1] == "prefix_tokens":
        return f"{where}: unknown field; only decode's engine tells its node how much of a prompt decode already holds"
    value = found.get("input")
    got = f", got {value!r}" if isinstance(value, (str, int, float)) and len(str(value)) <= 80 else ""
    return f"{where}: {str(found['msg']).removeprefix('Value error, ')}{got}"


def _takes(request: Request, method: str) -> bool:
    """Return whether any route of the path takes a method: the framework looks at the first route alone."""
    asked = {**request.scope, "method": method}
    return any(route.matches(asked)[0] is Match.FULL for route in request.app.routes)


class PlainRoute(APIRoute):
    """A route that calls its endpoint as Starlette does: with the request, and with the path's parameters as strings.

    FastAPI only describes the route. Its reading of the arguments would take most of the time of a request for a room.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the function for each request."""

        async def handle(request: Request) -> Response:
            made: Response = await self.endpoint(request, **request.path_params)
            return made

        return handle


class Shortcut:
    """The innermost middleware: a POST to a plain route without parameters skips routing, which costs as much as admission."""

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
        except FORESEEN as error:
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
    """Add a plain route for POST to a router. `more`: as for `add_api_route`."""
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
    """Return the description of a body for `read_body`; the application names the model among its `bodies`."""
    reference = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": reference}}}


async def read_body(
    request: Request, kind: type[ModelT], *, extra: Literal["ignore", "forbid"] | None = None
) -> ModelT:
    """Return a JSON body as a `kind`; texts are no numbers. `extra`: refuse or ignore unknown fields."""
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
    """Answer a request for a room with 201 and the document that `make` returns.

    `make` gets the body and the namespaces that the caller may name. `undo` gets the document if the caller has left meanwhile.
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
    """Return the result of `work`. When the caller closes the connection first, cancel the work or `undo` its result."""
    working, closed = asyncio.ensure_future(work), asyncio.ensure_future(wait_closed(connection.receive))
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


async def wait_closed(receive: Receive) -> None:
    """Return when the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
