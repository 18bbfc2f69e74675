"""The memory of an attached engine: the node's pools mapped into this process, or its own tensors and their rank workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import structlog
import torch

from kvbridge.control.unix_sockets import WORKER_SOCKET
from kvbridge.core.errors import BridgeError, DeadlineError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.engine_messages import Attached
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.gpu_memory import HostRegistration
from kvbridge.pool.memory.layout import Progress, RankPart
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from kvbridge.worker.lifecycle import NoNodeError, UnclosedError, serve_rank
from kvbridge.worker.rank import NodeLink, open_node_link

log = structlog.get_logger(__name__)

SETUP_TIMEOUT_S = 120.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 2.0
"""Pauses before an ended rank worker starts again. They double, until a worker has served longer than the longest pause."""
ENDED = "its node has ended it"
"""Reason of a rank worker whose node has shut it down, as a node does when it stops."""
CLOSE_TIMEOUT_S = 30.0
"""Longest wait for the end of a rank worker: the default limit of closing transports, and some seconds."""
KEEP_TENSORS = "it may still read and write the adopted tensors, so keep them where they are and end this process"

_SPACES = {
    ComponentKind.SWA_KV: IndexSpace.SWA,
    ComponentKind.C4_STATE: IndexSpace.SWA,
    ComponentKind.C4_INDEXER_STATE: IndexSpace.SWA,
    ComponentKind.C128_STATE: IndexSpace.REQUEST,
}
"""Index space of each component that is not in `full`."""


class EngineMemory:
    """The pools of an engine's ranks in this process, and views of them. Valid until `close`."""

    def __init__(
        self,
        answer: Attached,
        adopted: Mapping[Rank, Sequence[Region]],
        daemon_user: int | None,
        on_progress: Progress | None,
    ) -> None:
        """`adopted`: the device regions of this process. `on_progress`: as for `Engine.attach`."""
        brought = {rank: _checked(answer, rank, given) for rank, given in adopted.items()}
        devices = {rank: answer.device.get(str(rank), ()) for rank in answer.ranks}
        shared = (*answer.twins, *answer.host, *(region for rank in answer.ranks for region in devices[rank]))
        self.views: dict[Rank, PoolViews] = {}
        with ExitStack() as stack:
            self.mapped = mapped = stack.enter_context(MappedRegions(shared, daemon_user))
            stack.callback(self.views.clear)
            left = iter(mapped.regions)
            self.twins = tuple(islice(left, len(answer.twins)))
            """Host copies of device pages on this node."""
            host = tuple(islice(left, len(answer.host)))
            for rank in answer.ranks:
                owned = tuple(islice(left, len(devices[rank])))
                self.views[rank] = PoolViews(answer.geometry, owned + brought.get(rank, ()) + host)
            gpus = sorted(views.device for views in self.views.values() if views.device is not None)
            if gpus and on_progress is not None:
                extents, gpu = mapped.extents(), gpus[0]
                registration = HostRegistration(mapped.mappings, extents=extents, device=gpu, on_progress=on_progress)
                stack.callback(registration.close)
            self._open = stack.pop_all()

    def close(self) -> None:
        """Drop the views and unmap the memory. Tensors from the views must not be used any more."""
        self._open.close()


def _checked(answer: Attached, rank: Rank, given: Sequence[Region]) -> tuple[Region, ...]:
    """Check an adopted rank's memory here as well as in its worker, so that the caller gets the error."""
    part = RankPart(rank=rank, pp_size=answer.pp_size, tp_size=answer.tp_size, layers=answer.layers[str(rank)])
    on_host = {shared.region.component for shared in answer.host}
    return MemoryPool.adopted(answer.geometry, part, given, exclude=on_host, own_host=answer.own_host).regions


@contextmanager
def present_gpu_kept() -> Iterator[None]:
    """Restore the GPU that the engine has chosen: opening memory makes its GPU the thread's current one."""
    before = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_device(before)


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a rank worker of this process. Its transports are closed, so it moves no byte any more."""

    rank: Rank
    reason: str
    node: str = ""
    """Incarnation of the rank worker's node."""
    node_gone: bool = False
    """Whether this node has ended, too. A living node notices the end, and sends the events of its rooms."""


def adopted_region(
    component: Component | ComponentKind | str,
    layer: int,
    pages: torch.Tensor,
    *,
    lanes: tuple[int, int] = (0, 1),
    in_host: bool = False,
) -> Region:
    """Describe one component of one layer in the engine's own tensor.

    `component`: its kind, such as "mha_kv", or the component of a geometry. `pages`: uint8 [page_count, page_bytes] with contiguous
    rows, the first dimension of any stride; do not move or free them while adopted. `lanes`: the [start, stop) of the component's
    lanes in the tensor. `in_host`: the pages are those of the space `host` (`pools.host.memory: adopted`). Raises InvalidInputError
    for another form.
    """
    if isinstance(component, Component):
        kind, space = component.kind, component.space
    elif component in tuple(ComponentKind):
        kind = ComponentKind(component)
        space = _SPACES.get(kind, IndexSpace.FULL)
    else:
        raise InvalidInputError(f"'{component}' is no component; the kinds are {', '.join(ComponentKind)}")
    if pages.dtype is not torch.uint8 or pages.ndim != 2 or pages.stride(1) != 1:
        raise InvalidInputError(
            f"{kind} layer {layer}: adopted pages are a uint8 tensor [page_count, page_bytes] with contiguous rows, "
            f"got {pages.dtype} of shape {tuple(pages.shape)} and strides {pages.stride()}"
        )
    return Region(
        component=kind,
        layer=layer,
        space=IndexSpace.HOST if in_host else space,
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
    """The rank worker of one rank, on a thread of the engine's process.

    It does the work of a rank-worker process: the node decides everything and owns the host pool. The tensors must stay in place
    until `close`, and pages of a room belong to the room until the event that ends it.
    """

    def __init__(self, runtime_dir: Path, rank: Rank, regions: Sequence[Region]) -> None:
        """Start the thread, which connects to the node, and again after each end of the rank worker."""
        self.rank = rank
        self._ends: deque[WorkerEnd] = deque()
        self._link: NodeLink | None = None
        self._unclosed = ""
        """Why the rank worker may still move bytes, though its thread has ended."""
        self._stop = threading.Event()
        socket = runtime_dir.absolute() / WORKER_SOCKET
        self._thread = threading.Thread(target=self._run, args=(socket, regions), name=f"kvbridge-{rank}", daemon=True)
        self._thread.start()

    @property
    def node(self) -> str:
        """Incarnation of the rank worker's present node; empty without one."""
        link = self._link
        return link.daemon if link is not None else ""

    def ends(self) -> list[WorkerEnd]:
        """Return the ends of the rank worker since the last call; for one thread."""
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
                return  # its transports may still reach the tensors: no second worker
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
        """Serve until the end. Return None when serving did not begin. Raises UnclosedError when something stays open."""
        try:
            link = open_node_link(socket)
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
        except Exception as error:  # noqa: BLE001 - the engine has to hear of every end of its worker
            reason = str(error) or type(error).__name__
        finally:
            node, node_gone, self._link = link.daemon, link.daemon_ended, None
            link.close()
        return WorkerEnd(self.rank, reason, node, node_gone=node_gone or reason == ENDED)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Stop the rank worker and wait for its end. It moves no byte afterwards.

        Raises DeadlineError when it does not end in time, and UnclosedError, at every call, when it has ended without closing
        everything: the tensors must then stay where they are until this process ends.
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
