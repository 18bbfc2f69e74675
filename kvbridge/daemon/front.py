"""The HTTP API of any daemon, and the life of a daemon that is an HTTP API and little else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from kvbridge.api.status import Readiness
from kvbridge.config.endpoints import HttpConfig
from kvbridge.config.loading import read_grants
from kvbridge.core.process import moment
from kvbridge.daemon.lifecycle import ToldReadiness, first_ended
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.http.app import AppSettings
from kvbridge.http.connections import ConnectionLimits
from kvbridge.http.server import Application, HttpServer, TlsFiles
from kvbridge.processes import affordable
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.registry import Metrics


def open_http(
    http: HttpConfig,
    build: Callable[[AppSettings], Application],
    secrets: SecretFiles,
    seldom: Seldom,
    *,
    shutdown_s: float,
) -> HttpServer:
    """Build the application and serve it. Raises UnavailableError for a taken address or an unreadable secret."""
    tokens = secrets.add("http.token_file", (http.token_file,), lambda: read_grants(http, key="http.token_file"))
    settings = AppSettings(
        grants=lambda: tokens.current,
        open_metrics=http.open_metrics,
        max_body_bytes=http.max_body_bytes,
        max_wait_s=http.max_wait_s,
    )
    certificate, key = http.tls_certificate_file, http.tls_key_file
    tls = TlsFiles(certificate, key) if certificate is not None and key is not None else None
    connections = affordable(http.max_connections, "http.max_connections")
    limits = ConnectionLimits(request_s=http.max_request_s, connections=connections, seldom=seldom)
    server = HttpServer(build(settings), host=http.host, port=http.port, shutdown_s=shutdown_s, limits=limits, tls=tls)
    if tls is not None:
        pair = secrets.add("http.tls_certificate_file", (tls.certificate, tls.key), tls.read)
        pair.on_change = lambda _: server.use_certificate(tls)
    return server


class Service:
    """Bootstrap or a router: an HTTP API and some tasks. Drive it with `lifecycle.run_daemon`."""

    def __init__(self, role: str) -> None:
        self.metrics = Metrics(role=role)
        self.metrics.built(role, role)
        self.secrets = SecretFiles()
        self.seldom = Seldom(self.metrics.line_left_out)
        self._told = ToldReadiness()
        self.started_at = moment()
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """The bound address; empty before `start`."""
        return self._http.url if self._http else ""

    async def open(
        self,
        http: HttpConfig,
        build: Callable[[AppSettings], Application],
        *works: Callable[[], Coroutine[Any, Any, None]],
        shutdown_s: float,
    ) -> None:
        """Open the endpoint, and begin the daemon's works. Raises as `open_http` does."""
        self._http = open_http(http, build, self.secrets, self.seldom, shutdown_s=shutdown_s)
        self._tasks = [asyncio.create_task(work(), name=work.__qualname__) for work in (self.secrets.run, *works)]

    async def failed(self) -> None:
        """Raise what ended the endpoint or one of the tasks."""
        if self._http is not None:
            await first_ended(self._http.wait_ended(), self._tasks)

    async def end(self) -> None:
        """End the tasks and the endpoint."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        self.seldom.tell(everything=True)

    def tell(self, readiness: Readiness) -> None:
        """Log what is news: whether the daemon is ready, and how many lines were left out."""
        self._told.look(readiness)
        self.seldom.tell()
