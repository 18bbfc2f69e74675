"""The HTTP API of the router: OpenAI's API, passed through.

Errors of these routes have the form that OpenAI's clients read. After a stream's first byte an error is an event inside the stream,
which ends without the `[DONE]` of a whole answer. Any other broken answer is cut off.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from kvbridge.api.status import RouterStatus
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, InvalidInputError, NotReadyError, PeerError
from kvbridge.http.app import AppSettings, StatusPort, assemble_app
from kvbridge.http.requests import wait_closed
from kvbridge.router.bodies import Asked
from kvbridge.router.exchange import EVENT_END, Router
from kvbridge.telemetry.context import REQUEST_ID, REQUEST_ID_HEADER

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
PASSED_ON = ("authorization", "traceparent", "tracestate", "x-session-id", "x-vllm-priority")


def create_router_app(router: Router, status: StatusPort, settings: AppSettings) -> FastAPI:
    """Build the application of the router; it holds no state of its own."""
    routes = APIRouter(tags=["openai"])

    async def complete(request: Request) -> Response:
        """Pass a request on to a prefill and a decode server, and the answer back."""
        return _PassedThrough(router, request)

    for path in COMPLETIONS:
        routes.add_api_route(path, complete, methods=["POST"], name=path.rpartition("v1/")[2].replace("/", "_"))

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """Return the models of a decode server."""
        try:
            code, content = await router.models(_passed_on(request.headers))
        except BridgeError as error:
            return _openai_error(error)
        return Response(content, code, media_type="application/json")

    return assemble_app("kvbridge router", [routes], (), status=status, kind=RouterStatus, settings=settings)


def _passed_on(headers: Headers) -> dict[str, str]:
    passed = {name: headers[name] for name in PASSED_ON if name in headers}
    for name, value in passed.items():
        if not value.isascii():
            raise InvalidInputError(
                f"header {name} has a byte beyond ASCII, and servers cannot be sent such a header: leave it out"
            )
    return passed | {REQUEST_ID_HEADER: REQUEST_ID.get()}


def _openai_error(error: BridgeError) -> Response:
    # The words for a server's failure are ours: 400 would say that the client is wrong.
    code = PeerError.http_status if isinstance(error, PeerError) else error.http_status
    headers = {"Retry-After": str(max(1, round(error.retry_after_s)))} if isinstance(error, CapacityError) else None
    return JSONResponse(_document(error, code), code, headers)


def _document(error: BridgeError, code: int) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.code, "param": None, "code": code}}


class _PassedThrough(Response):
    """Passes an answer on piece by piece, until its client leaves or the router ends."""

    def __init__(self, router: Router, request: Request) -> None:
        super().__init__()
        self._router = router
        self._request = request
        self._stream = False
        self._begun = False
        self._between_events = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the request, and send its answer."""
        try:
            with self._router.place() as hold:
                headers, pieces = _passed_on(self._request.headers), []
                async for piece in self._request.stream():
                    hold(len(piece))
                    pieces.append(piece)
                asked = Asked.read(self._request.url.path, b"".join(pieces), headers)
                await self._pass_through(asked, scope, receive, send)
        except BridgeError as error:
            await _openai_error(error)(scope, receive, send)
        except ClientDisconnect:
            return  # nobody would read an answer

    async def _pass_through(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        passing = asyncio.create_task(self._pass(asked, send))
        others = {asyncio.create_task(wait_closed(receive)), asyncio.create_task(self._router.cut_off.wait())}
        try:
            await asyncio.wait({passing, *others}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = [task for task in (passing, *others) if task.cancel()]
            await asyncio.gather(*left, return_exceptions=True)
        if passing.cancelled():
            if self._router.cut_off.is_set():
                await self._fail(NotReadyError("the router is ending"), scope, receive, send)
            return
        error = passing.exception()
        if isinstance(error, BridgeError):
            await self._fail(error, scope, receive, send)
        elif error is not None:
            raise error

    async def _pass(self, asked: Asked, send: Send) -> None:
        async with self._router.answer(asked) as answer:
            self._stream = any(name == b"content-type" and b"event-stream" in value for name, value in answer.headers)
            self._begun = True
            await self._send(send, {"type": "http.response.start", "status": answer.status, "headers": answer.headers})
            await self._send_piece(send, answer.first)
            async with aclosing(answer.rest) as rest:  # type: ignore[type-var]  # a generator
                async for piece in rest:
                    await self._send_piece(send, piece)
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_piece(self, send: Send, piece: bytes) -> None:
        await self._send(send, {"type": "http.response.body", "body": piece, "more_body": True})
        self._between_events = piece.endswith(EVENT_END)

    async def _send(self, send: Send, message: Message) -> None:
        idle_s = self._router.config.timeouts.idle_s
        try:
            async with asyncio.timeout(idle_s):
                await send(message)
        except TimeoutError:
            raise DeadlineError(
                f"the client took longer than {idle_s:g} s over a piece of its answer (timeouts.idle_s)"
            ) from None

    async def _fail(self, error: BridgeError, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the client of an error, if that is still possible."""
        if not self._begun:
            await _openai_error(error)(scope, receive, send)
        elif self._stream:
            event = b"data: " + json.dumps(_document(error, error.http_status)).encode() + EVENT_END
            piece = event if self._between_events else EVENT_END + event
            await self._send(send, {"type": "http.response.body", "body": piece, "more_body": False})
        # Else the server closes the connection of an answer that was not sent to its end.
