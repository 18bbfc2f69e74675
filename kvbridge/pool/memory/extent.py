"""What pools hand to whoever registers their memory.

Owns: `Extent`, how long one is, and the form of a progress report. Must not know: transports, engines.
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
    """Report to nobody."""


def align_up(length_bytes: int, alignment_bytes: int) -> int:
    """The next multiple of `alignment_bytes` that is not less than `length_bytes`."""
    return -(-length_bytes // alignment_bytes) * alignment_bytes


class Extent(FrozenModel):
    """A stretch of memory of this process that is registered as one. Lives as long as the pool that it came from.

    No extent of a pool overlaps another, and every page of every region lies in exactly one.
    """

    address: Positive
    length_bytes: Positive
    memory: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    origin: Origin | None = None
    """Where other processes of the host find it; None when they cannot."""
    offset_bytes: NonNegative = 0
    """Where the extent begins there."""
    label: str = ""
    """What it is, for error messages ("host 0 extent 3")."""


def pages_per_extent(page_count: int, stride_bytes: int, limit_bytes: int) -> int:
    """How many pages of `stride_bytes` one extent of at most `limit_bytes` holds.

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
