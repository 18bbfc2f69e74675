"""What the prefill and the decode daemon have in common: memory, workers, engines, doors, announcements, drain.

Owns: the composition of a node and the order in which its parts open and close. Must not know: the tables of either side; the two
roles plug in their rooms and their peers.

Doors first, memory after: `/ready` can say how far registration has come while a large pool is still being made.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from functools import cached_property
from typing import Any, Protocol

import structlog

from kvbridge import __version__
from kvbridge.config.loading import read_secret
from kvbridge.config.pools import DecodePools, MemoryOwner
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.link import PeerSettings
from kvbridge.control.local import prepare_runtime_directory
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.errors import NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import Attached, NodeToEngine
from kvbridge.core.wire.messages import NodeDescription
from kvbridge.core.wire.worker_messages import WorkerSetup
from kvbridge.daemon.admission import admission_limits
from kvbridge.daemon.announce import Announcer, DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.daemon.engine_host import EngineHost
from kvbridge.daemon.front import open_http
from kvbridge.daemon.memory import NodeMemory, plan_memory
from kvbridge.daemon.model import load_geometry
from kvbridge.daemon.node_status import node_metrics, node_status
from kvbridge.daemon.observe import MetricsObserver
from kvbridge.daemon.peer_setup import curve_keys, peer_settings
from kvbridge.daemon.worker_host import WorkerHost, WorkerReport
from kvbridge.http.client import DirectoryClient
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import Application, HttpServer
from kvbridge.pool.book import PageState
from kvbridge.pool.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.service.admission import AdmissionDesk, ReservingRooms
from kvbridge.service.engine_door import EngineDoor
from kvbridge.service.ports import Load, NodeRegistration, PeerAddress, Readiness
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

TICK_S = 0.05
"""How often deadlines are looked at."""
CLOSING_SHARE = 8
"""Half of `timeouts.shutdown_s` is the rooms' own; each part that closes afterwards gets this part (1/n) of it."""


class Rooms(ReservingRooms, Protocol):
    """What a node needs of its role's rooms."""

    def tick(self) -> None:
        """Look at deadlines."""


class Node(ABC):
    """A prefill or decode daemon. Drive it with `life.run_daemon`, or call start, drain and close yourself."""

    role: Role

    def __init__(self, config: PrefillConfig | DecodeConfig) -> None:
        """Decide everything that can be decided without opening anything. Raises ConfigError, InvalidInputError."""
        self.config = config
        self.incarnation = secrets.token_hex(8)
        self.geometry = load_geometry(config.model)
        self.layout = plan_memory(config, self.geometry)
        self.adopted = config.pools.memory is MemoryOwner.ADOPTED
        self.book = self.layout.book()
        self.metrics = Metrics(role=self.role.value, version=__version__)
        self.observer = MetricsObserver(self.metrics)
        self.memory = NodeMemory(self.layout)
        self._host = WorkerHost(
            config,
            {rank: part.layers for rank, part in self.layout.parts.items()},
            setup=self._worker_setup,
            listener=self,
            metrics=self.metrics,
        )
        self.workers = self._host.workers
        self._engines = EngineHost(lambda: self.door, on_refused=self.frame_refused)
        self.started_s = time.monotonic()
        self._refusals = Seldom()
        self._memory_problem = "memory is being created"
        self._broken: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._announcer: Announcer | None = None
        self.control: PeerAddress | None = None

    @cached_property
    def desk(self) -> AdmissionDesk:
        """Where users and engines ask for rooms."""
        return AdmissionDesk(
            self.rooms,
            self.book,
            limits=admission_limits(self.config.admission),
            observer=self.observer,
            on_readiness=self._readiness_changed,
        )

    # ------------------------------------------------------------------ what the roles plug in

    @property
    @abstractmethod
    def rooms(self) -> Rooms:
        """The role's rooms."""

    @property
    @abstractmethod
    def door(self) -> EngineDoor:
        """Where engines come in."""

    @property
    def epoch(self) -> int:
        """Of the endpoints that rank workers are to give out."""
        return 0

    @abstractmethod
    def open_peers(self, identity: PeerIdentity, settings: PeerSettings) -> PeerAddress | None:
        """Open the way to peers; returns the bound control address of a role that listens."""

    @abstractmethod
    async def close_peers(self, timeout_s: float) -> None:
        """Let the last messages out and close the way to peers."""

    @abstractmethod
    def watch_peers(self) -> None:
        """Send heartbeats and look for silent peers; called every `timeouts.control_heartbeat_s`."""

    @abstractmethod
    def worker_returned(self, rank: Rank) -> None:
        """A rank worker is ready (again)."""

    @abstractmethod
    def worker_lost(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone, and with it all that it had under way."""

    @abstractmethod
    def worker_said(self, rank: Rank, message: WorkerReport) -> None:
        """A rank worker reports on rooms or peers."""

    @abstractmethod
    def peer_status(self) -> list[dict[str, object]]:
        """For `/status`."""

    @abstractmethod
    def open_rooms(self) -> int:
        """Rooms that have not ended."""

    @abstractmethod
    async def end_rooms(self, reason: str) -> None:
        """Abort every room that has not ended."""

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Open the doors, make the memory, start the workers. Returns when the doors are open and workers are starting."""
        config = self.config
        self._broken = asyncio.get_running_loop().create_future()
        prepare_runtime_directory(config.runtime_dir)
        self._host.open(self.incarnation)
        self._engines.open(self.incarnation, config.runtime_dir)
        keys = curve_keys(config.control.curve)
        identity = PeerIdentity(self.incarnation, keys, insecure=config.insecure)
        bound = self.open_peers(identity, peer_settings(config))
        if bound is not None:
            self.control = PeerAddress(
                endpoint=config.control.advertised(bound.endpoint), public_key=keys.public if keys else ""
            )
        self._http = await open_http(config.http, self._app, shutdown_s=config.timeouts.shutdown_s / CLOSING_SHARE)
        self._background(self._http.wait_ended(), "http")
        self._announce(self._http.url)
        self._background(self._ticks(), "ticks")
        await asyncio.to_thread(self._create_memory)
        self._memory_problem = ""
        self._host.start(own_processes=not self.adopted)
        self._background(self._host.failed(), "workers")

    async def failed(self) -> None:
        """Raise when a part that the daemon cannot do without has ended."""
        if self._broken is not None:
            await asyncio.shield(self._broken)

    async def drain(self) -> None:
        """Admit nothing more, let rooms end, abort those that do not end in time (`timeouts.shutdown_s`)."""
        limit_s = self.config.timeouts.shutdown_s
        self.workers.draining = "the daemon is shutting down"
        self.desk.close(self.workers.draining)
        leaving = [] if self._announcer is None else [self._background(self._announcer.leave(), "leave")]
        log.info("draining", rooms=self.open_rooms(), limit_s=limit_s)
        if not await self._wait_idle(limit_s / 2):
            log.warning("rooms_aborted", rooms=self.open_rooms(), limit="timeouts.shutdown_s")
            await self.end_rooms("the daemon was shut down")
            await self._wait_idle(limit_s / CLOSING_SHARE)
        if leaving:
            await asyncio.wait(leaving, timeout=limit_s / CLOSING_SHARE)

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.open_rooms() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - rooms end in many ways
            await asyncio.sleep(TICK_S)
        return not self.open_rooms()

    async def close(self) -> None:
        """Close everything, in the order in which nothing is pulled from under anybody. Harmless when nothing is open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._http is not None:
            await self._http.stop()
        if self._announcer is not None:
            await self._announcer.close()
        await self._host.close(self.config.timeouts.shutdown_s / CLOSING_SHARE)
        await self.close_peers(min(1.0, self.config.timeouts.shutdown_s / CLOSING_SHARE))
        self._engines.close()
        remove_endpoint(self.config.runtime_dir, self.incarnation)
        self.memory.close()

    def _background(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.append(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _ticks(self) -> None:
        heartbeat_s = self.config.timeouts.control_heartbeat_s
        next_heartbeat_s = time.monotonic() + heartbeat_s
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()
            self._host.watch()
            if self._announcer is not None:
                self._announcer.look()
            if time.monotonic() >= next_heartbeat_s:
                next_heartbeat_s += heartbeat_s
                self.watch_peers()

    def tick(self) -> None:
        """Look at deadlines."""
        self.rooms.tick()
        self.desk.tick()

    # ------------------------------------------------------------------ parts

    def _app(self, settings: AppSettings) -> Application:
        return create_daemon_app(
            rooms=self.desk, status=self, metrics_render=lambda: node_metrics(self), settings=settings
        )

    def _announce(self, url: str) -> None:
        config = self.config
        endpoint = DaemonEndpoint(
            role=self.role,
            instance=config.instance,
            node=config.node,
            incarnation=self.incarnation,
            pid=os.getpid(),
            http_url=url,
            control=self.control,
        )
        write_endpoint(config.runtime_dir, endpoint)
        log.info("doors_open", http=url, control=self.control.endpoint if self.control else "")
        if not config.bootstrap.url:
            return
        token = read_secret(config.bootstrap.token, config.bootstrap.token_file, key="bootstrap.token_file")
        self._announcer = Announcer(
            [
                DirectoryClient(url, token=token, timeout_s=config.timeouts.bootstrap_call_s)
                for url in (config.bootstrap.url, *config.bootstrap.other_urls)
            ],
            registration=self._registration,
            readiness=self.readiness,
            load=self._load,
            interval_s=config.bootstrap.heartbeat_interval_s,
        )
        self._background(self._announcer.run(), "announcer")

    def _registration(self) -> NodeRegistration:
        if self._http is None:
            raise RuntimeError("the doors are not open")
        config = self.config
        return NodeRegistration(
            instance=config.instance,
            node=config.node,
            role=self.role,
            incarnation=self.incarnation,
            http_url=config.http.advertised(self._http.url),
            control=self.control,
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            ranks=tuple(self.workers.layers),
            fingerprint=fingerprint(self.geometry),
            geometry=self.geometry,
            host=tuple(sorted(self.layout.host_kinds)),
            ready=self.readiness().ready,
            load=self._load(),
        )

    def _load(self) -> Load:
        counts = self.book.counts()
        return Load(
            rooms=self.open_rooms(),
            free_pages={space.value: states[PageState.FREE] for space, states in counts.items()},
            total_pages={space.value: pages for space, pages in self.book.totals().items()},
        )

    def _create_memory(self) -> None:
        begun_s = time.monotonic()
        directory = (
            self.config.pools.host.directory if isinstance(self.config.pools, DecodePools) else DEFAULT_DIRECTORY
        )
        self.memory.create(
            directory=directory,
            instance=self.config.instance,
            node=f"{self.role}-{self.config.node}",
            incarnation=self.incarnation,
            on_progress=self._memory_progress,
        )
        log.info("memory_created", bytes=self.layout.node_bytes, seconds=round(time.monotonic() - begun_s, 3))

    def _memory_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._memory_problem = (
            f"memory is being created ({done_bytes / max(1, total_bytes):.0%} of {total_bytes} bytes)"
        )

    # ------------------------------------------------------------------ workers

    def _worker_setup(self, rank: Rank) -> WorkerSetup:
        config = self.config
        return WorkerSetup(
            geometry=self.geometry,
            rank=rank,
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            layers=self.layout.parts[rank].layers,
            device=self.memory.device.get(rank, ()),
            allocate=self.layout.orders.get(rank),
            host=self.memory.host,
            transports=config.transports.model_dump_json(),
            transfer_timeout_s=config.timeouts.transfer_s,
            epoch=self.epoch,
        )

    def worker_up(self, rank: Rank) -> None:
        """A rank worker is ready (again)."""
        self.worker_returned(rank)
        self._readiness_changed()

    def worker_down(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone, and with it the device memory that it made."""
        self.worker_lost(rank, reason)
        if rank in self.layout.orders:  # after its rooms, so that engines hear of those first
            self.door.memory_lost(rank, f"rank worker {rank} is gone: {reason}")
        self._readiness_changed()

    @property
    def bootstrap_problem(self) -> str:
        """Why the directory does not know us as we are, or an empty text."""
        return self._announcer.problem if self._announcer else ""

    def _readiness_changed(self) -> None:
        if self._announcer is not None:
            self._announcer.changed()

    # ------------------------------------------------------------------ engines

    def send_engine(self, engine: str, message: NodeToEngine) -> None:
        """Send to an attached engine; one that does not read is reported and lost."""
        self._engines.send(engine, message)

    def describe_engine(self, call: int, ranks: tuple[Rank, ...]) -> Attached:
        """Answer an attach. Raises NotReadyError while the memory to be attached to is being made."""
        if self._memory_problem and self.layout.total_bytes:  # engines that adopt still share our host pool
            raise NotReadyError(f"nothing to attach to yet: {self._memory_problem}; try again shortly")
        made = {rank: self.workers.device(rank) for rank in ranks if rank in self.layout.orders}
        return Attached(
            call=call,
            instance=self.config.instance,
            incarnation=self.incarnation,
            geometry=self.geometry,
            ranks=ranks,
            layers={str(rank): self.layout.parts[rank].layers for rank in ranks},
            pp_size=self.config.parallelism.pp_size,
            tp_size=self.config.parallelism.tp_size,
            device={str(rank): made.get(rank) or self.memory.device.get(rank, ()) for rank in ranks},
            host=self.memory.host,
        )

    def description(self) -> NodeDescription:
        """How this node introduces itself to peers."""
        return NodeDescription(
            instance=self.config.instance,
            node=self.config.node,
            role=self.role,
            incarnation=self.incarnation,
            geometry=self.geometry,
            ranks=self.workers.descriptions(),
        )

    def frame_refused(self, kind: str, detail: str) -> None:
        """Count a frame that was refused, and log the first few of its kind every ten seconds."""
        self.metrics.frame_refused(kind)
        if self._refusals.admits(kind):
            log.warning("frame_refused", kind=kind, detail=detail)

    # ------------------------------------------------------------------ StatusPort

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""
        reasons = [reason for reason in (self._memory_problem, self.workers.missing(), self.desk.problem()) if reason]
        return Readiness(ready=not reasons, reasons=tuple(reasons))

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see."""
        return node_status(self)

    @abstractmethod
    def room_states(self) -> dict[str, int]:
        """Rooms by what users see."""

    @abstractmethod
    def quarantined_rooms(self) -> dict[str, int]:
        """Rooms whose pages are quarantined, by cause."""
