"""The order in which cached pages go: old ones first, and of these the ones that lie side by side.

Pages that are free side by side are given out as one run, and runs move in long operations. A pool that evicts strictly by age
crumbles: what came together goes together only until some of it has been used again, and the holes that this leaves are filled with
pages of another age, for ever. So age only says what may go, the oldest fifth. In that, a hand goes over memory, again and again,
and takes what it comes to. It costs hardly a hit: what goes earlier than its age asks is made up for by what stays longer.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvbridge.tier.records import NO_RECORD, RecordArray, Records
from kvbridge.tier.retention import PRIORITY_RANK

_OLD_SHARE = 0.2
"""Share of all records that are old."""
_RANK_SAMPLE = 4096
"""Ranks that are looked at to find out which ones are old."""
_REACH = 16
"""Pages that are passed for each one wanted, and as many as are sampled, before it is left to age alone."""
_SPARE_CANDIDATES = 1024
"""Outdated candidates that are always tolerated."""


class Subtree:
    """A set of records in which none is without its parent: which they are, and how many children each has among them."""

    def __init__(self, records: Records) -> None:
        self.capacity = records.capacity
        self._parent, self._parent_at = records.parent, records.parent_at
        self.children = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        self.children_at = self.children.data
        self.leaf_count = 0

    def all(self) -> RecordArray:
        """All records of the set, by their number."""
        return np.flatnonzero(self.children != NO_RECORD).astype(np.int32)

    def has(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Which of the records are in the set."""
        is_in: npt.NDArray[np.bool_] = self.children[records] != NO_RECORD
        return is_in

    def depth(self, path: RecordArray) -> int:
        """Return the number of records of a path that are in the set: its first ones."""
        if not len(path) or self.children_at[path[-1]] != NO_RECORD:
            return len(path)
        return int(np.count_nonzero(self.has(path)))

    def add(self, records: RecordArray) -> None:
        """Take records in that continue a path of the set; the last of them is a leaf."""
        parent = self._parent_at[records[0]]
        self.children[records] = 1
        self.children_at[records[-1]] = 0
        self.leaf_count += 1
        if parent != NO_RECORD:
            self.leaf_count -= self.children_at[parent] == 0
            self.children_at[parent] += 1

    def remove_leaf(self, record: int) -> int:
        """Take a leaf off. Returns its parent if that is a leaf now, else NO_RECORD."""
        children_at = self.children_at
        children_at[record] = NO_RECORD
        parent: int = self._parent_at[record]
        if parent != NO_RECORD:
            children_at[parent] -= 1
            if not children_at[parent]:
                return parent  # one leaf for the other
        self.leaf_count -= 1
        return NO_RECORD

    def adds_up(self) -> bool:
        """Recount."""
        there = self.all()
        parents = self._parent[there]
        inner = parents[parents != NO_RECORD]
        children = np.bincount(inner, minlength=self.capacity)
        return (
            bool((parents >= NO_RECORD).all() and (self.children[inner] > 0).all())
            and bool((self.children[there] == children[there]).all())
            and self.leaf_count == np.count_nonzero(self.children == 0)
        )


class Victims:
    """The evictable ones of some records. The columns have a place for each record, and are the index's."""

    def __init__(
        self,
        records: Subtree,
        *,
        pages: npt.NDArray[np.int32],
        pins: npt.NDArray[np.int32],
        rank: npt.NDArray[np.float64],
    ) -> None:
        """`pages`: where a record lies; what is side by side there mostly is so in all spaces. `rank`: the lowest goes first."""
        self._records, self._pages, self._pins, self._rank = records, pages, pins, rank
        self._pins_at, self._rank_at = pins.data, rank.data
        self._record_at = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        """By page; it grows with the largest one seen."""
        self._hand = 0
        """The page above which the next look begins, downwards; 0: at the top."""
        self._candidates: list[tuple[float, int]] = []
        """A heap of (rank, record) that has every leaf that nobody pins, and some that are outdated."""

    def place(self, records: RecordArray) -> None:
        """Note where new records lie."""
        pages = self._pages[records]
        missing = int(pages.max()) + 1 - len(self._record_at)
        if missing > 0:
            self._record_at = np.pad(self._record_at, (0, missing), constant_values=NO_RECORD)
        self._record_at[pages] = records

    def forget(self, records: RecordArray) -> None:
        """These are gone, and their pages are somebody else's."""
        self._record_at[self._pages[records]] = NO_RECORD

    def offer(self, record: int) -> None:
        """Make a record a candidate, if it is a leaf that nobody pins."""
        records, candidates = self._records, self._candidates
        if records.children_at[record] or self._pins_at[record]:
            return
        heappush(candidates, (self._rank_at[record], record))
        if len(candidates) > 2 * records.leaf_count + _SPARE_CANDIDATES:
            candidates[:] = self._leaves()
            heapify(candidates)

    def take(self, count: int) -> RecordArray:
        """Take `count` leaves off, each before its parent; so many have to be there that nobody pins."""
        found = self._neighbours(count)
        found += self._oldest(count - len(found))
        return np.array(found, dtype=np.int32)

    def leaves(self) -> RecordArray:
        """Return the leaves that nobody pins, the one of the lowest rank first."""
        leaves = np.flatnonzero((self._records.children == 0) & (self._pins == 0))
        return leaves[np.argsort(self._rank[leaves], kind="stable")].astype(np.int32)

    def add_up(self) -> bool:
        """Recount."""
        there = self._records.all()
        return (
            set(self._candidates).issuperset(self._leaves())
            and np.array_equal(self._record_at[self._pages[there]], there)
            and np.count_nonzero(self._record_at != NO_RECORD) == len(there)
        )

    def _leaves(self) -> list[tuple[float, int]]:
        leaves = self.leaves()
        return list(zip(self._rank[leaves].tolist(), leaves.tolist(), strict=True))

    def _neighbours(self, count: int) -> list[int]:
        """Take up to `count` old leaves off, in the order in which the hand comes to their pages.

        It goes down, since the pages of a path mostly ascend: so it comes to the end of a path first, and behind each leaf to what
        that leaves bare.
        """
        records, children_at = self._records, self._records.children_at
        old = self._old_rank()
        found: list[int] = []
        bare = NO_RECORD
        left = min(len(self._record_at), _REACH * count + _RANK_SAMPLE)
        while len(found) < count and left > 0:
            stop = self._hand or len(self._record_at)
            self._hand = start = max(0, stop - min(left, 4 * (count - len(found)) + 64))
            left -= stop - start
            there = self._record_at[start:stop]
            places = np.flatnonzero((there != NO_RECORD) & (self._rank[there] <= old) & (self._pins[there] == 0))[::-1]
            for place, record in zip(places.tolist(), there[places].tolist(), strict=True):
                if children_at[record]:
                    continue
                if bare not in {record, NO_RECORD}:
                    self.offer(bare)
                found.append(record)
                bare = records.remove_leaf(record)
                if len(found) == count:
                    self._hand = start + place
                    break
        if bare != NO_RECORD:
            self.offer(bare)
        return found

    def _old_rank(self) -> float:
        """Up to which rank records are old, by a sample of those that have the lowest priority."""
        every = slice(None, None, -(-self._records.capacity // _RANK_SAMPLE))
        ranks = self._rank[every][self._records.children[every] != NO_RECORD]
        if not len(ranks):
            return -np.inf
        ranks = ranks[ranks < (ranks.min() // PRIORITY_RANK + 1) * PRIORITY_RANK]
        at = int(_OLD_SHARE * len(ranks))
        return float(np.partition(ranks, at)[at])

    def _oldest(self, count: int) -> list[int]:
        """Take `count` leaves off by rank, and behind each what it leaves bare, as far as its rank goes."""
        records, pins_at, rank_at = self._records, self._pins_at, self._rank_at
        found: list[int] = []
        while len(found) < count:
            rank, record = heappop(self._candidates)
            if records.children_at[record] or pins_at[record] or rank_at[record] != rank:
                continue  # outdated
            while len(found) < count and record != NO_RECORD and not pins_at[record] and rank_at[record] <= rank:
                found.append(record)
                record = records.remove_leaf(record)
            if record != NO_RECORD:
                self.offer(record)
        return found
