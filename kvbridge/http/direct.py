"""The request for a room, answered without the framework when there is nothing unusual about it.

Owns: what is unusual. Must not know: what the route does.

An eighth of the calls that a daemon made for a room were FastAPI's, to find the route, solve its dependencies and read the body
twice. So a request with a whole JSON body that a strict reading takes, and without a query, goes straight to the service. All else
goes to the framework's route as if nobody had looked at it, which takes what can be taken and says what is wrong with the rest:
there is one set of rules, and this is the short way through it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbridge.core.errors import BridgeError
from kvbridge.core.prefixes import Namespaces
from kvbridge.http.problems import answer_bridge_error


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """One POST with a body that is answered with 201."""

    path: str
    kind: type[BaseModel]
    """Of the body. One whose `wait_s` is not 0 is the framework's, since its caller may hang up meanwhile."""
    answer: Callable[[Any, Namespaces], Awaitable[BaseModel]]
    """From the body, and what the caller may name, to what was made, which has an id in `room`."""


class Direct:
    """The last middleware: `app` is the framework's."""

    def __init__(self, app: ASGIApp, *, route: DirectRoute) -> None:
        self._app = app
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        route = self._route
        if scope["type"] != "http" or scope["path"] != route.path or scope["method"] != "POST" or scope["query_string"]:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if headers.get("content-type", "").lower() != "application/json" or "content-length" not in headers:
            await self._app(scope, receive, send)
            return
        first = await receive()
        body = self._read(first)
        if body is None:
            await self._app(scope, _again(first, receive), send)
            return
        scope["route"] = route
        try:
            made = await route.answer(body, scope["state"]["namespaces"])
        except BridgeError as error:
            response = await answer_bridge_error(Request(scope), error)
        else:
            location = {"Location": f"{route.path}/{made.room}"}  # type: ignore[attr-defined]  # see `DirectRoute`
            response = Response(made.model_dump_json(), 201, location, "application/json")
        await response(scope, receive, send)

    def _read(self, message: Message) -> Any:  # noqa: ANN401 - of the route's kind
        """Return the body, None for one that is the framework's."""
        if message["type"] != "http.request" or message.get("more_body", False):
            return None
        try:
            body = self._route.kind.model_validate_json(message.get("body", b""), strict=True)
        except ValidationError:
            return None
        return None if body.wait_s else body  # type: ignore[attr-defined]  # see `DirectRoute`


def _again(first: Message, receive: Receive) -> Receive:
    """Return what gives a message that was taken already, and then those that follow."""
    taken = [first]

    async def give() -> Message:
        return taken.pop() if taken else await receive()

    return give
