"""A pool in shared memory: files that one process creates and others of the host map.

Owns: the mappings of one pool and their names. Must not know: which pages are free, transports, engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.shared_memory import FileOrigin, SharedRegion
from kvbridge.pool.memory.extent import Progress, ignore_progress
from kvbridge.pool.memory.memory_pool import MemoryPool
from kvbridge.pool.memory.placement import Placement
from kvbridge.pool.memory.shared_mapping import DEFAULT_CHUNK_BYTES, SharedMapping, close_all, require_memory
from kvbridge.pool.memory.sharing import mapping_extent, registered_extents


def mapping_paths(placement: Placement, directory: Path | str, prefix: str) -> tuple[str, ...]:
    """The file of each mapping of a pool that is created with this directory and prefix."""
    return tuple(str(Path(directory) / f"{prefix}.{mapping.name}") for mapping in placement.mappings)


class MappedPool(MemoryPool):
    """A pool whose mappings are shared files. Made by `create`."""

    def __init__(self, placement: Placement, mappings: Sequence[SharedMapping]) -> None:
        if placement.memory is not MemoryKind.DRAM:
            raise UnsupportedError(f"a pool of {placement.memory} cannot be a shared file; allocate it on the device")
        regions = placement.regions_at([mapping.address for mapping in mappings])
        super().__init__(regions, registered_extents(regions, [mapping_extent(mapping) for mapping in mappings]))
        self.placement = placement
        self._mappings = tuple(mappings)

    @classmethod
    def create(
        cls,
        placement: Placement,
        directory: Path | str,
        prefix: str,
        *,
        on_progress: Progress = ignore_progress,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        threads: int = 4,
    ) -> Self:
        """Create the files of a placement, zeroed and in memory; this pool owns them and removes them in `close`.

        `on_progress` counts over all files. Raises RegistrationError, and leaves nothing, when they cannot be created.
        """
        paths = mapping_paths(placement, directory, prefix)
        require_memory(paths[0], placement.total_bytes)
        mappings: list[SharedMapping] = []
        done_bytes = 0
        try:
            for path, planned in zip(paths, placement.mappings, strict=True):
                mappings.append(
                    SharedMapping.create(
                        directory,
                        Path(path).name,
                        planned.length_bytes,
                        on_progress=_part_of(on_progress, done_bytes, placement.total_bytes),
                        chunk_bytes=chunk_bytes,
                        threads=threads,
                    )
                )
                done_bytes += planned.length_bytes
            return cls(placement, mappings)
        except BaseException:
            close_all(mappings)
            raise

    @property
    def mappings(self) -> tuple[SharedMapping, ...]:
        """The mappings themselves, for whoever builds views of whole regions or pins memory for a device."""
        return self._mappings

    @property
    def paths(self) -> tuple[str, ...]:
        """The file of each mapping."""
        return tuple(str(mapping.path) for mapping in self._mappings)

    def shared_regions(self) -> tuple[SharedRegion, ...]:
        """The regions as other processes of the host map them (`sharing.MappedRegions`)."""
        return self.placement.shared_regions([FileOrigin(path=path) for path in self.paths])

    def close(self) -> None:
        """Unmap everything; the creator removes the files. Harmless when closed.

        Raises ConflictError while views are in use; what could be closed is closed then, and `close` can be called
        again.
        """
        close_all(self._mappings)


def _part_of(on_progress: Progress, before_bytes: int, total_bytes: int) -> Progress:
    """Report the progress of one file as progress of the whole pool."""
    return lambda done_bytes, _: on_progress(before_bytes + done_bytes, total_bytes)
