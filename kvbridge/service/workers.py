"""The rank workers of a node, as the node sees them.

Owns: which rank's worker is there, in which life, with what memory; and the words for what is missing. Must not know: how a
worker is started or restarted (the daemon's supervisor), what rooms do with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import structlog

from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import (
    NodeToWorker,
    RankDescription,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
)

log = structlog.get_logger(__name__)


class WorkerState(StrEnum):
    """Where a rank's worker stands."""

    ABSENT = "absent"
    STARTING = "starting"
    READY = "ready"


@dataclass
class _Worker:
    rank: Rank
    layers: tuple[int, ...]
    state: WorkerState = WorkerState.ABSENT
    link: str = ""
    """The name of its connection; a restarted worker has another."""
    pid: int = 0
    description: RankDescription | None = None
    progress: float = 0.0
    """Share of its memory that is registered."""
    error: str = ""
    restarts: int = 0
    heard_s: float = 0.0


class WorkerSet:
    """All rank workers of a node. Called from the event loop's thread only."""

    def __init__(
        self,
        layers: dict[Rank, tuple[int, ...]],
        *,
        send: Callable[[str, NodeToWorker], None],
        setup: Callable[[Rank], WorkerSetup],
        on_progress: Callable[[Rank, float], None],
    ) -> None:
        """`send(link, message)`; `setup(rank)` says what a worker is to serve."""
        self._workers = {rank: _Worker(rank, held) for rank, held in layers.items()}
        self._links: dict[str, _Worker] = {}
        self._send = send
        self._setup = setup
        self._on_progress = on_progress

    # ------------------------------------------------------------------ what services ask

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""
        return {rank: worker.layers for rank, worker in self._workers.items()}

    def missing(self) -> str:
        """Why not every rank can work now, or an empty text."""
        words = [self._lack(worker) for worker in self._workers.values() if worker.state is not WorkerState.READY]
        return "; ".join(words)

    @staticmethod
    def _lack(worker: _Worker) -> str:
        if worker.state is WorkerState.STARTING:
            return f"rank worker {worker.rank} is starting ({worker.progress:.0%} of its memory is registered)"
        return f"rank worker {worker.rank} is not there" + (f": {worker.error}" if worker.error else "")

    def manifests(self) -> tuple[RankManifest, ...]:
        """Of every rank that is ready, in the order in which they are introduced to peers."""
        return tuple(description.manifest for description in self.descriptions())

    def descriptions(self) -> tuple[RankDescription, ...]:
        """What a peer needs to write to our ranks."""
        return tuple(worker.description for worker in self._workers.values() if worker.description is not None)

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order; dropped when the worker is gone, whose end is reported separately."""
        worker = self._workers[rank]
        if worker.link:
            self._send(worker.link, message)

    def rank_of(self, link: str) -> Rank | None:
        """Return whose worker a connection is, None for one that has been replaced or never said hello."""
        worker = self._links.get(link)
        return worker.rank if worker is not None and worker.link == link else None

    # ------------------------------------------------------------------ what workers say

    def hello(self, link: str, message: WorkerHello) -> str:
        """A worker came: tell it what to serve. Returns the connection that it replaces, or an empty text."""
        worker = self._workers.get(message.rank)
        if worker is None:
            log.error("unknown_worker", rank=str(message.rank), pid=message.pid)
            return ""
        replaced = worker.link
        worker.state, worker.link, worker.pid = WorkerState.STARTING, link, message.pid
        worker.description, worker.progress, worker.error = None, 0.0, ""
        self._links[link] = worker
        self._send(link, self._setup(message.rank))
        return replaced

    def progress(self, message: WorkerProgress) -> None:
        """A worker registered more of its memory."""
        worker = self._workers[message.rank]
        worker.progress = message.done_bytes / message.total_bytes if message.total_bytes else 1.0
        self._on_progress(message.rank, worker.progress)

    def ready(self, message: WorkerReady) -> None:
        """A worker can serve."""
        worker = self._workers[message.rank]
        worker.state, worker.description, worker.error = WorkerState.READY, message.description, ""
        log.info("worker_ready", rank=str(message.rank), pid=message.pid)

    def failed(self, message: WorkerFailed) -> None:
        """A worker cannot serve; its process is about to end."""
        worker = self._workers[message.rank]
        worker.state, worker.error = WorkerState.ABSENT, message.message
        log.error("worker_failed", rank=str(message.rank), code=message.code, reason=message.message)

    def gone(self, rank: Rank, reason: str) -> None:
        """A worker's process ended."""
        worker = self._workers[rank]
        self._links.pop(worker.link, None)
        worker.state, worker.link, worker.pid, worker.description = WorkerState.ABSENT, "", 0, None
        worker.error = worker.error or reason
        worker.restarts += 1

    def status(self) -> list[dict[str, object]]:
        """For `/status`."""
        return [
            {
                "rank": str(worker.rank),
                "state": worker.state,
                "pid": worker.pid,
                "layers": len(worker.layers),
                "registered": round(worker.progress, 3),
                "restarts": worker.restarts,
                "error": worker.error,
                "transports": [endpoint.transport for endpoint in worker.description.endpoints] if worker.description else [],
            }
            for worker in self._workers.values()
        ]

    def __repr__(self) -> str:
        return f"<WorkerSet {', '.join(f'{worker.rank} {worker.state}' for worker in self._workers.values())}>"
