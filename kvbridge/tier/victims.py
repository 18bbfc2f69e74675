"""A set of records, and the order in which cached pages go: old ones first, and of these the ones that lie side by side.

Pages that are free side by side are given out as one run, and runs move in long operations. A pool that evicts strictly by age
crumbles: pages that came together go together only until some of them are used again, and pages of another age fill the holes, for
ever. Age therefore only says which pages may go: the oldest fifth. In that fifth a hand goes over memory, again and again, and
takes the pages that it meets. This costs hardly a hit: some pages go earlier than their age asks, and others stay longer.
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
"""Ranks that are sampled to find out which records are old."""
_REACH = 16
"""The hand passes so many pages for each one wanted, and as many as are sampled; then age alone decides."""
_SPARE_CANDIDATES = 1024
"""Outdated candidates that are always tolerated."""


class Subtree:
    """A set of records in which none is without its parent, with their pins, pages and ranks. A column has a place for each."""

    def __init__(self, records: Records, rank: npt.NDArray[np.float64], space_count: int) -> None:
        """`rank`: of each record; the lowest goes first. A record has a page in each of `space_count` spaces."""
        self._parent, self._parent_at = records.parent, records.parent_at
        self._rank, self._rank_at = rank, rank.data
        self._pages = np.zeros((space_count, records.capacity), dtype=np.int32)
        """By space. Records that are neighbours in the first space mostly are so in all."""
        self._pins = np.zeros(records.capacity, dtype=np.int32)
        self._pins_at = self._pins.data
        self._children = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        """Number of children of each record in the set."""
        self._children_at = self._children.data
        self._leaf_count = 0
        self._record_at = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        """By page of the first space; it grows with the largest page seen."""
        self._hand = 0
        """The page above which the next look begins, downwards; 0: at the top."""
        self._candidates: list[tuple[float, int]] = []
        """A heap of (rank, record) that has every leaf that nobody pins, and some that are outdated."""

    def all(self) -> RecordArray:
        """Return all records of the set, by their number."""
        return np.flatnonzero(self._children != NO_RECORD).astype(np.int32)

    def has(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are in the set."""
        is_in: npt.NDArray[np.bool_] = self._children[records] != NO_RECORD
        return is_in

    def depth(self, path: RecordArray) -> int:
        """Return the number of records of a path that are in the set: its first ones."""
        if not len(path) or self._children_at[path[-1]] != NO_RECORD:
            return len(path)
        return int(np.count_nonzero(self.has(path)))

    def leaves(self) -> RecordArray:
        """Return the leaves that nobody pins, the one of the lowest rank first."""
        leaves = np.flatnonzero((self._children == 0) & (self._pins == 0))
        return leaves[np.argsort(self._rank[leaves], kind="stable")].astype(np.int32)

    def _add(self, records: RecordArray) -> None:
        """Take in records, whose pages are set, that continue a path of the set; the last record is a leaf."""
        parent = self._parent_at[records[0]]
        self._children[records] = 1
        self._children_at[records[-1]] = 0
        self._leaf_count += 1
        if parent != NO_RECORD:
            self._leaf_count -= self._children_at[parent] == 0
            self._children_at[parent] += 1
        pages = self._pages[0, records]
        missing = int(pages.max()) + 1 - len(self._record_at)
        if missing > 0:
            self._record_at = np.pad(self._record_at, (0, missing), constant_values=NO_RECORD)
        self._record_at[pages] = records

    def _remove_leaf(self, record: int) -> int:
        """Take a leaf off. Returns its parent if the parent is a leaf now, else NO_RECORD."""
        children_at = self._children_at
        children_at[record] = NO_RECORD
        parent: int = self._parent_at[record]
        if parent != NO_RECORD:
            children_at[parent] -= 1
            if not children_at[parent]:
                return parent  # one leaf for the other
        self._leaf_count -= 1
        return NO_RECORD

    def _offer(self, record: int) -> None:
        """Make a record a candidate, if it is a leaf that nobody pins."""
        candidates = self._candidates
        if self._children_at[record] or self._pins_at[record]:
            return
        heappush(candidates, (self._rank_at[record], record))
        if len(candidates) > 2 * self._leaf_count + _SPARE_CANDIDATES:
            candidates[:] = self._ranked_leaves()
            heapify(candidates)

    def _ranked_leaves(self) -> list[tuple[float, int]]:
        leaves = self.leaves()
        return list(zip(self._rank[leaves].tolist(), leaves.tolist(), strict=True))

    def _victims(self, count: int) -> RecordArray:
        """Take `count` leaves off, each before its parent; there are so many records that nobody pins."""
        found = self._neighbours(count)
        found += self._oldest(count - len(found))
        return np.array(found, dtype=np.int32)

    def _neighbours(self, count: int) -> list[int]:
        """Take up to `count` old leaves off, in the order in which the hand comes to their pages.

        The hand goes down, since the pages of a path mostly ascend: it meets the end of a path first, and behind each leaf the
        record that has become a leaf.
        """
        children_at, old = self._children_at, self._old_rank()
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
                    self._offer(bare)
                found.append(record)
                bare = self._remove_leaf(record)
                if len(found) == count:
                    self._hand = start + place
                    break
        if bare != NO_RECORD:
            self._offer(bare)
        return found

    def _old_rank(self) -> float:
        """Return the highest rank of old records, by a sample of those that have the lowest priority."""
        every = slice(None, None, -(-len(self._rank) // _RANK_SAMPLE))
        ranks = self._rank[every][self._children[every] != NO_RECORD]
        if not len(ranks):
            return -np.inf
        ranks = ranks[ranks < (ranks.min() // PRIORITY_RANK + 1) * PRIORITY_RANK]
        at = int(_OLD_SHARE * len(ranks))
        return float(np.partition(ranks, at)[at])

    def _oldest(self, count: int) -> list[int]:
        """Take `count` leaves off by rank, and behind each the records that become leaves, as far as its rank goes."""
        children_at, pins_at, rank_at = self._children_at, self._pins_at, self._rank_at
        found: list[int] = []
        while len(found) < count:
            rank, record = heappop(self._candidates)
            if children_at[record] or pins_at[record] or rank_at[record] != rank:
                continue  # outdated
            while len(found) < count and record != NO_RECORD and not pins_at[record] and rank_at[record] <= rank:
                found.append(record)
                record = self._remove_leaf(record)
            if record != NO_RECORD:
                self._offer(record)
        return found

    def _adds_up(self) -> bool:
        """Recount children, leaves, places and candidates."""
        there = self.all()
        parents = self._parent[there]
        inner = parents[parents != NO_RECORD]
        children = np.bincount(inner, minlength=len(self._children))
        return (
            bool((parents >= NO_RECORD).all() and (self._children[inner] > 0).all())
            and bool((self._children[there] == children[there]).all())
            and self._leaf_count == np.count_nonzero(self._children == 0)
            and set(self._candidates).issuperset(self._ranked_leaves())
            and np.array_equal(self._record_at[self._pages[0, there]], there)
            and np.count_nonzero(self._record_at != NO_RECORD) == len(there)
        )
