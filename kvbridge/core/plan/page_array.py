"""The addresses of pages: page `p` begins `p % pages_per_extent` strides behind the base of its extent, `p // pages_per_extent`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import PageOutOfBoundsError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.plan.operations import AddressArray, Operations

IndexArray = npt.NDArray[np.int64]

NO_BORDERS = 0
"""In place of a distance between extents: all pages lie in one."""


@dataclass(frozen=True, slots=True, eq=False)
class PageArray:
    """The pages of some layers that lie alike, at addresses of one process."""

    bases: AddressArray
    """Shape (layers, extents), or (layers, 1) where the extents of each layer follow each other without a gap."""
    pages_per_extent: int
    stride_bytes: int
    page_count: int
    borders: int = NO_BORDERS
    """Distance in pages of the borders between registrations, which no operation crosses."""

    @classmethod
    def of(cls, regions: Sequence[Region], *, offset_bytes: int = 0) -> Self:
        """Return the pages of regions of one form. `offset_bytes`: where in a page the addresses are."""
        form = regions[0]
        bases = np.array([region.extent_addresses for region in regions], dtype=np.uint64)
        borders = NO_BORDERS if bases.shape[1] == 1 else form.pages_per_extent
        per_extent = form.pages_per_extent
        if (np.diff(bases, axis=1) == np.uint64(per_extent * form.page_stride_bytes)).all():
            bases, per_extent = bases[:, :1], form.page_count
        bases = bases + np.uint64(offset_bytes)
        return cls(bases, per_extent, form.page_stride_bytes, form.page_count, borders)

    @classmethod
    def contiguous(cls, *addresses: int, page_count: int, stride_bytes: int) -> Self:
        """Return the pages of layers that are one stretch of memory each, as a tensor [page_count, stride_bytes] is."""
        return cls(np.array(addresses, dtype=np.uint64)[:, None], page_count, stride_bytes, page_count)

    def __len__(self) -> int:
        return len(self.bases)

    def layers(self, rows: Sequence[int] | slice) -> Self:
        """Return the pages of some of the layers."""
        return replace(self, bases=self.bases[rows])

    def require(self, ids: npt.NDArray[np.integer]) -> None:
        """Raise PageOutOfBoundsError for a page that does not exist."""
        wrong = (ids < 0) | (ids >= self.page_count)
        if wrong.any():
            raise PageOutOfBoundsError(f"page {int(ids[wrong][0])} does not exist among {self.page_count}")

    def write(self, ids: IndexArray, offset: IndexArray | int, out: AddressArray) -> None:
        """Write the address `offset` bytes behind the begin of each page to `out`: (layers, pages). The ids have been checked."""
        if self.bases.shape[1] == 1:
            np.add(self.bases, (ids * self.stride_bytes + offset).view(np.uint64), out=out)
            return
        extent, within = np.divmod(ids, self.pages_per_extent)
        np.take(self.bases, extent, axis=1, out=out, mode="clip")
        out += (within * self.stride_bytes + offset).view(np.uint64)

    def addresses(self, ids: npt.NDArray[np.integer], offset: IndexArray | int = 0) -> AddressArray:
        """Return where pages begin: (layers, pages). Raises PageOutOfBoundsError."""
        self.require(ids)
        out = np.empty((len(self.bases), len(ids)), dtype=np.uint64)
        self.write(ids.astype(np.int64), offset, out)
        return out


def page_copies(
    source: tuple[PageArray, npt.NDArray[np.integer]],
    destination: tuple[PageArray, npt.NDArray[np.integer]],
    page_bytes: int,
) -> Operations:
    """Return the copies of the pages of all layers of two arrays, by their ids. Raises PageOutOfBoundsError."""
    origins, targets = (pages.addresses(ids).reshape(-1) for pages, ids in (source, destination))
    return Operations(origins, targets, np.full(len(origins), page_bytes, dtype=np.uint64))
