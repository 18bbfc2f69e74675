"""The rank workers of a node: where each stands, how it is reached, and what peers are told of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from kvbridge.api.status import RankStatus
from kvbridge.core.errors import BridgeError, NotReadyError, ProtocolError
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.messages import RankDescription
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.core.wire.worker_messages import (
    NodeToWorker,
    Shutdown,
    TransportsNotBuilt,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
)
from kvbridge.telemetry.facts import MemoryRegistered, SuccessorsFailed
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)


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
    """Share of its memory that is registered."""
    error: str = ""
    epoch: int = 0
    """The epoch of the endpoints in its description."""
    processes: int = 0
    """Processes that have said hello for this rank."""


class WorkerSet:
    """All rank workers of a node. Called from the event loop's thread only."""

    def __init__(self, layers: dict[Rank, tuple[int, ...]], events: EventStream) -> None:
        self._workers = {rank: _Worker(rank, held) for rank, held in layers.items()}
        self._links: dict[str, _Worker] = {}
        self._events = events
        self._post: Callable[[str, NodeToWorker], None]

    def connect(self, post: Callable[[str, NodeToWorker], None]) -> None:
        """Say how workers are reached, before one comes: `post(link, message)` raises BridgeError when that is gone."""
        self._post = post

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""
        return {rank: worker.layers for rank, worker in self._workers.items()}

    def missing(self) -> str:
        """Say why not every rank can work now, or return an empty text."""
        words = [self._lack(worker) for worker in self._workers.values() if worker.state is not WorkerState.READY]
        return "; ".join(words)

    @staticmethod
    def _lack(worker: _Worker) -> str:
        if worker.state is WorkerState.STARTING:
            return f"rank worker {worker.rank} is starting ({worker.progress:.0%} of its memory is registered)"
        return f"rank worker {worker.rank} is not there" + (f": {worker.error}" if worker.error else "")

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
        worker = self._worker(rank)
        if worker.state is not WorkerState.READY:
            raise NotReadyError(f"nothing to attach to yet: {self._lack(worker)}; try again shortly")
        return worker.device

    def epoch(self, rank: Rank) -> int:
        """Return the epoch of the endpoints that a rank gives out."""
        return self._worker(rank).epoch

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order; it is dropped when the worker is gone, whose end is reported separately."""
        worker = self._worker(rank)
        if worker.link:
            self.answer(worker.link, message)

    def answer(self, link: str, message: NodeToWorker) -> None:
        """Send over a connection. Never raises: its end is reported separately."""
        try:
            self._post(link, message)
        except BridgeError as error:
            log.warning("worker_unreachable", worker=link, code=error.code, reason=str(error))

    def rank_of(self, link: str) -> Rank | None:
        """Return the rank that a connection serves, None for one that was replaced or never said hello."""
        worker = self._links.get(link)
        return worker.rank if worker is not None else None

    def link_of(self, rank: Rank) -> str:
        """Return the link that serves a rank; empty when none does."""
        return self._worker(rank).link

    def hello(self, link: str, message: WorkerHello, setup: Callable[[Rank], WorkerSetup]) -> str:
        """Tell a new worker what to serve, `setup(rank)`. Returns the connection that it replaces, or an empty text.

        Raises ProtocolError for a rank of another node (the worker is told to end), and all that `setup` raises.
        """
        if message.rank not in self._workers:
            self.answer(link, Shutdown())
        worker = self._worker(message.rank)
        told = setup(message.rank)
        replaced = worker.link if worker.link != link else ""
        self._links.pop(worker.link, None)
        self._links[link] = worker
        worker.state, worker.link, worker.pid = WorkerState.STARTING, link, message.pid
        worker.description, worker.device, worker.progress, worker.error = None, (), 0.0, ""
        worker.processes += 1
        self.answer(link, told)
        return replaced

    def progress(self, message: WorkerProgress) -> None:
        """Note that a worker has registered more of its memory."""
        worker = self._worker(message.rank)
        worker.progress = min(1.0, message.done_bytes / message.total_bytes) if message.total_bytes else 1.0
        self._events.emit(MemoryRegistered(rank=message.rank, share=worker.progress))

    def ready(self, message: WorkerReady) -> None:
        """Take a worker's description. Raises InvalidInputError when its memory is in more pieces than peers can be told of."""
        worker = self._worker(message.rank)
        if not worker.link:
            raise ProtocolError(f"rank worker {message.rank} says ready without having said hello; it is ignored")
        worker.packed = pack_rank(message.description)
        worker.state, worker.description, worker.error = WorkerState.READY, message.description, ""
        worker.epoch, worker.device = message.epoch, message.device

    def not_built(self, message: TransportsNotBuilt) -> None:
        """Note that a worker cannot build successors of its transports, and tries again."""
        self._worker(message.rank).error = message.error
        self._events.emit(SuccessorsFailed(rank=message.rank, transports=message.transports, reason=message.error))

    def failed(self, message: WorkerFailed) -> None:
        """Note that a worker cannot serve; its process is about to end."""
        worker = self._worker(message.rank)
        worker.state, worker.description, worker.error = WorkerState.ABSENT, None, message.message
        log.error("worker_failed", rank=str(message.rank), code=message.code, reason=message.message)

    def gone(self, rank: Rank, reason: str) -> None:
        """Note that a worker's process has ended. Harmless when that was said before."""
        worker = self._worker(rank)
        self._links.pop(worker.link, None)
        worker.state, worker.link, worker.pid, worker.description = WorkerState.ABSENT, "", 0, None
        worker.device, worker.progress = (), 0.0
        worker.error = worker.error or reason

    def _worker(self, rank: Rank) -> _Worker:
        worker = self._workers.get(rank)
        if worker is None:
            raise ProtocolError(
                f"rank {rank} does not live on this node, which has {', '.join(map(str, self._workers))}; "
                "its worker was started with wrong arguments"
            )
        return worker

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
