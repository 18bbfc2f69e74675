"""A pool in shared memory: files that one process creates and others of the host map.

Owns: the mappings of one pool and their names. Must not know: which pages are free, transports, engines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from kvbridge.core.errors import RegistrationError, UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.pool.memory.extent import Progress, ignore_progress, part_of
from kvbridge.pool.memory.memory_pool import PlacedPool
from kvbridge.pool.memory.placement import Placement
from kvbridge.pool.memory.shared_mapping import SharedMapping, close_all, require_memory


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
