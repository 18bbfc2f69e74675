"""Regions as other processes of the node see them: origins and offsets, turned into addresses here.

Owns: that translation, what it opens for it, and the extents that hold a set of regions. Must not know: who the
other process is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import CudaOrigin, FileOrigin, Origin, SharedRegion
from kvbridge.pool.memory.device_memory import OpenedAllocation
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.shared_mapping import SharedMapping, close_all


def mapping_extent(mapping: SharedMapping) -> Extent:
    """All of a mapped file."""
    path = str(mapping.path)
    return Extent(
        address=mapping.address,
        length_bytes=mapping.length_bytes,
        origin=FileOrigin(path=path),
        label=mapping.path.name,
    )


class MappedRegions:
    """The regions of a node, in this process. Each file and each allocation is opened once; `close` closes them all.

    `regions` are valid until `close`, in the order in which they were given; the `device` of those in VRAM is this
    process's ordinal.
    """

    def __init__(self, shared: Iterable[SharedRegion]) -> None:
        """Raises RegistrationError for memory that is gone or not ours, InvalidInputError for a region beyond it.

        UnsupportedError for VRAM in a process without CUDA, or that does not see its device.
        """
        self._files: dict[str, SharedMapping] = {}
        self._allocations: dict[bytes, OpenedAllocation] = {}
        self._opened: dict[Origin, Extent] = {}
        try:
            self.regions: tuple[Region, ...] = tuple(self._place(region) for region in shared)
        except BaseException:
            self.close()
            raise

    def _place(self, shared: SharedRegion) -> Region:
        region, extents = shared.region, region_extents(shared.region)
        if len(shared.origins) != len(extents):
            raise InvalidInputError(f"{region.label} has {len(extents)} extents, but {len(shared.origins)} origins")
        opened = [self._open(origin) for origin in shared.origins]
        if any(extent.kind is not region.memory for extent in opened):
            raise InvalidInputError(f"{region.label} is {region.memory}, which is not what its origins hold")
        for extent, (offset, pages) in zip(opened, extents, strict=True):
            _check_within(region, extent, offset, pages)
        addresses = tuple(
            extent.address + offset for extent, offset in zip(opened, region.extent_addresses, strict=True)
        )
        return region.model_copy(update={"extent_addresses": addresses, "device": opened[0].device})

    def _open(self, origin: Origin) -> Extent:
        if origin not in self._opened:
            self._opened[origin] = self._open_file(origin) if origin.kind == "file" else self._open_cuda(origin)
        return self._opened[origin]

    def _open_file(self, origin: FileOrigin) -> Extent:
        mapping = self._files[origin.path] = SharedMapping.open(origin.path)
        return mapping_extent(mapping)

    def _open_cuda(self, origin: CudaOrigin) -> Extent:
        opened = OpenedAllocation(origin.handle, device_uuid=origin.device_uuid)
        self._allocations[origin.handle] = opened
        return Extent(
            address=opened.address,
            length_bytes=origin.length_bytes,
            kind=MemoryKind.VRAM,
            device=opened.device,
            origin=origin,
            label=f"cuda:{opened.device}",
        )

    @property
    def mappings(self) -> tuple[SharedMapping, ...]:
        """Every file that is mapped."""
        return tuple(self._files.values())

    @property
    def opened(self) -> tuple[Extent, ...]:
        """Every file and every allocation that is open, each as a whole."""
        return tuple(self._opened.values())

    def close(self) -> None:
        """Unmap everything. Harmless when closed. Nothing on any device uses any of it any more."""
        self._opened.clear()
        with ExitStack() as stack:
            stack.callback(self._close_files)
            for opened in self._allocations.values():
                stack.callback(opened.close)
            self._allocations.clear()

    def _close_files(self) -> None:
        close_all(self.mappings)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_within(region: Region, opened: Extent, offset: int, pages: int) -> None:
    """A region that reaches beyond its memory would only show as a crash, in whoever touches it."""
    end = offset + (pages - 1) * region.page_stride_bytes + region.page_bytes
    if end > opened.length_bytes:
        where = opened.origin.path if isinstance(opened.origin, FileOrigin) else opened.label
        raise InvalidInputError(f"{region.label} ends at byte {end} of {where}, which has {opened.length_bytes}")


def registered_extents(regions: Iterable[Region], shared: Sequence[Extent] = ()) -> list[Extent]:
    """Return the extents that hold `regions`, in address order: what is to be registered, each once.

    Regions whose pages interleave (`page_first`) share an extent; regions that merely touch do not. An extent inside
    one of `shared`, whole files and allocations, carries its origin.
    """
    spans = sorted(
        (
            address,
            address + (pages - 1) * region.page_stride_bytes + region.page_bytes,
            str(region.memory),
            region.device,
        )
        for region in regions
        for address, pages in region_extents(region)
    )
    merged: list[tuple[int, int, str, int]] = []
    for start, stop, kind, device in spans:
        if merged and start < merged[-1][1] and merged[-1][2:] == (kind, device):
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop), kind, device)
        else:
            merged.append((start, stop, kind, device))
    return [_extent(start, stop, MemoryKind(kind), device, shared) for start, stop, kind, device in merged]


def region_extents(region: Region) -> list[tuple[int, int]]:
    """Return (address, pages) of each extent of a region."""
    full, rest = divmod(region.page_count, region.pages_per_extent)
    counts = [region.pages_per_extent] * full + ([rest] if rest else [])
    return list(zip(region.extent_addresses, counts, strict=True))


def _extent(start: int, stop: int, kind: MemoryKind, device: int, shared: Sequence[Extent]) -> Extent:
    found = Extent(address=start, length_bytes=stop - start, kind=kind, device=device, label=f"{kind} at {start:#x}")
    for whole in shared:
        if whole.holds(start, stop, kind):
            offset = start - whole.address
            facts = {"origin": whole.origin, "offset_bytes": offset, "label": f"{whole.label} at {offset}"}
            return found.model_copy(update=facts)
    return found
