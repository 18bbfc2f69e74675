"""The router: servers, their health and the requests to them behind one HTTP API."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import structlog

from kvbridge import __version__
from kvbridge.api.client import DirectoryClient
from kvbridge.api.status import Readiness, RouterStatus, ServerStatus
from kvbridge.config.loading import read_token
from kvbridge.config.router import RouterConfig
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, NotReadyError
from kvbridge.core.ids import Role
from kvbridge.daemon.front import open_http
from kvbridge.daemon.lifecycle import ToldReadiness, first_ended
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.http.router_app import create_router_app
from kvbridge.http.server import HttpServer
from kvbridge.router.bodies import Asked
from kvbridge.router.exchange import Answer, Exchanges, FailedAttemptError
from kvbridge.router.health import DirectoryWatch, HealthWatch
from kvbridge.router.places import Place, Places
from kvbridge.router.servers import Servers
from kvbridge.router.upstream import OpenAiServers
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import BUILD, READY
from kvbridge.telemetry.registry import Metrics, library_versions
from kvbridge.telemetry.service_metrics import (
    ATTEMPTS_FAILED,
    FIRST_BYTE,
    ROUTED,
    ROUTER_SERVERS,
)

log = structlog.get_logger(__name__)

LOOK_S = 0.25
"""How often it is looked whether the router is ready."""


class RouterDaemon:
    """One router. Drive it with `lifecycle.run_daemon`."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.servers = Servers()
        self.metrics = Metrics(role="router")
        self.metrics.assign(BUILD, 1, __version__, "router", "router", "", "", *library_versions())
        self.ending = asyncio.Event()
        self.idle_s = config.timeouts.idle_s
        self._draining = False
        self._last_ended = asyncio.Event()
        """Set when the router is ending and the last answer has ended."""
        self._places = Places(config.limit, config.limit_bytes)
        self._started_s = time.monotonic()
        self._secrets = SecretFiles()
        self._upstream = OpenAiServers(config.timeouts)
        self._exchanges = Exchanges(
            self.servers, self._upstream.post, config.order, config.timeouts, self._attempt_failed
        )
        self._health = HealthWatch(self.servers, self._upstream.health, config.timeouts)
        self._replicas = self._open_directory()
        self._directory = DirectoryWatch(self.servers, [one.instances for one in self._replicas], self._health)
        self._told = ToldReadiness()
        self._seldom = Seldom(self.metrics.line_left_out)
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def _open_directory(self) -> list[DirectoryClient]:
        link, key = self.config.bootstrap, "bootstrap.token_file"
        token = self._secrets.add(key, (link.token_file,), lambda: read_token(link, key=key))
        urls = [url for url in (link.url, *link.other_urls) if url]
        limit_s = self.config.timeouts.health_s
        clients = [
            DirectoryClient(url, token=token.current, timeout_s=limit_s, timeout_key="timeouts.health_s")
            for url in urls
        ]

        def change(fresh: str) -> None:
            for client in clients:
                client.use_token(fresh)

        token.on_change = change
        return clients

    @property
    def url(self) -> str:
        """The bound address; empty before `start`."""
        return self._http.url if self._http else ""

    # ------------------------------------------------------------------ its life

    async def start(self) -> None:
        """Open the endpoint. Servers that are away do not keep it shut: `/ready` gives the reason."""
        if self._replicas:
            await self._directory.look()
        else:
            for role, urls in {Role.PREFILL: self.config.prefill, Role.DECODE: self.config.decode}.items():
                self.servers.use(role, urls)
            self._health.follow()
        self._http = await open_http(
            self.config.http,
            lambda settings: create_router_app(service=self, status=self, settings=settings),
            self._secrets,
            self._seldom,
            shutdown_s=self.config.timeouts.shutdown_s / 5,
        )
        works = [self._secrets.run(), self._look()]
        if self._replicas:
            works.append(self._directory.run(self.config.timeouts.health_interval_s))
        self._tasks = [asyncio.create_task(work) for work in works]
        log.info("daemon_listens", http=self._http.url, order=self.config.order.value)

    async def failed(self) -> None:
        """Raise what ended the endpoint, or what looks after servers."""
        if self._http is not None:
            await first_ended(self._http.wait_ended(), self._tasks)

    async def drain(self) -> None:
        """Take no request more, and let answers end; those that do not in time are told why they end here."""
        self._draining = True
        limit_s = self.config.timeouts.shutdown_s * 0.7
        try:
            async with asyncio.timeout(limit_s):
                if self._places.taken:
                    await self._last_ended.wait()
        except TimeoutError:
            log.warning("answers_cut_off", answers=self._places.taken, limit_s=limit_s)

    async def close(self) -> None:
        """Cut off what is left, and close the endpoint, then what is behind it."""
        self._draining = True
        self.ending.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._health.close()
        if self._http is not None:
            await self._http.stop()
        await self._upstream.close()
        for replica in self._replicas:
            await replica.close()
        self._seldom.tell(everything=True)

    async def _look(self) -> None:
        while True:
            self._told.look(self.readiness())
            self._seldom.tell()
            await asyncio.sleep(LOOK_S)

    # ------------------------------------------------------------------ requests

    @contextmanager
    def place(self) -> Iterator[Place]:
        """See `RouterPort`."""
        if self._draining:
            raise NotReadyError("the router is ending: ask another one, or again when it is back")
        try:
            with self._places.take() as place:
                yield place
        except CapacityError:
            self.metrics.count(ROUTED, "none", "over_limit")
            raise
        finally:
            if self._draining and not self._places.taken:
                self._last_ended.set()

    @asynccontextmanager
    async def answer(self, asked: Asked) -> AsyncIterator[Answer]:
        """See `RouterPort`."""
        begun_s, order, outcome = time.monotonic(), "none", "client_left"
        try:
            async with self._exchanges.answer(asked) as found:
                order = found.order
                self.metrics.observe(FIRST_BYTE, time.monotonic() - begun_s, order)
                yield found
                outcome = "answered" if found.status < 400 else "refused"
        except BridgeError as error:
            outcome = "failed" if order == "none" else "broken"
            if self._seldom.admits("request_failed"):
                log.warning("request_failed", path=asked.path, outcome=outcome, code=error.code, reason=str(error))
            raise
        finally:
            self.metrics.count(ROUTED, order, outcome)

    def _attempt_failed(self, failure: FailedAttemptError) -> None:
        server = failure.server
        self.metrics.count(ATTEMPTS_FAILED, server.role.value, failure.reason)
        if self._seldom.admits("attempt_failed"):
            log.warning("attempt_failed", peer_role=server.role.value, url=server.url, reason=str(failure))

    async def models(self, headers: dict[str, str]) -> tuple[int, bytes]:
        """See `RouterPort`."""
        _, server = self.servers.choose_pair(alone=True)
        url, limit_s = f"{server.url}/v1/models", self.config.timeouts.health_s
        with self.place():
            try:
                async with asyncio.timeout(limit_s), self._upstream.get(url, headers, read_s=limit_s) as found:
                    return found.status, await found.read()
            except TimeoutError:
                raise DeadlineError(
                    f"{server} did not say all of its models within {limit_s:g} s (timeouts.health_s)"
                ) from None

    # ------------------------------------------------------------------ operators

    def readiness(self) -> Readiness:
        """Return ready while there is a server of each role that is well."""
        reasons = ("the router is ending",) if self._draining else self.servers.obstacles()
        if reasons and self._replicas and self._directory.problem:
            reasons = (*reasons, f"the directory cannot be asked: {self._directory.problem}")
        return Readiness(ready=not reasons, reasons=reasons)

    def status(self) -> RouterStatus:
        """Everything an operator wants to see."""
        return RouterStatus(
            version=__version__,
            uptime_s=round(time.monotonic() - self._started_s, 1),
            ready=self.readiness(),
            order=self.config.order.value,
            outstanding=self._places.taken,
            limit=self.config.limit,
            directory_problem=self._directory.problem if self._replicas else "",
            servers=tuple(
                ServerStatus(
                    role=role,
                    url=one.url,
                    problem=one.problem,
                    outstanding=one.outstanding,
                    load_tokens=one.load,
                    paired=one.pairs and one.addresses is not None,
                )
                for role in Role
                for one in self.servers.of(role)
            ),
        )

    def render_metrics(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Set what is only known now, and return the metrics page in pieces, in an accepted form, and its content type."""
        servers = [one for role in Role for one in self.servers.of(role)]
        states = Counter((one.role.value, "out" if one.problem else "well") for one in servers)
        self.metrics.replace(ROUTER_SERVERS, states)
        self.metrics.assign(READY, self.readiness().ready)
        return self.metrics.render(accept)
