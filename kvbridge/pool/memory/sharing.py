"""Regions as other processes of the node see them: origins and offsets, turned into addresses here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import FileOrigin, Origin, SharedRegion
from kvbridge.pool.memory.device_memory import OpenedAllocation, device_extent
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.shared_mapping import SharedMapping


class MappedRegions(Closing):
    """The regions of a node, in this process. Each file and each allocation is opened once; `close` closes them all.

    `regions` are valid until `close`, in the order in which they were given; the `device` of those in VRAM is this
    process's ordinal.
    """

    def __init__(self, shared: Iterable[SharedRegion], owner: int | None = None) -> None:
        """`owner`: the user whose files they are (default: this process's).

        Raises RegistrationError for memory that is gone or not ours, InvalidInputError for a region beyond it.

        UnsupportedError for VRAM in a process without CUDA, or that does not see its device.
        """
        self._owner = owner
        self._opened: dict[Origin, tuple[SharedMapping | OpenedAllocation, Extent]] = {}
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
        for extent, (offset, _, length_bytes) in zip(opened, extents, strict=True):
            _check_within(region, extent, offset + length_bytes)
        placed = region.at(extent.address for extent in opened)
        return placed.model_copy(update={"device": opened[0].device})

    def _open(self, origin: Origin) -> Extent:
        if origin not in self._opened:
            if origin.kind == "file":
                mapping = SharedMapping.open(origin.path, self._owner)
                self._opened[origin] = mapping, mapping.extent
            else:
                found = OpenedAllocation(origin.handle, device_uuid=origin.device_uuid)
                self._opened[origin] = found, device_extent(found.address, found.device, origin)
        return self._opened[origin][1]

    @property
    def mappings(self) -> tuple[SharedMapping, ...]:
        """Every file that is mapped."""
        return tuple(opened for opened, _ in self._opened.values() if isinstance(opened, SharedMapping))

    @property
    def opened(self) -> tuple[Extent, ...]:
        """Every file and every allocation that is open, each as a whole."""
        return tuple(extent for _, extent in self._opened.values())

    def close(self) -> None:
        """Unmap everything. Harmless when closed. Nothing on any device uses any of it any more.

        Raises ConflictError while views of a file are in use; all else is closed then, and `close` can be called again.
        """
        with ExitStack() as stack:
            for opened, _ in self._opened.values():
                stack.callback(opened.close)


def _check_within(region: Region, opened: Extent, end: int) -> None:
    """A region that reaches beyond its memory would only show as a crash, in whoever touches it."""
    if end > opened.length_bytes:
        where = opened.origin.path if isinstance(opened.origin, FileOrigin) else opened.label
        raise InvalidInputError(f"{region.label} ends at byte {end} of {where}, which has {opened.length_bytes}")


def registered_extents(regions: Iterable[Region], shared: Sequence[Extent] = ()) -> list[Extent]:
    """Return the extents that hold `regions`, in address order: what is to be registered, each once.

    Regions whose pages interleave (`page_first`) share an extent, also where each has a single page, which then touch but
    do not interleave; regions that merely touch do not. An extent inside one of `shared`, whole files and allocations,
    carries its origin.
    """
    spans = sorted(
        (address, address + length_bytes, str(region.memory), region.device, region.page_stride_bytes)
        for region in regions
        for address, _, length_bytes in region.extents()
    )
    merged: list[tuple[int, int, str, int, int]] = []
    for start, stop, kind, device, stride in spans:
        first, before, *home, first_stride = merged[-1] if merged else (0, 0, "", 0, 0)
        interleave = start < before
        one_page = start == before and stride == first_stride and stop - first <= stride
        if home == [kind, device] and (interleave or one_page):
            merged[-1] = (first, max(before, stop), kind, device, first_stride)
        else:
            merged.append((start, stop, kind, device, stride))
    return [_extent(start, stop, MemoryKind(kind), device, shared) for start, stop, kind, device, _ in merged]


def _extent(start: int, stop: int, kind: MemoryKind, device: int, shared: Sequence[Extent]) -> Extent:
    found = Extent(address=start, length_bytes=stop - start, kind=kind, device=device, label=f"{kind} at {start:#x}")
    for whole in shared:
        if whole.holds(start, stop, kind):
            offset = start - whole.address
            facts = {"origin": whole.origin, "offset_bytes": offset, "label": f"{whole.label} at {offset}"}
            return found.model_copy(update=facts)
    return found
