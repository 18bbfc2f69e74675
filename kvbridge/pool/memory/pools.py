"""Pools with memory behind them: regions at addresses of this process, in shared files, on a GPU, or in an engine's memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError, RegistrationError, UnsupportedError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.device_memory import export
from kvbridge.pool.memory.extent import Extent, Progress, align_up, ignore_progress, part_of
from kvbridge.pool.memory.placement import Placement
from kvbridge.pool.memory.shared_mapping import SharedMapping, close_all, require_memory
from kvbridge.pool.memory.sharing import registered_extents

SHARED_ALIGNMENT_BYTES = 2 << 20
"""Shorter allocations share a block of the driver's, and CUDA IPC would give all of that block away."""


class MemoryPool(Closing):
    """The regions of one rank's device pool, or of a node's host pool, in this process."""

    def __init__(self, regions: Sequence[Region], shared: Sequence[Extent] = ()) -> None:
        """`shared`: whole files and allocations in which some of the regions lie, and that other processes can reach."""
        self._regions = tuple(regions)
        self._extents = tuple(registered_extents(regions, shared))
        self._page_counts: dict[IndexSpace, int] = {}
        for region in regions:
            if self._page_counts.setdefault(region.space, region.page_count) != region.page_count:
                raise InvalidInputError(
                    f"{region.label} has {region.page_count} pages, other regions of space '{region.space}' have "
                    f"{self._page_counts[region.space]}; a page id must exist in all of them"
                )

    def regions(self) -> tuple[Region, ...]:
        """All regions, for the rank's manifest. Addresses are valid until `close`."""
        return self._regions

    def extents(self) -> tuple[Extent, ...]:
        """All memory, in the pieces to register it in."""
        return self._extents

    def close(self) -> None:
        """Give up what the pool has made. No peer holds a manifest of it and nothing is in flight. Harmless when closed."""

    def __repr__(self) -> str:
        pages = ", ".join(f"{count} {space}" for space, count in self._page_counts.items())
        size_bytes = sum(extent.length_bytes for extent in self._extents)
        return f"<{type(self).__name__}: {len(self._regions)} regions, pages {pages}, {size_bytes} bytes>"


class PlacedPool(MemoryPool):
    """A pool in memory that this process made for it, which other processes of the host can reach."""

    def __init__(self, placement: Placement, made: Sequence[Extent]) -> None:
        """`made`: the placement's mappings, each as a whole."""
        super().__init__(placement.regions_at([whole.address for whole in made]), made)
        self.placement = placement
        self._origins = [whole.origin for whole in made if whole.origin is not None]

    def shared_regions(self) -> tuple[SharedRegion, ...]:
        """The regions as other processes of the host open them (`sharing.MappedRegions`)."""
        return self.placement.shared_regions(self._origins)


class MappedPool(PlacedPool):
    """A pool whose mappings are shared files. Made by `create`."""

    def __init__(self, placement: Placement, mappings: Sequence[SharedMapping]) -> None:
        if placement.memory is not MemoryKind.DRAM:
            raise UnsupportedError(f"a pool of {placement.memory} cannot be a shared file; allocate it on the device")
        super().__init__(placement, [mapping.extent for mapping in mappings])
        self.mappings = tuple(mappings)
        """For whoever builds views of whole regions or pins memory for a device."""

    @classmethod
    def create(
        cls,
        placement: Placement,
        directory: Path | str,
        prefix: str,
        *,
        on_progress: Progress = ignore_progress,
    ) -> Self:
        """Create the files of a placement, zeroed and in memory; this pool owns them and removes them in `close`.

        `on_progress` counts over all files. Raises RegistrationError, and leaves nothing, when they cannot be created.
        """
        require_memory(Path(directory) / prefix, placement.total_bytes)
        mappings: list[SharedMapping] = []
        done_bytes = 0
        try:
            for planned in placement.mappings:
                report = part_of(on_progress, done_bytes, placement.total_bytes)
                name = f"{prefix}.{planned.name}"
                mappings.append(SharedMapping.create(directory, name, planned.length_bytes, on_progress=report))
                done_bytes += planned.length_bytes
            return cls(placement, mappings)
        except BaseException:
            close_all(mappings)
            raise

    @classmethod
    def take_over(
        cls,
        placement: Placement,
        old: Sequence[Path],
        prefix: Path,
        *,
        wait_s: float,
        on_progress: Progress = ignore_progress,
    ) -> Self:
        """Own the files of an equal placement whose owner has left them, with what is in them: one for each mapping, in order.

        They get names that begin with `prefix`. Raises RegistrationError when that cannot be; the files are removed then, but stay
        when `on_progress` raises.
        """
        deadline_s, done_bytes = time.monotonic() + wait_s, 0
        mappings: list[SharedMapping] = []
        paths = [prefix.with_name(f"{prefix.name}.{planned.name}") for planned in placement.mappings]
        try:
            for planned, file, path in zip(placement.mappings, old, paths, strict=True):
                report = part_of(on_progress, done_bytes, placement.total_bytes)
                left_s = max(0.0, deadline_s - time.monotonic())
                mappings.append(SharedMapping.take_over(file, path, wait_s=left_s, on_progress=report))
                done_bytes += planned.length_bytes
            return cls(placement, mappings)
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

    def leave(self) -> None:
        """Let the files stay when this is closed, for whoever takes them over."""
        for mapping in self.mappings:
            mapping.leave()

    def close(self) -> None:
        """Unmap everything; the creator removes the files. Harmless when closed.

        Raises ConflictError while views are in use; what could be closed is closed then, and `close` can be called
        again.
        """
        close_all(self.mappings)


class CudaPool(PlacedPool):
    """Components on the GPU of one rank. Made by `create`; other processes open it by `shared_regions`.

    Freeing memory that another process still has open is undefined, so it is closed only when nobody else can have it open any
    more. A rank worker leaves that to the end of its process, which the driver survives: it keeps such memory until the last
    process that opened it has closed it, and nothing can be allocated in its place before.
    """

    def __init__(self, placement: Placement, addresses: Sequence[int], stack: ExitStack) -> None:
        """Export the allocations of a placement. `stack` frees them."""
        exported = [export(placement.device, address) for address in addresses]
        for one in exported:
            stack.callback(one.forget)
        super().__init__(placement, [one.extent for one in exported])
        self._stack = stack

    @classmethod
    def create(cls, placement: Placement, *, on_progress: Progress = ignore_progress) -> Self:
        """Allocate every mapping of a placement in VRAM, zeroed.

        Raises RegistrationError with what is free when it does not fit, UnsupportedError without CUDA or without that
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
            pool = cls(placement, addresses, stack)
            pool._stack = stack.pop_all()
            return pool

    def close(self) -> None:
        """Free it. Nobody else has it open, nothing on any device uses it. Harmless when closed."""
        self._stack.close()
