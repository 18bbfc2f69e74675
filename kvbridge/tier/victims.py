"""The order in which cached pages go: old pages first, those that lie side by side together; pages that requests retain go last.

Pages that are free side by side are given out as one run, and runs move in long operations. A pool that evicts strictly by age
crumbles: pages that came together go together only until some of them are used again, and pages of another age fill the holes, for
ever. Age therefore only says which pages may go: the oldest fifth. In that fifth a hand goes over memory, again and again, and
takes the pages that it meets. This costs hardly a hit: some pages go earlier than their age asks, and others stay longer.

A request may ask with `retention` that its pages go after others. A priority adds to the rank that a record has from its last use:
the record goes after every record of a lower priority, and before every record of a higher one. The priority falls by itself, in
equal steps. Retention pins nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvbridge.core.prefixes import RETENTION_PRIORITIES, Evicted, Retention
from kvbridge.tier.records import NO_RECORD, RecordArray, Records

PRIORITY_RANK = 2.0**36
"""One step of priority adds this to a rank; it is more than any time of use, and ranks in this range are exact to 0.1 ms."""
MOST_TOGETHER = 0.5
"""Share of all records that all namespaces may retain together, unless one alone may retain more. Other records go by use alone,
and a name costs nothing: without this limit, many names could retain everything."""
_LOOK_EVERY_S = 1.0
"""Longest delay with which a priority falls: each look goes over all retained records."""
_ENDED = -1
"""The priority of a record that was retained once."""
_OLD_SHARE = 0.2
"""Share of all records that are old."""
_RANK_SAMPLE = 4096
"""Ranks that are sampled to find out which records are old."""
_REACH = 16
"""The hand passes this many pages for each page wanted, and as many more as are sampled; then age alone decides."""
_SPARE_CANDIDATES = 1024
"""Outdated candidates that are always tolerated."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A request's wish to retain its pages, counted for its namespace."""

    namespace: str
    retention: Retention


class Retentions:
    """The retained records of one index. Times are seconds above 0 that never fall."""

    def __init__(self, capacity: int, *, share: float) -> None:
        """`share`: the share of `capacity` records that each namespace may retain."""
        self.limit = int(share * capacity)
        """The most records that one namespace may retain."""
        self.together = int(max(share, MOST_TOGETHER) * capacity)
        """The most records that all namespaces together may retain."""
        self.by_namespace: Counter[str] = Counter()
        """Records that were retained at the last look."""
        self._until_s = np.zeros((RETENTION_PRIORITIES, capacity))
        """The times at which a record's priority falls below 1, 2, ...; they do not ascend."""
        self._priority = np.zeros(capacity, dtype=np.int8)
        self._priority_at = self._priority.data
        self._number = np.zeros(capacity, dtype=np.int32)
        """The number of each record's namespace."""
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._next_look_s = 0.0

    def __len__(self) -> int:
        """Number of retained records."""
        return self.by_namespace.total()

    def retain(self, records: RecordArray, now: float, claim: Claim) -> bool:
        """Give records of a path at least the claim's priority from `now` on.

        False, and nothing has changed, when the namespace, or all namespaces, would retain too many. Call `decay` at `now` first.
        """
        top = claim.retention.priority
        if not top or not claim.retention.for_s or not len(records):
            return True
        new = records[self._priority[records] <= 0]
        left = min(self.limit - self.by_namespace[claim.namespace], self.together - len(self))
        if len(new) and len(new) > left:
            return False
        steps = np.arange(top, 0, -1) / top  # the lowest priority lasts longest
        until_s = self._until_s[:top, records]
        self._until_s[:top, records] = np.maximum(until_s, (now + claim.retention.for_s * steps)[:, None])
        self._priority[records] = self._at(records, now)
        new = new[self._priority[new] > 0]
        if len(new):
            self._number[new] = self._number_of(claim.namespace)
            self.by_namespace[claim.namespace] += len(new)
        return True

    def decay(self, now: float) -> RecordArray:
        """Lower priorities whose time is over, and return their records."""
        if now < self._next_look_s or not len(self):
            return np.empty(0, dtype=np.int32)
        self._next_look_s = now + _LOOK_EVERY_S
        retained = np.flatnonzero(self._priority > 0).astype(np.int32)
        priority = self._at(retained, now)
        fallen = priority < self._priority[retained]
        records = retained[fallen]
        self._priority[records] = priority[fallen]
        ended = records[priority[fallen] == 0]
        self._priority[ended] = _ENDED
        self._uncount(ended)
        return records

    def priorities(self) -> range:
        """Return the priorities that records can have now, the lowest first."""
        return range(RETENTION_PRIORITIES + 1) if len(self) else range(1)

    def priority(self, record: int) -> int:
        """Return the priority of a record now."""
        return max(self._priority_at[record], 0)

    def added_rank(self, records: RecordArray) -> npt.NDArray[np.float64]:
        """Return what the priorities of records add to their ranks."""
        found: npt.NDArray[np.float64] = np.maximum(self._priority[records], 0) * PRIORITY_RANK
        return found

    def reasons(self, records: RecordArray) -> Counter[Evicted]:
        """Count the reasons why these records go now that others need their pages."""
        priority = self._priority[records]
        retained, ended = int(np.count_nonzero(priority > 0)), int(np.count_nonzero(priority == _ENDED))
        counts = {
            Evicted.SPACE: len(records) - retained - ended,
            Evicted.RETENTION_ENDED: ended,
            Evicted.RETAINED: retained,
        }
        return Counter({reason: count for reason, count in counts.items() if count})

    def forget(self, records: RecordArray) -> None:
        """Forget records that are gone; their numbers are used again."""
        self._uncount(records[self._priority[records] > 0])
        self._priority[records] = 0
        self._until_s[:, records] = 0

    def _at(self, records: RecordArray, now: float) -> npt.NDArray[np.int8]:
        found: npt.NDArray[np.int8] = (self._until_s[:, records] > now).sum(axis=0, dtype=np.int8)
        return found

    def _number_of(self, namespace: str) -> int:
        if namespace not in self._numbers:
            number = next(number for number in range(len(self._names) + 1) if number not in self._names)
            self._numbers[namespace], self._names[number] = number, namespace
        return self._numbers[namespace]

    def _uncount(self, records: RecordArray) -> None:
        numbers, counts = np.unique(self._number[records], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            name = self._names[number]
            self.by_namespace[name] -= count
            if not self.by_namespace[name]:
                del self.by_namespace[name], self._names[number], self._numbers[name]


def base_rank(rank: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks without what priorities have added to them."""
    return np.mod(rank, PRIORITY_RANK)


class Subtree:
    """A set of records in which none is without its parent, with their pins, pages and ranks."""

    def __init__(self, records: Records, rank: npt.NDArray[np.float64], space_count: int) -> None:
        """`rank`: of each record; the lowest goes first. A record has one page in each of `space_count` spaces."""
        self._parent, self._parent_at = records.parent, records.parent_at
        self._rank, self._rank_at = rank, rank.data
        self._pages = np.zeros((space_count, records.capacity), dtype=np.int32)
        """By space and record. Records that are neighbours in the first space mostly are neighbours in all."""
        self._pins = np.zeros(records.capacity, dtype=np.int32)
        self._pins_at = self._pins.data
        self._children = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        """Number of children of each record in the set; NO_RECORD: the record is not in the set."""
        self._children_at = self._children.data
        self._leaf_count = 0
        self._record_at = np.full(records.capacity, NO_RECORD, dtype=np.int32)
        """The record of each page of the first space; as long as the largest page seen."""
        self._hand = 0
        """The next look goes down from this page; 0: from the top."""
        self._candidates: list[tuple[float, int]] = []
        """A heap of (rank, record) with every leaf that nobody pins, and some outdated entries."""

    def all(self) -> RecordArray:
        """Return all records of the set, by their number."""
        return np.flatnonzero(self._children != NO_RECORD).astype(np.int32)

    def has(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are in the set."""
        is_in: npt.NDArray[np.bool_] = self._children[records] != NO_RECORD
        return is_in

    def depth(self, path: RecordArray) -> int:
        """Return how many records of a path are in the set: its first ones."""
        if not len(path) or self._children_at[path[-1]] != NO_RECORD:
            return len(path)
        return int(np.count_nonzero(self.has(path)))

    def leaves(self) -> RecordArray:
        """Return the leaves that nobody pins, the one of the lowest rank first."""
        leaves = np.flatnonzero((self._children == 0) & (self._pins == 0))
        return leaves[np.argsort(self._rank[leaves], kind="stable")].astype(np.int32)

    def _add(self, records: RecordArray) -> None:
        """Take in records that continue a path of the set, and whose pages are set; the last record is a leaf."""
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
        """Take off a leaf. Returns its parent if that is a leaf now, else NO_RECORD."""
        children_at = self._children_at
        children_at[record] = NO_RECORD
        parent: int = self._parent_at[record]
        if parent != NO_RECORD:
            children_at[parent] -= 1
            if not children_at[parent]:
                return parent  # one leaf instead of the other
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
        """Take off `count` leaves, each before its parent; so many records are not pinned."""
        found = self._neighbours(count)
        found += self._oldest(count - len(found))
        return np.array(found, dtype=np.int32)

    def _neighbours(self, count: int) -> list[int]:
        """Take off up to `count` old leaves, in the order in which the hand comes to their pages.

        The hand goes down. The pages of a path mostly ascend, so the hand meets the end of a path first, and after each leaf the
        record that has become a leaf by that.
        """
        children_at, old = self._children_at, self._old_rank()
        found: list[int] = []
        uncovered = NO_RECORD
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
                if uncovered not in {record, NO_RECORD}:
                    self._offer(uncovered)
                found.append(record)
                uncovered = self._remove_leaf(record)
                if len(found) == count:
                    self._hand = start + place
                    break
        if uncovered != NO_RECORD:
            self._offer(uncovered)
        return found

    def _old_rank(self) -> float:
        """Return the highest rank of old records, by a sample of those of the lowest priority."""
        every = slice(None, None, -(-len(self._rank) // _RANK_SAMPLE))
        ranks = self._rank[every][self._children[every] != NO_RECORD]
        if not len(ranks):
            return -np.inf
        ranks = ranks[ranks < (ranks.min() // PRIORITY_RANK + 1) * PRIORITY_RANK]
        at = int(_OLD_SHARE * len(ranks))
        return float(np.partition(ranks, at)[at])

    def _oldest(self, count: int) -> list[int]:
        """Take off `count` leaves by rank, and after each the records that become leaves, unless their rank is higher."""
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
