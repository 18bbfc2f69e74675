"""How long a caller may take over its request, and how many callers there may be.

Owns: accepting connections, and the two limits on them that uvicorn does not have. Must not know: what is asked.

Both hold for whoever reaches the port, with or without a token: a connection that says nothing, or sends a byte now and
then, is closed, and beyond the limit new ones are closed at once, before TLS begins, so that no caller takes the descriptors
that the rest of the process needs. A connection counts from the moment that it is accepted to its end.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

ACCEPTS_PER_TURN = 128
"""After so many connections the rest of the loop gets its turn."""
ACCEPT_PAUSE_S = 1.0
"""A system that has nothing left for a new connection (descriptors, memory) is asked again after this."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The configuration keys `http.max_request_s` and `http.max_connections`."""

    request_s: float
    """From the connection, or the first byte after an answer, to the last byte of a request. A TLS handshake before that
    may take as long, and so may the end of TLS after it."""
    connections: int


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with the limits of its class; see `bounded`."""

    limits: ConnectionLimits
    _request_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self.ended = asyncio.Event()
        self._arm()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self.conn.their_state in {h11.IDLE, h11.SEND_BODY}:
            self._arm()
        else:
            self._disarm()  # the request is here; how long its answer takes is the application's business

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._disarm()
        super().connection_lost(exc)
        self.ended.set()

    def _arm(self) -> None:
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self.limits.request_s, self._too_slow)

    def _disarm(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _too_slow(self) -> None:
        self._request_timer = None
        log.debug("connection_closed", reason="no whole request in time", limit="http.max_request_s")
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return a protocol for uvicorn that keeps the limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})


class Acceptor:
    """Takes connections off a listening socket and serves them, each in a task of its own, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        build: Callable[[], BoundedProtocol],
        limits: ConnectionLimits,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Begin in the running loop. Owns the listener from then on; `build` makes the protocol of one connection."""
        self.listener = listener
        self._build = build
        self._limits = limits
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._refusals = Seldom()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept nothing more and cut connections whose handshake is not done; the others are left to uvicorn."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self.listener)
        self.listener.close()
        for task in self._connections:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _EXHAUSTED:
                    raise
                log.error("accept_failed", reason=str(error), open=len(self._connections), again_in_s=ACCEPT_PAUSE_S)
                self._loop.remove_reader(self.listener)
                self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)
                return
            self._admit(connection)

    def _resume(self) -> None:
        self._loop.add_reader(self.listener, self._accept)

    def _admit(self, connection: socket.socket) -> None:
        if len(self._connections) >= self._limits.connections:
            if self._refusals.admits("connection_refused"):
                log.warning("connection_refused", open=len(self._connections), limit="http.max_connections")
            connection.close()
            return
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        limit_s = self._limits.request_s if self._tls else None
        try:
            _, protocol = await self._loop.connect_accepted_socket(
                self._build, connection, ssl=self._tls, ssl_handshake_timeout=limit_s, ssl_shutdown_timeout=limit_s
            )
        except OSError as error:  # also a handshake that is wrong, or late
            log.debug("connection_closed", reason=f"no connection was made: {error}", limit="http.max_request_s")
            return
        await protocol.ended.wait()
