"""Which prefixes a node has: a record for each cached page, found by its key.

Owns: records, their pages in every growing space, pins, last use, digests, and *checkpoints*. Must not know: memory, the page
book, requests, a clock of its own.

A key names all tokens up to a page's end, so a flat map from keys to records needs no tree: as no record is ever without its
parent (the record of the page before), what is known of a prompt is a run from its start, whose end a binary search finds.

- A *path* is a run of records from a prompt's first page on, each the parent of the next. Readers pin whole paths, so the pins of
  a record are at least those of its children together, and a record that nobody pins has no pinned descendant.
- Only *leaves* are evicted, records without children that nobody pins: with `children` counted, a page cannot lose its parent.
- A record that is dropped while it is pinned is *unreachable* at once, for every key, and its pages come back with the last unpin.
- A *checkpoint* is the windows and states at exactly a record's end, in pages of `swa`. It has pins of its own, for those who
  restore from it; without any, it goes when `swa` pages are needed, the one that was used longest ago first.

Records are numbers, columns are arrays: a page takes less than 300 bytes without its digests, which are `digest_words` x 4 more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.tier.keys import Keys
from kvbridge.tier.policy import EvictionPolicy, LeastRecentlyUsed

RecordArray = npt.NDArray[np.int32]
"""Numbers of records, in the order of their pages in a prompt unless something else is said."""
DigestArray = npt.NDArray[np.uint32]
"""Of shape (records, digest_words)."""
CHECKPOINT_SPACE = IndexSpace.SWA

_NO_RECORD = -1
"""Parent of a prompt's first page; children of a number that is no record now."""
_NO_RECORDS = np.empty(0, dtype=np.int32)
_NO_PAGES = np.empty(0, dtype=np.int32)
_SPARE_LEAVES = 1024
"""So many outdated candidates are always tolerated."""


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """What became of the pages given to `insert`."""

    records: RecordArray
    """Of all of `keys[start:]`."""
    kept: npt.NDArray[np.bool_]
    """Which of the pages given are the index's now; of the others it had the first arrival, and they stay the caller's."""


@dataclass(slots=True)
class _Checkpoint:
    pages: PageIdArray
    pins: int = 0


class PrefixIndex:
    """The cached pages of one node. Not thread-safe: it belongs to the node process's one deciding thread."""

    def __init__(
        self,
        spaces: Sequence[IndexSpace],
        capacity: int,
        *,
        policy: EvictionPolicy | None = None,
        digest_words: int = 0,
    ) -> None:
        """`spaces`: those in which every record has one page. `capacity`: as many records as pages of the smallest of them."""
        if not spaces or len(set(spaces)) != len(spaces) or CHECKPOINT_SPACE in spaces:
            raise InvalidInputError(
                f"an index has one page of each of some spaces that grow with the tokens, got {list(spaces)}"
            )
        if not 1 <= capacity <= np.iinfo(np.int32).max:
            raise InvalidInputError(f"an index has 1 to 2^31 - 1 records, got {capacity}")
        self.spaces = tuple(spaces)
        self.capacity = capacity
        self._policy = policy or LeastRecentlyUsed()
        self._record_of: dict[bytes, int] = {}
        # Untouched parts of zeros take no memory.
        self._key = np.zeros((capacity, 2), dtype=np.uint64)
        self._parent = np.zeros(capacity, dtype=np.int32)
        self._depth = np.zeros(capacity, dtype=np.int32)
        self._children = np.full(capacity, _NO_RECORD, dtype=np.int32)
        self._pins = np.zeros(capacity, dtype=np.int32)
        self._rank = np.zeros(capacity, dtype=np.float64)
        self._pages = np.zeros((len(spaces), capacity), dtype=np.int32)
        self._digests = np.zeros((capacity, digest_words), dtype=np.uint32)
        self._is_digested = np.zeros(capacity, dtype=np.bool_)
        self._is_unreachable = np.zeros(capacity, dtype=np.bool_)
        self._is_checkpointed = np.zeros(capacity, dtype=np.bool_)
        # One record at a time is read several times faster through these.
        self._parent_at, self._children_at = memoryview(self._parent), memoryview(self._children)
        self._pins_at, self._rank_at = memoryview(self._pins), memoryview(self._rank)
        self._unused = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        """A stack of numbers that are no records, `_unused_count` of them."""
        self._unused_count = capacity
        self._pinned = 0
        self._leaf_count = 0
        self._leaves: list[tuple[float, int]] = []
        """A heap of (rank, record) that has every evictable leaf, and candidates that are none any more."""
        self._checkpoints: dict[int, _Checkpoint] = {}
        """Of records, the one that was used longest ago first."""
        self._free_checkpoint_pages = 0
        """Pages of checkpoints that nobody pins."""

    # ------------------------------------------------------------------------------------- finding

    def __len__(self) -> int:
        """How many records there are, the unreachable ones among them."""
        return self.capacity - self._unused_count

    def match(self, keys: Keys, *, at_most: int | None = None) -> RecordArray:
        """Return the path of the longest known run of `keys` from the first on, of at most so many pages. Changes nothing."""
        known, stop = 0, min(len(keys), len(self), len(keys) if at_most is None else max(0, at_most))
        last = _NO_RECORD
        while known < stop:  # every key up to `known` is known, none from `stop` on
            middle = (known + stop + 1) // 2
            record = self._record_of.get(keys[middle - 1])
            if record is None:
                stop = middle - 1
            else:
                known, last = middle, record
        if not known:
            return _NO_RECORDS
        path = self._path(last)
        # Keys come from outside. Those that are no chain match as far as the index has the same.
        return path[: keys.shared_with(self._keys_of(path))]

    def checkpointed(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Which of the records have a checkpoint."""
        return self._is_checkpointed[records]

    def checkpoint(self, record: int) -> PageIdArray:
        """Return the pages of a record's checkpoint. Raises NotFoundError when it has none."""
        return self._checkpoint(record).pages

    def pages(self, records: RecordArray) -> dict[IndexSpace, PageIdArray]:
        """Return the pages of records in each space, in their order."""
        return {space: self._pages[row, records] for row, space in enumerate(self.spaces)}

    def digests(self, records: RecordArray) -> tuple[DigestArray, npt.NDArray[np.bool_]]:
        """Return the digests of records, and which of them have one; those of the others are zeros."""
        return self._digests[records], self._is_digested[records]

    def is_dropped(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Which of the records no key reaches any more."""
        return self._is_unreachable[records]

    def pins(self) -> tuple[npt.NDArray[np.int32], dict[int, int]]:
        """Return the readers of each record, by its number, and those of each checkpoint, by its record's."""
        return self._pins.copy(), {record: checkpoint.pins for record, checkpoint in self._checkpoints.items()}

    def evictable(self) -> dict[IndexSpace, int]:
        """How many pages of each space `evict` could give now."""
        return dict.fromkeys(self.spaces, len(self) - self._pinned) | {CHECKPOINT_SPACE: self._free_checkpoint_pages}

    def all_pages(self) -> dict[IndexSpace, PageIdArray]:
        """Return every page that is the index's, those of checkpoints and of unreachable records too."""
        checkpoints = [checkpoint.pages for checkpoint in self._checkpoints.values()]
        return self.pages(self._all()) | {CHECKPOINT_SPACE: np.concatenate([_NO_PAGES, *checkpoints])}

    # ------------------------------------------------------------------------------------- use

    def pin(self, records: RecordArray) -> None:
        """Count a reader on every record of a path, or of a part that continues a path which the same reader has pinned.

        Raises IntegrityError, and changes nothing, when the records are no such path.
        """
        self._require_path(records, "pin")
        if not len(records):
            return
        first = self._parent_at[records[0]]
        if first != _NO_RECORD and not self._pins_at[first]:
            raise IntegrityError(f"record {records[0]} cannot be pinned: nobody pins its parent {first}")
        pins = self._pins[records]
        self._pins[records] = pins + 1
        self._pinned += len(records) - int(np.count_nonzero(pins))

    def unpin(self, records: RecordArray) -> dict[IndexSpace, PageIdArray]:
        """End what `pin` began, for all that one reader has pinned: a path from a prompt's first page on.

        Returns the pages that the last reader of dropped records has let go; mostly there are none. Raises IntegrityError, and
        changes nothing, when the records are no path or one of them is not pinned.
        """
        self._require_path(records, "unpin", whole=True)
        if not len(records):
            return {}
        pins = self._pins[records] - 1
        if pins.min() < 0:
            raise IntegrityError(f"record {records[pins.argmin()]} is unpinned more often than it was pinned")
        ended = records[pins == 0]
        for at in np.flatnonzero(self._is_checkpointed[records]).tolist():
            if self._checkpoints[int(records[at])].pins > pins[at]:
                raise IntegrityError(f"record {records[at]} is unpinned by a reader who still pins its checkpoint")
        self._pins[records] = pins
        self._pinned -= len(ended)
        self._offer(int(records[-1]))
        unreachable = ended[self._is_unreachable[ended]]
        return self._release(unreachable) if len(unreachable) else {}

    def touch(self, records: RecordArray, now: float) -> None:
        """Note that a path was used at `now`, a number that never falls. Raises IntegrityError when it is no path."""
        self._require_path(records, "touch", whole=True)
        if len(records):
            self._rank[records] = self._policy.rank(now, len(records))
            self._offer(int(records[-1]))

    # ------------------------------------------------------------------------------------- pages that come

    def insert(
        self,
        keys: Keys,
        start: int,
        pages: Mapping[IndexSpace, PageIdArray],
        *,
        now: float,
        digests: DigestArray | None = None,
    ) -> Inserted:
        """Take the pages of `keys[start:]`, one of each space for each key; those of `keys[:start]` must be known.

        A page that is known keeps its first arrival; `Inserted` says which pages were taken. Used at `now`, like the path before
        them. Raises NotFoundError when `keys[:start]` are not known (any more), InvalidInputError for keys that are no chain and
        for arrays of another length; the index is as before then.
        """
        count = len(keys) - start
        self._require_arrays(count, pages, digests)
        path = self.match(keys)
        known = len(path)
        if known < start:
            raise NotFoundError(f"page {start} cannot be cached: only {known} pages before it are known (any more)")
        kept = np.arange(start, len(keys)) >= known
        if known < len(keys):
            records = self._create(keys, path)
            for row, space in enumerate(self.spaces):
                self._pages[row, records] = pages[space][known - start :]
            if digests is not None:
                self._digests[records] = digests[known - start :]
            self._is_digested[records] = digests is not None
            path = np.concatenate((path, records))
        self.touch(path, now)
        return Inserted(path[start:], kept)

    def _create(self, keys: Keys, path: RecordArray) -> RecordArray:
        """Make records for the keys behind a path."""
        known = len(path)
        new = keys[known:].to_list()
        if not self._record_of.keys().isdisjoint(new) or len(set(new)) != len(new):
            raise InvalidInputError(f"keys from page {known} on are no chain: one of them is that of another page")
        if len(new) > self._unused_count:
            raise IntegrityError(f"{len(new)} pages are cached beside {len(self)}, of {self.capacity} that there are")
        self._unused_count -= len(new)
        records = self._unused[self._unused_count : self._unused_count + len(new)][::-1].copy()
        self._record_of.update(zip(new, records.tolist(), strict=True))
        self._key[records] = np.frombuffer(keys.data, np.uint64).reshape(-1, 2)[known:]
        parent = int(path[-1]) if known else _NO_RECORD
        self._parent[records[0]] = parent
        self._parent[records[1:]] = records[:-1]
        self._depth[records] = np.arange(known, len(keys))
        self._children[records] = 1
        self._children_at[records[-1]] = 0
        self._leaf_count += 1
        if known:
            self._leaf_count -= self._children_at[parent] == 0
            self._children_at[parent] += 1
        return records

    # ------------------------------------------------------------------------------------- checkpoints

    def set_checkpoint(self, record: int, pages: PageIdArray) -> bool:
        """Keep the windows and states at a record's end; False when it has some: they stay, and these are still the caller's."""
        if self._children_at[record] == _NO_RECORD or not len(pages):
            raise IntegrityError(f"record {record} cannot have a checkpoint of {len(pages)} pages")
        if self._is_checkpointed[record]:
            return False
        self._checkpoints[record] = _Checkpoint(pages)
        self._is_checkpointed[record] = True
        self._free_checkpoint_pages += len(pages)
        return True

    def pin_checkpoint(self, record: int) -> PageIdArray:
        """Count a reader on a record's checkpoint and return its pages; the reader has pinned the record, and unpins it later."""
        checkpoint = self._checkpoint(record)
        if checkpoint.pins >= self._pins_at[record]:
            raise IntegrityError(f"the checkpoint of record {record} is read by somebody who has not pinned the record")
        if not checkpoint.pins:
            self._free_checkpoint_pages -= len(checkpoint.pages)
        checkpoint.pins += 1
        self._checkpoints[record] = self._checkpoints.pop(record)  # used last
        return checkpoint.pages

    def unpin_checkpoint(self, record: int) -> None:
        """End what `pin_checkpoint` began."""
        checkpoint = self._checkpoint(record)
        if not checkpoint.pins:
            raise IntegrityError(f"the checkpoint of record {record} is unpinned more often than it was pinned")
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self._free_checkpoint_pages += len(checkpoint.pages)

    # ------------------------------------------------------------------------------------- pages that go

    def evict(self, lacking: Mapping[IndexSpace, int]) -> dict[IndexSpace, PageIdArray]:
        """Give up at least so many pages of each space, all or nothing: leaves by rank, the pages of one path together.

        A record that goes gives its page of every space and its checkpoint, so there may be more than was asked for. Raises
        CapacityError when `evictable` has fewer.
        """
        evictable = self.evictable()
        short = {space: count - evictable.get(space, 0) for space, count in lacking.items()}
        short = {space: count for space, count in short.items() if count > 0}
        if short:
            raise CapacityError(f"so many pages more are pinned than can be evicted: {short}", lacking=short)
        count = max((lacking.get(space, 0) for space in self.spaces), default=0)
        found = self._forget(self._victims(count))
        short_of = lacking.get(CHECKPOINT_SPACE, 0) - len(found[CHECKPOINT_SPACE])
        if short_of > 0:
            found[CHECKPOINT_SPACE] = np.concatenate((found[CHECKPOINT_SPACE], *self._oldest_checkpoints(short_of)))
        return found

    def drop(self, records: RecordArray | None = None) -> dict[IndexSpace, PageIdArray]:
        """Make records and all that depends on them unreachable at once; None: all there are.

        Returns the pages that nobody reads. Those of the others come with the last `unpin`.
        """
        doomed = self._all() if records is None else self._descendants(records)
        doomed = doomed[~self._is_unreachable[doomed]]
        for key in self._key_list(doomed):
            del self._record_of[key]
        self._is_unreachable[doomed] = True
        return self._release(doomed[self._pins[doomed] == 0])

    # ------------------------------------------------------------------------------------- for operators

    def check_integrity(self) -> None:
        """Compare every structure with every other. Raises IntegrityError that names the first contradiction."""
        there = self._all()
        unused = self._unused[: self._unused_count]
        reachable = there[~self._is_unreachable[there]]
        parents = self._parent[there]
        inner = parents != _NO_RECORD
        children, child_pins = (np.zeros(self.capacity, dtype=np.int64) for _ in range(2))
        np.add.at(children, parents[inner], 1)
        np.add.at(child_pins, parents[inner], self._pins[there][inner])
        free = there[self._pins[there] == 0]
        leaves = free[self._children[free] == 0]
        candidates = set(self._leaves)
        unpinned = [len(checkpoint.pages) for checkpoint in self._checkpoints.values() if not checkpoint.pins]
        facts = {
            "used and unused numbers": len(there) + len(unused) == self.capacity
            and not np.isin(unused, there).any()
            and len(np.unique(unused)) == len(unused),
            "keys and records": self._record_of
            == dict(zip(self._key_list(reachable), reachable.tolist(), strict=True)),
            "records and their parents": bool((self._children[parents[inner]] > 0).all())
            and bool((self._depth[there] == np.where(inner, self._depth[parents] + 1, 0)).all())
            and not (self._is_unreachable[parents] & inner & ~self._is_unreachable[there]).any(),
            "children": bool((self._children[there] == children[there]).all()),
            "pins": bool((self._pins[there] >= np.maximum(child_pins[there], self._is_unreachable[there])).all()),
            "pinned records": self._pinned == len(there) - len(free) and not self._pins[unused].any(),
            "leaves": self._leaf_count == int(np.count_nonzero(self._children[there] == 0)),
            "candidates": candidates.issuperset(zip(self._rank[leaves].tolist(), leaves.tolist(), strict=True)),
            "pages": all(len(np.unique(pages)) == len(pages) for pages in self.all_pages().values()),
            "checkpoints": sorted(self._checkpoints) == np.flatnonzero(self._is_checkpointed).tolist()
            and np.isin(list(self._checkpoints), there).all(),
            "pins of checkpoints": all(0 <= one.pins <= self._pins_at[of] for of, one in self._checkpoints.items()),
            "unpinned checkpoints": self._free_checkpoint_pages == sum(unpinned),
        }
        for fact, holds in facts.items():
            if not holds:
                raise IntegrityError(f"{fact} contradict the records in {self!r}")

    def __repr__(self) -> str:
        return (
            f"<prefix index: {len(self)} of {self.capacity} records, {self._pinned} pinned, {self._leaf_count} leaves, "
            f"{len(self) - len(self._record_of)} unreachable, {len(self._checkpoints)} checkpoints>"
        )

    # ------------------------------------------------------------------------------------- inside

    def _all(self) -> RecordArray:
        return np.flatnonzero(self._children != _NO_RECORD).astype(np.int32)

    def _path(self, record: int) -> RecordArray:
        """All records from a prompt's first page to this one."""
        parent_at = self._parent_at
        found = []
        while record != _NO_RECORD:
            found.append(record)
            record = parent_at[record]
        found.reverse()
        return np.array(found, dtype=np.int32)

    def _keys_of(self, records: RecordArray) -> Keys:
        return Keys(self._key[records].tobytes())

    def _key_list(self, records: RecordArray) -> list[bytes]:
        return self._keys_of(records).to_list()

    def _checkpoint(self, record: int) -> _Checkpoint:
        try:
            return self._checkpoints[record]
        except KeyError:
            raise NotFoundError(f"record {record} has no checkpoint (any more)") from None

    def _require_path(self, records: RecordArray, verb: str, *, whole: bool = False) -> None:
        if not len(records):
            return
        chained = (self._parent[records[1:]] == records[:-1]).all() and (self._children[records] >= 0).all()
        if not chained or (whole and self._parent_at[records[0]] != _NO_RECORD):
            raise IntegrityError(f"{verb}: {len(records)} records from {records[0]} on are no path of {self!r}")

    def _require_arrays(
        self, count: int, pages: Mapping[IndexSpace, PageIdArray], digests: DigestArray | None
    ) -> None:
        lengths = {space: len(ids) for space, ids in pages.items()}
        if count < 0 or lengths != dict.fromkeys(self.spaces, count):
            raise InvalidInputError(f"{count} keys need so many pages of each of {list(self.spaces)}, got {lengths}")
        if digests is not None and digests.shape != (count, self._digests.shape[1]):
            raise InvalidInputError(
                f"{count} pages need {self._digests.shape[1]} words of digests each, got {digests.shape}"
            )

    def _offer(self, record: int) -> None:
        """Make a record a candidate for eviction, if it is a leaf that nobody pins."""
        if self._children_at[record] == 0 and not self._pins_at[record]:
            heappush(self._leaves, (self._rank_at[record], record))
            if len(self._leaves) > 2 * self._leaf_count + _SPARE_LEAVES:
                leaves = np.flatnonzero((self._children == 0) & (self._pins == 0))
                self._leaves = list(zip(self._rank[leaves].tolist(), leaves.tolist(), strict=True))
                heapify(self._leaves)

    def _victims(self, count: int) -> RecordArray:
        """Take leaves off by rank, and behind each what it leaves bare: a path is eaten from its end as far as the rank goes."""
        leaves, children_at, pins_at = self._leaves, self._children_at, self._pins_at
        parent_at, rank_at = self._parent_at, self._rank_at
        found: list[int] = []
        rank = 0.0
        while len(found) < count:
            rank, record = heappop(leaves)
            if children_at[record] or pins_at[record] or rank_at[record] != rank:
                continue  # outdated
            while True:
                found.append(record)
                children_at[record] = _NO_RECORD
                parent = parent_at[record]
                if parent == _NO_RECORD:
                    self._leaf_count -= 1
                    break
                children_at[parent] -= 1
                if children_at[parent]:
                    self._leaf_count -= 1
                    break
                if pins_at[parent] or len(found) == count or rank_at[parent] > rank:
                    self._offer(parent)
                    break
                record = parent
        if found:
            self._policy.evicted(rank)
        return np.array(found, dtype=np.int32)

    def _release(self, records: RecordArray) -> dict[IndexSpace, PageIdArray]:
        """Give up records that have no children but one another, and that no key reaches any more."""
        parents = self._parent[records]
        parents = parents[parents != _NO_RECORD]
        self._leaf_count -= int(np.count_nonzero(self._children[records] == 0))
        np.subtract.at(self._children, parents, 1)
        self._children[records] = _NO_RECORD
        bare = np.unique(parents[self._children[parents] == 0])
        self._leaf_count += len(bare)
        self._is_unreachable[records] = False
        pages = self._clear(records)
        for record in bare.tolist():
            self._offer(record)
        return pages

    def _forget(self, victims: RecordArray) -> dict[IndexSpace, PageIdArray]:
        for key in self._key_list(victims):
            del self._record_of[key]
        return self._clear(victims)

    def _clear(self, records: RecordArray) -> dict[IndexSpace, PageIdArray]:
        """Return the pages of records, with their checkpoints, and the numbers to the stack."""
        checkpoints = [self._take_checkpoint(record) for record in records[self._is_checkpointed[records]].tolist()]
        self._unused[self._unused_count : self._unused_count + len(records)] = records
        self._unused_count += len(records)
        return self.pages(records) | {CHECKPOINT_SPACE: np.concatenate([_NO_PAGES, *checkpoints])}

    def _oldest_checkpoints(self, pages: int) -> list[PageIdArray]:
        """Take checkpoints off their records, which stay, until there are so many pages."""
        chosen = []
        for record, checkpoint in self._checkpoints.items():
            if pages <= 0:
                break
            if not checkpoint.pins:
                chosen.append(record)
                pages -= len(checkpoint.pages)
        return [self._take_checkpoint(record) for record in chosen]

    def _take_checkpoint(self, record: int) -> PageIdArray:
        self._is_checkpointed[record] = False
        pages = self._checkpoints.pop(record).pages
        self._free_checkpoint_pages -= len(pages)
        return pages

    def _descendants(self, records: RecordArray) -> RecordArray:
        """Records and all that depends on them, at whatever depth: each step looks twice as far up as the one before."""
        there = self._all()
        doomed = np.zeros(self.capacity + 1, dtype=np.bool_)
        doomed[records] = True
        above = np.full(self.capacity + 1, self.capacity, dtype=np.int32)
        above[there] = np.where(self._parent[there] == _NO_RECORD, self.capacity, self._parent[there])
        while (above[there] != self.capacity).any():
            doomed[there] |= doomed[above[there]]
            above[there] = above[above[there]]
        return there[doomed[there]]
