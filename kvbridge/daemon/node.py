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
from contextlib import AsyncExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog

from kvbridge import __version__
from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.api.rooms import PeerAddress
from kvbridge.api.status import Readiness
from kvbridge.config.loading import read_secret
from kvbridge.config.pools import MemoryOwner
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.link import PeerSettings
from kvbridge.control.local import prepare_runtime_directory
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.errors import NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import Attached, NodeToEngine
from kvbridge.core.wire.features import DIRECTORY_FEATURES, ENGINE_FEATURES
from kvbridge.core.wire.messages import REASON_CHARS, NodeDescription
from kvbridge.core.wire.worker_messages import WorkerSetup
from kvbridge.daemon.admission import admission_limits
from kvbridge.daemon.announce import Announcer, DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.daemon.engine_host import EngineHost
from kvbridge.daemon.front import open_http
from kvbridge.daemon.memory import (
    NodeMemory,
    file_prefix,
    memory_directory,
    plan_memory,
    require_memory_directory,
)
from kvbridge.daemon.model import load_geometry
from kvbridge.daemon.node_status import node_metrics, node_status
from kvbridge.daemon.peer_setup import control_modes, curve_keys, peer_settings
from kvbridge.daemon.worker_host import WorkerHost, WorkerReport
from kvbridge.http.client import DirectoryClient
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import Application, HttpServer
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_api import EngineApi, EnginePorts
from kvbridge.node.rooms import Rooms
from kvbridge.pool.accounts.book import PageState
from kvbridge.pool.memory.layout import even_boundaries
from kvbridge.pool.memory.leftovers import remove_leftovers
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.telemetry.events import EventStream, FrameRefused
from kvbridge.telemetry.metrics import Metrics
from kvbridge.telemetry.readers import LogReader, MetricsReader, StatusReader

log = structlog.get_logger(__name__)

TICK_S = 0.05
"""How often deadlines are looked at."""
CLOSING_PARTS = 8
"""`timeouts.shutdown_close_s` in equal parts: rooms that are aborted get one, HTTP two, rank workers four, peers one."""


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
        self.events, self.recent = EventStream(), StatusReader()
        for reader in (MetricsReader(self.metrics), LogReader(), self.recent):
            self.events.add_reader(reader)
        self.memory = NodeMemory(self.layout)
        self._host = WorkerHost(
            config,
            {rank: part.layers for rank, part in self.layout.parts.items()},
            setup=self._worker_setup,
            listener=self,
            events=self.events,
        )
        self.workers = self._host.workers
        self._engines = EngineHost(
            lambda: self.door, settle_s=config.timeouts.engine_settle_s, on_refused=self.frame_refused
        )
        self.started_s = time.monotonic()
        self._memory_problem = "memory is being created"
        self._broken: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._announcer: Announcer | None = None
        self.control: PeerAddress | None = None

    @cached_property
    def desk(self) -> AdmissionController:
        """Where users and engines ask for rooms."""
        return AdmissionController(
            self.rooms,
            self.book,
            limits=admission_limits(self.config.admission),
            events=self.events,
            on_readiness=self._readiness_changed,
        )

    @property
    def stage_boundaries(self) -> tuple[int, ...]:
        """The first layers of the instance's pipeline stages but the first."""
        sizes = self.config.parallelism
        return sizes.stage_boundaries or even_boundaries(self.geometry.layer_count, sizes.pp_size)

    # ------------------------------------------------------------------ what the roles plug in

    @property
    @abstractmethod
    def rooms(self) -> Rooms:
        """The role's rooms."""

    @property
    @abstractmethod
    def door(self) -> EngineApi[Any]:
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
        require_memory_directory(config, self.layout)
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
        self._http = await open_http(config.http, self._app, shutdown_s=self._closing_part_s)
        self._background(self._http.wait_ended(), "http")
        self._announce(self._http.url)
        self._background(self._ticks(), "ticks")
        await self._create_memory()
        self._memory_problem = ""
        self._host.start(own_processes=not self.adopted)
        self._background(self._host.failed(), "workers")

    async def failed(self) -> None:
        """Raise when a part that the daemon cannot do without has ended."""
        if self._broken is not None:
            await asyncio.shield(self._broken)

    async def drain(self) -> None:
        """Admit nothing more, let rooms end, abort those that do not end in time (`timeouts.shutdown_rooms_s`)."""
        limit_s = self.config.timeouts.shutdown_rooms_s
        self.workers.draining = "the daemon is shutting down"
        self.desk.close(self.workers.draining)
        leaving = [] if self._announcer is None else [self._background(self._announcer.leave(), "leave")]
        log.info("draining", rooms=self.open_rooms(), limit_s=limit_s)
        if not await self._wait_idle(limit_s):
            log.warning("rooms_aborted", rooms=self.open_rooms(), limit="timeouts.shutdown_rooms_s")
            await self.end_rooms("the daemon was shut down")
            await self._wait_idle(self._closing_part_s)
        elif leaving:
            await asyncio.wait(leaving, timeout=self._closing_part_s)

    @property
    def _closing_part_s(self) -> float:
        return self.config.timeouts.shutdown_close_s / CLOSING_PARTS

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.open_rooms() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - rooms end in many ways
            await asyncio.sleep(TICK_S)
        return not self.open_rooms()

    async def close(self) -> None:
        """Close everything, in the order in which nothing is pulled from under anybody. Harmless when nothing is open.

        What goes wrong on the way is raised when everything has been closed.
        """
        async with AsyncExitStack() as last_first:
            last_first.callback(self.memory.close)
            last_first.callback(remove_endpoint, self.config.runtime_dir, self.incarnation)
            last_first.callback(self._engines.close)
            last_first.push_async_callback(self.close_peers, min(1.0, self._closing_part_s))
            last_first.push_async_callback(self._host.close, 2 * self._closing_part_s)
            if self._announcer is not None:
                last_first.push_async_callback(self._announcer.close)
            if self._http is not None:
                last_first.push_async_callback(self._http.stop)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

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
            admission=self.desk,
            rooms=self.rooms,
            status=self,
            metrics_render=lambda: node_metrics(self),
            settings=settings,
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
            load=self._load,
            interval_s=config.bootstrap.heartbeat_interval_s,
        )
        self._background(self._announcer.run(), "announcer")

    def _registration(self) -> NodeRegistration:
        if self._http is None:
            raise RuntimeError("the doors are not open")
        config, reasons = self.config, self._obstacles()
        return NodeRegistration(
            instance=config.instance,
            node=config.node,
            role=self.role,
            incarnation=self.incarnation,
            http_url=config.http.advertised(self._http.url),
            control=self.control,
            meets_by=control_modes(config, self.control),
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            stage_boundaries=self.stage_boundaries,
            ranks=tuple(self.workers.layers),
            fingerprint=fingerprint(self.geometry),
            geometry=self.geometry,
            host=tuple(sorted(self.layout.host_kinds)),
            ready=not reasons,
            reasons=tuple(reason[:REASON_CHARS] for reason in reasons),
            load=self._load(),
            features=DIRECTORY_FEATURES,
        )

    def _load(self) -> Load:
        counts = self.book.counts()
        return Load(
            rooms=self.open_rooms(),
            free_pages={space.value: states[PageState.FREE] for space, states in counts.items()},
            total_pages={space.value: pages for space, pages in self.book.totals().items()},
        )

    async def _create_memory(self) -> None:
        begun_s = time.monotonic()
        directory = memory_directory(self.config)
        proofs = Path(self.config.transports.local.proof_directory)
        await asyncio.to_thread(remove_leftovers, (directory, DEFAULT_DIRECTORY, proofs))
        await self.memory.create(
            directory,
            file_prefix(self.config.instance, f"{self.role}-{self.config.node}") + self.incarnation,
            on_progress=self._memory_progress,
            cancel_s=self.config.timeouts.shutdown_close_s / 2,
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
        """Send to an attached engine; one that does not read is reported."""
        self._engines.send(engine, message)

    def engine_pid(self, engine: str) -> int:
        """The process id of an engine as the kernel tells it, 0 for one of another pid namespace."""
        return self._engines.pid(engine)

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
            features=ENGINE_FEATURES,
        )

    def engine_ports(self) -> EnginePorts:
        """What the engine API needs of the node."""
        return EnginePorts(
            send=self.send_engine,
            pid=self.engine_pid,
            describe=self.describe_engine,
            ranks=tuple(self.workers.layers),
            events=self.events,
        )

    def description(self) -> NodeDescription:
        """How this node introduces itself to peers."""
        return NodeDescription(
            instance=self.config.instance,
            node=self.config.node,
            role=self.role,
            incarnation=self.incarnation,
            geometry=self.geometry,
            ranks=self.workers.packed(),
        )

    def frame_refused(self, kind: str, detail: str) -> None:
        """A frame was refused; `kind` is one of few words, `detail` is for people."""
        self.events.emit(FrameRefused(kind=kind, detail=detail))

    # ------------------------------------------------------------------ StatusPort

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""
        refusal = self._announcer.refusal if self._announcer else ""
        reasons = [*self._obstacles(), self.desk.problem(), refusal and f"bootstrap refuses this node: {refusal}"]
        return Readiness(ready=not any(reasons), reasons=tuple(filter(None, reasons)))

    def _obstacles(self) -> list[str]:
        """What keeps every room out, whatever is free: bootstrap need not ask. A node that is full it does ask, and is told."""
        return [reason for reason in (self._memory_problem, self.workers.missing()) if reason]

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see."""
        return node_status(self)

    @abstractmethod
    def room_states(self) -> dict[str, int]:
        """Rooms by what users see."""

    @abstractmethod
    def quarantined_rooms(self) -> dict[str, int]:
        """Rooms whose pages are quarantined, by cause."""
