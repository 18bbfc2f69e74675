"""Each request before and after its route. Plain ASGI: no body is read for a caller without a token."""

from __future__ import annotations

import secrets
from collections.abc import Callable

import structlog
from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbridge.api.problems import make_problem, problem_of
from kvbridge.core.clock import monotonic
from kvbridge.core.errors import BridgeError, UnauthorizedError
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces, TokenGrant
from kvbridge.http.problems import problem_response
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
"""Counted as the route of a request that met none."""
CLIENT_LEFT = 499
"""Counted as the status of a request that got no answer."""

Answered = Callable[[str, str, int, float], None]
"""(the route's template, method, status, seconds). Must not raise."""


class Entrance:
    """Gives a request an id and its caller's trace, checks its token and the length of its body, and counts its answer.

    Routes find the namespaces that the caller may name in `scope["state"]["namespaces"]`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grants: Callable[[], tuple[TokenGrant, ...]],
        open_paths: frozenset[str],
        max_body_bytes: int,
        answered: Answered,
    ) -> None:
        """`grants` is asked at each request: without any, everybody is let in. Open paths need no token."""
        self._app = app
        self._grants = grants
        self._open_paths = open_paths
        self._max_body_bytes = max_body_bytes
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it. An error that nobody foresaw answers 500 without internals; the log has them."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s, status, headers = monotonic(), CLIENT_LEFT, Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if is_request_id(given) else secrets.token_hex(8)

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        bound, traced = REQUEST_ID.set(request_id), TRACE.set(_trace(headers))
        try:
            await self._let_in(scope, headers)(scope, self._limited(receive), watched)
        except Exception:
            if status != CLIENT_LEFT:
                raise  # half a response is out: only closing the connection is honest
            reference = secrets.token_hex(4)
            log.exception("request_failed", path=scope["path"], reference=reference)
            detail = f"an internal error, please report it; the log has it under reference {reference}"
            problem = make_problem(BridgeError.code, BridgeError.http_status, detail, path=scope["path"])
            await problem_response(problem)(scope, receive, watched)
        finally:
            template = getattr(scope.get("route"), "path", OTHER)
            self._answered(template, scope["method"], status, monotonic() - begun_s)
            REQUEST_ID.reset(bound)
            TRACE.reset(traced)

    def _let_in(self, scope: Scope, headers: Headers) -> ASGIApp:
        """Return the application, or the response that refuses a request by its head."""
        namespaces = self._namespaces(scope["path"], headers)
        if namespaces is None:
            error = UnauthorizedError("a valid token is needed: send 'Authorization: Bearer <http.token>'")
            return problem_response(problem_of(error, scope["path"]), {"WWW-Authenticate": "Bearer"})
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            problem = make_problem("body_too_large", 413, self._too_large(), path=scope["path"])
            return problem_response(problem, {"Connection": "close"})
        scope.setdefault("state", {})["namespaces"] = namespaces
        return self._app

    def _namespaces(self, path: str, headers: Headers) -> Namespaces | None:
        """Return the namespaces that a caller may name; None when it shows no valid token where one is needed."""
        grants = [grant for grant in self._grants() if grant.token]
        if not grants or path in self._open_paths:
            return ANY_NAMESPACE
        scheme, _, given = headers.get("authorization", "").partition(" ")
        shown = [grant for grant in grants if secrets.compare_digest(given.strip().encode(), grant.token.encode())]
        return shown[0].namespaces if shown and scheme.lower() == "bearer" else None

    def _limited(self, receive: Receive) -> Receive:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return limited

    def _too_large(self) -> str:
        return f"the body is longer than {self._max_body_bytes} bytes (http.max_body_bytes)"


def _trace(headers: Headers) -> TraceContext | None:
    """Return the caller's span; a header that names none, or several of them, are ignored."""
    given = headers.getlist(TRACEPARENT_HEADER)
    return parse_traceparent(given[0]) if len(given) == 1 else None
