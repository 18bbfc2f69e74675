"""How an application is put together, and what every daemon's endpoint offers.

/health and /ready need no token, since probes have none and learn little, nor do the files of the status page, which hold no data;
/metrics needs it unless opened. Load balancers may ask /health and /ready by HEAD.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, FastAPI, Header
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvbridge import __version__
from kvbridge.api.problems import PROBLEM_TYPE, Problem
from kvbridge.api.status import Readiness
from kvbridge.core.clock import monotonic
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.prefixes import TokenGrant
from kvbridge.core.wire.messages import PROTOCOL_VERSION
from kvbridge.http.middleware import Entrance
from kvbridge.http.page import PAGE_PATHS, Document, page_router
from kvbridge.http.problems import FORESEEN
from kvbridge.http.requests import Shortcut
from kvbridge.telemetry.registry import Metrics

OPEN_PATHS = PAGE_PATHS | {"/health", "/ready"}
TURN_S = 0.002
"""The making of a page of metrics lets others have their turn after this; more often, and the page would wait for them."""
METRICS_PAGE = {
    "description": "The metrics, as Prometheus reads them",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}
SCHEMAS = "#/components/schemas/"
PROBLEM = {
    "description": "A problem (RFC 9457). `code` says which one; docs/http-api.md lists all codes.",
    "content": {PROBLEM_TYPE: {"schema": {"$ref": f"{SCHEMAS}Problem"}}},
}
TOKEN_SCHEME = {"type": "http", "scheme": "bearer", "description": "The line of `http.token_file`, where there is one."}


class AppSettings(FrozenModel):
    """The configuration that an application needs."""

    grants: Callable[[], tuple[TokenGrant, ...]] = tuple
    """The bearer tokens at the moment; none: no token is asked for, and everybody may name any namespace."""
    open_metrics: bool = False
    max_body_bytes: Positive = 1 << 20
    max_wait_s: float = 60.0


class StatusPort(Protocol):
    """A daemon, as its operators see it."""

    metrics: Metrics

    def readiness(self) -> Readiness:
        """Return whether new rooms can be admitted, and every reason why not."""

    def status(self) -> BaseModel:
        """Return everything that an operator wants to see."""

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Return the page of metrics in pieces, in the form that an Accept header asks for, and its content type."""


class Alive(FrozenModel):
    """The process lives."""

    alive: bool = True


class Version(FrozenModel):
    """Releases that must fit together."""

    name: str = "kvbridge"
    version: str = __version__
    protocol_version: NonNegative = PROTOCOL_VERSION


def assemble_app(  # noqa: PLR0913 - each is what applications differ in
    title: str,
    routers: Sequence[APIRouter],
    bodies: Iterable[type[BaseModel]],
    *,
    status: StatusPort,
    kind: type[BaseModel],
    settings: AppSettings,
    page: Callable[[], Document] | None = None,
) -> FastAPI:
    """Build an application from its own routers and the operators' routes.

    `bodies` are the models that routes read by `read_body`, `kind` is that of `/status`, `page` makes the status page's document.
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
    shown = [] if page is None else [page_router(page, asks_token=asks_token)]
    for router in [*routers, _operators_router(status, kind), *shown]:
        app.include_router(router)
        for route in router.routes:
            if isinstance(route, APIRoute):
                status.metrics.serves(route.path, sorted(route.methods or ()), route.status_code or 200)
    open_paths = OPEN_PATHS | ({"/metrics"} if settings.open_metrics else set())

    @app.get("/openapi.json", include_in_schema=False)
    async def get_description() -> dict[str, Any]:
        app.openapi_schema = app.openapi_schema or describe(app, bodies, open_paths, asks_token=asks_token)
        return app.openapi_schema

    for error, answer in FORESEEN.items():
        app.add_exception_handler(error, answer)
    # The last one added is the first to see a request.
    app.add_middleware(Shortcut, routes=[route for router in routers for route in router.routes])
    app.add_middleware(
        Entrance,
        grants=settings.grants,
        open_paths=open_paths,
        max_body_bytes=settings.max_body_bytes,
        answered=status.metrics.answered,
    )
    return app


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
        """Say whether new rooms can be admitted here, or pairs be made, and every reason why not."""
        readiness = status.readiness()
        return JSONResponse(readiness.model_dump(mode="json"), status_code=200 if readiness.ready else 503)

    @router.get("/metrics", response_class=Response, responses={200: METRICS_PAGE})
    async def get_metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Return the metrics for Prometheus, with exemplars when OpenMetrics is asked for."""
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


def describe(
    app: FastAPI, bodies: Iterable[type[BaseModel]], open_paths: Iterable[str], *, asks_token: bool
) -> dict[str, Any]:
    """Return an application's description. `asks_token`: callers have to show one, except at the open paths."""
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
