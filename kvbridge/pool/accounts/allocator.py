"""The account of an index space from which this node allocates: free pages, given out in as few and as long runs as possible.

An operation that moves bytes costs the same whether it is short or long, so consecutive pages are worth more than any other
property of an allocation. `take` looks for the shortest free run that holds everything; where there is none, it uses up the longest
runs until the shortest run that holds the rest finishes the job. No other choice gives fewer runs. Pages that need not lie together
come from the shortest runs, and leave the long runs to others.

Free runs are filed by their length. `n` pages have fewer than `sqrt(2 n)` distinct lengths (447 for 100,000 pages), so the sorted
list of lengths stays short however fragmented the pool is, and a run is found, cut or joined in a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import PageIdArray


class RunAllocator:
    """Page ids [0, page_count) of one index space. A page that is not free belongs to an owner or is cached. Not thread-safe."""

    what = "a space that this node allocates from"

    def __init__(self, page_count: int, *, name: str = "pages") -> None:
        if page_count < 1 or page_count > np.iinfo(np.int32).max:
            raise InvalidInputError(f"{name}: a pool has 1 to 2^31 - 1 pages, got {page_count}")
        self.name = name
        self.page_count = page_count
        self._is_free = np.ones(page_count, dtype=np.bool_)
        self._is_cached = np.zeros(page_count, dtype=np.bool_)
        self.cached = 0
        """Pages that have no owner and are not free."""
        self.free = 0
        """Pages that can be given out now."""
        self._length_at_start: dict[int, int] = {}
        self._length_at_stop: dict[int, int] = {}
        self._starts_of_length: dict[int, list[int]] = {}
        self._place_of_start: dict[int, int] = {}
        self._lengths: list[int] = []
        self._add_run(0, page_count)

    @property
    def largest_run(self) -> int:
        """Length of the longest run of consecutive free pages; 0 when no page is free."""
        return self._lengths[-1] if self._lengths else 0

    def take(self, count: int, *, after: int | None = None, scattered: int = 0) -> PageIdArray:
        """Give out `count` pages, all or nothing: int32 ids, ascending, in the fewest runs possible.

        With `after`, free pages that directly follow page `after` come first, so a growing owner continues its run. The last
        `scattered` of the pages, ascending among themselves, come from the shortest runs. Raises CapacityError when fewer are free.
        """
        if not 0 <= scattered <= count:
            raise InvalidInputError(f"{self.name}: cannot take {count} pages, {scattered} of them scattered")
        if count > self.free:
            raise CapacityError(f"{self.name}: {count} pages wanted, {self.free} of {self.page_count} are free")
        if not scattered:
            return self._take(count, after)
        if scattered == count:
            return self._take_shortest(count)
        return np.concatenate((self._take(count - scattered, after), self._take_shortest(scattered)))

    def _take(self, count: int, after: int | None) -> PageIdArray:
        starts: list[int] = []
        lengths: list[int] = []
        left = count
        if left and after is not None and after + 1 in self._length_at_start:
            left -= self._cut(after + 1, left, starts, lengths)
        while left:
            left -= self._cut(self._best_start(left), left, starts, lengths)
        return self._taken(starts, lengths)

    def _take_shortest(self, count: int) -> PageIdArray:
        starts: list[int] = []
        lengths: list[int] = []
        while count:
            count -= self._cut(self._starts_of_length[self._lengths[0]][-1], count, starts, lengths)
        return self._taken(starts, lengths)

    def _taken(self, starts: list[int], lengths: list[int]) -> PageIdArray:
        ids = _expand(starts, lengths)
        self._is_free[ids] = False
        return ids

    def give(self, ids: npt.ArrayLike) -> None:
        """Take pages back, all or nothing. `ids` are distinct pages that are out, in any order.

        Raises PageOutOfBoundsError for an id that the space does not have and IntegrityError for a page that is not out (given
        twice). Both mean that somebody's books are wrong, and change nothing.
        """
        pages = np.sort(np.asarray(ids, dtype=np.int64), axis=None)
        if not len(pages):
            return
        if pages[0] < 0 or pages[-1] >= self.page_count:
            raise PageOutOfBoundsError(
                f"{self.name}: page {pages[0] if pages[0] < 0 else pages[-1]} is not in [0, {self.page_count})"
            )
        repeated = pages[1:][pages[1:] == pages[:-1]]
        not_out = pages[self._is_free[pages]]
        for wrong, why in ((repeated, "named twice"), (not_out, "not out")):
            if len(wrong):
                raise IntegrityError(f"{self.name}: pages given back that are {why}: {_abbreviated(wrong)}")
        self._is_free[pages] = True
        for start, stop in runs_of(pages):
            self._join(start, stop)

    def keep(self, ids: PageIdArray) -> None:
        """Note that these pages, which an owner had until now, are cached."""
        self._is_cached[ids] = True
        self.cached += len(ids)

    def drop(self, ids: PageIdArray) -> None:
        """Make cached pages free, all or nothing. Raises IntegrityError for a page that is not cached, or is named twice."""
        outside = (ids < 0) | (ids >= self.page_count)
        if outside.any() or len(np.unique(ids)) != len(ids) or not self._is_cached[ids].all():
            raise IntegrityError(
                f"space '{self.name}': pages leave the cache that are not cached, or are named twice: {ids.tolist()}"
            )
        self._is_cached[ids] = False
        self.cached -= len(ids)
        self.give(ids)

    def cached_ids(self) -> PageIdArray:
        """Return all cached pages."""
        return np.flatnonzero(self._is_cached).astype(np.int32)

    def __repr__(self) -> str:
        return f"<pages {self.name}: {self.free} of {self.page_count} free, longest run {self.largest_run}>"

    def _best_start(self, count: int) -> int:
        """Return the start of the shortest run that holds `count` pages, else of the longest run."""
        place = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        return self._starts_of_length[self._lengths[place]][-1]

    def _cut(self, start: int, count: int, starts: list[int], lengths: list[int]) -> int:
        """Take up to `count` pages from the front of the free run at `start`; append the piece and return its length."""
        length = self._remove_run(start)
        used = min(count, length)
        if used < length:
            self._add_run(start + used, length - used)
        starts.append(start)
        lengths.append(used)
        return used

    def _join(self, start: int, stop: int) -> None:
        """Add the free run [start, stop), joined with the free runs on both sides."""
        if before := self._length_at_stop.get(start):
            start -= before
            self._remove_run(start)
        if stop in self._length_at_start:
            stop += self._remove_run(stop)
        self._add_run(start, stop - start)

    def _add_run(self, start: int, length: int) -> None:
        self._length_at_start[start] = length
        self._length_at_stop[start + length] = length
        if length not in self._starts_of_length:
            self._starts_of_length[length] = []
            insort(self._lengths, length)
        starts = self._starts_of_length[length]
        self._place_of_start[start] = len(starts)
        starts.append(start)
        self.free += length

    def _remove_run(self, start: int) -> int:
        length = self._length_at_start.pop(start)
        del self._length_at_stop[start + length]
        starts = self._starts_of_length[length]
        place = self._place_of_start.pop(start)
        last = starts.pop()
        if last != start:  # the last fills the hole, so a removal costs the same however long the list is
            starts[place] = last
            self._place_of_start[last] = place
        if not starts:
            del self._starts_of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self.free -= length
        return length


def runs_of(ascending: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut ascending distinct ids into runs [start, stop) of consecutive ones."""
    if not len(ascending):
        return []
    first, stop = int(ascending[0]), int(ascending[-1]) + 1
    if stop - first == len(ascending):  # what most rooms have
        return [(first, stop)]
    breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
    starts = ascending[np.concatenate(([0], breaks))]
    stops = ascending[np.concatenate((breaks, [len(ascending)])) - 1] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _expand(starts: list[int], lengths: list[int]) -> PageIdArray:
    if len(starts) == 1:  # what most rooms have
        return np.arange(starts[0], starts[0] + lengths[0], dtype=np.int32)
    order = np.argsort(np.asarray(starts, dtype=np.int64))
    sorted_starts = np.asarray(starts, dtype=np.int64)[order]
    sorted_lengths = np.asarray(lengths, dtype=np.int64)[order]
    first_slot = np.cumsum(sorted_lengths) - sorted_lengths
    ids = np.repeat(sorted_starts - first_slot, sorted_lengths) + np.arange(sum(lengths), dtype=np.int64)
    return ids.astype(np.int32)


def _abbreviated(pages: npt.NDArray[np.int64], limit: int = 8) -> str:
    shown = ", ".join(str(page) for page in pages[:limit].tolist())
    return shown if len(pages) <= limit else f"{shown} and {len(pages) - limit} more"
