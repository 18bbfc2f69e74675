"""The records that have pages in some spaces, on the device, on the host or as such, with their readers and checkpoints there.

No record is in a residence without its parent. Readers pin a whole path from a prompt's first page on, so pins(parent) >= sum of
pins(children). An unpinned record has no pinned descendants: every unpinned record can be evicted, leaf first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, NotFoundError
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.tier.records import NO_RECORD, RecordArray, Records, join
from kvbridge.tier.retention import Retentions
from kvbridge.tier.victims import Subtree


@dataclass(slots=True)
class _Checkpoint:
    pages: PageIdArray
    pins: int = 0


class Checkpoints:
    """Windows and states at the ends of some records of a residence, from which a prefill engine can go on.

    A checkpoint is complete when it enters, and nobody writes it. Without pins it goes when its pages are needed, the one that was
    used longest ago first; its record stays.
    """

    def __init__(self, capacity: int) -> None:
        self._is_there = np.zeros(capacity, dtype=np.bool_)
        self._of_record: dict[int, _Checkpoint] = {}
        """The one that was used longest ago first."""
        self.unpinned_pages = 0
        """Pages of those that nobody pins."""

    def __len__(self) -> int:
        return len(self._of_record)

    def among(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records have one."""
        return self._is_there[records]

    def pages(self, record: int) -> PageIdArray:
        """Return the pages of a record's checkpoint. Raises NotFoundError when it has none."""
        return self._get(record).pages

    def readers(self) -> dict[int, int]:
        """Return the number of readers of each checkpoint, by its record."""
        return {record: checkpoint.pins for record, checkpoint in self._of_record.items()}

    def all_pages(self) -> PageIdArray:
        """Return all pages of all checkpoints."""
        return join([checkpoint.pages for checkpoint in self._of_record.values()])

    def add(self, record: int, pages: PageIdArray) -> None:
        """Give a record that has none its checkpoint."""
        self._of_record[record] = _Checkpoint(pages)
        self._is_there[record] = True
        self.unpinned_pages += len(pages)

    def pin(self, record: int, record_pins: int) -> PageIdArray:
        """Count a reader and a use; return the pages. The reader is one of `record_pins` readers of the record, and stays longer.

        Raises NotFoundError when there is none (any more).
        """
        checkpoint = self._get(record)
        if checkpoint.pins >= record_pins:
            raise IntegrityError(f"the checkpoint of record {record} is read by somebody who has not pinned the record")
        self._of_record[record] = self._of_record.pop(record)
        if not checkpoint.pins:
            self.unpinned_pages -= len(checkpoint.pages)
        checkpoint.pins += 1
        return checkpoint.pages

    def unpin(self, record: int) -> None:
        """End what `pin` began. Raises IntegrityError when it has been ended."""
        checkpoint = self._get(record)
        if not checkpoint.pins:
            raise IntegrityError(f"the checkpoint of record {record} is unpinned more often than it was pinned")
        checkpoint.pins -= 1
        if not checkpoint.pins:
            self.unpinned_pages += len(checkpoint.pages)

    def require_unread(self, path: RecordArray, pins: npt.NDArray[np.int32]) -> None:
        """Raise IntegrityError when every reader of a record, which has so many `pins`, still reads its checkpoint."""
        for at in np.flatnonzero(self.among(path)).tolist() if self._of_record else ():
            if self._get(int(path[at])).pins >= pins[at]:
                raise IntegrityError(f"record {path[at]} is unpinned by a reader who still pins its checkpoint")

    def take(self, records: RecordArray) -> PageIdArray:
        """Take away the checkpoints that these records have, which nobody pins, and return their pages."""
        found = []
        for record in records[self._is_there[records]].tolist():
            found.append(self._of_record.pop(record).pages)
            self._is_there[record] = False
            self.unpinned_pages -= len(found[-1])
        return join(found)

    def oldest(self, page_count: int, retentions: Retentions) -> RecordArray:
        """Return the records of the checkpoints to take for so many pages, or of all that nobody pins: retained ones last."""
        chosen: list[int] = []
        for priority in retentions.priorities():
            for record, checkpoint in self._of_record.items():
                if page_count <= 0:
                    break
                if not checkpoint.pins and retentions.priority(record) == priority:
                    chosen.append(record)
                    page_count -= len(checkpoint.pages)
        return np.array(chosen, dtype=np.int32)

    def check_integrity(self, record_pins: npt.NDArray[np.int32]) -> None:
        """Recount. `record_pins`: of each record; a reader of a checkpoint pins its record, too. Raises IntegrityError."""
        unpinned = sum(len(one.pages) for one in self._of_record.values() if not one.pins)
        facts = {
            "records that have one": sorted(self._of_record) == np.flatnonzero(self._is_there).tolist(),
            "pins": all(0 <= one.pins <= record_pins[record] for record, one in self._of_record.items()),
            "pages": len(np.unique(self.all_pages())) == len(self.all_pages()),
            "unpinned pages": self.unpinned_pages == unpinned,
        }
        for fact, holds in facts.items():
            if not holds:
                raise IntegrityError(f"checkpoints: {fact} do not add up among {len(self)}")

    def _get(self, record: int) -> _Checkpoint:
        try:
            return self._of_record[record]
        except KeyError:
            raise NotFoundError(f"record {record} has no checkpoint (any more)") from None


class Residence(Subtree):
    """Some of the records of an index. Only the index changes a residence, but for its checkpoints."""

    def __init__(
        self,
        records: Records,
        spaces: Sequence[IndexSpace],
        rank: npt.NDArray[np.float64],
        *,
        checkpoint_space: IndexSpace | None = None,
    ) -> None:
        """`rank`: see `Subtree`. `checkpoint_space`: of checkpoints at the ends of records here."""
        super().__init__(records, rank, len(spaces))
        self.spaces = tuple(spaces)
        self.pinned = 0
        """Number of records that somebody pins."""
        self._count = 0
        self._is_lost = np.zeros(records.capacity, dtype=np.bool_)
        self._lost_count = 0
        self.checkpoint_space = checkpoint_space
        self.checkpoints = Checkpoints(records.capacity)
        """Checkpoints of records that are here."""
        self._is_read_back = np.zeros(records.capacity, dtype=np.bool_)
        self.evicted = EvictedPages()

    # ------------------------------------------------------------------------------------- looking

    def __len__(self) -> int:
        return self._count

    def depth(self, path: RecordArray) -> int:
        """Return the number of records of a path that are here, and not lost: its first ones."""
        return 0 if self.is_lost(path) else super().depth(path)

    def is_lost(self, path: RecordArray) -> bool:
        """Return whether a path begins with lost records: nobody new finds any of it here, and none comes before those are gone."""
        return bool(self._lost_count and len(path) and self._is_lost[path[0]])

    def lost(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are lost."""
        found: npt.NDArray[np.bool_] = self._is_lost[records]
        return found

    def pages(self, records: RecordArray) -> Pages:
        """Return the pages of records that are here, in their order."""
        return {space: self._pages[row, records] for row, space in enumerate(self.spaces)}

    def all_pages(self) -> Pages:
        """Return every page that records have here, those of checkpoints too."""
        return self.pages(self.all()) | self._of_checkpoints(self.checkpoints.all_pages())

    def unpinned(self, records: RecordArray) -> RecordArray:
        """Return those of the records that are here and that nobody pins."""
        found: RecordArray = records[self.has(records) & (self._pins[records] == 0)]
        return found

    def evictable(self) -> dict[IndexSpace, int]:
        """Return the number of pages of each space that could go now."""
        found = dict.fromkeys(self.spaces, len(self) - self.pinned)
        if self.checkpoint_space is not None:
            found[self.checkpoint_space] = self.checkpoints.unpinned_pages
        return found

    def pins(self) -> tuple[npt.NDArray[np.int32], dict[int, int]]:
        """Return the readers of each record, by its number, and those of each checkpoint, by its record's."""
        return self._pins.copy(), self.checkpoints.readers()

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
        """Raise IntegrityError unless somebody pins a path, beside the readers that restore from its checkpoints."""
        pins = self._pins[path]
        if pins.min() < 1:
            raise IntegrityError(f"record {path[pins.argmin()]} is unpinned more often than it was pinned")
        self.checkpoints.require_unread(path, pins)

    def unpin(self, path: RecordArray) -> RecordArray:
        """End what `pin` began, for all that one reader has pinned. Returns the records that nobody pins any more."""
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
        """Note that records, of which some may be here, have another rank."""
        for leaf in records[self._children[records] == 0].tolist():
            self._offer(leaf)

    # ------------------------------------------------------------------------------------- checkpoints

    def checkpointed(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records have a checkpoint here, and are not lost."""
        return self.checkpoints.among(records) & ~self._is_lost[records]

    def lacks_checkpoint(self, records: RecordArray) -> npt.NDArray[np.bool_]:
        """Return which of the records are here, not lost, and have none."""
        lacks: npt.NDArray[np.bool_] = self.has(records) & ~self.checkpoints.among(records) & ~self._is_lost[records]
        return lacks

    def set_checkpoint(self, record: int, pages: PageIdArray) -> bool:
        """Keep the windows and states at a record's end. False when it has some: `pages` are still the caller's."""
        if self._children_at[record] == NO_RECORD or not len(pages):
            raise IntegrityError(f"record {record} cannot have a checkpoint of {len(pages)} pages in {self!r}")
        is_new = not self.checkpointed(np.array([record]))[0]
        if is_new:
            self.checkpoints.add(record, pages)
        return is_new

    def pin_checkpoint(self, record: int) -> PageIdArray:
        """Count a reader on the checkpoint of a record, as `Checkpoints.pin`."""
        return self.checkpoints.pin(record, self._pins_at[record])

    # ------------------------------------------------------------------------------------- what comes and goes

    def add(self, records: RecordArray, pages: Mapping[IndexSpace, PageIdArray]) -> None:
        """Take in records that continue a path that is here, one page of each space for each; call `used` next."""
        for row, space in enumerate(self.spaces):
            self._pages[row, records] = pages[space]
        self._add(records)
        self._is_read_back[records] = False
        self._count += len(records)

    def take(self, count: int) -> tuple[RecordArray, Pages]:
        """Evict `count` records and their checkpoints: old leaves that nobody pins, neighbours together, each before its parent."""
        victims = self._victims(count) if count > 0 else np.empty(0, dtype=np.int32)
        self.note_evicted(victims)
        return victims, self._clear(victims)

    def note_evicted(self, records: RecordArray) -> None:
        """Count records that leave here to make room, of whichever residence that is."""
        read_back = int(np.count_nonzero(self._is_read_back[records]))
        self.evicted.read_back += read_back
        self.evicted.unused += len(records) - read_back

    def read_back(self, records: RecordArray) -> None:
        """Note that the pages of these have been copied back to where they had gone."""
        self._is_read_back[records] = True

    def take_checkpoints(self, page_count: int, retentions: Retentions) -> tuple[RecordArray, Pages]:
        """Evict the checkpoints that were used longest ago, retained ones last, for so many pages; return their records, too."""
        oldest = self.checkpoints.oldest(page_count, retentions)
        return oldest, self._of_checkpoints(self.checkpoints.take(oldest))

    def lose(self, records: RecordArray) -> None:
        """Note that the contents of these are gone; the pages stay until nobody pins them. A path is lost from its start."""
        self._lost_count += int(np.count_nonzero(~self._is_lost[records]))
        self._is_lost[records] = True

    def remove(self, records: RecordArray) -> Pages:
        """Give up records that nobody pins, and their checkpoints; each comes before its parent."""
        for record in records.tolist():
            parent = self._remove_leaf(record)
            if parent != NO_RECORD:
                self._offer(parent)
        return self._clear(records)

    def _clear(self, records: RecordArray) -> Pages:
        """Return the pages of leaves that have been taken off, with their checkpoints."""
        self._count -= len(records)
        self._lost_count -= int(np.count_nonzero(self._is_lost[records]))
        self._is_lost[records] = False
        self._record_at[self._pages[0, records]] = NO_RECORD
        return self.pages(records) | self._of_checkpoints(self.checkpoints.take(records))

    def _of_checkpoints(self, pages: PageIdArray) -> Pages:
        return {} if self.checkpoint_space is None else {self.checkpoint_space: pages}

    # ------------------------------------------------------------------------------------- for operators

    def check_integrity(self, is_hidden: npt.NDArray[np.bool_]) -> None:
        """Compare every structure with every other; hidden records are here while somebody pins them. Raises IntegrityError."""
        self.checkpoints.check_integrity(self._pins)
        there = self.all()
        inner = there[self._parent[there] != NO_RECORD]
        by_children = np.bincount(self._parent[inner], weights=self._pins[inner], minlength=len(self._pins))
        facts = {
            "children, leaves, candidates and places": self._adds_up() and len(there) == len(self),
            "pins of records and their children": bool(
                (self._pins[there] >= np.maximum(by_children[there], is_hidden[there])).all()
            ),
            "pinned records": self.pinned == np.count_nonzero(self._pins[there]) == np.count_nonzero(self._pins),
            "pages and records": all(len(np.unique(ids)) == len(ids) for ids in self.pages(there).values()),
            "checkpoints and records": self.checkpoints.among(there).sum() == len(self.checkpoints),
            "lost ones": self._lost_count == self._is_lost.sum() == np.count_nonzero(self._pins[self._is_lost]),
        }
        for fact, holds in facts.items():
            if not holds:
                raise IntegrityError(f"{fact} contradict each other in {self!r}")

    def __repr__(self) -> str:
        spaces = ", ".join(self.spaces)
        return f"<{len(self)} records in {spaces}: {self.pinned} pinned, {len(self.checkpoints)} checkpoints>"


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


def merged(parts: Sequence[Pages]) -> Pages:
    """Return pages of several origins, space by space."""
    found: Pages = {}
    for pages in parts:
        for space, ids in pages.items():
            found[space] = np.concatenate((found[space], ids)) if space in found else ids
    return found
