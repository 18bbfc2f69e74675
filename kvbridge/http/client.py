"""Callers of the endpoints: a daemon's view of bootstrap, bootstrap's (and a router's) view of daemons, a command's of both.

Every call raises the error that the other side raised, DeadlineError when it does not answer in time, PeerError when it cannot be
reached. Calls of an event loop go over aiohttp, and to httpx's transport as they are: over httpx's own connections and client they
cost two to five times the processor time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import TracebackType
from typing import Any, Self, TypedDict, TypeVar, Unpack
from urllib.parse import quote

import httpcore
import httpx
from httpx_aiohttp import AiohttpTransport
from pydantic import BaseModel, TypeAdapter, ValidationError

from kvbridge.api.directory import (
    InstanceView,
    NodeHeartbeat,
    NodeRegistration,
    NodeView,
    PairRequest,
    Registered,
    Ticket,
)
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.api.status import Readiness
from kvbridge.bootstrap.ends import PairReport
from kvbridge.core.errors import DeadlineError, NamespaceError, PeerError, ProtocolError, UnauthorizedError
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.features import agree
from kvbridge.http.problems import error_of
from kvbridge.telemetry.context import REQUEST_ID, REQUEST_ID_HEADER, TRACE, TRACEPARENT_HEADER

AnswerT = TypeVar("AnswerT")

CONNECTIONS = 1024
"""Calls under way at once, to all daemons together; one may wait there for as long as a request may."""

_LISTING = TypeAdapter(tuple[InstanceView, ...])
_url = lru_cache(4_096)(httpx.URL)
"""Most calls go to the same few, and httpx spends as long on reading a URL as on an answer."""


class _Options(TypedDict, total=False):
    """What a call may carry besides its body."""

    body: BaseModel
    params: dict[str, str | int | float | list[str]]
    timeout: httpx.Timeout


class _Caller:
    """One token, one limit for each call: what is sent, and what an answer means. How one waits is up to the classes below."""

    def __init__(self, *, token: str, timeout_s: float, timeout_key: str) -> None:
        self._timeout_s = timeout_s
        self._timeout_key = timeout_key
        self.use_token(token)

    def use_token(self, token: str) -> None:
        """Show another token from now on; empty: none."""
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @contextmanager
    def _failures_named(self, method: str, url: str) -> Iterator[None]:
        """Turn what httpx raises inside into what every call raises."""
        try:
            yield
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            ValueError,
        ) as error:  # the last two are of a URL that nobody can ask
            if is_timeout(error):
                key = f" ({self._timeout_key})" if self._timeout_key else ""
                raise DeadlineError(f"{method} {url} was not answered within {self._timeout_s:g} s{key}") from error
            raise PeerError(f"{method} {url} failed: {error or type(error).__name__}") from error

    def _arguments(self, options: _Options) -> dict[str, Any]:
        """Return a call's options as httpx takes them."""
        body = options.get("body")
        return {
            # Without what stays at its default: an older release refuses a field that it does not know only when it matters.
            "content": None if body is None else body.model_dump_json(exclude_defaults=True),
            "headers": self._headers | _on_behalf() | ({} if body is None else {"Content-Type": "application/json"}),
            "params": options.get("params"),
            "timeout": options.get("timeout", httpx.Timeout(self._timeout_s)),
        }


class _Client(_Caller):
    """One pool of connections for the calls of an event loop."""

    LIMIT = ""
    """What errors call the limit, where nobody says otherwise."""

    def __init__(
        self,
        *,
        timeout_s: float,
        token: str = "",
        timeout_key: str = "",
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(token=token, timeout_s=timeout_s, timeout_key=timeout_key or self.LIMIT)
        limits = httpx.Limits(max_connections=CONNECTIONS)
        self._transport = transport or AiohttpTransport(limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def _call(self, method: str, url: str, **options: Unpack[_Options]) -> httpx.Response:
        arguments = self._arguments(options)
        arguments["extensions"] = {"timeout": arguments.pop("timeout").as_dict()}
        with self._failures_named(method, url):
            request = httpx.Request(method, _url(url), **arguments)
            response = await self._transport.handle_async_request(request)
            try:
                await response.aread()
            finally:
                await response.aclose()
        return _accepted(response, url)

    async def _ask(
        self, kind: type[AnswerT] | TypeAdapter[AnswerT], method: str, url: str, **options: Unpack[_Options]
    ) -> AnswerT:
        return _parsed(kind, await self._call(method, url, **options), url)


class BlockingClient(_Caller):
    """Calls of any daemons or bootstraps from code without an event loop; several threads may share one.

    The documents that the endpoints take and give are those of `kvbridge.api`.
    """

    def __init__(self, *, timeout_s: float, timeout_key: str, token: str = "") -> None:
        """`timeout_key` is what errors call the limit."""
        super().__init__(token=token, timeout_s=timeout_s, timeout_key=timeout_key)
        # A connection for each call: whoever calls now and then has nothing to close in between.
        self._http = httpx.Client(trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    def ask(self, kind: type[AnswerT], method: str, url: str, **options: Unpack[_Options]) -> AnswerT:
        """Return an answer as a `kind`. Raises what every call does, ProtocolError when it is none."""
        with self._failures_named(method, url):
            response = self._http.request(method, url, **self._arguments(options))
        return _parsed(kind, _accepted(response, url), url)


def _on_behalf() -> dict[str, str]:
    """Calls that are made for a request carry its id and its trace, so that what all daemons say of it can be found."""
    request_id, trace = REQUEST_ID.get(), TRACE.get()
    headers = {REQUEST_ID_HEADER: request_id} if request_id else {}
    if trace is not None:
        headers[TRACEPARENT_HEADER] = trace.traceparent
    return headers


def _accepted(response: httpx.Response, url: str) -> httpx.Response:
    """Return an answer that is no problem, or raise the error that it describes."""
    if response.is_success or _is_readiness(response):
        return response
    raise error_of(response.status_code, response.content, source=url)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a type form
    return TypeAdapter(kind)


def _parsed(kind: type[AnswerT] | TypeAdapter[AnswerT], response: httpx.Response, url: str) -> AnswerT:
    adapter: TypeAdapter[AnswerT] = kind if isinstance(kind, TypeAdapter) else _adapter(kind)  # type: ignore[arg-type]  # types are hashable
    try:
        return adapter.validate_json(response.content, extra="ignore")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ProtocolError(f"{url} answered something that is no {kind}: {first['loc']}: {first['msg']}") from error


def is_timeout(error: Exception) -> bool:
    """Whether time ran out: that of aiohttp reports a connection that was closed in our face as a timeout, too."""
    causes = (TimeoutError, httpcore.TimeoutException, type(None))
    return isinstance(error, httpx.TimeoutException) and isinstance(error.__cause__, causes)


def is_refused_connection(error: BaseException) -> bool:
    """Whether nobody listened: what the operating system said is at the end of the causes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionRefusedError):
        cause = cause.__cause__
    return cause is not None


def _is_readiness(response: httpx.Response) -> bool:
    return response.status_code == 503 and response.headers.get("content-type", "") == "application/json"


class DirectoryClient(_Client):
    """One bootstrap's endpoint."""

    def __init__(self, base_url: str, **more: Any) -> None:  # noqa: ANN401 - as of any client
        super().__init__(**more)
        self.base_url = base_url.rstrip("/")

    def _node(self, instance: str, node: str) -> str:
        return f"{self.base_url}/v1/instances/{quote(instance, safe='')}/nodes/{quote(node, safe='')}"

    async def register(self, registration: NodeRegistration) -> Registered:
        """Announce this node; see Directory.register for what is refused."""
        url = self._node(registration.instance, registration.node)
        answer = await self._ask(Registered, "PUT", url, body=registration)
        agree(registration.features, answer.features, us="this node", them=f"bootstrap at {self.base_url}")
        return answer

    async def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        """Say that this node lives. NotFoundError: register again; StaleError: another process took our place."""
        return await self._ask(NodeView, "POST", f"{self._node(instance, node)}/heartbeat", body=heartbeat)

    async def deregister(self, instance: str, node: str, incarnation: str) -> None:
        """Leave the directory."""
        await self._call("DELETE", self._node(instance, node), params={"incarnation": incarnation})

    async def instances(self) -> tuple[InstanceView, ...]:
        """Return the listing."""
        return await self._ask(_LISTING, "GET", f"{self.base_url}/v1/instances")

    async def pair(self, request: PairRequest) -> Ticket:
        """Ask for a pair. The whole pairing has to end within `timeout_s`, and the request's `wait_s`."""
        limit = httpx.Timeout(self._timeout_s + request.wait_s)
        return await self._ask(Ticket, "POST", f"{self.base_url}/v1/requests", body=request, timeout=limit)

    async def report(self, room: int) -> PairReport:
        """Return a paired room's two ends."""
        return await self._ask(PairReport, "GET", f"{self.base_url}/v1/requests/{room}")

    async def cancel(self, room: int, reason: str) -> PairReport:
        """Abort a paired room on both ends."""
        return await self._ask(PairReport, "DELETE", f"{self.base_url}/v1/requests/{room}", params={"reason": reason})


class DaemonClient(_Client):
    """The endpoints of any number of daemons that share a token; it is the `ReservePort` of bootstrap."""

    LIMIT = "timeouts.reserve_s"

    async def _room(self, method: str, url: str, **options: Unpack[_Options]) -> RoomReport:
        try:
            return await self._ask(RoomReport, method, url, **options)
        except UnauthorizedError as error:
            # Passed on as it is, it would tell our own caller that its token is wrong.
            raise PeerError(f"{url} refuses our token: daemons.token_file must hold the daemons' http.token") from error
        except NamespaceError as error:
            raise PeerError(
                f"{url} does not let our token name the namespace of the request ({error}): its line in the daemons' "
                "http.token_file needs namespaces=*"
            ) from error

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        """Reserve one end of a room; it may take the request's `wait_s` longer than other calls."""
        limit = httpx.Timeout(self._timeout_s + request.wait_s)
        return await self._room("POST", f"{url.rstrip('/')}/v1/requests", body=request, timeout=limit)

    async def report(self, url: str, room: int) -> RoomReport:
        """Return a room's report at once."""
        return await self._room("GET", f"{url.rstrip('/')}/v1/requests/{room}")

    async def wait(
        self, url: str, room: int, *, wait_s: float, until: frozenset[RoomState] = frozenset()
    ) -> RoomReport:
        """Return the report when the room is in one of the states or final, or after `wait_s` seconds."""
        params: dict[str, str | int | float | list[str]] = {
            "wait": wait_s,
            "until": sorted(state.value for state in until),
        }
        limit = httpx.Timeout(self._timeout_s + wait_s)
        return await self._room("GET", f"{url.rstrip('/')}/v1/requests/{room}", params=params, timeout=limit)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int | None = None) -> RoomReport:
        """Abort a room, or only one generation of it."""
        params: dict[str, str | int | float | list[str]] = {"reason": reason}
        if generation is not None:
            params["generation"] = generation
        return await self._room("DELETE", f"{url.rstrip('/')}/v1/requests/{room}", params=params)

    async def incarnation(self, url: str) -> str:
        """Return the incarnation of the daemon that answers at a URL, empty when its host refuses the connection.

        Raises what every call does: all else leaves open whether it is there. One with too many callers hangs up, too.
        """
        try:
            return str((await self.status(url)).get("incarnation", ""))
        except PeerError as error:
            if is_refused_connection(error):
                return ""
            raise

    async def readiness(self, url: str) -> Readiness:
        """Return whether a daemon can admit rooms, and why not."""
        return await self._ask(Readiness, "GET", f"{url.rstrip('/')}/ready")

    async def status(self, url: str) -> dict[str, Any]:
        """Return a daemon's status page."""
        return await self._ask(dict[str, Any], "GET", f"{url.rstrip('/')}/status")
