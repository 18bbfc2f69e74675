"""A daemon's HTTP application: the entrance that every request passes, operators' routes, the status page, the description.

/health and /ready need no token: probes have none and learn little. The files of the status page need none either, as they hold no
data: the page asks for a token and sends it with its requests (`page/page.js`). /metrics needs a token unless it is opened. Load
balancers may ask /health and /ready by HEAD.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import structlog
from fastapi import APIRouter, FastAPI, Header, HTTPException
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from pydantic_core import to_json
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvbridge import __version__
from kvbridge.api.problems import PROBLEM_TYPE, Problem, make_problem, problem_of
from kvbridge.api.status import Readiness
from kvbridge.config.endpoints import HttpConfig
from kvbridge.core.errors import BridgeError, NotFoundError, UnauthorizedError
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces, TokenGrant
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import PROTOCOL_VERSION
from kvbridge.http.requests import FORESEEN, Shortcut, answer_error, problem_response
from kvbridge.telemetry.context import (
    REQUEST_ID,
    REQUEST_ID_HEADER,
    TRACE,
    TRACEPARENT_HEADER,
    BeginTrace,
    TraceContext,
    is_request_id,
    parse_traceparent,
    pass_on,
)
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

OTHER = "other"
"""Route of a request in the metrics that met none."""
CLIENT_LEFT = 499
"""Status of a request in the metrics that got no answer."""
TURN_S = 0.002
"""Time after which the rendering of /metrics lets others have their turn; with less, the page would wait for them."""
METRICS_PAGE = {
    "description": "The metrics, as Prometheus reads them",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
SCHEMAS = "#/components/schemas/"
PROBLEM = {
    "description": "A problem (RFC 9457). `code` says which one; docs/http-api.md lists all codes.",
    "content": {PROBLEM_TYPE: {"schema": {"$ref": f"{SCHEMAS}Problem"}}},
}
TOKEN_SCHEME = {"type": "http", "scheme": "bearer", "description": "A line of `http.token_file`, where there is one."}

FOLDER = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE_FILES = {file.name: file for file in sorted(FOLDER.iterdir()) if file.suffix in KINDS}
PAGE_PATHS = frozenset({"/", *(f"/page/{name}" for name in PAGE_FILES)})
PAGE_HEADERS = {
    # Only scripts and styles of this daemon may run.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a page of one release must not run with scripts of another
}
PAGE_KEPT_S = 1.0
"""Shortest time between two documents of the status page, for all who look."""

Document = dict[str, Any]
"""Content of the status page, before it is JSON."""


class AppSettings(FrozenModel):
    """The configuration that an application needs."""

    http: HttpConfig = HttpConfig()
    grants: Callable[[], tuple[TokenGrant, ...]] = tuple
    """Returns the present bearer tokens. Without any, nobody needs a token, and everybody may name any namespace."""
    begin_trace: BeginTrace = pass_on
    """Makes the first span of a request for a room."""


class StatusPort(Protocol):
    """A daemon, as its operators see it."""

    metrics: Metrics

    def readiness(self) -> Readiness:
        """Return whether new rooms can be admitted, and every reason why not."""

    def status(self) -> BaseModel:
        """Return the document of `/status`."""

    def page(self) -> Document:
        """Return the document of the status page."""

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Return the page of metrics in pieces, in the form that an Accept header asks for, and its content type."""


class Alive(FrozenModel):
    """The process lives."""

    alive: bool = True


class Version(FrozenModel):
    """The release, and the protocol by which releases fit together."""

    name: str = "kvbridge"
    version: str = __version__
    protocol_version: NonNegative = PROTOCOL_VERSION


def assemble_app(
    title: str,
    routers: Sequence[APIRouter],
    bodies: Iterable[type[BaseModel]],
    *,
    status: StatusPort,
    kind: type[BaseModel],
    settings: AppSettings,
) -> FastAPI:
    """Build an application from its own routers and the operators' routes.

    `bodies`: the models that routes read by `read_body`; `kind`: the model of `/status`.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses={"default": PROBLEM},
        separate_input_output_schemas=False,
        generate_unique_id_function=lambda route: route.name,
        # FastAPI would make a global span of each request, beside the spans that are made here.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    asks_token = bool(settings.grants())
    for router in [*routers, _operators_router(status, kind), page_router(status.page, asks_token=asks_token)]:
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute):
                status.metrics.serves(route.path, sorted(route.methods or ()), route.status_code or 200)
    open_paths = PAGE_PATHS | {"/health", "/ready"} | ({"/metrics"} if settings.http.open_metrics else set())

    @app.get("/openapi.json", include_in_schema=False)
    async def get_description() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or describe(app, bodies, open_paths, asks_token=asks_token)
        return app.openapi_schema

    for error in FORESEEN:
        app.add_exception_handler(error, answer_error)
    # The middleware that was added last is the first to see a request.
    app.add_middleware(Shortcut, routes=[route for router in routers for route in router.routes])
    app.add_middleware(Entrance, settings=settings, open_paths=open_paths, answered=status.metrics.answered)
    return app


class Entrance:
    """Gives a request an id and its caller's trace, checks its token and the length of its body, and counts its answer.

    Plain ASGI, so no body is read for a caller without a token. Routes find the namespaces that the caller may name in
    `scope["state"]["namespaces"]`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: AppSettings,
        open_paths: frozenset[str],
        answered: Callable[[str, str, int, float], None],
    ) -> None:
        """`open_paths` need no token. `answered` gets the route's template, method, status and seconds, and must not raise."""
        self._app, self._settings, self._open_paths, self._answered = app, settings, open_paths, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it. The answer to an unforeseen error is 500 without internals, which the log has."""
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
        """Return the application, or the response that refuses a request because of its head."""
        namespaces = self._namespaces(scope["path"], headers)
        if namespaces is None:
            error = UnauthorizedError("a valid token is needed: send 'Authorization: Bearer <http.token>'")
            return problem_response(problem_of(error, scope["path"]), {"WWW-Authenticate": "Bearer"})
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._settings.http.max_body_bytes:
            problem = make_problem("body_too_large", 413, self._too_large(), path=scope["path"])
            return problem_response(problem, {"Connection": "close"})
        scope.setdefault("state", {})["namespaces"] = namespaces
        return self._app

    def _namespaces(self, path: str, headers: Headers) -> Namespaces | None:
        """Return the namespaces that a caller may name; None without a valid token where one is needed."""
        grants = [grant for grant in self._settings.grants() if grant.token]
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
            if received > self._settings.http.max_body_bytes:
                raise HTTPException(413, self._too_large())
            return message

        return limited

    def _too_large(self) -> str:
        return f"the body is longer than {self._settings.http.max_body_bytes} bytes (http.max_body_bytes)"


def _trace(headers: Headers) -> TraceContext | None:
    """Return the caller's span. A malformed header is ignored, and so are several headers."""
    given = headers.getlist(TRACEPARENT_HEADER)
    return parse_traceparent(given[0]) if len(given) == 1 else None


def _operators_router(status: StatusPort, kind: type[BaseModel]) -> APIRouter:
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def get_health() -> Alive:
        """Say that the process lives and its loop turns."""
        return Alive()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_model=Readiness, responses={503: {"model": Readiness, "description": "Not ready"}})
    async def get_ready() -> Response:
        """Say whether new rooms can be admitted here, or pairs be made, with every reason why not."""
        readiness = status.readiness()
        return JSONResponse(readiness.model_dump(mode="json"), status_code=200 if readiness.ready else 503)

    @router.get("/metrics", response_class=Response, responses={200: METRICS_PAGE})
    async def get_metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Return the metrics for Prometheus; OpenMetrics has exemplars."""
        pieces, content_type = status.render_metrics(accept)
        body, turn_s = b"", monotonic()
        for piece in pieces:
            body += piece
            if monotonic() - turn_s >= TURN_S:
                await asyncio.sleep(0)
                turn_s = monotonic()
        return Response(body, headers={"Content-Type": content_type})

    @router.get("/version")
    async def get_version() -> Version:
        """Return the release and the protocol version."""
        return Version()

    @router.get("/status", response_model=kind)
    async def get_status() -> BaseModel:
        """Return everything that an operator wants to see."""
        return status.status()

    return router


def page_router(make: Callable[[], Document], *, asks_token: bool, clock: Clock = monotonic) -> APIRouter:
    """Return the routes of the status page. `asks_token`: the page asks for a token before it calls the daemon."""
    router = APIRouter(include_in_schema=False)
    contents = {name: file.read_bytes() for name, file in PAGE_FILES.items()}
    made_s, document = 0.0, b""
    if asks_token:
        contents["index.html"] = contents["index.html"].replace(b'data-token="none"', b'data-token="required"')

    @router.api_route("/", methods=["GET", "HEAD"])
    async def page() -> Response:
        return await file("index.html")

    @router.api_route("/page/{name}", methods=["GET", "HEAD"])
    async def file(name: str) -> Response:
        if name not in contents:
            raise NotFoundError(f"the page has no file '{name}'")
        return Response(contents[name], headers=PAGE_HEADERS, media_type=KINDS[PAGE_FILES[name].suffix])

    @router.get("/v1/page")
    async def shown() -> Response:
        nonlocal made_s, document
        if not document or clock() - made_s >= PAGE_KEPT_S:
            made_s, document = clock(), to_json(make())
        return Response(document, media_type="application/json", headers={"Cache-Control": "no-store"})

    return router


def describe(
    app: FastAPI, bodies: Iterable[type[BaseModel]], open_paths: Iterable[str], *, asks_token: bool
) -> dict[str, Any]:
    """Return an application's OpenAPI document. `asks_token`: callers need a token except at the open paths."""
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {})
    kinds: list[type[BaseModel]] = [Problem, *bodies]
    _, own = models_json_schema([(kind, "validation") for kind in kinds], ref_template=f"{SCHEMAS}{{model}}")
    components["schemas"] = components.get("schemas", {}) | own["$defs"]
    components["securitySchemes"] = {"bearer": TOKEN_SCHEME}
    schema["security"] = [{"bearer": []}] if asks_token else [{}, {"bearer": []}]
    for path in open_paths:
        for operation in schema["paths"].get(path, {}).values():
            operation["security"] = []
    return schema
