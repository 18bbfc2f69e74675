"""Contiguous memory of this process, as pools hand it to transports.

How the names of memory relate:

- A `Region` (core.geometry.manifest) is where the pages of one component's layer are, in one process: one or more pieces.
- An `Extent` is a contiguous piece that is registered as a whole; pages of several regions may lie in it.
- An `Origin` (core.wire.shared_memory) is what other processes of the host map or open to reach it: a file or a device
  allocation. A `SharedRegion` is a region by its origins, with offsets for addresses.
- Peers are told of extents by the endpoint of a backend: `local` says where in which origin (`SharedExtent`), `nixl` the kind
  and device (`NixlExtent`), `mooncake` the address only.
- A `ReachableExtent` (transport.local.memory) is a peer's extent, or ours, with the address by which this process reaches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive
from kvbridge.core.wire.shared_memory import Origin

Progress = Callable[[int, int], None]
"""Called with (done bytes, total bytes) by the thread that called the long operation, at last with both equal."""

EXTENT_ALIGNMENT_BYTES = 4096
"""Blocks of a placement begin at multiples of this, so that no two share a memory page."""


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore a progress report."""


def part_of(on_progress: Progress, before_bytes: int, total_bytes: int) -> Progress:
    """Report the progress of one part as progress of a whole, of which `before_bytes` are done."""
    return lambda done_bytes, _: on_progress(before_bytes + done_bytes, total_bytes)


def align_up(length_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of `alignment_bytes` that is not less than `length_bytes`."""
    return -(-length_bytes // alignment_bytes) * alignment_bytes


class Extent(FrozenModel):
    """Contiguous memory of this process that is registered as one. Lives as long as the pool that it came from.

    No extent of a pool overlaps another, and every page of every region lies in exactly one.
    """

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    origin: Origin | None = None
    """Where other processes of the host find it; None when they cannot."""
    offset_bytes: NonNegative = 0
    """Where the extent begins there."""
    label: str = ""
    """A name for error messages ("host pool extent 3")."""

    def holds(self, start: int, stop: int, kind: MemoryKind) -> bool:
        """Return whether it holds all of [start, stop) of that kind of memory."""
        return kind is self.kind and self.address <= start and stop <= self.address + self.length_bytes


def pages_per_extent(page_count: int, stride_bytes: int, limit_bytes: int) -> int:
    """Return the number of pages of `stride_bytes` that one extent of at most `limit_bytes` holds.

    Where the limit allows, so many that the next extent begins at a multiple of 4 KiB too: drivers pin whole memory
    pages, and some refuse one that is pinned already. Raises InvalidInputError when not even one page fits.
    """
    most = limit_bytes // stride_bytes
    if most < 1:
        raise InvalidInputError(
            f"a page of {stride_bytes} bytes is longer than an extent or mapping of {limit_bytes}; raise that limit"
        )
    if most >= page_count:
        return page_count
    step = EXTENT_ALIGNMENT_BYTES // math.gcd(stride_bytes, EXTENT_ALIGNMENT_BYTES)
    return most // step * step or most
