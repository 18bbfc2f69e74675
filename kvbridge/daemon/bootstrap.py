"""The bootstrap daemon: the directory and the pairing behind one HTTP door.

Owns: how they are put together, and the sweep of what has expired.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from typing import Any

import structlog

from kvbridge import __version__
from kvbridge.config.loading import read_secret
from kvbridge.config.schema import BootstrapConfig
from kvbridge.daemon.announce import DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.daemon.front import open_http
from kvbridge.http.bootstrap_app import create_bootstrap_app
from kvbridge.http.client import DaemonClient
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import Application, HttpServer
from kvbridge.service.directory import Directory, MemoryStore
from kvbridge.service.pairing import PairingLimits, PairingService
from kvbridge.service.ports import Readiness
from kvbridge.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

SWEEP_S = 0.5


class BootstrapDaemon:
    """One bootstrap. Drive it with `life.run_daemon`."""

    def __init__(self, config: BootstrapConfig, *, endpoint_dir: Path | None = None) -> None:
        """`endpoint_dir`: where to write the endpoint file, for tools that let the system choose the port."""
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.metrics = Metrics(role="bootstrap", version=__version__)
        self._endpoint_dir = endpoint_dir
        self._started_s = time.monotonic()
        timeouts = config.timeouts
        token = read_secret(config.daemons.token, config.daemons.token_file, key="daemons.token_file")
        self._daemons = DaemonClient(token=token, timeout_s=timeouts.reserve_s)
        self.directory = Directory(MemoryStore(), expire_after_s=config.directory.expire_after_s)
        self.pairing = PairingService(
            self.directory,
            self._daemons,
            limits=PairingLimits(
                reserve_s=timeouts.reserve_s,
                cancel_s=timeouts.cancel_s,
                report_s=timeouts.report_s,
                pair_s=timeouts.pair_s,
                ticket_s=timeouts.ticket_s,
                room_keep_s=timeouts.room_keep_s,
                attempts=config.pairing.attempts,
                max_rooms=config.pairing.max_rooms,
            ),
        )
        self._http: HttpServer | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The bound address; empty before `start`."""
        return self._http.url if self._http else ""

    async def start(self) -> None:
        """Open the door."""
        self._http = await open_http(self.config.http, self._app, shutdown_s=self.config.timeouts.shutdown_s / 2)
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")
        if self._endpoint_dir is not None:
            self._endpoint_dir.mkdir(parents=True, exist_ok=True)
            endpoint = DaemonEndpoint(
                role="bootstrap", incarnation=self.incarnation, pid=os.getpid(), http_url=self._http.url
            )
            write_endpoint(self._endpoint_dir, endpoint)
        log.info("doors_open", http=self._http.url)

    def _app(self, settings: AppSettings) -> Application:
        return create_bootstrap_app(
            directory=self.directory,
            pairing=self.pairing,
            status=self,
            metrics_render=self._render_metrics,
            settings=settings,
        )

    async def failed(self) -> None:
        """Raise when the door or the sweeper has ended."""
        if self._http is not None and self._sweeper is not None:
            ended = asyncio.ensure_future(self._http.wait_ended())
            await asyncio.wait({ended, self._sweeper}, return_when=asyncio.FIRST_COMPLETED)

    async def drain(self) -> None:
        """Bootstrap holds nothing that would have to end first."""

    async def close(self) -> None:
        """Close the door."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)
        if self._http is not None:
            await self._http.stop()
        await self._daemons.close()
        if self._endpoint_dir is not None:
            remove_endpoint(self._endpoint_dir, self.incarnation)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for instance, node in self.directory.expire():
                log.warning("node_expired", instance=instance, node=node, limit="directory.expire_after_s")
            self.pairing.sweep()

    def readiness(self) -> Readiness:
        """Whether requests can be paired, and every reason why not."""
        return self.directory.readiness()

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see."""
        return {
            "role": "bootstrap",
            "incarnation": self.incarnation,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started_s, 1),
            "ready": self.readiness().model_dump(),
            "instances": [instance.model_dump(mode="json") for instance in self.directory.listing()],
            "rooms": self.pairing.counts(),
        }

    def _render_metrics(self) -> tuple[bytes, str]:
        self.metrics.rooms(self.pairing.counts())
        self.metrics.ready(self.readiness().ready)
        return self.metrics.render()
