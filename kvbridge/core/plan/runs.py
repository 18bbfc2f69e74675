"""Which pages and slots an interval of rows touches, and where page ids follow each other on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbridge.core.geometry.components import Component, RowInterval
from kvbridge.core.plan.page_array import NO_BORDERS, IndexArray


@dataclass(frozen=True, slots=True)
class PartialPage:
    """A logical page of which some slots are sent: intervals [start, stop), two when a ring wraps around."""

    page: int
    slots: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> int:
        """How many rows are sent of it."""
        return sum(stop - start for start, stop in self.slots)


@dataclass(frozen=True, slots=True)
class PageSplit:
    """The logical pages that an interval of rows touches: those of which every slot is sent, and the others."""

    full: range
    partial: tuple[PartialPage, ...]

    @property
    def touched(self) -> range:
        """Every logical page from the first to the last."""
        pages = [page.page for page in self.partial]
        if self.full:
            pages += [self.full[0], self.full[-1]]
        return range(min(pages), max(pages) + 1)


def split_rows(component: Component, rows: RowInterval) -> PageSplit:
    """Split a non-empty interval of rows into full pages and at most two partial ones."""
    span = component.rows_per_logical_page
    first, last = rows.start // span, (rows.stop - 1) // span
    everything = ((0, component.slots_per_page),)
    partial = []
    for page in dict.fromkeys((first, last)):
        slots = _slots(component, max(rows.start, page * span), min(rows.stop, (page + 1) * span))
        if slots != everything:
            partial.append(PartialPage(page, slots))
    partly = {page.page for page in partial}
    return PageSplit(range(first + (first in partly), last + (last not in partly)), tuple(partial))


def _slots(component: Component, start: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Slots of the rows [start, stop) of one logical page, as intervals in ascending order."""
    slots = component.slots_per_page
    if stop - start >= slots:
        return ((0, slots),)
    begin = start % slots
    end = begin + stop - start
    if end <= slots:
        return ((begin, end),)
    return ((0, end - slots), (begin, slots))


def byte_intervals(component: Component, lanes: int, slots: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Return (offset, length) in bytes of `slots` of every part of `lanes` neighbouring lanes, from the first lane on.

    Ascending; neighbours are merged, so what follows each other in the page is one interval.
    """
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


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Pages that follow each other on both sides: int64 arrays of equal length."""

    source: IndexArray
    """First page id of each run on the source."""
    destination: IndexArray
    pages: IndexArray
    """Length of each run, at least 1."""

    def __len__(self) -> int:
        return len(self.pages)


def single_pages(source: IndexArray, destination: IndexArray) -> Runs:
    """Take every page as a run of its own."""
    return Runs(source, destination, np.ones(len(source), dtype=np.int64))


def find_runs(
    source: IndexArray, destination: IndexArray, pages_per_extent: tuple[int, int] = (NO_BORDERS, NO_BORDERS)
) -> Runs:
    """Find the longest runs in two equally long arrays of page ids, in their order.

    A run ends where either side's ids do not go on, and at each border between extents, which no operation may cross:
    `pages_per_extent` gives their distance on the source and on the destination.
    """
    ends = (source[1:] != source[:-1] + 1) | (destination[1:] != destination[:-1] + 1)
    for ids, border_pages in zip((source, destination), pages_per_extent, strict=True):
        if border_pages != NO_BORDERS:
            ends |= ids[1:] % border_pages == 0
    starts = np.flatnonzero(ends) + 1
    if len(starts) + 1 >= len(source):
        return single_pages(source, destination)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
    return Runs(source[starts], destination[starts], np.diff(starts, append=len(source)))
