"""Clients of the HTTP APIs: of bootstrap, of daemons, and of both for code without an event loop.

Every call raises the error of the other side, DeadlineError without an answer in time, PeerError when the other side cannot be
reached. Clients of an event loop call aiohttp's transport directly: httpx's own connections and client cost two to five times the
processor time.
"""

from __future__ import annotations

import asyncio
from functools import cache, lru_cache
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpcore
import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from kvbridge.api.directory import (
    InstanceView,
    NodeHeartbeat,
    NodeRegistration,
    NodeView,
    Registered,
)
from kvbridge.api.problems import error_of
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.core.errors import DeadlineError, NamespaceError, PeerError, ProtocolError, UnauthorizedError
from kvbridge.core.wire.messages import agree
from kvbridge.telemetry.context import REQUEST_ID, REQUEST_ID_HEADER, TRACE, TRACEPARENT_HEADER

AnswerT = TypeVar("AnswerT")

CONNECTIONS = 1024
"""Limit of calls under way to all daemons together; a call may wait at its daemon for as long as a request may."""

_url = lru_cache(4_096)(httpx.URL)
"""Calls go to the same few URLs, and httpx spends as long on reading a URL as on an answer."""
Params = dict[str, str | int | float | list[str]]


class Client:
    """A pool of connections for an event loop, with one token and one limit for each call."""

    def __init__(
        self,
        *,
        timeout_s: float,
        token: str = "",
        timeout_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`timeout_key` names the limit in errors."""
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        if transport is None:
            from httpx_aiohttp import AiohttpTransport  # noqa: PLC0415 - loads all certificates of the host; a node may call nobody

            transport = AiohttpTransport(limits=httpx.Limits(max_connections=CONNECTIONS), trust_env=False)
        self._transport = transport
        self.use_token(token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    def use_token(self, token: str) -> None:
        """Show this token from now on; empty: none."""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def ask(
        self,
        kind: type[AnswerT],
        method: str,
        url: str,
        body: BaseModel | None = None,
        params: Params | None = None,
        waits_s: float = 0.0,
    ) -> AnswerT:
        """Return the answer as a `kind`. Raises ProtocolError for another answer. `waits_s`: extra time for this call."""
        headers, content = self._headers | _on_behalf(), None
        if body is not None:
            headers["Content-Type"] = "application/json"
            # Defaults are left out: an older release then refuses a field that it does not know only when the field matters.
            content = body.model_dump_json(exclude_defaults=True)
        limits = {"timeout": httpx.Timeout(self._timeout_s + waits_s).as_dict()}
        try:
            request = httpx.Request(
                method, _url(url), content=content, headers=headers, params=params, extensions=limits
            )
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # the last two: a URL that nobody can ask
            if is_timeout(error):
                key = f" ({self._timeout_key})" if self._timeout_key else ""
                raise DeadlineError(f"{method} {url} was not answered within {self._timeout_s:g} s{key}") from error
            raise PeerError(f"{method} {url} failed: {error or type(error).__name__}") from error
        is_readiness = response.status_code == 503 and response.headers.get("content-type", "") == "application/json"
        if not (response.is_success or is_readiness):
            raise error_of(response.status_code, response.content, source=url)
        adapter: TypeAdapter[AnswerT] = _adapter(kind)  # type: ignore[arg-type]  # types are hashable
        try:
            return adapter.validate_json(response.content or b"null", extra="ignore")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ProtocolError(
                f"{url} answered something that is no {kind}: {first['loc']}: {first['msg']}"
            ) from error


class BlockingClient:
    """A client for code without an event loop: each call has a connection of its own. Several threads may share it."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        """`options` are those of `Client`."""
        self._options = options

    def ask(
        self, kind: type[AnswerT], method: str, url: str, body: BaseModel | None = None, params: Params | None = None
    ) -> AnswerT:
        """Return an answer; see `Client.ask`."""

        async def call() -> AnswerT:
            async with Client(**self._options) as client:
                return await client.ask(kind, method, url, body, params)

        return asyncio.run(call())


def _on_behalf() -> dict[str, str]:
    """Return the id and the trace of the present request: every daemon logs them."""
    request_id, trace = REQUEST_ID.get(), TRACE.get()
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    return headers if trace is None else headers | {TRACEPARENT_HEADER: trace.traceparent}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a type form
    return TypeAdapter(kind)


def is_timeout(error: Exception) -> bool:
    """Return whether time ran out. aiohttp's transport reports a connection that the other side closed as a timeout, too."""
    causes = (TimeoutError, httpcore.TimeoutException, type(None))
    return isinstance(error, httpx.TimeoutException) and isinstance(error.__cause__, causes)


def is_refused_connection(error: BaseException) -> bool:
    """Return whether nobody listened: the operating system's error is at the end of the causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__
    return cause is not None


class DirectoryClient(Client):
    """One bootstrap's endpoint."""

    def __init__(self, base_url: str, **more: Any) -> None:  # noqa: ANN401 - the options of Client
        super().__init__(**more)
        self.base_url = base_url.rstrip("/")

    def _node(self, instance: str, node: str) -> str:
        return f"{self.base_url}/v1/instances/{quote(instance, safe='')}/nodes/{quote(node, safe='')}"

    async def register(self, registration: NodeRegistration) -> Registered:
        """Announce this node; see `Directory.register` for its errors."""
        url = self._node(registration.instance, registration.node)
        answer = await self.ask(Registered, "PUT", url, registration)
        agree(registration.features, answer.features, us="this node", them=f"bootstrap at {self.base_url}")
        return answer

    async def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        """Send a heartbeat. NotFoundError: register again. StaleError: another process has taken this node's place."""
        return await self.ask(NodeView, "POST", f"{self._node(instance, node)}/heartbeat", heartbeat)

    async def deregister(self, instance: str, node: str, incarnation: str) -> None:
        """Leave the directory."""
        await self.ask(type(None), "DELETE", self._node(instance, node), params={"incarnation": incarnation})

    async def instances(self) -> tuple[InstanceView, ...]:
        """Return every instance."""
        return await self.ask(tuple[InstanceView, ...], "GET", f"{self.base_url}/v1/instances")


class DaemonClient(Client):
    """A client of any number of daemons that share a token. `url` is a daemon's `http_url`."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - the options of Client
        super().__init__(timeout_key="timeouts.reserve_s", **options)

    async def _room(self, method: str, url: str, path: str, *options: Any, **more: Any) -> RoomReport:  # noqa: ANN401
        url = f"{url.rstrip('/')}/v1/requests{path}"
        try:
            return await self.ask(RoomReport, method, url, *options, **more)
        except UnauthorizedError as error:
            # Passed on unchanged, the error would tell our own caller that its token is wrong.
            raise PeerError(f"{url} refuses our token: daemons.token_file must hold the daemons' http.token") from error
        except NamespaceError as error:
            raise PeerError(
                f"{url} does not let our token name the namespace of the request ({error}): its line in the daemons' "
                "http.token_file needs namespaces=*"
            ) from error

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        """Reserve one end of a room. The call may take longer than others by the request's `wait_s`."""
        return await self._room("POST", url, "", request, waits_s=request.wait_s)

    async def report(self, url: str, room: int) -> RoomReport:
        """Return a room's present report."""
        return await self._room("GET", url, f"/{room}")

    async def cancel(self, url: str, room: int, reason: str, *, generation: int | None = None) -> RoomReport:
        """Abort a room, or one generation alone. Raises UnknownRoomError, StaleError for another generation."""
        params: Params = {"reason": reason}
        if generation is not None:
            params["generation"] = generation
        return await self._room("DELETE", url, f"/{room}", params=params)

    async def incarnation(self, url: str) -> str:
        """Return the incarnation of the daemon at a URL; empty when its host refuses the connection.

        After any other error the daemon may be there: a daemon with too many callers hangs up, too.
        """
        try:
            status = await self.ask(dict[str, Any], "GET", f"{url.rstrip('/')}/status")
            return str(status.get("incarnation", ""))
        except PeerError as error:
            if is_refused_connection(error):
                return ""
            raise
