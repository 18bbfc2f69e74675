"""An application on a socket, inside a loop that somebody else runs."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog
import uvicorn
from starlette.types import ASGIApp

from kvbridge.core.errors import ConfigError, UnavailableError
from kvbridge.http.connections import Acceptor, BoundedProtocol, ConnectionLimits, bounded

log = structlog.get_logger(__name__)

BACKLOG = 2048

Application = ASGIApp
"""What `create_daemon_app` and `create_bootstrap_app` return, for those who only pass it on."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of an endpoint that speaks TLS."""

    certificate: Path
    key: Path

    def read(self) -> tuple[bytes, bytes]:
        """Return both files' content. Raises ConfigError when they cannot be used, alone or together."""
        try:
            self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            return self.certificate.read_bytes(), self.key.read_bytes()
        except OSError as error:  # ssl.SSLError is one
            raise UnavailableError(f"http.tls_certificate_file, http.tls_key_file: cannot be used: {error}") from error

    def load(self, context: ssl.SSLContext) -> None:
        """Have a context show this certificate. Raises OSError, and the context is then of no use any more."""
        context.load_cert_chain(self.certificate, self.key)


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals and accepting alone and says when it has started."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, limits: ConnectionLimits) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._listener = listener
        self._limits = limits
        self._acceptor: Acceptor | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._acceptor = Acceptor(self._listener, self._protocol, self._limits, self.config.ssl)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> BoundedProtocol:
        kind: type[BoundedProtocol] = self.config.http_protocol_class  # type: ignore[assignment]  # `bounded` made it
        return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class HttpServer:
    """A running server. Made by `start`; ends by `stop`, which may be called again."""

    def __init__(self, server: _Uvicorn, task: asyncio.Task[None], *, url: str, shutdown_s: float) -> None:
        self._server = server
        self._task = task
        self._shutdown_s = shutdown_s
        self.url = url
        """What was bound, with the real port: `http://127.0.0.1:40123`."""

    def __repr__(self) -> str:
        return f"HttpServer({self.url}, {'ended' if self._task.done() else 'serving'})"

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        shutdown_s: float,
        limits: ConnectionLimits,
        tls: TlsFiles | None = None,
    ) -> Self:
        """Listen and serve in a task of the running loop; port 0 takes a free one.

        `shutdown_s` bounds `stop`. Raises ConfigError when the address cannot be listened on or a TLS file is wrong.
        """
        config = _uvicorn_config(app, tls, shutdown_s, limits)
        listener = _listen(host, port)
        try:
            config.load()
        except OSError as error:  # ssl.SSLError is one
            listener.close()
            raise UnavailableError(f"http.tls_certificate_file, http.tls_key_file: cannot be used: {error}") from error
        server = _Uvicorn(config, listener, limits)
        task = asyncio.create_task(server.serve(sockets=[]), name="http-server")
        started = asyncio.create_task(server.listening.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if task.done():
            listener.close()
            await task
            raise ConfigError(f"the HTTP server on {host}:{port} ended before it had started")
        scheme = "https" if tls else "http"
        return cls(server, task, url=f"{scheme}://{_printed(listener)}", shutdown_s=shutdown_s)

    def use_certificate(self, tls: TlsFiles) -> None:
        """Show the certificate that is in the files now to whoever connects from now on."""
        context = self._server.config.ssl
        if context is not None:
            tls.load(context)

    async def wait_ended(self) -> None:
        """Return when the server has ended, by `stop` or by a failure, which is raised."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Accept nothing more, let requests in progress end, and cut them off after `shutdown_s` seconds."""
        self._server.should_exit = True
        done, _ = await asyncio.wait({self._task}, timeout=self._shutdown_s)
        if not done:
            log.warning("http_server_cut_off", url=self.url, limit_s=self._shutdown_s)
            self._server.force_exit = True
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=self._shutdown_s)
            await self._cut_off()
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _cut_off(self) -> None:
        """End what uvicorn has left: on a busy machine it had not come to cut requests off when it was told to end."""
        state = self._server.server_state
        if left := set(state.tasks):
            for task in left:
                task.cancel()
            await asyncio.wait(left, timeout=self._shutdown_s)
        for connection in list(state.connections):
            connection.transport.close()


def _uvicorn_config(app: ASGIApp, tls: TlsFiles | None, shutdown_s: float, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded(limits),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        ws="none",
        # uvicorn counts whole seconds and takes two ticks besides; `stop` holds the true limit.
        timeout_graceful_shutdown=max(0, math.ceil(shutdown_s) - 1),
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )


def _listen(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    # The protocol must be named: asyncio turns Nagle's algorithm off only for sockets that say that they are TCP, and
    # with it every answer on a kept connection waits 40 ms for a delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
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
            "choose another port (0 takes a free one) or end the process that has it"
        ) from error
    return listener


def _printed(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if listener.family is socket.AF_INET6 else f"{host}:{port}"
