"""The free page ids of one index space, given out in as few and as long runs as the pool still has.

Every operation that moves bytes costs the same whether it is short or long, so consecutive pages are worth more than any other
property of an allocation. `take` first looks for the shortest free run that holds everything; where there is none, it uses up the
longest runs until the shortest run that holds the rest finishes the job. No other choice gives fewer runs. Pages that need not lie
together come from the shortest runs, and leave the long ones to others.

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
    """Page ids [0, page_count) of one index space.

    Not thread-safe: it belongs to the one thread that decides.
    """

    def __init__(self, page_count: int, *, name: str = "pages") -> None:
        if page_count < 1 or page_count > np.iinfo(np.int32).max:
            raise InvalidInputError(f"{name}: a pool has 1 to 2^31 - 1 pages, got {page_count}")
        self.name = name
        self.page_count = page_count
        self._is_free = np.ones(page_count, dtype=np.bool_)
        self._free = 0
        self._length_at_start: dict[int, int] = {}
        self._length_at_stop: dict[int, int] = {}
        self._starts_of_length: dict[int, list[int]] = {}
        self._place_of_start: dict[int, int] = {}
        self._lengths: list[int] = []
        self._add_run(0, page_count)

    @property
    def free(self) -> int:
        """Pages that can be given out now."""
        return self._free

    @property
    def largest_run(self) -> int:
        """Length of the longest run of consecutive free pages; 0 when nothing is free."""
        return self._lengths[-1] if self._lengths else 0

    def take(self, count: int, *, after: int | None = None, scattered: int = 0) -> PageIdArray:
        """Give out `count` pages, all or nothing: int32 ids, ascending, in the fewest runs possible.

        With `after`, the pages that directly follow page `after` come first (if they are free), so that a growing owner
        goes on with the run it has. The last `scattered` of the pages, ascending among themselves, come from the shortest
        runs. Raises CapacityError when fewer are free; nothing is kept then.
        """
        if not 0 <= scattered <= count:
            raise InvalidInputError(f"{self.name}: cannot take {count} pages, {scattered} of them scattered")
        if count > self._free:
            raise CapacityError(f"{self.name}: {count} pages wanted, {self._free} of {self.page_count} are free")
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

        Raises PageOutOfBoundsError for an id that the space does not have and IntegrityError for a page that is not
        out (given twice): both mean that somebody's books are wrong, so nothing is changed.
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
        for start, stop in _runs(pages):
            self._join(start, stop)

    def check_integrity(self) -> None:
        """Compare every structure with every other. Raises IntegrityError that names the first contradiction."""
        expected = {start: stop - start for start, stop in _runs(np.flatnonzero(self._is_free))}
        filed = {start: length for length, starts in self._starts_of_length.items() for start in starts}
        facts = {
            "runs by start": self._length_at_start == expected,
            "runs by stop": self._length_at_stop == {start + length: length for start, length in expected.items()},
            "runs by length": filed == expected and all(self._starts_of_length.values()),
            "places": self._place_of_start
            == {start: place for starts in self._starts_of_length.values() for place, start in enumerate(starts)},
            "sorted lengths": self._lengths == sorted(self._starts_of_length),
            "free count": self._free == sum(expected.values()),
        }
        for fact, holds in facts.items():
            if not holds:
                raise IntegrityError(f"{self.name}: {fact} do not match the map of free pages in {self!r}")

    def __repr__(self) -> str:
        return f"<pages {self.name}: {self._free} of {self.page_count} free, longest run {self.largest_run}>"

    def _best_start(self, count: int) -> int:
        """Where to cut next: the shortest run that holds `count` pages, else the longest there is."""
        place = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        return self._starts_of_length[self._lengths[place]][-1]

    def _cut(self, start: int, count: int, starts: list[int], lengths: list[int]) -> int:
        """Take up to `count` pages from the front of the free run at `start`; note them down and return how many."""
        length = self._remove_run(start)
        used = min(count, length)
        if used < length:
            self._add_run(start + used, length - used)
        starts.append(start)
        lengths.append(used)
        return used

    def _join(self, start: int, stop: int) -> None:
        """File the pages [start, stop) as free, in one run with the free runs on either side."""
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
        self._free += length

    def _remove_run(self, start: int) -> int:
        length = self._length_at_start.pop(start)
        del self._length_at_stop[start + length]
        starts = self._starts_of_length[length]
        place = self._place_of_start.pop(start)
        last = starts.pop()
        if last != start:  # fill the hole, so that leaving a file costs the same however long it is
            starts[place] = last
            self._place_of_start[last] = place
        if not starts:
            del self._starts_of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        self._free -= length
        return length


def _runs(ascending: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
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
    """All ids of the runs, in ascending order."""
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
