"""What the prefill and the decode daemon have in common: memory, workers, engines, doors, announcements, drain.

Owns: the composition of a node and the order in which its parts open and close. Must not know: the tables of either side; the two
roles plug in their rooms and their peers.

Doors first, memory after: `/ready` can say how far registration has come while a large pool is still being made.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from kvbridge import __version__
from kvbridge.config.loading import read_secret
from kvbridge.config.pools import DecodePools, MemoryOwner
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.addresses import ENGINE_SOCKET, WORKER_SOCKET
from kvbridge.control.keys import CurveKeys, load_keys
from kvbridge.control.link import PeerSettings
from kvbridge.control.local import LocalCallbacks, LocalServer, prepare_runtime_directory
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE, NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.delivery import DeliverySettings
from kvbridge.core.wire.engine_messages import Attached, EngineToNode, NodeToEngine
from kvbridge.core.wire.messages import (
    Heartbeat,
    NodeDescription,
    NodeToWorker,
    PeerConnected,
    RoomClosed,
    Sent,
    Shutdown,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
    WorkerToNode,
)
from kvbridge.daemon.announce import Announcer, DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.daemon.memory import NodeMemory, plan_memory
from kvbridge.daemon.model import load_geometry
from kvbridge.daemon.observe import MetricsObserver
from kvbridge.daemon.supervisor import Supervisor
from kvbridge.http.client import DirectoryClient
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import HttpServer, TlsFiles
from kvbridge.pool.book import PageState
from kvbridge.pool.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.service.engine_door import EngineDoor
from kvbridge.service.ports import Load, NodeRegistration, PeerAddress, Readiness, RoomsPort
from kvbridge.service.workers import WorkerSet, WorkerState
from kvbridge.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

TICK_S = 0.05
"""How often deadlines are looked at."""
CLOSING_SHARE = 8
"""Half of `timeouts.shutdown_s` is the rooms' own; each part that closes afterwards gets this part (1/n) of it."""


class Rooms(RoomsPort, Protocol):
    """What a node needs of its role's rooms beside admission."""

    def tick(self) -> None:
        """Look at deadlines."""


class DrainingWorkers(WorkerSet):
    """Rank workers of a node that may be shutting down: then they count as missing for every admission."""

    draining = ""

    def missing(self) -> str:
        """Why not every rank can work now, or an empty text."""
        return self.draining or super().missing()


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
        self.workers = DrainingWorkers(
            {rank: part.layers for rank, part in self.layout.parts.items()},
            send=self._send_worker,
            setup=self._worker_setup,
            on_progress=lambda _rank, share: self.metrics.registration(int(share * 1000), 1000),
        )
        self.started_s = time.monotonic()
        self._memory_share = 0.0
        self._memory_problem = "memory is being created"
        self._broken: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._announcer: Announcer | None = None
        self._directory: DirectoryClient | None = None
        self._supervisor: Supervisor | None = None
        self._worker_server: LocalServer[WorkerToNode, NodeToWorker] | None = None
        self._early_workers: dict[str, WorkerHello] = {}
        """Workers of engines that came before the memory that they are to map, by their links."""
        self._heard_s: dict[Rank, float] = {}
        """When a rank's worker said something last."""
        self._engine_server: LocalServer[EngineToNode, NodeToEngine] | None = None
        self.control: PeerAddress | None = None

    # ------------------------------------------------------------------ what the roles plug in

    @property
    @abstractmethod
    def rooms(self) -> Rooms:
        """The role's rooms."""

    @property
    @abstractmethod
    def door(self) -> EngineDoor:
        """Where engines come in."""

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
    def worker_up(self, rank: Rank) -> None:
        """A rank worker is ready (again)."""

    @abstractmethod
    def worker_down(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone."""

    @abstractmethod
    def worker_said(self, rank: Rank, message: PeerConnected | Sent | RoomClosed) -> None:
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
        self._open_local()
        keys = self._keys()
        identity = PeerIdentity(self.incarnation, keys, insecure=config.insecure)
        bound = self.open_peers(identity, self._peer_settings())
        if bound is not None:
            self.control = PeerAddress(
                endpoint=config.control.advertised(bound.endpoint), public_key=keys.public if keys else ""
            )
        self._http = await self._open_http()
        self._announce()
        self._background(self._ticks(), "ticks")
        await asyncio.to_thread(self._create_memory)
        self._memory_problem = ""
        if not self.adopted:
            self._supervise()
        for link, message in self._early_workers.items():
            self._welcome_worker(link, message)
        self._early_workers.clear()

    async def failed(self) -> None:
        """Raise when a part that the daemon cannot do without has ended."""
        if self._broken is not None:
            await asyncio.shield(self._broken)

    async def drain(self) -> None:
        """Admit nothing more, let rooms end, abort those that do not end in time (`timeouts.shutdown_s`)."""
        limit_s = self.config.timeouts.shutdown_s
        self.workers.draining = "the daemon is shutting down"
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
        if self._directory is not None:
            await self._directory.close()
        for rank in self.workers.layers:
            self.workers.send(rank, Shutdown())
        if self._supervisor is not None:
            await self._supervisor.stop(self.config.timeouts.shutdown_s / CLOSING_SHARE)
        await self.close_peers(min(1.0, self.config.timeouts.shutdown_s / CLOSING_SHARE))
        for server in (self._worker_server, self._engine_server):
            if server is not None:
                server.close()
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
            self.rooms.tick()
            self._watch_workers()
            if time.monotonic() >= next_heartbeat_s:
                next_heartbeat_s += heartbeat_s
                self.watch_peers()

    # ------------------------------------------------------------------ parts

    def _keys(self) -> CurveKeys | None:
        curve = self.config.control.curve
        if curve.secret_key_file is None:
            return None
        loaded = load_keys(curve.secret_key_file)
        return CurveKeys(curve.public_key or loaded.public, loaded.secret, frozenset(curve.allowed_public_keys))

    def _peer_settings(self) -> PeerSettings:
        timeouts = self.config.timeouts
        return PeerSettings(
            delivery=DeliverySettings(
                resend_first_s=timeouts.control_resend_s,
                resend_most_s=max(1.0, timeouts.control_resend_s),
                give_up_s=timeouts.control_delivery_s,
            )
        )

    def _open_local(self) -> None:
        runtime_dir = self.config.runtime_dir
        self._worker_server = LocalServer(
            self.incarnation,
            WORKER_TO_NODE,
            NODE_TO_WORKER,
            LocalCallbacks(self._on_worker, on_gone=self._on_worker_gone, on_refused=self.frame_refused),
        )
        self._worker_server.bind(runtime_dir / WORKER_SOCKET)
        self._engine_server = LocalServer(
            self.incarnation,
            ENGINE_TO_NODE,
            NODE_TO_ENGINE,
            LocalCallbacks(self._on_engine, on_gone=self._on_engine_gone, on_refused=self.frame_refused),
        )
        self._engine_server.bind(runtime_dir / ENGINE_SOCKET)

    async def _open_http(self) -> HttpServer:
        http = self.config.http
        settings = AppSettings(
            version=__version__,
            token=read_secret(http.token, http.token_file, key="http.token_file"),
            open_metrics=http.open_metrics,
            max_body_bytes=http.max_body_bytes,
            max_wait_s=http.max_wait_s,
        )
        app = create_daemon_app(rooms=self.rooms, status=self, metrics_render=self._render_metrics, settings=settings)
        tls = (
            TlsFiles(http.tls_certificate_file, http.tls_key_file)
            if http.tls_certificate_file is not None and http.tls_key_file is not None
            else None
        )
        shutdown_s = self.config.timeouts.shutdown_s / CLOSING_SHARE
        server = await HttpServer.start(app, host=http.host, port=http.port, shutdown_s=shutdown_s, tls=tls)
        self._background(server.wait_ended(), "http")
        return server

    def _announce(self) -> None:
        if self._http is None:
            return
        config = self.config
        endpoint = DaemonEndpoint(
            role=self.role,
            instance=config.instance,
            node=config.node,
            incarnation=self.incarnation,
            pid=os.getpid(),
            http_url=self._http.url,
            control=self.control,
        )
        write_endpoint(config.runtime_dir, endpoint)
        log.info("doors_open", http=self._http.url, control=self.control.endpoint if self.control else "")
        if not config.bootstrap.url:
            return
        token = read_secret(config.bootstrap.token, config.bootstrap.token_file, key="bootstrap.token_file")
        self._directory = DirectoryClient(config.bootstrap.url, token=token, timeout_s=config.timeouts.bootstrap_call_s)
        self._announcer = Announcer(
            self._directory,
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
        log.info("memory_created", bytes=self.layout.total_bytes, seconds=round(time.monotonic() - begun_s, 3))

    def _memory_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._memory_problem = (
            f"memory is being created ({done_bytes / max(1, total_bytes):.0%} of {total_bytes} bytes)"
        )

    def _supervise(self) -> None:
        telemetry = self.config.telemetry
        self._supervisor = Supervisor(
            self.workers.layers,
            socket=self.config.runtime_dir / WORKER_SOCKET,
            worker_start_s=self.config.timeouts.worker_start_s,
            log_level=telemetry.log_level.value,
            log_format=telemetry.log_format.value,
            on_gone=self._on_process_gone,
        )
        self._supervisor.start()

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
            host=self.memory.host,
            transports=config.transports.model_dump_json(),
            transfer_timeout_s=config.timeouts.transfer_s,
        )

    def _send_worker(self, link: str, message: NodeToWorker) -> None:
        if self._worker_server is None:
            return
        try:
            self._worker_server.send(link, message)
        except BridgeError as error:  # its end is reported by on_gone
            log.warning("worker_unreachable", worker=link, code=error.code, reason=str(error))

    def _on_worker(self, link: str, message: WorkerToNode) -> None:
        if isinstance(message, WorkerHello):
            self._welcome_worker(link, message)
            return
        rank = self.workers.rank_of(link)
        if rank is None or (not isinstance(message, Heartbeat) and message.rank != rank):
            self.frame_refused("stale", f"{message.type} of worker {link}, which does not serve that rank (any more)")
            return
        self._heard_s[rank] = time.monotonic()
        match message:
            case WorkerProgress():
                self.workers.progress(message)
            case WorkerReady():
                self.workers.ready(message)
                self.worker_up(message.rank)
                self._readiness_changed()
            case WorkerFailed():
                self.workers.failed(message)
            case PeerConnected() | Sent() | RoomClosed():
                self.worker_said(message.rank, message)
            case Heartbeat():
                pass

    def _welcome_worker(self, link: str, message: WorkerHello) -> None:
        if self._memory_problem:
            self._early_workers[link] = message
            return
        self._heard_s[message.rank] = time.monotonic()
        replaced = self.workers.hello(link, message)
        if replaced and self._worker_server is not None:
            self._worker_server.drop(replaced)
            self.worker_down(message.rank, "another worker took its place")

    def _on_worker_gone(self, link: str) -> None:
        self._early_workers.pop(link, None)
        rank = self.workers.rank_of(link)
        if rank is None:
            return
        if self._supervisor is None:  # an engine's worker closes its transports before its connection
            self._worker_lost(rank, "its connection ended")
        else:  # only the end of the process proves that nothing moves any more
            self._supervisor.kill(rank, "its connection ended")

    def _on_process_gone(self, rank: Rank, reason: str) -> None:
        self.metrics.worker_restarted(reason.split(" ", maxsplit=1)[0])
        self._worker_lost(rank, reason)

    def _worker_lost(self, rank: Rank, reason: str) -> None:
        self.workers.gone(rank, reason)
        self.worker_down(rank, reason)
        self._readiness_changed()

    def _watch_workers(self) -> None:
        """End workers that hang; the supervisor starts them again."""
        if self._supervisor is None:
            return
        timeouts = self.config.timeouts
        limits_s = {
            WorkerState.STARTING: (timeouts.worker_start_s, "timeouts.worker_start_s"),
            WorkerState.READY: (timeouts.worker_silence_s, "timeouts.worker_silence_s"),
        }
        for rank, state in self.workers.states().items():
            limit_s, name = limits_s.get(state, (math.inf, ""))
            silent_s = time.monotonic() - self._heard_s.get(rank, math.inf)
            if silent_s > limit_s:
                del self._heard_s[rank]
                self._supervisor.kill(rank, f"it said nothing for {silent_s:.1f} s (limit: {name})")

    def _readiness_changed(self) -> None:
        if self._announcer is not None:
            self._announcer.changed()

    # ------------------------------------------------------------------ engines

    def _on_engine(self, engine: str, message: EngineToNode) -> None:
        self.door.handle(engine, message)

    def _on_engine_gone(self, engine: str) -> None:
        self.door.gone(engine, "its process ended or closed the connection")

    def send_engine(self, engine: str, message: NodeToEngine) -> None:
        """Send to an attached engine; one that does not read is reported and lost."""
        if self._engine_server is None:
            return
        try:
            self._engine_server.send(engine, message)
        except BridgeError as error:
            log.warning("engine_unreachable", engine=engine, code=error.code, reason=str(error))

    def describe_engine(self, call: int, ranks: tuple[Rank, ...]) -> Attached:
        """Answer an attach. Raises NotReadyError while the memory to be attached to is being made."""
        if self._memory_problem and not self.adopted:
            raise NotReadyError(f"nothing to attach to yet: {self._memory_problem}; try again when /ready says so")
        return Attached(
            call=call,
            instance=self.config.instance,
            incarnation=self.incarnation,
            geometry=self.geometry,
            ranks=ranks,
            layers={str(rank): self.layout.parts[rank].layers for rank in ranks},
            tp_size=self.config.parallelism.tp_size,
            device={str(rank): self.memory.device.get(rank, ()) for rank in ranks},
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
        """Count and log a frame that was refused."""
        self.metrics.frame_refused(kind)
        log.warning("frame_refused", kind=kind, detail=detail)

    # ------------------------------------------------------------------ StatusPort

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""
        reasons = [reason for reason in (self._memory_problem, self.workers.missing()) if reason]
        return Readiness(ready=not reasons, reasons=tuple(reasons))

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see."""
        return {
            "role": self.role,
            "instance": self.config.instance,
            "node": self.config.node,
            "incarnation": self.incarnation,
            "version": __version__,
            "uptime_s": round(time.monotonic() - self.started_s, 1),
            "model": {"name": self.geometry.name, "fingerprint": fingerprint(self.geometry)},
            "memory_bytes": self.layout.total_bytes,
            "ready": self.readiness().model_dump(),
            "bootstrap": {
                "url": self.config.bootstrap.url,
                "problem": self._announcer.problem if self._announcer else "",
            },
            "control": self.control.endpoint if self.control else "",
            "ranks": self.workers.status(),
            "engines": [
                {"name": engine.name, "pid": engine.pid, "ranks": [str(rank) for rank in engine.ranks]}
                for engine in self.door.engines()
            ],
            "peers": self.peer_status(),
            "rooms": self.room_states(),
            "pools": {
                space.value: {state.value: pages for state, pages in states.items()}
                for space, states in self.book.counts().items()
            },
            "quarantine": {
                reason: [str(owner) for owner in owners] for reason, owners in self.book.quarantine_reasons().items()
            },
        }

    @abstractmethod
    def room_states(self) -> dict[str, int]:
        """Rooms by what users see."""

    def _render_metrics(self) -> tuple[bytes, str]:
        self.metrics.rooms(self.room_states())
        for space, states in self.book.counts().items():
            self.metrics.pool(space, {state.value: pages for state, pages in states.items()})
        self.metrics.peers({"known": len(self.peer_status())})
        self.metrics.ready(self.readiness().ready)
        return self.metrics.render()


def ignore_watch(_engine: str, _pid: int) -> None:
    """The end of an engine is noticed through its connection."""
