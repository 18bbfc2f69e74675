"""The memory of an attached engine: the node's pools mapped into this process, and views of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

import torch

from kvbridge.core.errors import NotReadyError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import Attach, Attached
from kvbridge.core.wire.messages import FEATURES, agree
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.engine.link import EngineLink
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.extent import Progress
from kvbridge.pool.memory.gpu_memory import HostRegistration
from kvbridge.pool.memory.layout import RankPart
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool

RETRY_PAUSE_S = 0.05


class EngineMemory:
    """The pools of an engine's ranks, mapped into this process, or its own tensors; and views of them, valid until `close`."""

    def __init__(self, answer: Attached, mapped: MappedRegions, adopted: Mapping[Rank, Sequence[Region]]) -> None:
        """`mapped`: the regions of `shared_regions`. `adopted`: device regions that this process brings for its ranks."""
        self.mapped = mapped
        left = iter(mapped.regions)
        self.twins = tuple(islice(left, len(answer.twins)))
        """Host copies of device pages on this node."""
        host = tuple(islice(left, len(answer.host)))
        self.views: dict[Rank, PoolViews] = {}
        self._registration: HostRegistration | None = None
        for rank in answer.ranks:
            owned = tuple(islice(left, len(answer.device.get(str(rank), ()))))
            self.views[rank] = PoolViews(answer.geometry, owned + tuple(adopted.get(rank, ())) + host)

    def register(self, device: int, on_progress: Progress) -> None:
        """Page-lock the mapped host memory for a GPU."""
        self._registration = HostRegistration(
            self.mapped.mappings, extents=self.mapped.extents(), device=device, on_progress=on_progress
        )

    def close(self) -> None:
        """Drop the views and unmap the memory. Tensors that came from the views must not be used any more."""
        with ExitStack() as stack:
            stack.callback(self.mapped.close)
            stack.callback(self.views.clear)
            if self._registration is not None:
                stack.callback(self._registration.close)


def shared_regions(answer: Attached) -> tuple[SharedRegion, ...]:
    """Return the regions that the node shares with an engine: host copies, the host pool, and the pools of the ranks in order."""
    devices = [region for rank in answer.ranks for region in answer.device.get(str(rank), ())]
    return *answer.twins, *answer.host, *devices


@contextmanager
def present_gpu_kept() -> Iterator[None]:
    """Opening memory makes its GPU the thread's current one. Restore the GPU that the engine had chosen before."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    before = torch.cuda.current_device() if used else None
    try:
        yield
    finally:
        if before is not None:
            torch.cuda.set_device(before)


def call_attach(link: EngineLink, role: Role, ranks: tuple[Rank, ...]) -> Attached:
    """Ask until the node has its memory: a node with adopted memory becomes ready only when its engines have attached."""
    until_s = time.monotonic() + link.timeout_s
    while True:
        try:
            call = Attach(call=link.number(), role=role, ranks=ranks, features=FEATURES)
            answer = link.call(call, Attached)
        except NotReadyError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(RETRY_PAUSE_S)
            continue
        agree(FEATURES, answer.features, us="this engine", them=f"the {role} node of {answer.instance}")
        return answer


def adopted_pages(answer: Attached, rank: Rank, given: Sequence[Region]) -> tuple[Region, ...]:
    """Check an adopted rank's memory here as well as in its worker, so that the caller gets the error."""
    part = RankPart(rank=rank, pp_size=answer.pp_size, tp_size=answer.tp_size, layers=answer.layers[str(rank)])
    on_host = {shared.region.component for shared in answer.host}
    return MemoryPool.adopted(answer.geometry, part, given, exclude=on_host).regions()
