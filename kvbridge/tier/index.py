"""Which prefixes a node has: a record for each cached page, found by its key.

Owns: the pages of records in every space that grows with the tokens, their pins, last use, digests and checkpoints, and what is
evicted. Must not know: memory, the page book, requests, a clock of its own.

- Readers pin whole paths (`records.py`), so a record is pinned at least as often as its children together, and below one that
  nobody pins nobody pins anything.
- Only leaves that nobody pins are evicted, so no page is ever without its parent. The policy ranks paths when they are used; among
  what is old, neighbours go together (`victims.py`).
- A record that is dropped while it is pinned is *unreachable* at once, for every key, and its pages come back with the last unpin.
- A *checkpoint* is the windows and states at exactly a record's end, in pages of `swa`; it has pins of its own (`checkpoints.py`).

Records are numbers and what is known of them is in arrays: a page takes less than 300 bytes, and 4 for each of its
`digest_words`. Those who read a record, or its number, have pinned it, or do so in the same step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.core.prefixes import Evicted
from kvbridge.tier.checkpoints import Checkpoints, join
from kvbridge.tier.keys import Keys
from kvbridge.tier.policy import EvictionPolicy, LeastRecentlyUsed
from kvbridge.tier.records import NO_RECORD, RecordArray, Records
from kvbridge.tier.retention import Claim, Retentions, base_rank
from kvbridge.tier.victims import Victims

DigestArray = npt.NDArray[np.uint32]
"""Of shape (records, digest_words)."""
Pages = dict[IndexSpace, PageIdArray]
"""Page ids of each space, int32."""
CHECKPOINT_SPACE = IndexSpace.SWA


@dataclass(frozen=True, slots=True, eq=False)
class Inserted:
    """What became of the pages given to `insert`."""

    records: RecordArray
    """Of all of `keys[start:]`."""
    kept: npt.NDArray[np.bool_]
    """Which of the pages given are the index's now; of the others it had the first arrival, and they stay the caller's."""


class PrefixIndex:
    """The cached pages of one node. Not thread-safe: it belongs to the node process's one deciding thread."""

    def __init__(
        self,
        spaces: Sequence[IndexSpace],
        capacity: int,
        *,
        policy: EvictionPolicy | None = None,
        digest_words: int = 0,
        retained_share: float = 0.0,
    ) -> None:
        """`spaces`: those in which every record has one page. `capacity`: as many records as the smallest of them has pages."""
        if not spaces or len(set(spaces)) != len(spaces) or CHECKPOINT_SPACE in spaces:
            raise InvalidInputError(
                f"an index has one page of each of some spaces that grow with the tokens, got {list(spaces)}"
            )
        self.spaces = tuple(spaces)
        self._policy = policy or LeastRecentlyUsed()
        self._records = Records(capacity)
        self._checkpoints = Checkpoints(capacity)
        self._pages = np.zeros((len(spaces), capacity), dtype=np.int32)
        self._digests = np.zeros((capacity, digest_words), dtype=np.uint32)
        self._is_digested = np.zeros(capacity, dtype=np.bool_)
        self._pins = np.zeros(capacity, dtype=np.int32)
        self._rank = np.zeros(capacity, dtype=np.float64)
        self._uses = np.zeros(capacity, dtype=np.int32)
        self.retentions = Retentions(capacity, share=retained_share)
        self._pins_at = self._pins.data
        self._victims = Victims(self._records, pages=self._pages[0], pins=self._pins, rank=self._rank)
        self._pinned = 0
        self.evicted: Counter[Evicted] = Counter()
        """Records that have gone since others needed their pages, or their checkpoint's."""
        self.kept_since = -math.inf
        """What was used after this has not been evicted, nor has its checkpoint; unknown where the policy goes by more."""

    # ------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        """How many records there are, the unreachable ones among them."""
        return len(self._records)

    @property
    def checkpoint_count(self) -> int:
        """How many records have a checkpoint."""
        return len(self._checkpoints)

    @property
    def reachable(self) -> int:
        """How many records keys lead to."""
        return len(self._records) - self._records.hidden_count

    def match(self, keys: Keys, *, at_most: int | None = None) -> RecordArray:
        """Return the path of the longest known run of `keys` from the first on, of at most so many pages. Changes nothing."""
        return self._records.match(keys, len(keys) if at_most is None else at_most)

    def pages(self, records: RecordArray) -> Pages:
        """Return the pages of records in each space, in their order."""
        return {space: self._pages[row, records] for row, space in enumerate(self.spaces)}

    def digests(self, records: RecordArray) -> tuple[DigestArray, npt.NDArray[np.bool_]]:
        """Return the digests of records, and which of them have one; those of the others are zeros."""
        return self._digests[records], self._is_digested[records]

    def set_digests(self, records: RecordArray, digests: DigestArray) -> None:
        """Note the digests of records, one row each, as far as they have none yet."""
        new = ~self._is_digested[records]
        self._digests[records[new]] = digests[new]
        self._is_digested[records[new]] = True

    def checkpointed(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Which of the records have a checkpoint."""
        return self._checkpoints.among(records)

    def checkpoint(self, record: int) -> PageIdArray:
        """Return the pages of a record's checkpoint. Raises NotFoundError when it has none."""
        return self._checkpoints.pages(record)

    def is_dropped(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Which of the records no key reaches any more."""
        return self._records.is_hidden(records)

    def pins(self) -> tuple[npt.NDArray[np.int32], dict[int, int]]:
        """Return the readers of each record, by its number, and those of each checkpoint, by its record's."""
        return self._pins.copy(), self._checkpoints.readers()

    def evictable(self) -> dict[IndexSpace, int]:
        """How many pages of each space `evict` could give now."""
        return dict.fromkeys(self.spaces, len(self) - self._pinned) | {
            CHECKPOINT_SPACE: self._checkpoints.unpinned_pages
        }

    def all_pages(self) -> Pages:
        """Return every page that is the index's, those of checkpoints and of unreachable records too."""
        return self.pages(self._records.all()) | {CHECKPOINT_SPACE: self._checkpoints.all_pages()}

    # ------------------------------------------------------------------------------------- use

    def pin(self, records: RecordArray) -> None:
        """Count a reader on every record of a path, or of a part that continues a path which the same reader has pinned.

        Raises IntegrityError, and changes nothing, when the records are no such path.
        """
        if not self._is_path(records, "pin"):
            return
        parent = self._records.parent_at[records[0]]
        if parent != NO_RECORD and not self._pins_at[parent]:
            raise IntegrityError(f"record {records[0]} cannot be pinned: nobody pins its parent {parent}")
        pins = self._pins[records]
        self._pins[records] = pins + 1
        self._pinned += len(records) - int(np.count_nonzero(pins))

    def unpin(self, records: RecordArray) -> Pages:
        """End what `pin` began, for all that one reader has pinned: a path from a prompt's first page on.

        Returns the pages that the last reader of dropped records has let go; mostly it is empty. Raises IntegrityError, and
        changes nothing, when the records are no such path or somebody has unpinned them before.
        """
        if not self._is_path(records, "unpin", whole=True):
            return {}
        pins = self._pins[records] - 1
        if pins.min() < 0:
            raise IntegrityError(f"record {records[pins.argmin()]} is unpinned more often than it was pinned")
        for at in np.flatnonzero(self._checkpoints.among(records)).tolist() if len(self._checkpoints) else ():
            if self._checkpoints.pins(int(records[at])) > pins[at]:
                raise IntegrityError(f"record {records[at]} is unpinned by a reader who still pins its checkpoint")
        self._pins[records] = pins
        ended = records[pins == 0]
        self._pinned -= len(ended)
        self._victims.offer(int(records[-1]))
        unreachable = ended[self._records.is_hidden(ended)]
        return self._release(unreachable[::-1]) if len(unreachable) else {}

    def touch(self, records: RecordArray, now: float) -> None:
        """Note that a path was used at `now`, a number that never falls. Raises IntegrityError when it is no path."""
        if self._is_path(records, "touch", whole=True):
            uses = self._uses[records] = self._uses[records] + 1
            self._rank[records] = self._policy.rank(now, uses) + self.retentions.added_rank(records)
            self._victims.offer(int(records[-1]))

    def retain(self, records: RecordArray, now: float, claim: Claim) -> bool:
        """Let a path go after others for as long as a claim says from `now` on.

        False, and nothing has changed, when its namespace retains as much as it may. Raises IntegrityError when it is no path.
        """
        if not self._is_path(records, "retain", whole=True):
            return True
        self.decay(now)
        if not self.retentions.retain(records, now, claim):
            return False
        self._rank_anew(records)
        return True

    def decay(self, now: float) -> None:
        """Let priorities of records fall whose time is over."""
        self._rank_anew(self.retentions.decay(now))

    def _rank_anew(self, records: RecordArray) -> None:
        self._rank[records] = base_rank(self._rank[records]) + self.retentions.added_rank(records)
        for record in records[self._records.children[records] == 0].tolist():
            self._victims.offer(record)

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
        self._require_arrays(len(keys) - start, pages, digests)
        path = self.match(keys)
        known = len(path)
        if known < start:
            raise NotFoundError(f"page {start} cannot be cached: only {known} pages before it are known (any more)")
        if known < len(keys):
            records = self._records.create(keys, path)
            for row, space in enumerate(self.spaces):
                self._pages[row, records] = pages[space][known - start :]
            self._victims.place(records)
            self._digests[records] = 0 if digests is None else digests[known - start :]
            self._is_digested[records] = digests is not None
            self._uses[records] = 0
            path = np.concatenate((path, records))
        self.touch(path, now)
        return Inserted(path[start:], np.arange(start, len(keys)) >= known)

    # ------------------------------------------------------------------------------------- checkpoints

    def set_checkpoint(self, record: int, pages: PageIdArray) -> bool:
        """Keep the windows and states at a record's end. False when it has some: those stay, these are still the caller's."""
        if self._records.children_at[record] == NO_RECORD or not len(pages):
            raise IntegrityError(f"record {record} cannot have a checkpoint of {len(pages)} pages in {self!r}")
        is_new = not self._checkpoints.among(np.array([record]))[0]
        if is_new:
            self._checkpoints.add(record, pages)
        return is_new

    def pin_checkpoint(self, record: int) -> PageIdArray:
        """Count a reader on a record's checkpoint and return its pages; the reader pins the record, too, and for longer.

        Raises NotFoundError when there is none (any more).
        """
        if self._checkpoints.pins(record) >= self._pins_at[record]:
            raise IntegrityError(f"the checkpoint of record {record} is read by somebody who has not pinned the record")
        return self._checkpoints.pin(record)

    def unpin_checkpoint(self, record: int) -> None:
        """End what `pin_checkpoint` began. Raises IntegrityError when it has been ended."""
        self._checkpoints.unpin(record)

    # ------------------------------------------------------------------------------------- pages that go

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Pages:
        """Give up at least so many pages of each space, all or nothing: old leaves, neighbours together.

        A record that goes gives its page of every space and its checkpoint, so there may be more than was asked for. When only
        `swa` lacks pages, checkpoints go and records stay. Raises CapacityError when `evictable` has fewer.
        """
        evictable = self.evictable()
        short = {space: count - evictable.get(space, 0) for space, count in lacking.items()}
        short = {space: count for space, count in short.items() if count > 0}
        if short:
            needs = ", ".join(f"{count} of '{space}'" for space, count in short.items())
            raise CapacityError(f"cached pages that nobody reads are too few, by {needs}", lacking=short)
        victims = self._victims.take(max((lacking.get(space, 0) for space in self.spaces), default=0))
        if len(victims):
            self._policy.evicted(float(base_rank(self._rank[victims]).min()))
            self.evicted += self.retentions.reasons(victims)
        found = self._clear(victims)
        oldest = self._checkpoints.oldest(
            lacking.get(CHECKPOINT_SPACE, 0) - len(found[CHECKPOINT_SPACE]), self.retentions
        )
        self._note_evicted(victims)
        self._note_evicted(oldest)
        return found | {CHECKPOINT_SPACE: join([found[CHECKPOINT_SPACE], self._checkpoints.take(oldest)])}

    def drop(self, records: RecordArray | None = None) -> Pages:
        """Make records and all that depends on them unreachable at once; None: all there are.

        Returns the pages that nobody reads. Those of the others come with the last `unpin`.
        """
        dropped = self._records.descendants(self._records.all() if records is None else records)
        self._records.hide(dropped[~self._records.is_hidden(dropped)])
        return self._release(dropped[self._pins[dropped] == 0])

    # ------------------------------------------------------------------------------------- for operators

    def check_integrity(self) -> None:
        """Compare every structure with every other. Raises IntegrityError that names the first contradiction."""
        self._records.check_integrity()
        self._checkpoints.check_integrity(self._pins)
        self.retentions.check_integrity()
        there, parent = self._records.all(), self._records.parent
        inner = there[parent[there] != NO_RECORD]
        by_children = np.bincount(parent[inner], weights=self._pins[inner], minlength=len(self._pins))
        needed = np.maximum(by_children[there], self._records.is_hidden(there))
        facts = {
            "pins of records and their children": bool((self._pins[there] >= needed).all()),
            "pinned records": self._pinned == np.count_nonzero(self._pins[there]) == np.count_nonzero(self._pins),
            "candidates, leaves and places": self._victims.add_up(),
            "pages and records": all(len(np.unique(ids)) == len(ids) for ids in self.pages(there).values()),
            "checkpoints and records": self._checkpoints.among(there).sum() == len(self._checkpoints),
        }
        for fact, holds in facts.items():
            if not holds:
                raise IntegrityError(f"{fact} contradict each other in {self!r}")

    def __repr__(self) -> str:
        return (
            f"<prefix index: {len(self)} of {self._records.capacity} records, {self._pinned} pinned, "
            f"{self._records.hidden_count} unreachable, {len(self._checkpoints)} checkpoints>"
        )

    # ------------------------------------------------------------------------------------- inside

    def _is_path(self, records: RecordArray, verb: str, *, whole: bool = False) -> bool:
        """Whether there is anything to do. Raises IntegrityError for what is no path."""
        if not len(records):
            return False
        starts_right = not whole or self._records.parent_at[records[0]] == NO_RECORD
        if not (starts_right and self._records.is_path(records)):
            raise IntegrityError(f"{verb}: {len(records)} records from {records[0]} on are no path of {self!r}")
        return True

    def _require_arrays(self, count: int, pages: Mapping[IndexSpace, PageIdArray], digests: DigestArray | None) -> None:
        lengths = {space: len(ids) for space, ids in pages.items()}
        if count < 0 or lengths != dict.fromkeys(self.spaces, count):
            raise InvalidInputError(f"{count} keys need so many pages of each of {list(self.spaces)}, got {lengths}")
        words = self._digests.shape[1]
        if digests is not None and digests.shape != (count, words):
            raise InvalidInputError(f"{count} pages need {words} words of digests each, got {digests.shape}")

    def _note_evicted(self, records: RecordArray) -> None:
        if self._policy.rank_is_time and len(records):
            self.kept_since = max(self.kept_since, float(base_rank(self._rank[records]).max()))

    def _release(self, records: RecordArray) -> Pages:
        """Give up records that nobody reads and no key reaches, each before its parent."""
        for record in records.tolist():
            parent = self._records.remove_leaf(record)
            if parent != NO_RECORD:
                self._victims.offer(parent)
        return self._clear(records)

    def _clear(self, records: RecordArray) -> Pages:
        """Return the pages of leaves that have been taken off, with their checkpoints."""
        pages = self.pages(records) | {CHECKPOINT_SPACE: self._checkpoints.take(records)}
        self._victims.forget(records)
        self.retentions.forget(records)
        self._records.forget(records)
        return pages
