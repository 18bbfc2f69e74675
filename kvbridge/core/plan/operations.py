"""The parts of a plan: sections of a request, the pages that rows touch, addresses of pages, and copies as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import Component, ComponentKind, RowInterval
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, NonNegative

AddressArray = npt.NDArray[np.uint64]
IndexArray = npt.NDArray[np.int64]

CUT_ALIGNMENT_BYTES = 4_096
"""Longer operations are cut at multiples of this from their beginning, where the limit allows."""
NO_BORDERS = 0
"""In place of a distance between extents: all pages lie in one."""


class Section(FrozenModel):
    """The tokens [start_token, stop_token) of some layers. The last section takes windows, tails and whole rows along."""

    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """First tokens, which decode holds already; a multiple of the geometry's tokens_per_page."""
    start_token: NonNegative
    stop_token: NonNegative
    layers: tuple[NonNegative, ...] | None = None
    """Global layer ids. None: every layer of the rank."""

    def added_rows(self, component: Component) -> RowInterval:
        """Return the rows that the section adds to those of the sections before; there may be none (count 0)."""
        published = partial(
            component.published_rows, prompt_tokens=self.prompt_tokens, prefix_tokens=self.prefix_tokens
        )
        before, after = published(self.start_token), published(self.stop_token)
        return RowInterval(start=max(before.stop, after.start), stop=after.stop)


class Amount(FrozenModel):
    """The amount of one component that was planned or sent."""

    lane_rows: NonNegative = 0
    """Rows times lanes, summed over layers and destinations. They decide a commit, since chunks do not change them."""
    bytes: NonNegative = 0
    """Bytes on the wire; a completed page counts with its padding."""
    operations: NonNegative = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            lane_rows=self.lane_rows + other.lane_rows,
            bytes=self.bytes + other.bytes,
            operations=self.operations + other.operations,
        )


Amounts = dict[ComponentKind, Amount]


def add_amounts(left: Amounts, right: Amounts) -> Amounts:
    """Return the sums, component by component."""
    return {kind: left.get(kind, Amount()) + right.get(kind, Amount()) for kind in left.keys() | right.keys()}


# ------------------------------------------------------------------------------------------- operations


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """Copies to make, in no particular order; no two destinations overlap.

    Three one-dimensional uint64 arrays of equal length, which are not written any more: virtual addresses in the source process and
    in the destination process, and bytes (never 0).
    """

    source: AddressArray
    destination: AddressArray
    length: AddressArray

    def __post_init__(self) -> None:
        for array in (self.source, self.destination, self.length):
            if array.dtype != np.uint64 or array.shape != (self.length.size,):
                raise InvalidInputError(
                    f"operation arrays are uint64, one-dimensional and equally long, got {array.dtype} of shape {array.shape}"
                )

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        """Sum of all lengths."""
        return int(self.length.sum(dtype=np.uint64))

    def __getitem__(self, part: slice) -> Operations:
        return Operations(self.source[part], self.destination[part], self.length[part])

    def taken(self, parts: Sequence[slice]) -> Operations:
        """Return those of some parts."""
        if len(parts) == 1:
            return self[parts[0]]
        columns = (self.source, self.destination, self.length)
        return Operations(*(np.concatenate([column[:0], *(column[part] for part in parts)]) for column in columns))

    def cut(self, max_bytes: int) -> Operations:
        """Return the copies, each cut into the fewest pieces of at most `max_bytes` that alignment allows."""
        if int(self.length.max(initial=0)) <= max_bytes:
            return self
        parts, size = cut_sizes(self.length, max_bytes)
        of = np.repeat(np.arange(len(self)), parts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
        offset = (nth * size[of]).astype(np.uint64)
        length = np.minimum(size[of].astype(np.uint64), self.length[of] - offset)
        return Operations(self.source[of] + offset, self.destination[of] + offset, length)


def cut_sizes(length: npt.NDArray[np.integer], max_bytes: int) -> tuple[IndexArray, IndexArray]:
    """Return the number of pieces of copies of these lengths, and the size of each copy's pieces but for the last one."""
    whole = length.astype(np.int64)
    if not len(whole) or whole.max() <= max_bytes:
        return np.ones_like(whole), whole
    alignment = CUT_ALIGNMENT_BYTES if max_bytes >= CUT_ALIGNMENT_BYTES else 1
    limit = max_bytes - max_bytes % alignment
    parts = np.where(whole > max_bytes, -(-whole // limit), 1)
    aligned = -(-whole // (parts * alignment)) * alignment
    size = np.where(parts > 1, aligned, whole)
    return -(-whole // size), size


# ------------------------------------------------------------------------------------------- pages


@dataclass(frozen=True, slots=True, eq=False)
class PageArray:
    """The pages of some layers that lie alike, at addresses of one process.

    Page `p` begins `p % pages_per_extent` strides behind the base of its extent, `p // pages_per_extent`.
    """

    bases: AddressArray
    """Shape (layers, extents), or (layers, 1) where the extents of each layer follow each other without a gap."""
    pages_per_extent: int
    stride_bytes: int
    page_count: int
    borders: int = NO_BORDERS
    """Distance in pages of the borders between registrations, which no operation crosses."""

    @classmethod
    def of(cls, regions: Sequence[Region], *, offset_bytes: int = 0) -> Self:
        """Return the pages of regions of one form. `offset_bytes`: the offset of all addresses in their pages."""
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
        """Return the pages of layers that are each one stretch of memory, as a tensor [page_count, stride_bytes] is."""
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
        """Write the addresses `offset` bytes behind the begin of each page to `out`: (layers, pages). The ids have been checked."""
        if self.bases.shape[1] == 1:
            np.add(self.bases, (ids * self.stride_bytes + offset).view(np.uint64), out=out)
            return
        extent, within = np.divmod(ids, self.pages_per_extent)
        np.take(self.bases, extent, axis=1, out=out, mode="clip")
        out += (within * self.stride_bytes + offset).view(np.uint64)

    def addresses(self, ids: npt.NDArray[np.integer], offset: IndexArray | int = 0) -> AddressArray:
        """Return the addresses `offset` bytes behind the begin of each page: (layers, pages). Raises PageOutOfBoundsError."""
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


Slots = tuple[tuple[int, int], ...]
"""Intervals [start, stop) of a page's slots, ascending; two when a ring wraps around."""


class PageSplit(NamedTuple):
    """The logical pages that an interval of rows touches."""

    full: range
    """Every slot is sent."""
    partial: dict[int, Slots]
    """The slots that are sent of each other page."""

    @property
    def touched(self) -> range:
        """Every logical page from the first to the last."""
        pages = [*self.partial, *self.full[:1], *self.full[-1:]]
        return range(min(pages), max(pages) + 1)


def split_rows(component: Component, rows: RowInterval) -> PageSplit:
    """Split a non-empty interval of rows into full pages and at most two partial ones."""
    span = component.rows_per_logical_page
    first, last = rows.start // span, (rows.stop - 1) // span
    partial = {}
    for page in (first, last):
        slots = _slots(component, max(rows.start, page * span), min(rows.stop, (page + 1) * span))
        if slots != ((0, component.slots_per_page),):
            partial[page] = slots
    return PageSplit(range(first + (first in partial), last + (last not in partial)), partial)


def _slots(component: Component, start: int, stop: int) -> Slots:
    slots = component.slots_per_page
    if stop - start >= slots:
        return ((0, slots),)
    begin = start % slots
    end = begin + stop - start
    if end <= slots:
        return ((begin, end),)
    return ((0, end - slots), (begin, slots))


def byte_intervals(component: Component, lanes: int, slots: Slots) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes of `slots` in each part of neighbouring `lanes`, ascending, merged where they touch."""
    merged: list[tuple[int, int]] = []
    for lane in range(lanes):
        for part, row_bytes in enumerate(component.row_parts_bytes):
            begin = lane * component.lane_block_bytes + component.part_offset(part)
            for start, stop in slots:
                offset, length = begin + start * row_bytes, (stop - start) * row_bytes
                if merged and sum(merged[-1]) == offset:
                    offset, length = merged[-1][0], merged.pop()[1] + length
                merged.append((offset, length))
    return merged


class Runs(NamedTuple):
    """Pages that follow each other on both sides: int64 arrays of equal length."""

    source: IndexArray
    """First page id of each run on the source."""
    destination: IndexArray
    pages: IndexArray
    """Length of each run, at least 1."""


def find_runs(
    source: IndexArray, destination: IndexArray, pages_per_extent: tuple[int, int] = (NO_BORDERS, NO_BORDERS)
) -> Runs:
    """Find the longest runs in two equally long arrays of page ids, in their order.

    A run ends where the ids of either side do not go on, and at each border between extents, which no operation may cross.
    `pages_per_extent`: the distance of borders on the source and on the destination.
    """
    ends = (source[1:] != source[:-1] + 1) | (destination[1:] != destination[:-1] + 1)
    for ids, border_pages in zip((source, destination), pages_per_extent, strict=True):
        if border_pages != NO_BORDERS:
            ends |= ids[1:] % border_pages == 0
    starts = np.flatnonzero(ends) + 1
    if len(starts) + 1 >= len(source):
        return Runs(source, destination, np.ones(len(source), dtype=np.int64))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    return Runs(source[starts], destination[starts], np.diff(starts, append=len(source)))
