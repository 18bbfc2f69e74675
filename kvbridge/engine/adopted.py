"""Adopted pools: the engine keeps its own tensors and page ids, and the rank worker lives in the engine's process.

Owns: the worker threads of this process and the description of the engine's tensors. Must not know: what is in the pages.

The worker runs on a thread of its own and does what a worker process does; the node still decides everything and owns the host
pool. The tensors must stay where they are until `close`, and pages that were given to a room belong to it until the
event that says so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog
import torch

from kvbridge.control.addresses import WORKER_SOCKET
from kvbridge.core.errors import BridgeError, DeadlineError, InvalidInputError
from kvbridge.core.geometry.components import Component
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind, Rank, Role
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment, WorkerEnd, attach
from kvbridge.engine.link import EngineLink
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.telemetry.logs import leave_standard_output
from kvbridge.worker.lifecycle import NoNodeError, UnclosedError, serve_rank
from kvbridge.worker.link import NodeLink, open_node_link

log = structlog.get_logger(__name__)

SETUP_TIMEOUT_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Pauses before a worker that has ended begins anew; each is twice as long as the one before, until it has served for a while."""
ENDED = "its node has ended it"
"""Which it does when it ends itself."""
CLOSE_TIMEOUT_S = 30.0
"""Longest wait for a worker's end: as long as its transports may take to close by default, and some seconds."""

KEEP_TENSORS = "it may still read and write the adopted tensors, so keep them where they are and end this process"


def adopted_region(component: Component, layer: int, pages: torch.Tensor, *, lanes: tuple[int, int] = (0, 1)) -> Region:
    """Describe one component of one layer in the engine's own tensor.

    `pages`: uint8 [page_count, page_bytes] with contiguous rows, the first dimension of any stride; not moved or freed while
    adopted. `lanes`: the [start, stop) of the component's lanes that the tensor holds. Raises InvalidInputError for another form.
    """
    if pages.dtype is not torch.uint8 or pages.ndim != 2 or pages.stride(1) != 1:
        raise InvalidInputError(
            f"{component.kind} layer {layer}: adopted pages are a uint8 tensor [page_count, page_bytes] with contiguous rows, "
            f"got {pages.dtype} of shape {tuple(pages.shape)} and strides {pages.stride()}"
        )
    return Region(
        component=component.kind,
        layer=layer,
        space=component.space,
        memory=MemoryKind.VRAM if pages.is_cuda else MemoryKind.DRAM,
        device=pages.device.index or 0,
        extent_addresses=(pages.data_ptr(),),
        pages_per_extent=pages.shape[0],
        page_count=pages.shape[0],
        page_bytes=pages.shape[1],
        page_stride_bytes=pages.stride(0),
        lane_start=lanes[0],
        lane_stop=lanes[1],
    )


class AdoptedWorker:
    """The rank worker of one rank, on a thread of the engine's process."""

    def __init__(self, runtime_dir: Path, rank: Rank, regions: Sequence[Region]) -> None:
        """Start it; it reports to the node by itself, and begins anew whenever it has ended."""
        self.rank = rank
        self._ends: deque[WorkerEnd] = deque()
        self._link: NodeLink | None = None
        self._unclosed = ""
        """Why something of it may still move bytes, though its thread has ended."""
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(runtime_dir / WORKER_SOCKET, regions), name=f"kvbridge-{rank}", daemon=True
        )
        self._thread.start()

    @property
    def node(self) -> str:
        """The incarnation of the node that it serves now; empty while there is none."""
        link = self._link
        return link.daemon if link is not None else ""

    def ends(self) -> list[WorkerEnd]:
        """Return how it has ended since the last call; for one thread."""
        return [self._ends.popleft() for _ in range(len(self._ends))]

    def _run(self, socket: Path, regions: Sequence[Region]) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            began_s = time.monotonic()
            try:
                end = self._serve(socket, regions)
            except UnclosedError as error:
                self._unclosed = str(error)
                log.error("adopted_worker_stuck", rank=str(self.rank), reason=str(error))
                return  # its transports may still reach the tensors, so there must not be a second one
            if self._stop.is_set():
                return
            if end is not None:
                self._ends.append(end)
                log.warning("adopted_worker_ended", rank=str(self.rank), reason=end.reason)
            pause_s = (
                FIRST_PAUSE_S if time.monotonic() - began_s > LONGEST_PAUSE_S else min(2 * pause_s, LONGEST_PAUSE_S)
            )
            self._stop.wait(pause_s)

    def _serve(self, socket: Path, regions: Sequence[Region]) -> WorkerEnd | None:
        """Serve until that ends; None when it did not begin. Raises UnclosedError when it holds on to something."""
        try:
            link = open_node_link(socket, self.rank)
        except BridgeError as error:
            log.info("no_node", rank=str(self.rank), code=error.code, reason=str(error))
            return None
        reason = ENDED
        self._link = link
        try:
            serve_rank(link, self.rank, setup_timeout_s=SETUP_TIMEOUT_S, adopted=regions, stopped=self._stop.is_set)
        except NoNodeError:
            return None
        except UnclosedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine has to hear that its worker has ended
            reason = str(error) or type(error).__name__
        finally:
            node, node_gone, self._link = link.daemon, link.daemon_ended, None
            link.close()
        return WorkerEnd(self.rank, reason, node, node_gone=node_gone or reason == ENDED)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop it and wait for its end; afterwards nothing of it moves a byte.

        Raises DeadlineError when it does not end in time, and UnclosedError when it has ended without closing everything, however
        often it is called: then the tensors must stay where they are until this process ends.
        """
        self._stop.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"the rank worker of {self.rank} in this process did not end within {timeout_s:g} s; {KEEP_TENSORS}"
            )
        if self._unclosed:
            raise UnclosedError(
                f"the rank worker of {self.rank} in this process is not closed: {self._unclosed}; {KEEP_TENSORS}"
            )


def adopt(
    runtime_dir: Path | str,
    role: Role,
    regions: Mapping[Rank, Sequence[Region]],
    *,
    call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    on_progress: Progress | None = ignore_progress,
) -> Attachment:
    """Serve ranks out of this process's own tensors and attach to their node, as `Engine.adopt` says."""
    leave_standard_output()
    with ExitStack() as stack:
        workers = [AdoptedWorker(Path(runtime_dir), rank, ours) for rank, ours in regions.items()]
        for worker in workers:
            stack.callback(worker.close)
        link = EngineLink(runtime_dir, timeout_s=call_timeout_s)
        attachment = attach(link, role, ranks=tuple(regions), adopted=regions, on_progress=on_progress)
        attachment.closers.extend(worker.close for worker in workers)
        attachment.worker_ends.extend(worker.ends for worker in workers)
        stack.pop_all()
    return attachment
