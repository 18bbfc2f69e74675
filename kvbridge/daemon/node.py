"""A prefill or decode daemon from its start to its end.

Owns: the order in which the parts of a node open and close, its background tasks, its entry in the directory. Must not know:
the tables of either side, what a part does (`prefill` and `decode` say which parts there are).

HTTP and sockets open first, memory is made after: `/ready` can say how far that has come while a large pool is still being made.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import structlog

from kvbridge.api.directory import Load, NodeRegistration
from kvbridge.api.rooms import PeerAddress
from kvbridge.api.status import Readiness
from kvbridge.config.loading import read_secret
from kvbridge.control.local import prepare_runtime_directory
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import Rank
from kvbridge.core.wire.features import DIRECTORY_FEATURES
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.worker_messages import WorkerSetup
from kvbridge.daemon.announce import Announcer, DaemonEndpoint, remove_endpoint, write_endpoint
from kvbridge.daemon.front import open_http
from kvbridge.daemon.memory import file_prefix, memory_directory, require_memory_directory
from kvbridge.daemon.node_status import node_metrics, node_status
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.peer_setup import control_modes, curve_keys
from kvbridge.http.client import DirectoryClient
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import Application, HttpServer
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_api import EngineApi
from kvbridge.node.rooms import Rooms
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.pool.memory.leftovers import remove_leftovers
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

log = structlog.get_logger(__name__)

TICK_S = 0.05
"""How often deadlines are looked at."""
CLOSING_PARTS = 8
"""`timeouts.shutdown_close_s` in equal parts: rooms that are aborted get one, HTTP two, rank workers four, peers one."""


class Peers(Protocol):
    """The nodes of the other role."""

    @property
    def epoch(self) -> int:
        """Of the endpoints that rank workers are to give out."""

    def open(self, identity: PeerIdentity) -> PeerAddress | None:
        """Open the ways to peers; returns the bound address of a role that listens."""

    async def close(self, timeout_s: float) -> None:
        """Let the last messages out and close the ways to peers. Harmless when closed."""

    def watch(self) -> None:
        """Send heartbeats and look for silent peers; called every `timeouts.control_heartbeat_s`."""

    def tick(self) -> None:
        """Look at deadlines."""

    def listing(self) -> list[dict[str, object]]:
        """The known peers, for `/status`."""

    def status(self) -> dict[str, object]:
        """What else `/status` shows of them."""


class NodeDaemon:
    """A prefill or decode daemon. Drive it with `lifecycle.run_daemon`, or call start, drain and close yourself."""

    def __init__(
        self, parts: NodeParts, peers: Peers, rooms: Rooms, admission: AdmissionController, api: EngineApi[Any]
    ) -> None:
        self.parts = parts
        self.peers = peers
        self.rooms = rooms
        self.admission = admission
        self.control: PeerAddress | None = None
        """Where peers meet this node, if it listens."""
        self.started_s = time.monotonic()
        self._api = api
        self._closers: list[Callable[[], Awaitable[None] | None]] = []
        self._broken: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._http: HttpServer | None = None
        self._announcer: Announcer | None = None
        self._obstacles_told: list[str] = []

    def on_close(self, close: Callable[[], Awaitable[None] | None]) -> None:
        """Let `close` be called when peers are closed; the last one that was given is called first."""
        self._closers.append(close)

    # ------------------------------------------------------------------ from start to end

    async def start(self) -> None:
        """Open HTTP and sockets, make the memory, start the workers. Returns when those are starting."""
        parts, config = self.parts, self.parts.config
        self._broken = asyncio.get_running_loop().create_future()
        require_memory_directory(config, parts.layout)
        prepare_runtime_directory(config.runtime_dir)
        parts.worker_host.open(parts.identity.incarnation)
        parts.engine_socket.open(parts.identity.incarnation, config.runtime_dir, self._api)
        self._open_peers()
        self._http = await open_http(config.http, self._app, shutdown_s=self._closing_part_s)
        self._background(self._http.wait_ended(), "http")
        self._announce(self._http.url)
        self._background(self._ticks(), "ticks")
        await self._create_memory()
        parts.worker_host.start(self._worker_setup, own_processes=not parts.adopted)
        self._background(parts.worker_host.failed(), "workers")

    async def failed(self) -> None:
        """Raise when a part that the daemon cannot do without has ended."""
        if self._broken is not None:
            await asyncio.shield(self._broken)

    async def drain(self) -> None:
        """Admit nothing more, let rooms end, abort those that do not end in time (`timeouts.shutdown_rooms_s`)."""
        limit_s = self.parts.config.timeouts.shutdown_rooms_s
        self.admission.close("the daemon is shutting down")
        leaving = [] if self._announcer is None else [self._background(self._announcer.leave(), "leave")]
        log.info("draining", rooms=len(self.rooms.open()), limit_s=limit_s)
        if not await self._wait_idle(limit_s):
            log.warning("rooms_aborted", rooms=len(self.rooms.open()), limit="timeouts.shutdown_rooms_s")
            for room in self.rooms.open():
                await self.rooms.cancel(room, "the daemon was shut down")
            await self._wait_idle(self._closing_part_s)
        elif leaving:
            await asyncio.wait(leaving, timeout=self._closing_part_s)

    async def close(self) -> None:
        """Close everything, in the order in which nothing is pulled from under anybody. Harmless when nothing is open.

        What goes wrong on the way is raised when everything has been closed.
        """
        parts = self.parts
        async with AsyncExitStack() as last_first:
            last_first.callback(parts.memory.close)
            last_first.callback(remove_endpoint, parts.config.runtime_dir, parts.identity.incarnation)
            last_first.callback(parts.engine_socket.close)
            for close in self._closers:
                last_first.push_async_callback(_call, close)
            last_first.push_async_callback(self.peers.close, min(1.0, self._closing_part_s))
            last_first.push_async_callback(parts.worker_host.close, 2 * self._closing_part_s)
            if self._announcer is not None:
                last_first.push_async_callback(self._announcer.close)
            if self._http is not None:
                last_first.push_async_callback(self._http.stop)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()

    @property
    def _closing_part_s(self) -> float:
        return self.parts.config.timeouts.shutdown_close_s / CLOSING_PARTS

    async def _wait_idle(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while self.rooms.open() and time.monotonic() < deadline_s:  # noqa: ASYNC110 - rooms end in many ways
            await asyncio.sleep(TICK_S)
        return not self.rooms.open()

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
        heartbeat_s = self.parts.config.timeouts.control_heartbeat_s
        next_heartbeat_s = time.monotonic() + heartbeat_s
        while True:
            await asyncio.sleep(TICK_S)
            self.rooms.tick()
            self.admission.tick()
            self.peers.tick()
            self.parts.worker_host.watch()
            self._look_for_announcements()
            if time.monotonic() >= next_heartbeat_s:
                next_heartbeat_s += heartbeat_s
                self.peers.watch()

    # ------------------------------------------------------------------ parts

    def _open_peers(self) -> None:
        config = self.parts.config
        keys = curve_keys(config.control.curve)
        bound = self.peers.open(PeerIdentity(self.parts.identity.incarnation, keys, insecure=config.insecure))
        if bound is not None:
            endpoint = config.control.advertised(bound.endpoint)
            self.control = PeerAddress(endpoint=endpoint, public_key=keys.public if keys else "")

    def _app(self, settings: AppSettings) -> Application:
        return create_daemon_app(
            admission=self.admission,
            rooms=self.rooms,
            status=self,
            metrics_render=lambda: node_metrics(self),
            settings=settings,
        )

    async def _create_memory(self) -> None:
        config, begun_s = self.parts.config, time.monotonic()
        directory = memory_directory(config)
        proofs = Path(config.transports.local.proof_directory)
        await asyncio.to_thread(remove_leftovers, (directory, DEFAULT_DIRECTORY, proofs))
        identity = self.parts.identity
        prefix = file_prefix(identity.instance, f"{identity.role}-{identity.node}") + identity.incarnation
        await self.parts.memory.create(directory, prefix, cancel_s=config.timeouts.shutdown_close_s / 2)
        seconds = round(time.monotonic() - begun_s, 3)
        log.info("memory_created", bytes=self.parts.layout.node_bytes, seconds=seconds)

    def _worker_setup(self, rank: Rank) -> WorkerSetup:
        return self.parts.worker_setup(rank, self.peers.epoch)

    # ------------------------------------------------------------------ the directory

    def _announce(self, url: str) -> None:
        config, identity = self.parts.config, self.parts.identity
        endpoint = DaemonEndpoint(
            role=identity.role,
            instance=identity.instance,
            node=identity.node,
            incarnation=identity.incarnation,
            pid=os.getpid(),
            http_url=url,
            control=self.control,
        )
        write_endpoint(config.runtime_dir, endpoint)
        log.info("daemon_ready", http=url, control=self.control.endpoint if self.control else "")
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

    def _look_for_announcements(self) -> None:
        """Tell the directory ahead of time when this node can work, or cannot any more, or has much more or less room."""
        if self._announcer is None:
            return
        obstacles = self._obstacles()
        if obstacles != self._obstacles_told:
            self._obstacles_told = obstacles
            self._announcer.changed()
        self._announcer.look()

    def _registration(self) -> NodeRegistration:
        if self._http is None:
            raise RuntimeError("HTTP is not open")
        parts, config, reasons = self.parts, self.parts.config, self._obstacles()
        return NodeRegistration(
            instance=config.instance,
            node=config.node,
            role=parts.identity.role,
            incarnation=parts.identity.incarnation,
            http_url=config.http.advertised(self._http.url),
            control=self.control,
            meets_by=control_modes(config, self.control),
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            stage_boundaries=parts.stage_boundaries,
            ranks=tuple(parts.workers.layers),
            fingerprint=fingerprint(parts.geometry),
            geometry=parts.geometry,
            host=tuple(sorted(parts.layout.host_kinds)),
            features=DIRECTORY_FEATURES,
            ready=not reasons,
            reasons=tuple(reason[:REASON_CHARS] for reason in reasons),
            load=self._load(),
        )

    def _load(self) -> Load:
        counts = self.parts.book.counts()
        return Load(
            rooms=len(self.rooms.open()),
            free_pages={space.value: states[PageState.FREE] for space, states in counts.items()},
            total_pages={space.value: sum(states.values()) for space, states in counts.items()},
        )

    # ------------------------------------------------------------------ StatusPort

    @property
    def bootstrap_problem(self) -> str:
        """Why the directory does not know us as we are, or an empty text."""
        return self._announcer.problem if self._announcer else ""

    def readiness(self) -> Readiness:
        """Whether new rooms can be admitted, and every reason why not."""
        refusal = self._announcer.refusal if self._announcer else ""
        reasons = [*self._obstacles(), self.admission.problem(), refusal and f"bootstrap refuses this node: {refusal}"]
        return Readiness(ready=not any(reasons), reasons=tuple(filter(None, reasons)))

    def _obstacles(self) -> list[str]:
        """What keeps every room out, whatever is free: bootstrap need not ask. A node that is full it does ask, and is told."""
        candidates = (self.parts.memory.problem, self.parts.workers.missing(), self.admission.closed)
        return [reason for reason in candidates if reason]

    def status(self) -> dict[str, Any]:
        """Everything an operator wants to see."""
        return node_status(self)


async def _call(close: Callable[[], Awaitable[None] | None]) -> None:
    waiting = close()
    if waiting is not None:
        await waiting
