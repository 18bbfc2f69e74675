"""Contiguous memory of this process, as pools hand it to transports.

A `Region` (core.geometry.manifest) has the addresses of the pages of one component's layer. An `Extent` is a piece that is
registered as a whole; pages of several regions may lie in it. An `Origin` (core.wire.shared_memory) is the file or device
allocation that other processes of the host open to reach an extent. A `PageArray` (core.plan.pages) computes addresses of pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive
from kvbridge.core.wire.shared_memory import Origin

Progress = Callable[[int, int], None]
"""Called with (done bytes, total bytes) in the thread of the long operation, at the end with both equal."""

EXTENT_ALIGNMENT_BYTES = 4096
"""Blocks of a placement begin at multiples of this, so that no two share a memory page."""


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore a progress report."""


def part_of(on_progress: Progress, before_bytes: int, total_bytes: int) -> Progress:
    """Report the progress of one part as progress of a whole, of which `before_bytes` are done."""
    return lambda done_bytes, _: on_progress(before_bytes + done_bytes, total_bytes)


def align_up(length_bytes: int, alignment_bytes: int) -> int:
    """Return the next multiple of `alignment_bytes` that is not less than `length_bytes`."""
    return -(-length_bytes // alignment_bytes) * alignment_bytes


class Extent(FrozenModel):
    """Contiguous memory of this process that is registered as one. It lives as long as its pool.

    No extent of a pool overlaps another, and every page of every region lies in exactly one.
    """

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    origin: Origin | None = None
    """The file or allocation by which other processes of the host reach it; None when they cannot."""
    offset_bytes: NonNegative = 0
    """The beginning of the extent in its origin."""
    label: str = ""
    """A name for error messages ("host pool extent 3")."""

    def holds(self, start: int, stop: int, kind: MemoryKind) -> bool:
        """Return whether the extent holds all of [start, stop) of that kind of memory."""
        return kind is self.kind and self.address <= start and stop <= self.address + self.length_bytes


def pages_per_extent(page_count: int, stride_bytes: int, limit_bytes: int) -> int:
    """Return the number of pages of `stride_bytes` that one extent of at most `limit_bytes` holds.

    Where the limit allows, the next extent begins at a multiple of 4 KiB too: drivers pin whole memory pages, and some refuse to
    pin one again. Raises InvalidInputError when not even one page fits.
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


def registered_extents(regions: Iterable[Region], shared: Sequence[Extent] = ()) -> list[Extent]:
    """Return the extents that hold `regions`, each once, in address order: the pieces to register.

    Regions whose pages interleave (`page_first`) share an extent, also where each has a single page, which then touch but do not
    interleave; regions that merely touch do not. An extent inside one of `shared`, whole files and allocations, carries its origin.
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
