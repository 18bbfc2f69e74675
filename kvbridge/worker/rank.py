"""Common to a rank worker's parts: the rank's identity, its link to the node, what contains defects, the pauses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from kvbridge.control.local import LocalClient
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.ids import Rank
from kvbridge.core.process import Clock
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.messages import REASON_CHARS, SharedRegion
from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode
from kvbridge.pool.memory.layout import Extent

log = structlog.get_logger(__name__)

NodeLink = LocalClient[NodeToWorker, WorkerToNode]
"""Only the thread that serves the rank uses it."""


def open_node_link(path: Path) -> NodeLink:
    """Connect to the node that listens for rank workers on `path`."""
    return LocalClient(path, NODE_TO_WORKER, WORKER_TO_NODE)


@dataclass(frozen=True)
class RankIdentity:
    """The rank that a worker serves, and its memory at addresses of this process."""

    geometry: ModelGeometry
    manifest: RankManifest
    memory: tuple[Extent, ...]
    """The pieces to register with transports."""
    transports: tuple[str, ...]
    """Transport names in order of preference."""
    epoch: int = 0
    """The epoch of the first endpoints that are given out."""
    made: tuple[SharedRegion, ...] = ()
    """Device memory that this worker has made, as engines open it."""
    twins: tuple[Region, ...] = ()
    """The node's host copies of device pages; in no manifest, and registered with no transport."""
    stage_tp_ranks: tuple[int, ...] = ()
    """Tensor-parallel indices of the ranks of this stage on this node, which share the host copies."""
    copy_backend: str = "kernel"
    """`tier.host.backend`."""

    @property
    def rank(self) -> Rank:
        """The rank's place in its instance."""
        return self.manifest.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Time limits of a worker's work."""

    transfer_s: float
    """Limit of a transfer, from its submission."""
    close_s: float
    """Limit of closing all transports and ending the GPU's copies, together."""


@contextmanager
def contained(work: str, **names: object) -> Iterator[None]:
    """Let BridgeErrors pass; log any other exception with its traceback and `names`, and raise a BridgeError in its place."""
    try:
        yield
    except BridgeError:
        raise
    except Exception as error:
        log.exception("work_failed", work=work, **names)
        raise BridgeError(f"{work} failed with {type(error).__name__}: {error}; please report it") from error


@contextmanager
def logged(event: str, work: str, **names: object) -> Iterator[None]:
    """Log any error of work whose failure concerns nobody else, and go on."""
    try:
        with contained(work, **names):
            yield
    except BridgeError as error:
        log.error(event, **names, code=error.code, reason=str(error))


def answered(error: BridgeError | None) -> dict[str, Any]:
    """Return the fields of an answer to the node that say how work has failed; none when it has not."""
    return {} if error is None else {"error_code": error.code, "error": (str(error) or repr(error))[:REASON_CHARS]}


BUSY_PAUSE_S = 0.0001
"""The longest pause; on few cores, sleeping is better than spinning."""
SHORTEST_PAUSE_S = 0.00002
PART_OF_WAITING = 0.02
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1_000


class Pauses:
    """The length of a worker's pauses while nothing moves. Used by one thread.

    A GPU sends no signal when its work ends, so a worker sees the end of a transfer, or a point in an engine's stream, only when it
    polls. Where a GPU copies, a pause is a fiftieth of the time since something moved last. A transfer of 2 ms is reported within
    40 us, and an engine that computes for a second is polled no more often than a copy by the processor.
    """

    def __init__(self, clock: Clock, *, with_gpu: bool) -> None:
        """`with_gpu`: whether a GPU copies for this worker."""
        self._clock = clock
        self._with_gpu = with_gpu
        self._moved_s = clock()

    def sleep_precisely(self) -> None:
        """Have the calling thread wake on time: by default Linux lets a thread sleep for up to 50 us longer."""
        if self._with_gpu:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)

    def moved(self) -> None:
        """Note that something began or ended."""
        self._moved_s = self._clock()

    def next_s(self) -> float:
        """Return the length of the pause to make now."""
        if not self._with_gpu:
            return BUSY_PAUSE_S
        waited_s = self._clock() - self._moved_s
        return min(BUSY_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s * PART_OF_WAITING))
