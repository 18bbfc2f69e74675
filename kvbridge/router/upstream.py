"""Calls of OpenAI servers by the router.

A connection whose answer was not read to its end is closed, by which an engine knows that nobody wants the rest. A connection whose
answer was read is kept for less time than servers keep theirs, so that none is used in the moment in which its server closes it.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from kvbridge.api.client import is_refused_connection, is_timeout
from kvbridge.config.schema import RouterTimeouts
from kvbridge.core.errors import PeerError
from kvbridge.router.bodies import Asked, Body

CONNECT_S = 3.0
"""A server accepts a connection within this."""
KEPT_S = 2.0
PIECE_BYTES = 256 << 10
NOT_PASSED_BACK = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"date", b"server", b"x-request-id"})
"""Headers of one connection, and those that our own server says."""


class UpstreamError(PeerError):
    """A server could not be reached, or its answer broke off."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        """`refused`: no connection was made, so nothing was sent."""
        super().__init__(message)
        self.refused = refused


class UpstreamAnswer:
    """An answer whose status and headers are there."""

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
    """The connections to any number of servers."""

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
        """Send a request; the caller limits the time of its answer.

        The connection is closed with the context unless all of the answer was read. Raises UpstreamError.
        """
        headers = {**asked.headers, "content-type": "application/json", "content-length": str(sum(map(len, body)))}
        async with self._open("POST", f"{url}{asked.path}", headers, content=_pieces(body)) as answer:
            yield answer

    @asynccontextmanager
    async def get(self, url: str, headers: dict[str, str]) -> AsyncIterator[UpstreamAnswer]:
        """Get a page, each part of which has to come within `timeouts.health_s`. Raises UpstreamError."""
        async with self._open("GET", url, headers, read_s=self._timeouts.health_s) as answer:
            yield answer

    async def health(self, url: str) -> str:
        """Return why a server is not well; empty when it is."""
        try:
            async with self.get(f"{url}/health", {}) as answer:
                await answer.read()
                return "" if answer.status == HTTPStatus.OK else f"/health answered {answer.status}"
        except UpstreamError as error:
            return str(error)

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
        times = httpx.Timeout(read_s, connect=min(CONNECT_S, read_s or CONNECT_S))
        headers = {**headers, "accept-encoding": "identity"}  # nobody has asked the client what it can read
        with _failures_named(method, url):
            request = httpx.Request(
                method, url, content=content, headers=headers, extensions={"timeout": times.as_dict()}
            )
            response = await self._transport.handle_async_request(request)
        response.request = request
        try:
            yield UpstreamAnswer(response)
        finally:
            await response.aclose()


async def _pieces(body: Body) -> AsyncIterator[bytes]:
    """Yield a body in pieces: a connection is given no more than it takes."""
    for part in body:
        for start in range(0, len(part), PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]


@contextmanager
def _failures_named(method: str, url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, aiohttp.ClientError, OSError, httpx.InvalidURL, ValueError) as error:
        asked = f"{method} /{url.partition('://')[2].partition('/')[2]}"
        if isinstance(
            error, (httpx.InvalidURL, ValueError)
        ):  # errors of httpx, aiohttp and the lookup of names about a URL
            why, refused = f": nobody can ask there: {type(error).__name__}: {error}", True
        elif is_refused_connection(error):
            why, refused = ": nobody listens there", True
        elif isinstance(error.__cause__, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
            why, refused = f": no connection was made: {error.__cause__}", True
        elif isinstance(error, httpx.HTTPError) and is_timeout(error):
            why, refused = " was not answered in time", False
        else:
            reason = str(error) or type(error.__cause__ or error).__name__
            why, refused = f" was not answered to the end: {reason}", False
        raise UpstreamError(f"{asked}{why}", refused=refused) from error
