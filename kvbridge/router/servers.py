"""The prefill and decode servers: calls of them, their health, and the choice of the next one.

Load is the estimated number of prompt tokens of requests under way: one long prompt keeps a prefill server busier than many short
ones, and takes as much of a decode server's cache.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import aiohttp
import httpx
import structlog
from httpx_aiohttp import AiohttpTransport

from kvbridge.api.client import is_refused_connection, is_timeout
from kvbridge.api.directory import InstanceView
from kvbridge.config.schema import RouterTimeouts
from kvbridge.core.errors import BridgeError, NotReadyError, PeerError, UnauthorizedError
from kvbridge.core.ids import Role
from kvbridge.router.bodies import SGLANG_INFO, Asked, Body, Directory, sglang_directory
from kvbridge.telemetry.recent import Problems

log = structlog.get_logger(__name__)

LOST_AFTER = 3
"""Failed health checks in a row after which requests that wait for a server's first byte are tried elsewhere. One failed check only
keeps new requests away, because a server may be busy for a while."""
RETRY_AFTER_S = 2.0
SHOWN = 8
"""Servers that one error names."""
CONNECT_S = 3.0
"""Longest wait for a server to accept a connection."""
KEPT_S = 2.0
"""Time that an idle connection is kept. Servers keep theirs longer, so none is used at the moment at which its server closes it."""
PIECE_BYTES = 256 << 10
NOT_PASSED_BACK = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"})
"""Headers of one connection, and those that our own server sets."""


@dataclass(eq=False)
class Server:
    """One server of one role."""

    role: Role
    url: str
    addresses: Any = None
    """Addresses of a prefill server's node for decode, from an answer of the server; None: no answer has named them yet."""
    pairs: bool = True
    """Whether it accepts the room that a request names, as far as is known."""
    directory: Directory | None = None
    """Directory of a server of SGLang's pairs. None: its engine is another one."""
    is_known: bool = False
    """Whether its engine has been asked for since it began to listen."""
    outstanding: int = 0
    """Requests under way."""
    load: int = 0
    """Estimated prompt tokens of these requests."""
    turn: int = 0
    """Number of the choice that chose it last. The one of equal servers that has waited longest is next."""
    problem: str = "its health is not known yet"
    """Reason why it gets no request; empty: it is well."""
    failures: int = 0
    """Failed health checks since the last good one."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when callers that wait for a first byte should ask another server. The next good check makes a new event."""

    def __str__(self) -> str:
        return f"{self.role} server {self.url}"

    @contextmanager
    def serving(self, size: int) -> Iterator[None]:
        """Count a request of `size` prompt tokens as under way inside the block."""
        self.outstanding += 1
        self.load += size
        try:
            yield
        finally:
            self.outstanding -= 1
            self.load -= size

    def is_well(self) -> bool:
        """Note a good health check. Return whether the server was not well before."""
        news, self.problem, self.failures = bool(self.problem), "", 0
        if self.lost.is_set():
            self.lost = asyncio.Event()
        return news

    def is_ill(self, problem: str) -> bool:
        """Note a failed health check. Return whether the server was well before."""
        self.failures += 1
        if self.failures >= LOST_AFTER:
            self.lost.set()
        return self.is_gone(problem)

    def is_gone(self, problem: str) -> bool:
        """Send no request there before the next good check. Return whether the server was well before."""
        # The next server that starts at this URL has other addresses, and may be another release.
        news, self.problem, self.addresses, self.pairs, self.is_known = not self.problem, problem, None, True, False
        return news


class UpstreamError(PeerError):
    """A server could not be reached, or its answer broke off."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused`: no connection was made, so nothing was sent."""
        super().__init__(message)
        self.refused = refused


class UpstreamAnswer:
    """An answer whose status and headers have come."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        raw = [(name.lower(), value) for name, value in response.headers.raw]
        self.headers = [(name, value) for name, value in raw if name not in NOT_PASSED_BACK]

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in pieces as they come. Raises UpstreamError."""
        request = self._response.request
        with _failures_named(request.method, str(request.url)):
            async for chunk in self._response.aiter_raw():
                yield chunk

    async def read(self) -> bytes:
        """Return the body. Raises UpstreamError."""
        return b"".join([chunk async for chunk in self.chunks()])


class OpenAiServers:
    """The connections to all servers.

    A connection is closed unless its answer was read to the end: an engine takes that as a sign that nobody wants the rest.
    """

    def __init__(self, timeouts: RouterTimeouts) -> None:
        self._timeouts = timeouts
        # Without a limit: the router's own limit bounds the requests.
        limits = httpx.Limits(max_connections=0, keepalive_expiry=KEPT_S)
        self._transport = AiohttpTransport(verify=ssl.create_default_context(), limits=limits, trust_env=False)

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    @asynccontextmanager
    async def post(self, url: str, body: Body, asked: Asked) -> AsyncIterator[UpstreamAnswer]:
        """Send a request; the caller limits the time of its answer. Raises UpstreamError."""
        headers = {**asked.headers, "content-type": "application/json", "content-length": str(sum(map(len, body)))}
        async with self._open("POST", f"{url}{asked.path}", headers, content=_pieces(body)) as answer:
            yield answer

    @asynccontextmanager
    async def get(self, url: str, headers: dict[str, str]) -> AsyncIterator[UpstreamAnswer]:
        """Get a page; each part of it has to come within `timeouts.health_s`. Raises UpstreamError."""
        async with self._open("GET", url, headers, read_s=self._timeouts.health_s) as answer:
            yield answer

    @asynccontextmanager
    async def _open(
        self,
        method: str,
        url: str,
        headers: dict[str, str],
        *,
        content: AsyncIterator[bytes] | None = None,
        read_s: float | None = None,
    ) -> AsyncIterator[UpstreamAnswer]:
        times = httpx.Timeout(read_s, connect=min(CONNECT_S, read_s or CONNECT_S)).as_dict()
        headers = {**headers, "accept-encoding": "identity"}  # the client may be unable to read another encoding
        with _failures_named(method, url):
            request = httpx.Request(method, url, content=content, headers=headers, extensions={"timeout": times})
            response = await self._transport.handle_async_request(request)
        response.request = request
        try:
            yield UpstreamAnswer(response)
        finally:
            await response.aclose()


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    """Yield a body in pieces, because a connection buffers each piece whole."""
    for part in body:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


@contextmanager
def _failures_named(method: str, url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, aiohttp.ClientError, OSError, httpx.InvalidURL, ValueError) as error:
        refused = True
        if isinstance(error, httpx.InvalidURL | ValueError):  # httpx, aiohttp and the look-up of names refuse the URL
            why = f": it cannot be sent there: {type(error).__name__}: {error}"
        elif is_refused_connection(error):
            why = ": nobody listens there"
        elif isinstance(error.__cause__, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            why = f": no connection was made: {error.__cause__}"
        else:
            refused = False
            if isinstance(error, httpx.HTTPError) and is_timeout(error):
                why = " was not answered in time"
            else:
                why = f" was not answered to the end: {str(error) or type(error.__cause__ or error).__name__}"
        path = url.partition("://")[2].partition("/")[2]
        raise UpstreamError(f"{method} /{path}{why}", refused=refused) from error


class Servers:
    """All servers, by role: the choice of the next one, their health, and the directory that names them, if there is one.

    Each server's health is checked by a task of its own, so a server that hangs delays no other check. While the directory does not
    answer, the servers that it named last stay in use.
    """

    def __init__(
        self,
        upstream: OpenAiServers,
        timeouts: RouterTimeouts,
        listings: Iterable[Callable[[], Awaitable[tuple[InstanceView, ...]]]] = (),
        token: Callable[[], str] = str,
    ) -> None:
        """`listings`: one function for each replica of the directory, which asks the replica for its instances.

        `token`: the bearer token for servers that answer nobody else.
        """
        self.upstream = upstream
        self._timeouts, self._listings, self._token = timeouts, tuple(listings), token
        self._by_role: dict[Role, dict[str, Server]] = {role: {} for role in Role}
        self._turns = 0
        self._watched: dict[Server, asyncio.Task[None]] = {}
        self.problems = Problems()
        """Failed requests, attempts and health checks."""
        self.directory_problem = "the directory has not been read yet" if self._listings else ""
        """Reason why the directory's last answer may be out of date; empty when it is not."""

    def use(self, role: Role, urls: Iterable[str]) -> None:
        """Use these servers and no others. Requests under way at a server that is left out go on."""
        known = self._by_role[role]
        self._by_role[role] = {url: known.get(url) or Server(role, url) for url in urls}

    def of(self, role: Role) -> tuple[Server, ...]:
        """Return all servers of a role."""
        return tuple(self._by_role[role].values())

    def all(self) -> list[Server]:
        """Return the servers of both roles."""
        return [server for role in Role for server in self.of(role)]

    def choose_pair(self, avoid: Collection[Server] = (), *, alone: bool = False) -> tuple[Server | None, Server]:
        """Return a prefill server, or None with `alone`, and a decode server. Those in `avoid` have failed this request already.

        A process of both roles is no pair with itself: it decodes alone when there is no other. Raises NotReadyError.
        """
        prefill = None if alone else self._choose(Role.PREFILL, avoid)
        others = [one for one in self.of(Role.DECODE) if prefill is not None and one.url == prefill.url]
        try:
            return prefill, self._choose(Role.DECODE, [*avoid, *others])
        except NotReadyError:
            return None, self._choose(Role.DECODE, avoid)

    def _choose(self, role: Role, avoid: Collection[Server]) -> Server:
        candidates = [one for one in self.of(role) if not one.problem and one not in avoid]
        if not candidates:
            raise NotReadyError(self._obstacle(role), retry_after_s=RETRY_AFTER_S)
        chosen = min(candidates, key=lambda one: (one.load, one.outstanding, one.turn))
        self._turns += 1
        chosen.turn = self._turns
        return chosen

    def obstacles(self) -> tuple[str, ...]:
        """Return why requests cannot be served now; empty when a server of each role is well."""
        return tuple(self._obstacle(role) for role in Role if all(one.problem for one in self.of(role)))

    def _obstacle(self, role: Role) -> str:
        servers = self.of(role)
        if not servers:
            return f"the directory has no {role} instance that is ready and tells its engine_url"
        return f"no {role} server is well: " + "; ".join(f"{one.url}: {one.problem}" for one in servers[:SHOWN])

    def follow(self) -> None:
        """Start to check new servers, and stop checking servers that have been left out."""
        present = set(self.all())
        for server in self._watched.keys() - present:
            self._watched.pop(server).cancel()
        for server in present - self._watched.keys():
            self._watched[server] = asyncio.create_task(self._watch(server), name=f"health of {server}")

    async def close(self) -> None:
        """Stop all checks."""
        tasks = list(self._watched.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        while True:
            await self.look(server)
            await asyncio.sleep(self._timeouts.health_interval_s)

    async def look(self, server: Server) -> None:
        """Check a server's health once."""
        try:
            limit = asyncio.timeout(self._timeouts.health_s)
            async with limit, self.upstream.get(f"{server.url}/health", {}) as answer:
                await answer.read()
                problem = "" if answer.status == HTTPStatus.OK else f"/health answered {answer.status}"
                if not problem and not server.is_known:
                    await self._know(server)
        except BridgeError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"its health was not told within {self._timeouts.health_s:g} s (timeouts.health_s)"
        except Exception as error:  # noqa: BLE001 - a node names the URL: no URL may end the checks
            problem = f"it cannot be asked: {type(error).__name__}: {error}"
        if not problem and server.is_well():
            log.info("server_is_well", peer_role=server.role.value, url=server.url)
        elif problem and server.is_ill(problem):
            self.problems.add(f"{server.role} server out", server.url, problem)
            log.warning("server_is_out", peer_role=server.role.value, url=server.url, reason=problem)

    async def _know(self, server: Server) -> None:
        """Ask a server whether it is one of SGLang's pairs. Raises a BridgeError that says why that is not known."""
        token = self._token()
        shown = {"authorization": f"Bearer {token}"} if token else {}
        async with self.upstream.get(f"{server.url}{SGLANG_INFO}", shown) as answer:
            info = await answer.read()
        if answer.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
            raise UnauthorizedError(
                f"{SGLANG_INFO} answered {answer.status}: put the server's --api-key first into the router's --token-file"
            )
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UpstreamError(f"{SGLANG_INFO} answered {answer.status}")
        is_there = answer.status == HTTPStatus.OK
        server.directory = sglang_directory(server.role, server.url, info) if is_there else None
        server.is_known = True

    async def run(self) -> None:
        """Ask the directory for ever."""
        while True:
            await asyncio.sleep(self._timeouts.health_interval_s)
            await self.read_directory()

    async def read_directory(self) -> None:
        """Take the servers from the first replica that answers."""
        problems = []
        for listing in self._listings:
            try:
                instances = await listing()
            except Exception as error:  # noqa: BLE001 - no answer ends the router
                problems.append(str(error) if isinstance(error, BridgeError) else f"{type(error).__name__}: {error}")
                continue
            for role in Role:
                ready = [node for one in instances if one.role is role and one.ready for node in one.nodes]
                self.use(role, [node.engine_url.rstrip("/") for node in ready if node.engine_url])
            self.follow()
            self.directory_problem = ""
            return
        problem = "; ".join(problems)
        if problem != self.directory_problem:
            log.warning("directory_away", effect="the servers that it named last stay in use", reason=problem)
        self.directory_problem = problem
