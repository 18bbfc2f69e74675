"""The memory of one rank worker: what the node shares, what the worker makes on its GPU, what its engine brings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import structlog

from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.errors import RegistrationError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.core.wire.worker_messages import WorkerSetup
from kvbridge.pool.memory.extent import Extent, Progress
from kvbridge.pool.memory.gpu_memory import HostRegistration, export, forget_export
from kvbridge.pool.memory.layout import RankPart, device_placement
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WorkerMemory:
    """All memory that a worker serves, at addresses of its process."""

    regions: tuple[Region, ...]
    extents: tuple[Extent, ...]
    """The pieces to register with transports."""
    made: tuple[SharedRegion, ...] = ()
    """Device memory that the worker has made, as engines open it."""
    twins: tuple[Region, ...] = ()
    """The node's twins of device pages, in no manifest and registered with no transport."""


def bring_memory(
    setup: WorkerSetup,
    settings: TransportSettings,
    adopted: Sequence[Region],
    stack: ExitStack,
    *,
    on_progress: Progress,
) -> WorkerMemory:
    """Map what the node owns, make what it asks for on the GPU, adopt what this process brings; `stack` undoes it.

    Only device memory that was made stays: others may have it open until this process ends (see `MemoryPool`). `on_progress`
    hears how far page-locking the host pool and the twins has come. Raises RegistrationError, InvalidInputError, UnsupportedError.
    """
    mapped = stack.enter_context(MappedRegions((*setup.device, *setup.host)))
    kept = stack.enter_context(MappedRegions(setup.twins))
    regions, extents = mapped.regions, mapped.extents()
    made: tuple[SharedRegion, ...] = ()
    part = RankPart(rank=setup.rank, pp_size=setup.pp_size, tp_size=setup.tp_size, layers=setup.layers)
    if setup.allocate is not None:
        pool = _make(setup, part, on_progress)
        regions, extents, made = pool.regions() + regions, [*pool.extents(), *extents], pool.shared_regions()
    if adopted:
        on_host = {shared.region.component for shared in setup.host}
        exported = _exported(adopted, stack, required=TransportName.LOCAL in settings.order)
        ours = MemoryPool.adopted(setup.geometry, part, adopted, exclude=on_host, shared=exported)
        regions, extents = regions + ours.regions(), [*extents, *ours.extents()]
    device = _gpu(regions)
    if device is not None:
        locked = (*mapped.mappings, *kept.mappings)
        stack.enter_context(
            HostRegistration(
                locked, extents=[*mapped.extents(), *kept.extents()], device=device, on_progress=on_progress
            )
        )
    return WorkerMemory(regions, tuple(extents), made, kept.regions)


def _make(setup: WorkerSetup, part: RankPart, on_progress: Progress) -> MemoryPool:
    request = setup.allocate
    assert request is not None
    placement = device_placement(
        setup.geometry,
        part.model_copy(update={"memory": MemoryKind.VRAM, "device": request.device}),
        page_counts=request.page_counts,
        exclude=request.exclude,
        page_first=request.page_first,
    )
    return MemoryPool.on_gpu(placement, on_progress=on_progress)


def _gpu(regions: Iterable[Region]) -> int | None:
    """The GPU of this rank, None when it has none."""
    return next((region.device for region in regions if region.memory is MemoryKind.VRAM), None)


def _exported(adopted: Sequence[Region], stack: ExitStack, *, required: bool) -> list[Extent]:
    """Make the engine's device memory known to other processes of the host, each allocation once.

    `required`: memory that cannot be shared is an error, since the `local` transport is to reach it.
    """
    allocations: list[Extent] = []
    for region in adopted:
        if region.memory is not MemoryKind.VRAM:
            continue
        address = region.extent_addresses[0]
        if any(known.holds(address, address + region.page_bytes, region.memory) for known in allocations):
            continue
        try:
            exported = export(region.device, address)
        except RegistrationError as error:
            if required:
                raise RegistrationError(f"{region.label}: {error}; or take `local` out of transports.order") from error
            log.info("device_memory_not_shared", region=region.label, reason=str(error))
            continue
        stack.callback(forget_export, exported)
        allocations.append(exported)
    return allocations
