"""The places of pages and rows in memory, and the lists of pages that a copy kernel is told.

Page `p` begins at `extent_addresses[p // pages_per_extent] + (p % pages_per_extent) * page_stride_bytes`, as in a manifest's
`Region`. Row `r` lies in page `r // slots` at slot `r % slots`; a page holds, for each part of a row, that part of all its slots
one after another. So a DeepSeek-V4 row (576, 8) lies in two places of its page; with one slot a page, rows are dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.manifest import Region
from kvbridge.kernels.reference import array_at, copy_operations

AddressArray = npt.NDArray[np.uint64]
IdArray = npt.NDArray[np.int32]

MOST_PAGE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class PageMemory:
    """The pages of one component of one layer, at addresses of this process. They outlive whatever copies them."""

    extent_addresses: tuple[int, ...]
    """Address of the first page of each extent."""
    pages_per_extent: int
    page_stride_bytes: int
    page_count: int

    def __post_init__(self) -> None:
        needed = -(-self.page_count // self.pages_per_extent) if self.pages_per_extent > 0 else 0
        if self.page_count < 1 or self.page_stride_bytes < 1 or len(self.extent_addresses) != needed:
            raise InvalidInputError(
                f"{self.page_count} pages of {self.pages_per_extent} an extent, {self.page_stride_bytes} bytes apart, do not "
                f"fit {len(self.extent_addresses)} extents"
            )

    @classmethod
    def of(cls, region: Region) -> Self:
        """The pages of a manifest's region, whose addresses must be those of this process."""
        return cls(region.extent_addresses, region.pages_per_extent, region.page_stride_bytes, region.page_count)

    @classmethod
    def contiguous(cls, address: int, *, page_count: int, page_stride_bytes: int) -> Self:
        """Pages in one stretch of memory, as in a tensor [page_count, page_stride_bytes]."""
        return cls((address,), page_count, page_stride_bytes, page_count)

    def addresses(self, pages: npt.NDArray[np.integer]) -> AddressArray:
        """Return where pages begin. Raises PageOutOfBoundsError."""
        wide = pages.astype(np.int64)
        wrong = (wide < 0) | (wide >= self.page_count)
        if wrong.any():
            raise PageOutOfBoundsError(f"page {int(wide[wrong][0])} does not exist among {self.page_count}")
        extent, within = np.divmod(wide, self.pages_per_extent)
        bases = np.array(self.extent_addresses, dtype=np.uint64)[extent]
        return bases + (within * self.page_stride_bytes).astype(np.uint64)


@dataclass(frozen=True, slots=True)
class IdPairs:
    """Which pages to copy where: two int32 arrays in memory that the copying processor reads when it runs.

    On a GPU: device memory, or host memory registered with CUDA. Not written until the copy is done. An id of -1 in either
    array leaves its pair out. No destination id occurs twice.
    """

    source_address: int
    destination_address: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0:
            raise InvalidInputError(f"a copy of {self.count} ids makes no sense")

    def read(self) -> tuple[IdArray, IdArray]:
        """Return the pairs to copy, out of memory of the CPU; those with -1 are left out."""
        if not self.count:
            return np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32)
        source, destination = (
            array_at(address, (self.count,), np.int32) for address in (self.source_address, self.destination_address)
        )
        wanted = (source != -1) & (destination != -1)
        return source[wanted], destination[wanted]


@dataclass(frozen=True, slots=True)
class PagePair:
    """Pages of one component of one layer, and where they are copied to."""

    source: PageMemory
    destination: PageMemory
    page_bytes: int
    """Bytes that are copied of each page; the rest of its stride is left alone."""
    group: int = 0
    """Pairs of a lower group are copied first; a stream can wait for a group. Usually the layer's position."""
    table: int = 0
    """Which of the lists given to a copy names this pair's pages."""

    def __post_init__(self) -> None:
        strides = (self.source.page_stride_bytes, self.destination.page_stride_bytes)
        if not 0 < self.page_bytes <= min(*strides, MOST_PAGE_BYTES) or self.group < 0 or self.table < 0:
            raise InvalidInputError(
                f"pages of {self.page_bytes} bytes at strides {strides}, group {self.group}, table {self.table} cannot be"
            )


@dataclass(frozen=True, slots=True)
class RowMemory:
    """Rows of one component of one layer."""

    pages: PageMemory
    slots: int
    """Rows that a page holds; 1 for rows that lie dense, one stride apart."""

    def addresses(self, rows: npt.NDArray[np.integer], row_parts_bytes: Sequence[int]) -> list[AddressArray]:
        """Return, for each part of a row, the address of that part of each row. Raises PageOutOfBoundsError."""
        page, slot = np.divmod(rows.astype(np.int64), self.slots)
        begins = self.pages.addresses(page)
        offsets = accumulate((part * self.slots for part in row_parts_bytes[:-1]), initial=0)
        return [
            begins + (offset + slot * part).astype(np.uint64)
            for part, offset in zip(row_parts_bytes, offsets, strict=True)
        ]


def copy_rows(
    source: tuple[RowMemory, npt.NDArray[np.integer]],
    destination: tuple[RowMemory, npt.NDArray[np.integer]],
    row_parts_bytes: Sequence[int],
) -> None:
    """Copy rows by their ids, in memory of this process. Raises PageOutOfBoundsError."""
    sides = [memory.addresses(rows, row_parts_bytes) for memory, rows in (source, destination)]
    for part_bytes, origins, targets in zip(row_parts_bytes, *sides, strict=True):
        copy_operations(origins, targets, np.full(len(origins), part_bytes, dtype=np.uint64))


def most_tables(pairs: Sequence[PagePair]) -> int:
    """Return how many lists a copy of these pairs needs."""
    return 1 + max(pair.table for pair in pairs)
