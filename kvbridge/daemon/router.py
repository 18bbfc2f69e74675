"""The router daemon: servers, their health and the requests to them, behind one HTTP API."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from functools import partial

import structlog

from kvbridge import __version__
from kvbridge.api.status import Readiness, RouterStatus, ServerStatus
from kvbridge.config.loading import read_token
from kvbridge.config.schema import RouterConfig
from kvbridge.core.ids import Role
from kvbridge.core.process import moment
from kvbridge.daemon.lifecycle import Daemon
from kvbridge.http.app import Document
from kvbridge.http.router_app import create_router_app
from kvbridge.router.exchange import Router
from kvbridge.router.servers import OpenAiServers, Servers
from kvbridge.telemetry.metrics import READY, ROUTER_SERVERS
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

LOOK_S = 0.25
"""Time between two checks of readiness for the log."""


class RouterDaemon(Daemon):
    """One router."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(Metrics(role="router"), spans_s=0.0)
        self.metrics.built("router", "router")
        self.config = config
        limit_s = config.timeouts.health_s
        self._replicas = self.open_directory(config.bootstrap, timeout_s=limit_s, key="timeouts.health_s")
        listings = [replica.instances for replica in self._replicas]
        token = partial(read_token, config.http, key="http.token_file")
        self.servers = Servers(OpenAiServers(config.timeouts), config.timeouts, listings, token)
        self.router = Router(config, self.servers, self.metrics, self.seldom)

    async def start(self) -> None:
        """Open the endpoint, also while servers do not answer: `/ready` gives the reason."""
        if self._replicas:
            await self.servers.read_directory()
        else:
            self.servers.use(Role.PREFILL, self.config.prefill)
            self.servers.use(Role.DECODE, self.config.decode)
            self.servers.follow()
        build = partial(create_router_app, self.router, self)
        self.open(self.config.http, build, shutdown_s=self.config.timeouts.shutdown_s / 5)
        self.background(self._look(), "look")
        if self._replicas:
            self.background(self.servers.run(), "directory")
        log.info("daemon_listens", http=self.url, order=self.config.order.value)

    async def drain(self) -> None:
        """Refuse new requests, and let answers end."""
        await self.router.drain(self.config.timeouts.shutdown_s * 0.7)

    async def close(self) -> None:
        """Cut off the requests that are left, then close as every daemon does."""
        self.router.end()
        await self.servers.close()
        await super().close()

    def close_parts(self, last_first: AsyncExitStack) -> None:
        for replica in self._replicas:
            last_first.push_async_callback(replica.close)
        last_first.push_async_callback(self.servers.upstream.close)

    async def _look(self) -> None:
        while True:
            self.tell(self.readiness())
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------------ operators

    def readiness(self) -> Readiness:
        """Return ready while a server of each role is healthy."""
        reasons = self.router.obstacles()
        if reasons and self.servers.directory_problem:
            reasons = (*reasons, f"the directory cannot be asked: {self.servers.directory_problem}")
        return Readiness(ready=not reasons, reasons=reasons)

    def status(self) -> RouterStatus:
        """Return the status page's document."""
        return RouterStatus(
            version=__version__,
            at=moment(),
            started_at=self.started_at,
            ready=self.readiness(),
            order=self.config.order.value,
            outstanding=self.router.under_way,
            limit=self.config.limit,
            directory_problem=self.servers.directory_problem,
            servers=tuple(
                ServerStatus(
                    role=one.role,
                    url=one.url,
                    problem=one.problem,
                    outstanding=one.outstanding,
                    load_tokens=one.load,
                    paired=one.directory is not None or (one.pairs and one.addresses is not None),
                )
                for one in self.servers.all()
            ),
            requests=self.router.requests.lately(),
            problems=self.servers.problems.lately(),
        )

    def page(self) -> Document:
        """Return the document of the status page."""
        return {"status": self.status()}

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Set the gauges. Return the metrics page in pieces, in an accepted form, and its content type."""
        states = Counter((one.role.value, "out" if one.problem else "well") for one in self.servers.all())
        self.metrics.replace(ROUTER_SERVERS, states)
        self.metrics.assign(READY, self.readiness().ready)
        return self.metrics.render(accept)
