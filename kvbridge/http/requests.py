"""How routes read requests, and what becomes of work whose caller hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.prefixes import Namespaces

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")

REQUESTS = "/v1/requests"
LEFT = "its client left before it was told"
"""Why something is undone that nobody waits for any more."""


async def read_body(
    request: Request, kind: type[ModelT], *, extra: Literal["ignore", "forbid"] | None = None
) -> ModelT:
    """Return a JSON body as a `kind`: a number that is written as text is none. `extra`: what becomes of unknown fields."""
    if "json" not in request.headers.get("content-type", ""):
        raise InvalidInputError("send the body as JSON with Content-Type: application/json")
    try:
        return kind.model_validate_json(await request.body(), strict=True, extra=extra)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RequestValidationError([{**fault, "loc": ("body", *fault["loc"])} for fault in faults]) from None
    except ClientDisconnect:
        raise _left() from None


def body_of_any_release(kind: type[BaseModel]) -> Any:  # noqa: ANN401 - what FastAPI calls a dependency
    """Return the dependency for a body that a node sends by itself: fields that a later release adds are ignored."""

    async def read(request: Request) -> BaseModel:
        return await read_body(request, kind, extra="ignore")

    return Depends(read)


def describes(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what a route says of a body that it reads by `read_body`; the application names the model among its `bodies`."""
    reference = {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}
    return {"requestBody": {"required": True, "content": {"application/json": reference}}}


async def create(
    request: Request,
    kind: type[Any],
    make: Callable[[Any, Namespaces], Coroutine[Any, Any, Any]],
    undo: Callable[[Any], Awaitable[object]],
) -> Response:
    """Answer a request for a room with 201 and what was made.

    `make` is given the body and the namespaces that the caller may name. `undo` is given what was made, when the caller has left.
    """
    if request.scope["query_string"]:
        name = next(iter(request.query_params), "")
        raise InvalidInputError(f"query.{name[:80]}: unknown parameter; there are none here")
    asked = await read_body(request, kind)
    work = make(asked, request.scope["state"]["namespaces"])
    made = await (while_connected(request, work, undo) if asked.wait_s else work)
    location = {"Location": f"{REQUESTS}/{made.room}"}
    return Response(made.model_dump_json(), 201, location, "application/json")


async def while_connected(
    connection: Request,
    work: Coroutine[Any, Any, ResultT],
    undo: Callable[[ResultT], Awaitable[object]] | None = None,
) -> ResultT:
    """Return what `work` returns; cancel it, or undo what it has done, when its caller closes the connection before that."""
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
