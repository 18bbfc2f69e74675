"""Regions as other processes of the node see them: files and offsets, turned into addresses here.

Owns: that translation, the mappings that it opens, and the extents that hold a set of regions. Must not know: who the
other process is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.worker_messages import SharedRegion
from kvbridge.pool.extent import Extent
from kvbridge.pool.shared_mapping import SharedMapping, close_all


class MappedRegions:
    """The regions of a node, mapped into this process. Each file is mapped once; `close` unmaps all of them.

    `regions` are valid until `close`, in the order in which they were given.
    """

    def __init__(self, shared: Iterable[SharedRegion]) -> None:
        """Raises RegistrationError for a file that is gone or not ours, InvalidInputError for a region beyond it."""
        self._mappings: dict[str, SharedMapping] = {}
        try:
            self.regions: tuple[Region, ...] = tuple(self._place(region) for region in shared)
        except BaseException:
            self.close()
            raise

    def _place(self, shared: SharedRegion) -> Region:
        self._check(shared)
        addresses = tuple(
            self._mapping(path).address + offset
            for path, offset in zip(shared.paths, shared.region.extent_addresses, strict=True)
        )
        return shared.region.model_copy(update={"extent_addresses": addresses})

    def _check(self, shared: SharedRegion) -> None:
        """A region that reaches beyond its file would only show as a crash, in whoever touches it."""
        region, extents = shared.region, region_extents(shared.region)
        if len(shared.paths) != len(extents):
            raise InvalidInputError(f"{region.label} has {len(extents)} extents, but {len(shared.paths)} paths")
        for path, (offset, pages) in zip(shared.paths, extents, strict=True):
            end = offset + (pages - 1) * region.page_stride_bytes + region.page_bytes
            if end > self._mapping(path).length_bytes:
                raise InvalidInputError(
                    f"{region.label} ends at byte {end} of {path}, which has {self._mapping(path).length_bytes}"
                )

    def _mapping(self, path: str) -> SharedMapping:
        if path not in self._mappings:
            self._mappings[path] = SharedMapping.open(path)
        return self._mappings[path]

    @property
    def mappings(self) -> tuple[SharedMapping, ...]:
        """Every file that is mapped."""
        return tuple(self._mappings.values())

    def close(self) -> None:
        """Unmap everything. Harmless when closed."""
        close_all(self.mappings)
        self._mappings.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def registered_extents(regions: Iterable[Region], mappings: Sequence[SharedMapping] = ()) -> list[Extent]:
    """Return the stretches of memory that hold `regions`, in address order: what is to be registered, each once.

    Regions whose pages interleave (`page_first`) share an extent; regions that merely touch do not. An extent inside
    one of `mappings` carries its file.
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
    return [_extent(start, stop, MemoryKind(kind), device, mappings) for start, stop, kind, device in merged]


def region_extents(region: Region) -> list[tuple[int, int]]:
    """Return (address, pages) of each extent of a region."""
    full, rest = divmod(region.page_count, region.pages_per_extent)
    counts = [region.pages_per_extent] * full + ([rest] if rest else [])
    return list(zip(region.extent_addresses, counts, strict=True))


def _extent(start: int, stop: int, kind: MemoryKind, device: int, mappings: Sequence[SharedMapping]) -> Extent:
    for mapping in mappings:
        if mapping.address <= start and stop <= mapping.address + mapping.length_bytes:
            offset = start - mapping.address
            return Extent(
                address=start,
                length_bytes=stop - start,
                memory=kind,
                device=device,
                path=str(mapping.path),
                offset_bytes=offset,
                label=f"{mapping.path.name} at {offset}",
            )
    return Extent(address=start, length_bytes=stop - start, memory=kind, device=device, label=f"{kind} at {start:#x}")
