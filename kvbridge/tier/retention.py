"""Pages that requests ask to retain: by namespace, with a priority that falls by itself, in equal steps.

A request may ask with `retention` that its pages go after others. A priority adds to the rank that a record has from its last use:
the record goes after every record of a lower priority, and before every record of a higher one. Retention pins nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.prefixes import RETENTION_PRIORITIES, Evicted, Retention
from kvbridge.tier.records import RecordArray

PRIORITY_RANK = 2.0**36
"""One step of priority adds this to a rank; it is more than any time of use, and ranks in this range are exact to 0.1 ms."""
MOST_TOGETHER = 0.5
"""Share of all records that all namespaces may retain together, unless one alone may retain more. Other records go by use alone,
and a name costs nothing: without this limit, many names could retain everything."""
_LOOK_EVERY_S = 1.0
"""Longest delay with which a priority falls: each look goes over all retained records."""
_ENDED = -1
"""The priority of a record that was retained once."""


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
        """Give records of a path at least the claim's priority from `now` on. Call `decay` at `now` first.

        False, and nothing has changed, when the namespace, or all namespaces, would retain too many.
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
            if claim.namespace not in self._numbers:
                number = next(number for number in range(len(self._names) + 1) if number not in self._names)
                self._numbers[claim.namespace], self._names[number] = number, claim.namespace
            self._number[new] = self._numbers[claim.namespace]
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
        """Return the ranks that the priorities of records add."""
        found: npt.NDArray[np.float64] = np.maximum(self._priority[records], 0) * PRIORITY_RANK
        return found

    def reasons(self, records: RecordArray) -> Counter[Evicted]:
        """Count the reasons why these records go now that others need their pages."""
        priority = self._priority[records]
        retained, ended = int(np.count_nonzero(priority > 0)), int(np.count_nonzero(priority == _ENDED))
        space = len(records) - retained - ended
        return +Counter({Evicted.SPACE: space, Evicted.RETENTION_ENDED: ended, Evicted.RETAINED: retained})

    def forget(self, records: RecordArray) -> None:
        """Forget records that are gone; their numbers are used again."""
        self._uncount(records[self._priority[records] > 0])
        self._priority[records] = 0
        self._until_s[:, records] = 0

    def _at(self, records: RecordArray, now: float) -> npt.NDArray[np.int8]:
        found: npt.NDArray[np.int8] = (self._until_s[:, records] > now).sum(axis=0, dtype=np.int8)
        return found

    def _uncount(self, records: RecordArray) -> None:
        numbers, counts = np.unique(self._number[records], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            name = self._names[number]
            self.by_namespace[name] -= count
            if not self.by_namespace[name]:
                del self.by_namespace[name], self._names[number], self._numbers[name]


def base_rank(rank: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return ranks without the steps that priorities have added."""
    return np.mod(rank, PRIORITY_RANK)
