"""The records that have pages in one place (on the device, on the host, in their home), with their readers and checkpoints there.

No record is in a residence without its parent. A reader pins a whole path from a prompt's first page on, so pins(parent) >= sum of
pins(children). An unpinned record has no pinned descendants: every unpinned record can be evicted, leaf first.

Old pages go first, and old pages that lie side by side go together. Pages that are free side by side are given out as one run, and
runs move in long operations. A pool that evicts strictly by age crumbles: pages that came together go together only until some of
them are used again, and pages of another age fill the holes, for ever. Age therefore only says which pages may go: the oldest
fifth. In that fifth a hand goes over memory, again and again, and takes the pages that it meets. This costs hardly a hit: some
pages go earlier than their age asks, and others stay longer.

A *checkpoint* is the windows and states at a record's end, from which a prefill engine can go on. A checkpoint is complete when it
enters, and nobody writes it. Without pins it goes when its pages are needed, the longest unused one first; its record stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.tier.records import NO_RECORD, RecordArray, Records, join
from kvbridge.tier.retention import PRIORITY_RANK, Retentions

_OLD_SHARE = 0.2
"""Share of all records that are old."""
_RANK_SAMPLE = 4096
"""Ranks that are sampled to find out which records are old."""
_REACH = 16
"""The hand passes this many pages for each page wanted, and as many more as are sampled; then age alone decides."""
_SPARE_CANDIDATES = 1024
"""Outdated candidates that are always tolerated."""


@dataclass(slots=True)
class _Checkpoint:
    pages: PageIdArray
    pins: int = 0


@dataclass(slots=True)
class EvictedPages:
    """Numbers of records that have left a residence to make room."""

    read_back: int = 0
    """Records that were of use there: they had been copied back at least once."""
    unused: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """The result of `PrefixIndex.insert`."""

    records: RecordArray
    """The records of `keys[start:]`, without those left out."""
    residence: Residence
    """The residence into which they were inserted."""
    new: RecordArray
    """The last of them, which are new there."""
    pages: Pages
    """The given pages that are the index's now. The index had a first arrival of the others, which stay the caller's."""
    left_out: int
    """Number of the last keys that were left out, since a page elsewhere has the first of these keys."""


class Residence:
    """Some of the records of an index. Only the index changes a residence, except for checkpoints."""

    def __init__(
        self,
        records: Records,
        spaces: Sequence[IndexSpace],
        rank: npt.NDArray[np.float64],
        *,
        checkpoint_space: IndexSpace | None = None,
    ) -> None:
        """A record has one page in each of `spaces`. `rank`: of each record; the lowest goes first.

        `checkpoint_space`: the space of checkpoints here; None: there are none.
        """
        capacity = records.capacity
        self._records, self.spaces, self.checkpoint_space = records, tuple(spaces), checkpoint_space
        self._parent, self._parent_at = records.parent, records.parent_at
        self._rank, self._rank_at = rank, rank.data
        self._pages = np.zeros((len(spaces), capacity), dtype=np.int32)
        """By space and record. Records that are neighbours in the first space mostly are neighbours in all."""
        self._record_at = np.full(capacity, NO_RECORD, dtype=np.int32)
        """The record of each page of the first space; as long as the largest page seen."""
        self._pins = np.zeros(capacity, dtype=np.int32)
        self._pins_at = self._pins.data
        self._children = np.full(capacity, NO_RECORD, dtype=np.int32)
        """Number of children of each record here; NO_RECORD: the record is not here."""
        self._children_at = self._children.data
        self._count = self._leaf_count = self.pinned = 0
        """Numbers of records, of leaves, and of records that somebody pins."""
        self._hand = 0
        """The next look for neighbours goes down from this page; 0: from the top."""
        self._candidates: list[tuple[float, int]] = []
        """A heap of (rank, record) with every leaf that nobody pins, and some outdated entries."""
        self._is_lost = np.zeros(capacity, dtype=np.bool_)
        self._lost_count = 0
        self._checkpoints: dict[int, _Checkpoint] = {}
        """By record; the longest unused one is first."""
        self._has_checkpoint = np.zeros(capacity, dtype=np.bool_)
        self._unpinned_checkpoint_pages = 0
        self._is_read_back = np.zeros(capacity, dtype=np.bool_)
        self.evicted = EvictedPages()

    # ------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        return self._count

    def all(self) -> RecordArray:
        """Return all records here, by their number."""
        return np.flatnonzero(self._children != NO_RECORD).astype(np.int32)

    def has(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are here."""
        found: npt.NDArray[np.bool_] = self._children[records] != NO_RECORD
        return found

    def depth(self, path: RecordArray) -> int:
        """Return the number of records of a path that are here, and not lost: its first ones."""
        if self.is_lost(path):
            return 0
        if not len(path) or self._children_at[path[-1]] != NO_RECORD:
            return len(path)
        return int(np.count_nonzero(self.has(path)))

    def is_lost(self, path: RecordArray) -> bool:
        """Return whether a path begins with lost records: no new reader finds any of it here before those are gone."""
        return bool(self._lost_count and len(path) and self._is_lost[path[0]])

    def lost(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are lost."""
        return self._is_lost[records]

    def pages(self, records: RecordArray) -> Pages:
        """Return the pages of records that are here, in their order."""
        return {space: self._pages[row, records] for row, space in enumerate(self.spaces)}

    def leaves(self) -> RecordArray:
        """Return the leaves that nobody pins, the one of the lowest rank first."""
        leaves = np.flatnonzero((self._children == 0) & (self._pins == 0))
        return leaves[np.argsort(self._rank[leaves], kind="stable")].astype(np.int32)

    def unpinned(self, records: RecordArray) -> RecordArray:
        """Return those of the records that are here and that nobody pins."""
        found: RecordArray = records[self.has(records) & (self._pins[records] == 0)]
        return found

    def evictable(self) -> dict[IndexSpace, int]:
        """Return the number of pages of each space that could go now."""
        found = dict.fromkeys(self.spaces, len(self) - self.pinned)
        if self.checkpoint_space is not None:
            found[self.checkpoint_space] = self._unpinned_checkpoint_pages
        return found

    # ------------------------------------------------------------------------------------- use

    def require_pinnable(self, records: RecordArray) -> None:
        """Raise IntegrityError unless a path is here, and the record before it is pinned."""
        if self._children_at[records[-1]] == NO_RECORD:
            raise IntegrityError(f"record {records[-1]} cannot be pinned: it is not in {self!r}")
        parent = self._parent_at[records[0]]
        if parent != NO_RECORD and not self._pins_at[parent]:
            raise IntegrityError(f"record {records[0]} cannot be pinned: nobody pins its parent {parent}")

    def pin(self, records: RecordArray) -> None:
        """Count a reader on every record of a path, or of a part that continues a path which the same reader has pinned."""
        pins = self._pins[records]
        self._pins[records] = pins + 1
        self.pinned += len(records) - int(np.count_nonzero(pins))

    def require_pinned(self, path: RecordArray) -> None:
        """Raise IntegrityError unless a reader can unpin a path: one that has pinned it and reads no checkpoint of it any more."""
        pins = self._pins[path]
        if pins.min() < 1:
            raise IntegrityError(f"record {path[pins.argmin()]} is unpinned more often than it was pinned")
        for at in np.flatnonzero(self._has_checkpoint[path]).tolist() if self._checkpoints else ():
            if self._checkpoint(int(path[at])).pins >= pins[at]:
                raise IntegrityError(f"record {path[at]} is unpinned by a reader who still pins its checkpoint")

    def unpin(self, path: RecordArray) -> RecordArray:
        """Undo all pins of one reader. Returns the records that nobody pins any more."""
        pins = self._pins[path] - 1
        self._pins[path] = pins
        ended: RecordArray = path[pins == 0]
        self.pinned -= len(ended)
        self._offer(int(path[-1]))
        return ended

    def used(self, path: RecordArray) -> None:
        """Note that a path was used, or that some of it came."""
        here = self.depth(path)
        if here:
            self._offer(int(path[here - 1]))

    def ranked_anew(self, records: RecordArray) -> None:
        """Note that the rank of records has changed; some may be here."""
        for leaf in records[self._children[records] == 0].tolist():
            self._offer(leaf)

    # ------------------------------------------------------------------------------------- checkpoints

    @property
    def checkpoint_count(self) -> int:
        """Number of checkpoints here."""
        return len(self._checkpoints)

    def checkpointed(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records have a checkpoint here, and are not lost."""
        return self._has_checkpoint[records] & ~self._is_lost[records]

    def lacks_checkpoint(self, record: int) -> bool:
        """Return whether a record is here, not lost, and has no checkpoint."""
        return not (self._children_at[record] == NO_RECORD or self._has_checkpoint[record] or self._is_lost[record])

    def checkpoint_pages(self, record: int) -> PageIdArray:
        """Return the pages of a record's checkpoint. Raises NotFoundError when there is none (any more)."""
        return self._checkpoint(record).pages

    def set_checkpoint(self, record: int, pages: PageIdArray) -> bool:
        """Keep the windows and states at a record's end. False when there are some: `pages` are still the caller's."""
        if self._children_at[record] == NO_RECORD or not len(pages):
            raise IntegrityError(f"record {record} cannot have a checkpoint of {len(pages)} pages in {self!r}")
        if not self.lacks_checkpoint(record):
            return False
        self._checkpoints[record] = _Checkpoint(pages)
        self._records.changed(record)
        self._has_checkpoint[record] = True
        self._unpinned_checkpoint_pages += len(pages)
        return True

    def pin_checkpoint(self, record: int) -> None:
        """Count a use and a reader, who has pinned the record and unpins it later. Raises NotFoundError."""
        checkpoint = self._checkpoint(record)
        if checkpoint.pins >= self._pins_at[record]:
            raise IntegrityError(f"the checkpoint of record {record} is read by somebody who has not pinned the record")
        self._checkpoints[record] = self._checkpoints.pop(record)
        if not checkpoint.pins:
            self._unpinned_checkpoint_pages -= len(checkpoint.pages)
        checkpoint.pins += 1

    def unpin_checkpoint(self, record: int) -> None:
        """Undo `pin_checkpoint`. Raises IntegrityError when it is undone."""
        checkpoint = self._checkpoint(record)
        if not checkpoint.pins:
            raise IntegrityError(f"the checkpoint of record {record} is unpinned more often than it was pinned")
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self._unpinned_checkpoint_pages += len(checkpoint.pages)

    def take_checkpoints(self, page_count: int, retentions: Retentions) -> tuple[RecordArray, Pages]:
        """Evict unpinned checkpoints for so many pages, the longest unused first, retained ones last; return their records, too."""
        chosen: list[int] = []
        for priority in retentions.priorities():
            for record, checkpoint in self._checkpoints.items():
                if page_count <= 0:
                    break
                if not checkpoint.pins and retentions.priority(record) == priority:
                    chosen.append(record)
                    page_count -= len(checkpoint.pages)
        oldest = np.array(chosen, dtype=np.int32)
        return oldest, self._remove_checkpoints(oldest)

    def _remove_checkpoints(self, records: RecordArray) -> Pages:
        """Give up the checkpoints, which nobody pins, that these records have."""
        self._records.changed(records)
        found = []
        for record in records[self._has_checkpoint[records]].tolist():
            found.append(self._checkpoints.pop(record).pages)
            self._has_checkpoint[record] = False
            self._unpinned_checkpoint_pages -= len(found[-1])
        return {} if self.checkpoint_space is None else {self.checkpoint_space: join(found)}

    def _checkpoint(self, record: int) -> _Checkpoint:
        try:
            return self._checkpoints[record]
        except KeyError:
            raise NotFoundError(f"record {record} has no checkpoint (any more)") from None

    # ------------------------------------------------------------------------------------- pages that come and go

    def add(self, records: RecordArray, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take in records that continue a path that is here, with one page of each space for each; call `used` next."""
        for row, space in enumerate(self.spaces):
            self._pages[row, records] = pages[space]
        parent = self._parent_at[records[0]]
        self._children[records] = 1
        self._children_at[records[-1]] = 0
        self._leaf_count += 1
        if parent != NO_RECORD:
            self._leaf_count -= self._children_at[parent] == 0
            self._children_at[parent] += 1
        ids = self._pages[0, records]
        missing = int(ids.max()) + 1 - len(self._record_at)
        if missing > 0:
            self._record_at = np.pad(self._record_at, (0, missing), constant_values=NO_RECORD)
        self._record_at[ids] = records
        self._records.changed(records)
        self._is_read_back[records] = False
        self._count += len(records)

    def take(self, count: int) -> tuple[RecordArray, Pages]:
        """Evict `count` records and their checkpoints: old leaves that nobody pins, neighbours together, each before its parent."""
        found = self._neighbours(count) if count > 0 else []
        victims = np.array(found + self._oldest(count - len(found)), dtype=np.int32)
        self.note_evicted(victims)
        return victims, self._clear(victims)

    def note_evicted(self, records: RecordArray) -> None:
        """Count records that leave here to make room, in this residence or another."""
        read_back = int(np.count_nonzero(self._is_read_back[records]))
        self.evicted.read_back += read_back
        self.evicted.unused += len(records) - read_back

    def read_back(self, records: RecordArray) -> None:
        """Note that the pages of these records have been copied back to the device."""
        self._is_read_back[records] = True

    def lose(self, records: RecordArray) -> None:
        """Note that the contents of these are gone; the pages stay until nobody pins them. A path is lost from its start."""
        self._lost_count += int(np.count_nonzero(~self._is_lost[records]))
        self._is_lost[records] = True
        self._records.changed(records)

    def remove(self, records: RecordArray) -> Pages:
        """Give up records that nobody pins, and their checkpoints; each comes before its parent."""
        for record in records.tolist():
            parent = self._remove_leaf(record)
            if parent != NO_RECORD:
                self._offer(parent)
        return self._clear(records)

    def _clear(self, records: RecordArray) -> Pages:
        """Return the pages of leaves that have been taken off, with those of their checkpoints."""
        self._count -= len(records)
        self._lost_count -= int(np.count_nonzero(self._is_lost[records]))
        self._is_lost[records] = False
        self._record_at[self._pages[0, records]] = NO_RECORD
        return self.pages(records) | self._remove_checkpoints(records)

    def __repr__(self) -> str:
        spaces = ", ".join(self.spaces)
        return f"<{len(self)} records in {spaces}: {self.pinned} pinned, {len(self._checkpoints)} checkpoints>"

    # ------------------------------------------------------------------------------------- victims

    def _remove_leaf(self, record: int) -> int:
        """Take off a leaf, and return its parent if the parent is a leaf now, else NO_RECORD."""
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
            leaves = self.leaves()
            candidates[:] = zip(self._rank[leaves].tolist(), leaves.tolist(), strict=True)
            heapify(candidates)

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
