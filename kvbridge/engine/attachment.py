"""What an engine process gets when it attaches: the node's answer, its memory mapped, and views of it.

Owns: the link, the mappings and the views of one engine process, and their order of closing. Must not know: the verbs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice

import structlog
import torch

from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import Accepted, Attach, Attached, Detach
from kvbridge.core.wire.features import ENGINE_FEATURES, agree
from kvbridge.engine.link import EngineLink
from kvbridge.engine.stream_order import StreamOrder
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.adopted_pool import AdoptedPool
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.pool.memory.host_registration import HostRegistration
from kvbridge.pool.memory.layout import RankPart
from kvbridge.pool.memory.sharing import MappedRegions
from kvbridge.telemetry.logs import leave_standard_output

log = structlog.get_logger(__name__)

DEFAULT_CALL_TIMEOUT_S = 10.0
RETRY_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A rank worker of this process has ended: its transports are closed, so nothing of it moves a byte any more."""

    rank: Rank
    reason: str
    node: str = ""
    """The incarnation of the node that it served."""
    node_gone: bool = False
    """Whether that has ended, too. Otherwise it knows of this end, and says itself what has become of its rooms."""


@dataclass
class Attachment:
    """One engine process on one node. Used by one thread. Views are valid until `close`."""

    link: EngineLink
    answer: Attached
    mapped: MappedRegions
    views: dict[Rank, PoolViews]
    """For each rank that this engine serves: its device pools and the node's host pool."""
    order: StreamOrder
    """The GPUs of these ranks."""
    twins: tuple[Region, ...] = ()
    """The node's twins of device pages."""
    posts: bool = False
    """Adopted pools: nothing that is answered by Accepted is waited for, and what is refused comes as an event."""
    worker_ends: list[Callable[[], list[WorkerEnd]]] = field(default_factory=list)
    """What each rank worker of this process has to tell of its ends."""
    closers: list[Callable[[], None]] = field(default_factory=list)
    """What else ends with the attachment, and before its memory is unmapped (adopted pools: the workers)."""

    def close(self, *, through: bool) -> None:
        """Drop the views, unmap the memory and leave the node. Tensors that came from the views must not be used any more.

        `through`: nothing on any GPU uses the pools any more; the node is told so when all of this has succeeded. Otherwise it
        uses their pages again only when this process has ended.
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
        """Tell the node that nothing here uses its pages any more, unless something of it could not be closed."""
        if kind is not None:
            return
        try:
            self.link.call(Detach(call=self.link.number()), Accepted)
        except BridgeError as failure:  # then the node waits for the end of this process, if it is there at all
            log.warning("detach_failed", code=failure.code, reason=str(failure))


def attach(
    link: EngineLink,
    role: Role,
    *,
    ranks: Iterable[Rank] = (),
    adopted: Mapping[Rank, Sequence[Region]] | None = None,
    on_progress: Progress | None = ignore_progress,
) -> Attachment:
    """Attach as `Engine.attach` says; `adopted` is the device memory that this process brings for its ranks.

    Closes the link if it fails.
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
    """Opening memory makes its GPU the thread's current one; the choice of an engine that has made one is put back."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.current_device() if used else None
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_device(before)


def _call_attach(link: EngineLink, role: Role, ranks: tuple[Rank, ...]) -> Attached:
    """Ask until the node has its memory: it cannot become ready before engines that bring theirs have attached."""
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
