"""An HTTP server inside a running loop: its socket, its TLS, its callers, its bounded end.

The server accepts connections itself. uvicorn would accept any number of them, and give a TLS handshake a minute: callers without a
token would then take descriptors that the rest of the process needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from kvbridge.config.endpoints import HttpConfig
from kvbridge.core.errors import ConfigError, UnavailableError
from kvbridge.http.connections import BoundedProtocol, Turns, refusal
from kvbridge.processes import affordable
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

BACKLOG = 2048
ACCEPTS_PER_TURN = 128
"""Connections accepted before the rest of the loop gets its turn."""
ACCEPT_PAUSE_S = 1.0
"""Pause after the system had no descriptor or no memory for a new connection."""
REQUEST_READ_BYTES = 65_536
"""Part of a refused caller's request that is read: closing with unread bytes would reset the connection."""
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

Application = ASGIApp
"""An application, for modules that only pass it on."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of an endpoint that speaks TLS."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """Return the content of both files. Raises UnavailableError when they are unusable, alone or together."""
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return self.certificate.read_bytes(), self.key.read_bytes()

    def load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        """Have a context show this certificate, and return it. Raises UnavailableError; the context is of no use then."""
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl.SSLError is one
            raise UnavailableError(f"http.tls_certificate_file, http.tls_key_file: cannot be used: {error}") from error
        return context


class HttpServer:
    """A server that listens and serves in a task of the running loop, until `stop`."""

    def __init__(self, app: ASGIApp, http: HttpConfig, seldom: Seldom, *, shutdown_s: float) -> None:
        """`shutdown_s` bounds `stop`; `seldom` limits log lines about callers. Raises ConfigError."""
        certificate, key = http.tls_certificate_file, http.tls_key_file
        self.tls = TlsFiles(certificate, key) if certificate is not None and key is not None else None
        self._context = self.tls.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) if self.tls else None
        self._config = uvicorn.Config(app, http="h11", log_config=None, access_log=False, lifespan="off", ws="none")
        self._config.load()
        self._listener = _listen(http.host, http.port)
        self._seldom, self._shutdown_s, self._request_s = seldom, shutdown_s, http.max_request_s
        self._most = affordable(http.max_connections, "http.max_connections")
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(self._loop.call_soon)
        self._refusal = refusal(
            f"{self._most} connections stand here, as many as may (http.max_connections); keep connections and use them "
            "again, or come back later"
        )
        self.state = ServerState()
        self._open = 0
        """Number of connections, with those in their TLS handshake."""
        self._handshakes: set[asyncio.Task[None]] = set()
        self._tell_date()
        self._accepting = self._loop.create_task(self._accept(), name="http-server")
        bound, real_port = self._listener.getsockname()[:2]
        shown = f"[{bound}]" if ":" in bound else bound
        self.url = f"{'https' if self.tls else 'http'}://{shown}:{real_port}"
        """The bound address, with the real port: `http://127.0.0.1:40123`."""

    def __repr__(self) -> str:
        return f"HttpServer({self.url}, {'ended' if self._accepting.done() else 'serving'})"

    def use_certificate(self) -> None:
        """Show the present certificate of the files to new connections."""
        if self.tls is not None and self._context is not None:
            self.tls.load(self._context)

    async def wait_ended(self) -> None:
        """Return after `stop`, or raise the failure that has ended the server."""
        await asyncio.wait({self._accepting})
        if not self._accepting.cancelled():
            self._accepting.result()

    async def stop(self) -> None:
        """Accept nothing more, let open requests end, and cut them off after `shutdown_s`. May be called again."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)
        self._date.cancel()
        self._listener.close()
        for connection in list(self.state.connections):
            connection.shutdown()
        if not await self._end_within(self._shutdown_s):
            log.warning("http_server_cut_off", url=self.url, limit_s=self._shutdown_s)
            for task in self.state.tasks:
                task.cancel()
            await self._end_within(self._shutdown_s)
            for connection in list(self.state.connections):
                connection.transport.close()

    async def _end_within(self, limit_s: float) -> bool:
        """Wait for the end of all requests and connections. Return whether they have ended in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self.state.tasks or self.state.connections:  # noqa: ASYNC110 - uvicorn's sets
                    await asyncio.sleep(0.01)
                return True
        return False

    def _tell_date(self) -> None:
        self.state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._date = self._loop.call_later(1.0, self._tell_date)

    # ------------------------------------------------------------------ accepting

    async def _accept(self) -> None:
        while True:
            for _ in range(ACCEPTS_PER_TURN):
                try:
                    connection, _ = await self._loop.sock_accept(self._listener)
                except ConnectionAbortedError:
                    continue
                except OSError as error:
                    if error.errno not in _EXHAUSTED:
                        raise
                    log.error("accept_failed", reason=str(error), open=self._open, again_in_s=ACCEPT_PAUSE_S)
                    await asyncio.sleep(ACCEPT_PAUSE_S)
                    continue
                if self._open < self._most:
                    self._open += 1
                    task = self._loop.create_task(self._connect(connection))
                    self._handshakes.add(task)
                    task.add_done_callback(self._handshakes.discard)
                else:
                    self._refuse(connection)
            await asyncio.sleep(0)

    def _refuse(self, connection: socket.socket) -> None:
        if self._seldom.admits("connection_refused"):
            log.warning("connection_refused", open=self._open, limit="http.max_connections")
        with connection, contextlib.suppress(OSError):  # the caller has left, or has not sent anything yet
            if self.tls is None:  # a handshake would cost more than the refused request
                connection.send(self._refusal)
                connection.recv(REQUEST_READ_BYTES)

    async def _connect(self, connection: socket.socket) -> None:
        limit_s = self._request_s if self.tls else None
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=limit_s,
                ssl_shutdown_timeout=limit_s,
            )
        except OSError as error:  # also a handshake that is wrong, or late
            self._count_end()
            log.debug("connection_closed", reason=f"no connection was made: {error}", limit="http.max_request_s")

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(
            self._config, self.state, self._turns, self._count_end, request_s=self._request_s, seldom=self._seldom
        )

    def _count_end(self) -> None:
        self._open -= 1


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's algorithm off only for sockets that say that they are TCP, and
    # with it every answer on a kept connection waits 40 ms for a delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((bare, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        kind = ConfigError if isinstance(error, PermissionError) else UnavailableError
        raise kind(
            f"http.host {host}, http.port {port}: cannot listen there: {error.strerror or error}; "
            + (
                "no interface of this host has that address: ip -br addr shows those that it has"
                if error.errno == errno.EADDRNOTAVAIL
                else "choose another port (0 takes a free one) or end the process that has it"
            )
        ) from error
    return listener
