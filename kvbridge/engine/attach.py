"""How an engine process attaches to its node: the node's answer, the mapped memory, the adopted tensors and their rank workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import structlog
import torch

from kvbridge.control.runtime_directory import WORKER_SOCKET
from kvbridge.core.errors import BridgeError, DeadlineError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.components import Component, ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank, Role
from kvbridge.core.wire.engine_messages import Accepted, Attach, Attached, Detach
from kvbridge.core.wire.features import ENGINE_FEATURES, agree
from kvbridge.engine.link import EngineLink
from kvbridge.engine.streams import StreamOrder
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.adopted_pool import AdoptedPool
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.pool.memory.host_registration import HostRegistration
from kvbridge.pool.memory.layout import RankPart
from kvbridge.pool.memory.sharing import MappedRegions
from kvbridge.telemetry.logs import leave_standard_output
from kvbridge.worker.lifecycle import NoNodeError, UnclosedError, serve_rank
from kvbridge.worker.link import NodeLink, open_node_link

log = structlog.get_logger(__name__)

DEFAULT_CALL_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.05
SETUP_TIMEOUT_S = 120.0
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
"""Pauses before an ended rank worker starts again. Each pause doubles, until a worker has served longer than the longest one."""
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
"""Index space of the components that are not in `full`."""


# ---------------------------------------------------------------------------------------------- attaching


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A rank worker of this process has ended. Its transports are closed, so it moves no byte any more."""

    rank: Rank
    reason: str
    node: str = ""
    """Incarnation of the node that the rank worker served."""
    node_gone: bool = False
    """Whether this node has ended, too. A node that lives knows of the end, and sends the events of its rooms."""


@dataclass
class Attachment:
    """One engine process on one node. Used by one thread. Views are valid until `close`."""

    link: EngineLink
    answer: Attached
    mapped: MappedRegions
    views: dict[Rank, PoolViews]
    """Device pools of each rank that this engine serves, with the node's host pool."""
    order: StreamOrder
    """GPUs of these ranks."""
    twins: tuple[Region, ...] = ()
    """Host copies of device pages on this node."""
    posts: bool = False
    """Adopted pools: calls that are answered by Accepted do not wait, and a refusal arrives as an event."""
    worker_ends: list[Callable[[], list[WorkerEnd]]] = field(default_factory=list)
    """Returns the ends of each rank worker of this process."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Called by `close` before the memory is unmapped (adopted pools: closes the rank workers)."""

    def close(self, *, through: bool) -> None:
        """Drop the views, unmap the memory and leave the node. Tensors that came from the views must not be used any more.

        `through`: no GPU uses the pools any more. The node hears so when everything here is closed. Otherwise the node uses these
        pages again only when this process has ended.
        """
        with _present_gpu_kept(), ExitStack() as stack:  # in the order from bottom to top
            stack.callback(self.link.close)
            if through:
                stack.push(self._detach)
            stack.callback(self.mapped.close)
            stack.callback(self.views.clear)
            stack.callback(self.order.close)
            for close in self.closers:
                stack.callback(close)
            self.closers.clear()

    def _detach(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tell the node that this process uses no page any more, unless something here could not be closed."""
        if kind is not None:
            return
        try:
            self.link.call(Detach(call=self.link.number()), Accepted)
        except BridgeError as failure:  # a node that is there waits for the end of this process
            log.warning("detach_failed", code=failure.code, reason=str(failure))


def attach(
    link: EngineLink,
    role: Role,
    *,
    ranks: Iterable[Rank] = (),
    adopted: Mapping[Rank, Sequence[Region]] | None = None,
    on_progress: Progress | None = ignore_progress,
) -> Attachment:
    """Attach as `Engine.attach` says. `adopted`: device memory that this process brings for its ranks.

    Closes the link when attaching fails.
    """
    leave_standard_output()
    with ExitStack() as stack:
        stack.callback(link.close)
        answer = _call_attach(link, role, tuple(ranks))
        brought = {rank: _adopted_regions(answer, rank, given) for rank, given in (adopted or {}).items()}
        devices = [region for rank in answer.ranks for region in answer.device.get(str(rank), ())]
        with _present_gpu_kept():
            mapped = stack.enter_context(MappedRegions((*answer.twins, *answer.host, *devices), link.daemon_user))
            views = _views(answer, mapped, brought)
            order = StreamOrder(views)
            twins = mapped.regions[: len(answer.twins)]
            attachment = Attachment(link, answer, mapped, views, order, twins, posts=adopted is not None)
            if order.devices and on_progress is not None:
                registration = stack.enter_context(
                    HostRegistration(mapped.mappings, device=order.devices[0], on_progress=on_progress)
                )
                attachment.closers.append(registration.close)
        stack.pop_all()
    return attachment


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


def _views(
    answer: Attached, mapped: MappedRegions, brought: Mapping[Rank, tuple[Region, ...]]
) -> dict[Rank, PoolViews]:
    left = iter(mapped.regions[len(answer.twins) :])
    host = tuple(islice(left, len(answer.host)))
    views = {}
    for rank in answer.ranks:
        owned = tuple(islice(left, len(answer.device.get(str(rank), ()))))
        views[rank] = PoolViews(answer.geometry, owned + brought.get(rank, ()) + host)
    return views


@contextmanager
def _present_gpu_kept() -> Iterator[None]:
    """Opening memory makes its GPU the thread's current one. Restore the GPU that the engine had chosen before."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.current_device() if used else None
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_device(before)


def _call_attach(link: EngineLink, role: Role, ranks: tuple[Rank, ...]) -> Attached:
    """Ask until the node has its memory: a node with adopted memory becomes ready only when its engines have attached."""
    until_s = time.monotonic() + link.timeout_s
    while True:
        try:
            call = Attach(call=link.number(), role=role, ranks=ranks, features=ENGINE_FEATURES)
            answer = link.call(call, Attached)
        except NotReadyError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(RETRY_PAUSE_S)
            continue
        agree(ENGINE_FEATURES, answer.features, us="this engine", them=f"the {role} node of {answer.instance}")
        return answer


def _adopted_regions(answer: Attached, rank: Rank, given: Sequence[Region]) -> tuple[Region, ...]:
    """Check an adopted rank's memory here as well as in its worker, so that the caller gets the error."""
    part = RankPart(rank=rank, pp_size=answer.pp_size, tp_size=answer.tp_size, layers=answer.layers[str(rank)])
    on_host = {shared.region.component for shared in answer.host}
    return AdoptedPool(answer.geometry, part, given, exclude=on_host).regions()


# ---------------------------------------------------------------------------------------------- adopted tensors


def adopted_region(
    component: Component | ComponentKind | str, layer: int, pages: torch.Tensor, *, lanes: tuple[int, int] = (0, 1)
) -> Region:
    """Describe one component of one layer in the engine's own tensor.

    `component`: its kind, such as "mha_kv", or the component of a geometry. `pages`: uint8 [page_count, page_bytes] with contiguous
    rows, the first dimension of any stride; not moved or freed while adopted. `lanes`: the [start, stop) of the component's lanes
    that the tensor holds. Raises InvalidInputError for another form.
    """
    kind = component.kind if isinstance(component, Component) else _kind(component)
    if pages.dtype is not torch.uint8 or pages.ndim != 2 or pages.stride(1) != 1:
        raise InvalidInputError(
            f"{kind} layer {layer}: adopted pages are a uint8 tensor [page_count, page_bytes] with contiguous rows, "
            f"got {pages.dtype} of shape {tuple(pages.shape)} and strides {pages.stride()}"
        )
    return Region(
        component=kind,
        layer=layer,
        space=component.space if isinstance(component, Component) else _SPACES.get(kind, IndexSpace.FULL),
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


def _kind(name: str) -> ComponentKind:
    try:
        return ComponentKind(name)
    except ValueError:
        raise InvalidInputError(f"'{name}' is no component; the kinds are {', '.join(ComponentKind)}") from None


class AdoptedWorker:
    """The rank worker of one rank, on a thread of the engine's process.

    The thread does the work of a rank-worker process. The node still decides everything and owns the host pool. The tensors must
    stay where they are until `close`, and pages of a room belong to the room until the event that ends it.
    """

    def __init__(self, runtime_dir: Path, rank: Rank, regions: Sequence[Region]) -> None:
        """Start the thread, which connects to the node by itself and starts again whenever it has ended."""
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
        """Incarnation of the node that the rank worker serves now; empty while there is none."""
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
        """Serve until the end; return None when serving did not begin. Raises UnclosedError when something is not closed."""
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

        Raises DeadlineError when the rank worker does not end in time, and UnclosedError, at every call, when it has ended without
        closing everything. Then the tensors must stay where they are until this process ends.
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
