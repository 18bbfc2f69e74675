"""What happens to a request before and after its route. Plain ASGI: no body is read for a caller without a token."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import structlog
from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbridge.core.clock import monotonic
from kvbridge.core.errors import BridgeError, UnauthorizedError
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces, TokenGrant
from kvbridge.http.problems import FORESEEN, answer_error, make_problem, problem_of, problem_response
from kvbridge.telemetry.context import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    TRACE,
    TRACEPARENT_HEADER,
    TraceContext,
    is_request_id,
    parse_traceparent,
)

log = structlog.get_logger(__name__)

OTHER = "other"
"""What stands for the route of a request that met none."""
CLIENT_LEFT = 499
"""Counted as the status of a request that got no answer."""

Answered = Callable[[str, str, int, float], None]
"""(the route's template, method, status, seconds). Must not raise."""


class Observed:
    """Give every request an id, take over the caller's, tell it in the answer; take over its trace; say how it was answered."""

    def __init__(self, app: ASGIApp, *, answered: Answered) -> None:
        self._app = app
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = monotonic()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if is_request_id(given) else secrets.token_hex(8)
        status = CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        bound, traced = REQUEST_ID.set(request_id), TRACE.set(_trace(headers))
        try:
            await self._app(scope, receive, watched)
        finally:
            template = getattr(scope.get("route"), "path", OTHER)
            self._answered(template, scope["method"], status, monotonic() - begun_s)
            REQUEST_ID.reset(bound)
            TRACE.reset(traced)


def _trace(headers: Headers) -> TraceContext | None:
    """The caller's span; a header that names none is as good as none, and so are several."""
    given = headers.getlist(TRACEPARENT_HEADER)
    return parse_traceparent(given[0]) if len(given) == 1 else None


class BearerToken:
    """Refuse requests without one of the tokens, except to open paths. Without tokens everybody is let in.

    What the caller may name is then `scope["state"]["namespaces"]`.
    """

    def __init__(
        self, app: ASGIApp, *, grants: Callable[[], tuple[TokenGrant, ...]], open_paths: frozenset[str]
    ) -> None:
        """`grants` is asked at each request."""
        self._app = app
        self._grants = grants
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        grants = [grant for grant in self._grants() if grant.token]
        if scope["type"] != "http" or not grants or scope["path"] in self._open_paths:
            await self._let_in(ANY_NAMESPACE, scope, receive, send)
            return
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        shown = [grant for grant in grants if secrets.compare_digest(given.strip().encode(), grant.token.encode())]
        if scheme.lower() == "bearer" and shown:
            await self._let_in(shown[0].namespaces, scope, receive, send)
            return
        error = UnauthorizedError("a valid token is needed: send 'Authorization: Bearer <http.token>'")
        response = problem_response(problem_of(error, scope["path"]), {"WWW-Authenticate": "Bearer"})
        await response(scope, receive, send)

    async def _let_in(self, namespaces: Namespaces, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["namespaces"] = namespaces
        await self._app(scope, receive, send)


class BodyLimit:
    """Refuse request bodies longer than the limit with 413, by their announced length or by what arrives."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            problem = make_problem("body_too_large", 413, self._detail(), path=scope["path"])
            await problem_response(problem, {"Connection": "close"})(scope, receive, send)
            return
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._detail())
            return message

        await self._app(scope, limited, send)

    def _detail(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes (http.max_body_bytes)"


class UnhandledErrors:
    """Answer an error that nobody foresaw with 500 and no internals, and log it with all of them."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if scope["type"] != "http" or begun:
                raise  # half a response is out: only closing the connection is honest
            reference = secrets.token_hex(4)
            log.exception("request_failed", path=scope["path"], reference=reference)
            detail = f"an internal error, please report it; the log has it under reference {reference}"
            problem = make_problem(BridgeError.code, BridgeError.http_status, detail, path=scope["path"])
            await problem_response(problem)(scope, receive, send)


class Direct:
    """The last middleware: a route that is asked for with each room does not pass the framework, which is most of its time."""

    def __init__(self, app: ASGIApp, *, route: APIRoute) -> None:
        """`route` takes POST, and its function the request alone."""
        self._app = app
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http" or scope["path"] != self._route.path or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        scope["route"] = self._route
        request = Request(scope, receive)
        try:
            response = await self._route.endpoint(request)
        except FORESEEN as error:
            response = await answer_error(request, error)
        await response(scope, receive, send)
