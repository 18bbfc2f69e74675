"""Pools with memory behind them: regions at addresses of this process, in shared files, on a GPU, or in an engine's memory."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from kvbridge.core.errors import InvalidInputError, RegistrationError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, check_manifest, fingerprint
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.core.process import Closing
from kvbridge.core.wire.messages import FileOrigin, Origin, SharedRegion
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import OpenedAllocation, export, forget_export
from kvbridge.pool.memory.layout import (
    DEFAULT_EXTENT_BYTES,
    Extent,
    Placement,
    Progress,
    RankPart,
    align_up,
    ignore_progress,
    pages_per_extent,
    part_of,
    registered_extents,
)
from kvbridge.pool.memory.shared_mapping import SharedMapping, close_all, require_memory

SHARED_ALIGNMENT_BYTES = 2 << 20
"""Shorter allocations share a block of the driver's, and CUDA IPC would give all of that block away."""


class MemoryPool(Closing):
    """The regions of one rank's device pool, or of a node's host pool, in this process.

    The memory is in shared files (`in_files`, `taken_over`), on a GPU (`on_gpu`), or an engine's, which the pool describes and
    never touches (`adopted`). To free GPU memory that another process still has open is undefined, so a pool on a GPU is closed
    only when nobody else can have it open any more. A rank worker does not close its pool: when the process ends, the driver keeps
    the memory until the last process that opened it has closed it, and allocates nothing in its place before.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        shared: Sequence[Extent] = (),
        *,
        placement: Placement | None = None,
        mappings: Sequence[SharedMapping] = (),
        allocations: ExitStack | None = None,
    ) -> None:
        """`shared`: whole files and allocations in which some of the regions lie, and that other processes can reach."""
        self.regions = tuple(regions)
        """All regions, for the rank's manifest. Addresses are valid until `close`."""
        self.extents = tuple(registered_extents(regions, shared))
        """All memory, in the pieces to register it in."""
        self._origins = [whole.origin for whole in shared if whole.origin is not None]
        self.placement = placement
        self.mappings = tuple(mappings)
        """The shared files, for views of whole regions and for registration with a device."""
        self._allocations = allocations or ExitStack()
        self._page_counts: dict[IndexSpace, int] = {}
        for region in regions:
            if self._page_counts.setdefault(region.space, region.page_count) != region.page_count:
                raise InvalidInputError(
                    f"{region.label} has {region.page_count} pages, other regions of space '{region.space}' have "
                    f"{self._page_counts[region.space]}; a page id must exist in all of them"
                )

    @classmethod
    def _in_mappings(cls, placement: Placement, mappings: Sequence[SharedMapping]) -> Self:
        made = [mapping.extent for mapping in mappings]
        regions = placement.regions_at([whole.address for whole in made])
        return cls(regions, made, placement=placement, mappings=mappings)

    @classmethod
    def in_files(
        cls, placement: Placement, directory: Path | str, prefix: str, *, on_progress: Progress = ignore_progress
    ) -> Self:
        """Create the files of a placement, zeroed and in memory; the pool owns them, and `close` removes them.

        `on_progress` counts over all files. Raises RegistrationError, and leaves nothing, when they cannot be created.
        """
        if placement.memory is not MemoryKind.DRAM:
            raise UnsupportedError(f"a pool of {placement.memory} cannot be a shared file; allocate it on the device")
        require_memory(Path(directory) / prefix, placement.total_bytes)
        mappings: list[SharedMapping] = []
        try:
            for planned in placement.mappings:
                done_bytes = sum(mapping.length_bytes for mapping in mappings)
                report = part_of(on_progress, done_bytes, placement.total_bytes)
                name = f"{prefix}.{planned.name}"
                mappings.append(SharedMapping.create(directory, name, planned.length_bytes, on_progress=report))
            return cls._in_mappings(placement, mappings)
        except BaseException:
            close_all(mappings)
            raise

    @classmethod
    def taken_over(
        cls, placement: Placement, old: Sequence[Path], prefix: Path, *, wait_s: float, on_progress: Progress
    ) -> Self:
        """Own the files of an equal placement that their owner has left, one for each mapping, in order; keep their content.

        The files get names that begin with `prefix`. Raises RegistrationError when they cannot be owned, and removes them; they
        stay when `on_progress` raises.
        """
        deadline_s = time.monotonic() + wait_s
        mappings: list[SharedMapping] = []
        paths = [prefix.with_name(f"{prefix.name}.{planned.name}") for planned in placement.mappings]
        try:
            for file, path in zip(old, paths, strict=True):
                done_bytes = sum(mapping.length_bytes for mapping in mappings)
                report = part_of(on_progress, done_bytes, placement.total_bytes)
                left_s = max(0.0, deadline_s - time.monotonic())
                mappings.append(SharedMapping.take_over(file, path, wait_s=left_s, on_progress=report))
            return cls._in_mappings(placement, mappings)
        except RegistrationError:
            close_all(mappings)
            for path in (*old, *paths):
                path.unlink(missing_ok=True)
            raise
        except BaseException:
            for mapping in mappings:
                mapping.leave()
            close_all(mappings)
            raise

    @classmethod
    def on_gpu(cls, placement: Placement, *, on_progress: Progress = ignore_progress) -> Self:
        """Allocate every mapping of a placement in VRAM, zeroed.

        Raises RegistrationError with the free bytes when it does not fit, UnsupportedError without CUDA or without that
        device; then nothing is left.
        """
        if placement.memory is not MemoryKind.VRAM:
            raise InvalidInputError(f"a CUDA pool is made of VRAM, the placement asks for {placement.memory}")
        with ExitStack() as stack:
            addresses, device, done_bytes = [], placement.device, 0
            for mapping in placement.mappings:
                address = runtime.allocate(device, align_up(mapping.length_bytes, SHARED_ALIGNMENT_BYTES))
                stack.callback(runtime.free, device, address)
                runtime.fill(device, address, mapping.length_bytes)
                addresses.append(address)
                done_bytes += mapping.length_bytes
                on_progress(done_bytes, placement.total_bytes)
            runtime.synchronize(device)
            made = [export(device, address) for address in addresses]
            for extent in made:
                stack.callback(forget_export, extent)
            return cls(placement.regions_at(addresses), made, placement=placement, allocations=stack.pop_all())

    @classmethod
    def adopted(  # noqa: PLR0913 - one call for all facts of the memory that a worker and an engine know
        cls,
        geometry: ModelGeometry,
        part: RankPart,
        given: Sequence[Region],
        *,
        exclude: Collection[ComponentKind] = frozenset(),
        own_host: Collection[ComponentKind] = frozenset(),
        shared: Sequence[Extent] = (),
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
    ) -> Self:
        """Check and adopt an engine's memory: every component of `part` but `exclude`, each layer once, in the geometry's form.

        Components of `own_host` are given in the space `host`, the others on the device. `given` are regions of one extent each, at
        this process's addresses; `shared` are whole allocations in which some of them lie, and which other processes of the host
        can reach. The engine frees its memory when no peer holds a manifest of it. Raises InvalidInputError that names the
        component and layer that is missing, too much, or of another form.
        """
        _require_complete(geometry, part, given, exclude, own_host)
        facts = {"rank": part.rank, "pp_size": part.pp_size, "tp_size": part.tp_size}
        check_manifest(RankManifest(fingerprint=fingerprint(geometry), regions=tuple(given), **facts), geometry)
        return cls(cut_regions(given, extent_bytes), shared)

    def shared_regions(self) -> tuple[SharedRegion, ...]:
        """Return the regions as other processes of the host open them (`MappedRegions`); none of an engine's memory."""
        return () if self.placement is None else self.placement.shared_regions(self._origins)

    def leave(self) -> None:
        """Let the files stay after `close`, for the next owner."""
        for mapping in self.mappings:
            mapping.leave()

    def close(self) -> None:
        """Free the pool's files and allocations, of which no peer has a manifest any more. Harmless when closed.

        Raises ConflictError while views of files are in use; all else is closed then, and `close` can be called again.
        """
        close_all(self.mappings)
        self._allocations.close()

    def __repr__(self) -> str:
        pages = ", ".join(f"{count} {space}" for space, count in self._page_counts.items())
        size_bytes = sum(extent.length_bytes for extent in self.extents)
        return f"<MemoryPool: {len(self.regions)} regions, pages {pages}, {size_bytes} bytes>"


class MappedRegions(Closing):
    """The regions of a node's pools, in another process. Each file and each allocation is opened once; `close` closes them all.

    `regions` are valid until `close`, in the order in which they were given. The `device` of a region in VRAM is this process's.
    """

    def __init__(self, shared: Iterable[SharedRegion], owner: int | None = None) -> None:
        """`owner`: the user whose files they are (default: this process's).

        Raises RegistrationError for memory that is gone or not ours, InvalidInputError for a region beyond it,
        UnsupportedError for VRAM in a process without CUDA, or that does not see its device.
        """
        self._owner = owner
        self._opened: dict[Origin, SharedMapping | OpenedAllocation] = {}
        try:
            self.regions: tuple[Region, ...] = tuple(self._place(region) for region in shared)
        except BaseException:
            self.close()
            raise

    def _place(self, shared: SharedRegion) -> Region:
        region, extents = shared.region, shared.region.extents()
        if len(shared.origins) != len(extents):
            raise InvalidInputError(f"{region.label} has {len(extents)} extents, but {len(shared.origins)} origins")
        opened = [self._open(origin) for origin in shared.origins]
        if any(extent.kind is not region.memory for extent in opened):
            raise InvalidInputError(f"{region.label} is {region.memory}, which is not what its origins hold")
        for whole, (offset, _, length_bytes) in zip(opened, extents, strict=True):
            end = offset + length_bytes
            if end > whole.length_bytes:  # it would only show as a crash of the process that touches it
                where = whole.origin.path if isinstance(whole.origin, FileOrigin) else whole.label
                raise InvalidInputError(f"{region.label} ends at byte {end} of {where}, which has {whole.length_bytes}")
        placed = region.at(extent.address for extent in opened)
        return placed.model_copy(update={"device": opened[0].device})

    def _open(self, origin: Origin) -> Extent:
        if origin not in self._opened:
            if isinstance(origin, FileOrigin):
                self._opened[origin] = SharedMapping.open(origin.path, self._owner)
            else:
                self._opened[origin] = OpenedAllocation(origin)
        return self._opened[origin].extent

    @property
    def mappings(self) -> tuple[SharedMapping, ...]:
        """Every file that is mapped."""
        return tuple(opened for opened in self._opened.values() if isinstance(opened, SharedMapping))

    def extents(self) -> list[Extent]:
        """Return the extents that hold the regions, with their origins: the pieces to register."""
        return registered_extents(self.regions, [opened.extent for opened in self._opened.values()])

    def close(self) -> None:
        """Unmap everything, which no device uses any more. Harmless when closed.

        Raises ConflictError while views of a file are in use; all else is closed then, and `close` can be called again.
        """
        with ExitStack() as stack:
            for opened in self._opened.values():
                stack.callback(opened.close)


# ------------------------------------------------------------------------------------------- an engine's memory


def cut_regions(given: Sequence[Region], extent_bytes: int) -> tuple[Region, ...]:
    """Cut regions of one extent between pages into extents of at most `extent_bytes`. The order stays.

    Regions that interleave are cut at the same pages where they follow one pattern: one stride, one page count, all of page 0
    within one stride. Other regions that interleave stay whole, however long, since no cut could keep their extents apart.
    """
    cut: dict[tuple[ComponentKind, int], Region] = {}
    for group in _interleaving(given):
        stride, count, start = group[0].page_stride_bytes, group[0].page_count, group[0].extent_addresses[0]
        if all(
            (region.page_stride_bytes, region.page_count) == (stride, count)
            and region.extent_addresses[0] < start + stride
            for region in group
        ):
            per_extent = pages_per_extent(count, stride, extent_bytes)
            pages = range(0, count, per_extent)
            for region in group:
                addresses = tuple(region.extent_addresses[0] + page * stride for page in pages)
                update = {"extent_addresses": addresses, "pages_per_extent": per_extent}
                cut[region.component, region.layer] = region.model_copy(update=update)
    return tuple(cut.get((region.component, region.layer), region) for region in given)


def _require_complete(
    geometry: ModelGeometry,
    part: RankPart,
    given: Sequence[Region],
    exclude: Collection[ComponentKind],
    own_host: Collection[ComponentKind],
) -> None:
    held = {(component.kind, layer) for component, layers in part.components(geometry, exclude) for layer in layers}
    named = {(region.component, region.layer) for region in given}
    if wrong := sorted(held ^ named):
        kind, layer = wrong[0]
        raise InvalidInputError(
            f"rank {part.rank} holds no {kind} layer {layer} of '{geometry.name}' on its device, but the engine gave it"
            if wrong[0] in named
            else f"rank {part.rank}: the engine gave no memory for {kind} layer {layer} ({len(held - named)} regions are missing)"
        )
    if len(named) != len(given):
        raise InvalidInputError(f"rank {part.rank}: {len(given)} regions for {len(named)} components of layers")
    for region in given:
        home = "host" if region.component in own_host else "device"
        if (region.space is IndexSpace.HOST) is not (home == "host") or len(region.extent_addresses) != 1:
            raise InvalidInputError(f"rank {part.rank}: {region.label} must be {home} memory, given as one extent")


def _interleaving(given: Sequence[Region]) -> list[list[Region]]:
    """Group regions whose memory interleaves, in the order of addresses; most groups have one member."""
    groups: list[list[Region]] = []
    end = 0
    for region in sorted(given, key=lambda one: (one.memory, one.device, one.extent_addresses[0])):
        start = region.extent_addresses[0]
        stop = start + (region.page_count - 1) * region.page_stride_bytes + region.page_bytes
        last = groups[-1][0] if groups else None
        if last and (last.memory, last.device) == (region.memory, region.device) and start < end:
            groups[-1].append(region)
            end = max(end, stop)
        else:
            groups.append([region])
            end = stop
    return groups
