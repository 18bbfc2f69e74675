"""The rank workers of a node: their socket and their processes, the state of each, and the watch over them."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import structlog

from kvbridge.api.status import RankStatus
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.local import LocalServer
from kvbridge.control.unix_sockets import WORKER_SOCKET, PeerProcess
from kvbridge.core.errors import BridgeError, NotReadyError, ProtocolError
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import NodeIdentity, Rank
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE, pack_rank
from kvbridge.core.wire.messages import Heartbeat, RankDescription, SharedRegion
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    EndpointsRevoked,
    NodeToWorker,
    Shutdown,
    TransportsNotBuilt,
    WorkerClosed,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
    WorkerToNode,
)
from kvbridge.node.worker_process import worker_process
from kvbridge.processes import ChildEnd, EndCause, SupervisedChild
from kvbridge.telemetry.facts import EventStream, MemoryRegistered, SuccessorsFailed, WorkerLost, WorkerStarted
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

ABSENT_AFTER_S = 0.5
"""A node whose last tick is longer ago was itself stopped or starved: messages of its workers are still unread."""

Reports = Mapping[type, Callable[[Any], None]]
"""Handler of each kind of report about rooms and peers that workers of this role send."""


class WorkerState(StrEnum):
    """The state of a rank's worker."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"


@dataclass(eq=False)
class _Worker:
    rank: Rank
    layers: tuple[int, ...]
    state: WorkerState = WorkerState.ABSENT
    link: str = ""
    """The name of its connection; a restarted worker has another."""
    pid: int = 0
    description: RankDescription | None = None
    packed: bytes = b""
    """The description, as peers get it."""
    device: tuple[SharedRegion, ...] = ()
    """Device memory that the worker has made; empty when the node or an engine owns it."""
    progress: float = 0.0
    """The registered share of its memory."""
    error: str = ""
    epoch: int = 0
    """The epoch of the endpoints in its description."""
    processes: int = 0
    """Processes that have said hello for this rank."""
    heard_s: float = math.inf
    """Time of its last message; infinite while none is expected."""
    completed: list[CloseRoom] = field(default_factory=list)
    """Completed rooms that the worker can forget: news that goes with the next message, or at the next tick."""
    unended: dict[str, PeerProcess] = field(default_factory=dict)
    """By link, processes of engines whose workers are gone: peers may still write to endpoints there."""
    revoked: EndpointsRevoked | None = None
    """A report that holds only when the processes in `unended` have ended."""
    child: SupervisedChild | None = None
    """Its process; None when an engine brings the worker."""

    def reset(self, state: WorkerState, link: str = "", pid: int = 0) -> None:
        self.state, self.link, self.pid = state, link, pid
        self.description, self.device, self.progress = None, (), 0.0
        self.completed.clear()

    @property
    def lack(self) -> str:
        """Why the worker cannot work; only for one that is not ready."""
        if self.state is WorkerState.STARTING:
            return f"rank worker {self.rank} is starting ({self.progress:.0%} of its memory is registered)"
        return f"rank worker {self.rank} is not there" + (f": {self.error}" if self.error else "")


class WorkerSet:
    """All rank workers of a node. Built and used in one running loop."""

    def __init__(
        self,
        config: PrefillConfig | DecodeConfig,
        layers: dict[Rank, tuple[int, ...]],
        events: EventStream,
        seldom: Seldom,
    ) -> None:
        """`seldom` limits the log lines of the libraries below the workers."""
        self.layers = layers
        """The global layer ids of every rank of the node."""
        self._config, self._events, self._seldom = config, events, seldom
        self._workers = {rank: _Worker(rank, held) for rank, held in layers.items()}
        self._links: dict[str, _Worker] = {}
        self._early: dict[str, WorkerHello] | None = {}
        """By link, workers of engines that came before the memory was made; None from then on."""
        self._server: LocalServer[WorkerToNode, NodeToWorker]
        self._open = ExitStack()
        self._setup: Callable[[Rank], WorkerSetup]
        self._on_ready: Callable[[Rank], None]
        self._on_gone: Callable[[Rank, str], None]
        self._reports: Reports
        self._looked_s = math.inf
        self._closing = False

    # ------------------------------------------------------------------ from start to end

    def serve(self, on_ready: Callable[[Rank], None], on_gone: Callable[[Rank, str], None], reports: Reports) -> None:
        """Set the callbacks. Call before `open`.

        `on_ready(rank)`: a worker is ready, perhaps with new endpoints. `on_gone(rank, reason)`: a worker is gone, and with it
        everything that it had under way.
        """
        self._on_ready, self._on_gone, self._reports = on_ready, on_gone, reports

    def open(self, incarnation: str) -> None:
        """Listen for workers. Raises ConflictError when another daemon uses the runtime directory."""
        self._server = LocalServer(
            incarnation,
            self._config.runtime_dir / WORKER_SOCKET,
            WORKER_TO_NODE,
            NODE_TO_WORKER,
            on_message=self.hear,
            on_gone=self._link_gone,
            on_refused=self._events.frame_refused,
        )
        self._open.callback(self._server.close)

    def start(self, setup: Callable[[Rank], WorkerSetup], identity: NodeIdentity | None) -> None:
        """Start a process for each rank, or take in the workers of engines. The memory has been made.

        `setup(rank)`: the setup of a worker. `identity`: for the workers' log; None when engines bring the workers.
        """
        self._setup = setup
        if identity is not None:
            config = self._config
            options = {
                "socket": str(config.runtime_dir / WORKER_SOCKET),
                "setup-timeout-s": str(config.timeouts.worker_start_s),
                "log-level": config.telemetry.log_level.value,
                **{name: str(getattr(identity, name)) for name in ("role", "instance", "node")},
            }
            for worker in self._workers.values():
                ended = partial(self._process_gone, worker)
                worker.child = worker_process(worker.rank, options, self._seldom, ended)
                worker.child.start()
        early, self._early = self._early or {}, None
        for link, message in early.items():
            self.hear(link, message)

    async def failed(self) -> None:
        """Raise when a defect has ended the supervision of a process. Returns at once when engines bring the workers."""
        await asyncio.gather(*(worker.child.failed() for worker in self._workers.values() if worker.child is not None))

    async def close(self, timeout_s: float) -> None:
        """End every worker; kill those that do not end in time."""
        self._closing = True
        for rank in self.layers:
            self.send(rank, Shutdown())
        why = "it did not end in time (timeouts.shutdown_close_s)"
        children = {rank: worker.child for rank, worker in self._workers.items() if worker.child is not None}
        killed = await asyncio.gather(*(child.stop(timeout_s, why) for child in children.values()))
        for rank, was_killed in zip(children, killed, strict=True):
            if was_killed:
                log.warning("worker_killed", rank=str(rank), why=why)
        self._open.close()

    def watch(self) -> None:
        """Give up workers that hang. The node starts its own again, and engines bring theirs again. Call it often."""
        timeouts, now_s = self._config.timeouts, time.monotonic()
        absent_s, self._looked_s = now_s - self._looked_s, now_s
        limits_s = {
            WorkerState.STARTING: (timeouts.worker_start_s, "timeouts.worker_start_s"),
            WorkerState.READY: (timeouts.worker_silence_s, "timeouts.worker_silence_s"),
        }
        for worker in self._workers.values():
            self._send_completed(worker)
            if absent_s > ABSENT_AFTER_S:  # this process was suspended: the worker was not silent in that time
                worker.heard_s = min(now_s, worker.heard_s + absent_s)
            limit_s, key = limits_s.get(worker.state, (math.inf, ""))
            silent_s = now_s - worker.heard_s
            if silent_s > limit_s:
                worker.heard_s = math.inf
                self._end(worker, f"it said nothing for {silent_s:.1f} s (limit: {key})")

    # ------------------------------------------------------------------ state

    def missing(self) -> str:
        """Return why not every rank can work now; empty when every rank can."""
        return "; ".join(worker.lack for worker in self._workers.values() if worker.state is not WorkerState.READY)

    def states(self) -> dict[Rank, WorkerState]:
        """Return the state of every rank's worker."""
        return {rank: worker.state for rank, worker in self._workers.items()}

    def manifests(self) -> tuple[RankManifest, ...]:
        """Return the manifests of the ranks that are ready, in the order in which peers get them."""
        ready = (worker.description for worker in self._workers.values())
        return tuple(description.manifest for description in ready if description is not None)

    def packed(self) -> tuple[bytes, ...]:
        """Return the descriptions of the ranks that are ready, as peers get them."""
        return tuple(worker.packed for worker in self._workers.values() if worker.description is not None)

    def device(self, rank: Rank) -> tuple[SharedRegion, ...]:
        """Return the device memory that a rank's worker has made, as engines open it. Raises NotReadyError until it is ready."""
        worker = self._workers[rank]
        if worker.state is not WorkerState.READY:
            raise NotReadyError(f"nothing to attach to yet: {worker.lack}; try again shortly")
        return worker.device

    def epoch(self, rank: Rank) -> int:
        """Return the epoch of the endpoints that a rank gives out."""
        return self._workers[rank].epoch

    def has_endpoints(self, rank: Rank) -> bool:
        """Return whether peers may reach a rank's memory: it has a worker, or an earlier worker's process has not ended."""
        worker = self._workers[rank]
        return bool(worker.link or worker.unended)

    def status(self) -> tuple[RankStatus, ...]:
        """Return the state of every rank, for `/status`."""
        return tuple(
            RankStatus(
                rank=str(worker.rank),
                state=worker.state,
                pid=worker.pid,
                layers=len(worker.layers),
                registered=round(worker.progress, 3),
                restarts=max(0, worker.processes - 1),
                error=worker.error,
                transports=tuple(
                    endpoint.transport for endpoint in (worker.description.endpoints if worker.description else ())
                ),
            )
            for worker in self._workers.values()
        )

    # ------------------------------------------------------------------ messages

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order. An order to a worker that is gone is dropped: `on_gone` reports the worker.

        The end of a completed room waits for the next message or tick, because it is no reason to wake the worker.
        """
        worker = self._workers[rank]
        if not worker.link:
            return
        if isinstance(message, CloseRoom) and message.all_sent:
            worker.completed.append(message)
            return
        if worker.completed:
            self._send_completed(worker)
        self._post(worker.link, message)

    def _send_completed(self, worker: _Worker) -> None:
        completed, worker.completed = worker.completed, []
        with suppress(BridgeError):  # a worker that is gone has forgotten them
            for message in completed:
                self._server.send(worker.link, message)

    def _post(self, link: str, message: NodeToWorker) -> None:
        try:
            self._server.send(link, message)
        except BridgeError as error:
            log.warning("worker_unreachable", worker=link, code=error.code, reason=str(error))

    def hear(self, link: str, message: WorkerToNode) -> None:
        """Take a worker's message.

        Raises ProtocolError for a rank of another node, InvalidInputError for memory in more pieces than peers can be told of, and
        all that `setup` raises.
        """
        worker = self._links.get(link)
        if isinstance(message, WorkerHello):
            if self._early is not None:
                self._early[link] = message
            else:
                self._welcome(link, message)
        elif isinstance(message, WorkerClosed):
            self._closed(link)
        elif worker is None or (not isinstance(message, Heartbeat) and message.rank != worker.rank):
            detail = f"{message.type} of worker {link}, which does not serve that rank (any more)"
            self._events.frame_refused("stale", detail)
        else:
            worker.heard_s = time.monotonic()
            self._take(worker, message)

    def _take(self, worker: _Worker, message: WorkerToNode) -> None:
        match message:
            case Heartbeat():
                pass
            case WorkerProgress():
                worker.progress = min(1.0, message.done_bytes / message.total_bytes) if message.total_bytes else 1.0
                self._events.emit(MemoryRegistered(rank=worker.rank, share=worker.progress))
            case WorkerReady():
                worker.packed = pack_rank(message.description)
                worker.state, worker.description, worker.error = WorkerState.READY, message.description, ""
                worker.epoch, worker.device = message.epoch, message.device
                self._events.emit(WorkerStarted(rank=worker.rank, pid=message.pid))
                self._on_ready(worker.rank)
            case WorkerFailed():  # its process is about to end
                worker.state, worker.description, worker.error = WorkerState.ABSENT, None, message.message
                log.error("worker_failed", rank=str(worker.rank), code=message.code, reason=message.message)
            case TransportsNotBuilt():  # it tries again
                worker.error = message.error
                failed = SuccessorsFailed(rank=worker.rank, transports=message.transports, reason=message.error)
                self._events.emit(failed)
            case EndpointsRevoked() if worker.unended:
                worker.revoked = message
            case _:
                self._report(worker.rank, message)

    def _report(self, rank: Rank, message: WorkerToNode) -> None:
        take = self._reports.get(type(message))
        if take is None:
            self._events.frame_refused("wrong_direction", f"{message.type} from rank worker {rank} of this role")
        else:
            take(message)

    # ------------------------------------------------------------------ workers that come and go

    def _welcome(self, link: str, message: WorkerHello) -> None:
        """Tell a new worker what to serve, in place of the one that served its rank."""
        worker = self._workers.get(message.rank)
        if worker is None:
            self._post(link, Shutdown())
            raise ProtocolError(
                f"rank {message.rank} does not live on this node, which has {', '.join(map(str, self._workers))}; "
                "its worker was started with wrong arguments"
            )
        setup = self._setup(worker.rank)
        replaced = worker.link if worker.link != link else ""
        self._links.pop(worker.link, None)
        self._links[link] = worker
        worker.reset(WorkerState.STARTING, link, message.pid)
        worker.error, worker.heard_s = "", time.monotonic()
        worker.processes += 1
        self._post(link, setup)
        if replaced:
            if worker.child is None:
                self._await_end(worker, replaced, self._server.process(replaced))
            self._server.drop(replaced)
            self._on_gone(worker.rank, "another worker took its place")
        if worker.child is None:
            process = self._server.process(link)
            # A process serves a rank again only after closing its former endpoints (`engine/memory.py`).
            for former, before in tuple(worker.unended.items()):
                if process.pid and before.pid == process.pid:
                    self._ended(worker, former)

    def _link_gone(self, link: str, process: PeerProcess) -> None:
        if self._early is not None:
            self._early.pop(link, None)
        worker = self._links.get(link)
        if worker is not None and not self._closing:
            self._end(worker, "its connection ended", process)

    def _closed(self, link: str) -> None:
        """Take leave of an engine's worker that has closed its transports: nothing waits for the end of its process."""
        self._post(link, Shutdown())
        if self._early is not None:
            self._early.pop(link, None)
        worker = self._links.get(link)
        if worker is not None and worker.child is None and not self._closing:
            self._server.drop(link)
            self.gone(worker.rank, "its engine has closed it")

    def _end(self, worker: _Worker, reason: str, process: PeerProcess | None = None) -> None:
        """Give a worker up. The node's own process is killed and started again: only its end proves that it moves nothing more."""
        if worker.child is not None:
            if worker.child.kill(reason):
                log.error("worker_killed", rank=str(worker.rank), pid=worker.child.pid, why=reason)
        elif worker.link:  # an engine's process is not the node's to end
            self._await_end(worker, worker.link, process or self._server.process(worker.link))
            self._server.drop(worker.link)
            self.gone(worker.rank, reason)

    def _await_end(self, worker: _Worker, link: str, process: PeerProcess) -> None:
        """Wait for the end of an engine's process, which closes the endpoints that its worker has left open."""
        worker.unended[link] = process
        followed = process.followed
        log.warning("worker_gone_unclosed", worker=link, rank=str(worker.rank), pid=process.pid, followed=followed)
        process.when_ended(lambda: self._ended(worker, link))

    def _ended(self, worker: _Worker, link: str) -> None:
        worker.unended.pop(link, None)
        if not worker.unended and worker.revoked is not None:
            message, worker.revoked = worker.revoked, None
            self._report(worker.rank, message)

    def _process_gone(self, worker: _Worker, end: ChildEnd) -> None:
        if not self._closing:
            if end.cause is EndCause.START_FAILED:
                log.error("worker_start_failed", rank=str(worker.rank), reason=end.reason)
            else:
                log.error("worker_gone", rank=str(worker.rank), pid=end.pid, reason=end.reason)
            self.gone(worker.rank, end.reason, cause=end.cause.value)

    def gone(self, rank: Rank, reason: str, *, cause: str = "") -> None:
        """Note that a rank's worker is gone, and tell everybody. Harmless when it was noted before."""
        worker = self._workers[rank]
        self._events.emit(WorkerLost(rank=rank, cause=cause, reason=reason))
        self._links.pop(worker.link, None)
        worker.reset(WorkerState.ABSENT)
        worker.error = worker.error or reason
        self._on_gone(rank, reason)
