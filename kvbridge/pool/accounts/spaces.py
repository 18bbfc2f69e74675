"""The accounts of single index spaces: one from which this node allocates, and one whose page ids an engine names."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import IndexSpace, PageIdArray


class RunAllocator:
    """Page ids [0, page_count) of one index space, given out in as few and as long runs as possible. Not thread-safe.

    A page that is not free belongs to an owner or is cached. An operation that moves bytes costs the same whether it is short or
    long, so consecutive pages are worth more than any other property of an allocation. `take` looks for the shortest free run that
    holds everything; where there is none, it uses up the longest runs until the shortest run that holds the rest finishes the job.
    No other choice gives fewer runs. Pages that need not lie together come from the shortest runs.

    Free runs are filed by their length. `n` pages have fewer than `sqrt(2 n)` distinct lengths (447 for 100,000 pages), so the
    sorted list of lengths stays short however fragmented the pool is, and a run is found, cut or joined in a few microseconds.
    """

    what = "a space that this node allocates from"

    def __init__(self, page_count: int, *, name: str = "pages") -> None:
        if page_count < 1 or page_count > np.iinfo(np.int32).max:
            raise InvalidInputError(f"{name}: a pool has 1 to 2^31 - 1 pages, got {page_count}")
        self.name = name
        self.page_count = page_count
        self._is_free = np.ones(page_count, dtype=np.bool_)
        self._is_cached = np.zeros(page_count, dtype=np.bool_)
        self.cached = self.free = 0
        """Numbers of pages that are cached, and that can be given out now."""
        self._length_at_start: dict[int, int] = {}
        self._length_at_stop: dict[int, int] = {}
        self._starts_of_length: dict[int, list[int]] = {}
        self._place_of_start: dict[int, int] = {}
        self._lengths: list[int] = []
        self._add_run(0, page_count)

    def take(self, count: int, *, after: int | None = None, scattered: int = 0) -> PageIdArray:
        """Give out `count` pages, all or nothing: int32 ids, ascending, in the fewest runs possible.

        With `after`, free pages that directly follow page `after` come first, so a growing owner continues its run. The last
        `scattered` of the pages, ascending among themselves, come from the shortest runs. Raises CapacityError when fewer are free.
        """
        if not 0 <= scattered <= count:
            raise InvalidInputError(f"{self.name}: cannot take {count} pages, {scattered} of them scattered")
        if count > self.free:
            raise CapacityError(f"{self.name}: {count} pages wanted, {self.free} of {self.page_count} are free")
        together: list[tuple[int, int]] = []
        apart: list[tuple[int, int]] = []
        left = count - scattered
        if left and after is not None and after + 1 in self._length_at_start:
            left -= self._cut(after + 1, left, together)
        while left:  # from the shortest run that holds the rest, else from the longest run
            place = min(bisect_left(self._lengths, left), len(self._lengths) - 1)
            left -= self._cut(self._starts_of_length[self._lengths[place]][-1], left, together)
        while scattered:
            scattered -= self._cut(self._starts_of_length[self._lengths[0]][-1], scattered, apart)
        ids = np.concatenate((_expand(together), _expand(apart))) if together and apart else _expand(together or apart)
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
                raise IntegrityError(
                    f"{self.name}: pages given back that are {why}: {np.array2string(wrong, threshold=8)}"
                )
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
                f"{self.name}: not cached pages, or pages named twice, leave the cache: {ids.tolist()}"
            )
        self._is_cached[ids] = False
        self.cached -= len(ids)
        self.give(ids)

    def _cut(self, start: int, count: int, pieces: list[tuple[int, int]]) -> int:
        """Take up to `count` pages from the front of the free run at `start`; append (start, length) and return the length."""
        length = self._remove_run(start)
        used = min(count, length)
        if used < length:
            self._add_run(start + used, length - used)
        pieces.append((start, used))
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


class AdoptedSpace:
    """Page ids [0, page_count) of one index space that an engine gives out.

    The engine says of each page whether a room writes the page, or only reads a page of the engine's own prefix cache. A page
    has at most one writer, and gets a writer only while nobody reads the page; any number of rooms may read a written page.
    """

    what = "an adopted space"

    def __init__(self, space: IndexSpace, page_count: int) -> None:
        if page_count < 1:
            raise InvalidInputError(f"adopted space '{space}' needs at least one page, got {page_count}")
        self.name = str(space)
        self.page_count = page_count
        self._is_written = np.zeros(page_count, dtype=np.bool_)
        self._readers = np.zeros(page_count, dtype=np.int32)
        self._written = 0
        self.cached = 0
        """Pages that rooms read and none writes."""

    @property
    def free(self) -> int:
        """Pages that the engine has not given to kvbridge; only the engine knows whether it could."""
        return self.page_count - self._written - self.cached

    def check(self, ids: npt.ArrayLike) -> PageIdArray:
        """Return an engine's page ids as an int32 copy. Raises when a page does not exist or is named twice."""
        pages = np.array(ids)
        if pages.ndim != 1 or (len(pages) and not np.issubdtype(pages.dtype, np.integer)):
            raise InvalidInputError(
                f"pages of adopted space '{self.name}' are a one-dimensional list of integers, "
                f"got {pages.dtype} of shape {pages.shape}"
            )
        outside = pages[(pages < 0) | (pages >= self.page_count)]
        if len(outside):
            raise PageOutOfBoundsError(
                f"page {outside[0]} is not in [0, {self.page_count}) of adopted space '{self.name}'"
            )
        if len(np.unique(pages)) != len(pages):
            raise InvalidInputError(f"a page of adopted space '{self.name}' is named twice among {len(pages)}")
        return pages.astype(np.int32)

    def in_use(self, ids: PageIdArray) -> PageIdArray:
        """Return the `ids` that have a writer or readers; nobody else may write these."""
        return ids[self._is_written[ids] | (self._readers[ids] > 0)]

    def written(self, ids: PageIdArray) -> PageIdArray:
        """Return the `ids` that a room writes, or has written and still holds."""
        return ids[self._is_written[ids]]

    def mark(self, ids: PageIdArray) -> None:
        """Note that a room writes these pages; `in_use` has none of them."""
        self._is_written[ids] = True
        self._written += len(ids)

    def read(self, ids: PageIdArray) -> None:
        """Note that one more room reads these pages without writing them."""
        self.cached += int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))
        self._readers[ids] += 1

    def give(self, ids: PageIdArray) -> None:
        """Note that a room does not write these pages any more. Raises IntegrityError when no room did."""
        if not self._is_written[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' are given back that no room writes")
        self._is_written[ids] = False
        self._written -= len(ids)
        self.cached += int(np.count_nonzero(self._readers[ids]))

    def read_no_more(self, ids: PageIdArray) -> None:
        """Note that one room fewer reads these pages. Raises IntegrityError when no room did."""
        if not self._readers[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' lose a reader that they never had")
        self._readers[ids] -= 1
        self.cached -= int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))


def runs_of(ascending: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cut ascending distinct ids into runs [start, stop) of consecutive ones."""
    if not len(ascending):
        return []
    first, stop = int(ascending[0]), int(ascending[-1]) + 1
    if stop - first == len(ascending):  # true of most rooms
        return [(first, stop)]
    breaks = np.flatnonzero(np.diff(ascending) != 1) + 1
    starts = ascending[np.concatenate(([0], breaks))]
    stops = ascending[np.concatenate((breaks, [len(ascending)])) - 1] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def _expand(pieces: list[tuple[int, int]]) -> PageIdArray:
    """Return the ids of pieces (start, length), ascending."""
    if len(pieces) == 1:  # true of most rooms
        return np.arange(pieces[0][0], sum(pieces[0]), dtype=np.int32)
    starts, lengths = np.array(sorted(pieces), dtype=np.int64).reshape(-1, 2).T
    ids = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return (ids + np.arange(len(ids))).astype(np.int32)
