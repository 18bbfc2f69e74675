"""What the parts of one rank worker have in common: whom it serves, its way to the node, where defects end, and its pauses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from kvbridge.control.local import LocalClient
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.ids import Rank
from kvbridge.core.process import Clock
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode
from kvbridge.pool.memory.extent import Extent

log = structlog.get_logger(__name__)

NodeLink = LocalClient[NodeToWorker, WorkerToNode]
"""Used by the thread that serves the rank only."""


def open_node_link(path: Path) -> NodeLink:
    """Connect to the node that listens for rank workers on `path`."""
    return LocalClient(path, NODE_TO_WORKER, WORKER_TO_NODE)


@dataclass(frozen=True)
class RankIdentity:
    """What a worker serves."""

    geometry: ModelGeometry
    manifest: RankManifest
    memory: tuple[Extent, ...]
    transports: tuple[str, ...]
    """Transport names in order of preference."""
    epoch: int = 0
    """Of the first endpoints that are given out."""
    made: tuple[SharedRegion, ...] = ()
    """Device memory that this worker has made, as engines open it."""
    twins: tuple[Region, ...] = ()
    """The node's twins of device pages, at addresses of this process."""
    stage_tp_ranks: tuple[int, ...] = ()
    """The tensor-parallel indices of the ranks of this stage on this node, who share the twins."""
    copy_backend: str = "kernel"
    """`tier.host.backend`."""

    @property
    def rank(self) -> Rank:
        """The worker's place in its instance."""
        return self.manifest.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of the time that a worker's work may take."""

    transfer_s: float
    """A transfer, from its submission."""
    close_s: float
    """The end of all transports, and of the GPU's copies, together."""


@contextmanager
def contained(work: str, **names: object) -> Iterator[None]:
    """Let deliberate errors pass; log any other exception with its traceback, and raise a BridgeError in its place.

    `work` says what is done, for the message; `names` say for whom, for the log.
    """
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        log.exception("work_failed", work=work, **names)
        raise BridgeError(f"{work} failed with {type(error).__name__}: {error}; please report it") from error


BUSY_PAUSE_S = 0.0001
"""The longest; sleeping beats spinning on few cores."""
SHORTEST_PAUSE_S = 0.00002
PART_OF_WAITING = 0.02
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1_000


class Pauses:
    """How long a worker rests when nothing has moved: as briefly as what it waits for is worth. Used by one thread.

    A GPU ends its work without a word, so the end of a transfer, and the point that an engine's stream has to reach, are seen with
    the next look. Where a GPU copies, a pause is a fiftieth of the time since something moved last: a transfer of 2 ms is answered
    for within 40 us, and an engine that computes for a second is asked no more often than a copy by the processor.
    """

    def __init__(self, clock: Clock, *, with_gpu: bool) -> None:
        """`with_gpu`: a GPU copies for this worker."""
        self._clock = clock
        self._with_gpu = with_gpu
        self._moved_s = clock()

    def sleep_precisely(self) -> None:
        """Have the calling thread wake when it wants to: by default Linux lets it sleep for up to 50 us longer."""
        if self._with_gpu:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)

    def moved(self) -> None:
        """Something began or ended."""
        self._moved_s = self._clock()

    def next_s(self) -> float:
        """How long to rest now."""
        if not self._with_gpu:
            return BUSY_PAUSE_S
        waited_s = self._clock() - self._moved_s
        return min(BUSY_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s * PART_OF_WAITING))
