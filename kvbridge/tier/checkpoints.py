"""Windows and states at the ends of some cached pages, from which a prefill engine can go on.

Owns: which record has a checkpoint, its pages of `swa`, and who restores from it. Must not know: keys, paths, other pages.

A checkpoint is complete when it enters and is written by nobody. Without pins it goes when its pages are needed, the one that was
used longest ago first; its record stays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, NotFoundError
from kvbridge.core.ids import PageIdArray
from kvbridge.tier.retention import Retentions


@dataclass(slots=True)
class _Checkpoint:
    pages: PageIdArray
    pins: int = 0


class Checkpoints:
    """The checkpoints of an index of so many records."""

    def __init__(self, capacity: int) -> None:
        self._is_there = np.zeros(capacity, dtype=np.bool_)
        self._of_record: dict[int, _Checkpoint] = {}
        """The one that was used longest ago first."""
        self.unpinned_pages = 0
        """Pages of those that nobody pins."""

    def __len__(self) -> int:
        return len(self._of_record)

    def among(self, records: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """Which of the records have one."""
        return self._is_there[records]

    def pages(self, record: int) -> PageIdArray:
        """Return the pages of a record's checkpoint. Raises NotFoundError when it has none."""
        return self._get(record).pages

    def pins(self, record: int) -> int:
        """How many readers a record's checkpoint has."""
        return self._get(record).pins

    def readers(self) -> dict[int, int]:
        """How many readers each checkpoint has, by its record."""
        return {record: checkpoint.pins for record, checkpoint in self._of_record.items()}

    def all_pages(self) -> PageIdArray:
        """All pages of all checkpoints."""
        return join([checkpoint.pages for checkpoint in self._of_record.values()])

    def add(self, record: int, pages: PageIdArray) -> None:
        """Give a record that has none its checkpoint."""
        self._of_record[record] = _Checkpoint(pages)
        self._is_there[record] = True
        self.unpinned_pages += len(pages)

    def pin(self, record: int) -> PageIdArray:
        """Count a reader, and a use; return the pages."""
        checkpoint = self._of_record[record] = self._of_record.pop(record)
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

    def take(self, records: npt.NDArray[np.int32]) -> PageIdArray:
        """Take away the checkpoints that these records have, which nobody pins, and return their pages."""
        return join([self._remove(record) for record in records[self._is_there[records]].tolist()])

    def oldest(self, page_count: int, retentions: Retentions) -> npt.NDArray[np.int32]:
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

    def _remove(self, record: int) -> PageIdArray:
        checkpoint = self._of_record.pop(record)
        self._is_there[record] = False
        self.unpinned_pages -= len(checkpoint.pages)
        return checkpoint.pages


def join(pages: list[PageIdArray]) -> PageIdArray:
    """Return the ids of several arrays, or of none, as one."""
    return np.concatenate(pages) if pages else np.empty(0, dtype=np.int32)
