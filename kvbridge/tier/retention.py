"""The cached pages that go after others, and until when, as requests ask with `retention`.

A priority adds to the rank that a record's use has given it: the record goes after every record of a lower priority, and before
every record of a higher one. The priority falls by itself, in equal steps. Retention pins nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError
from kvbridge.core.prefixes import RETENTION_PRIORITIES, Evicted, Retention
from kvbridge.tier.records import RecordArray

PRIORITY_RANK = 2.0**36
"""One step of priority adds this to a rank; it is more than any time of use, and ranks in this range are exact to 0.1 ms."""
_LOOK_EVERY_S = 1.0
"""Longest delay with which a priority falls: each look goes over all retained records."""
_ENDED = -1
MOST_TOGETHER = 0.5
"""Share of all records that all namespaces may have retained together, unless one alone may have more: a name costs nothing, and
the other records go by use alone."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The retention that one request asks for its pages, counted for its namespace."""

    namespace: str
    retention: Retention


class Retentions:
    """The retained records of one index. Times are seconds above 0 that never fall, as the index is given them."""

    def __init__(self, capacity: int, *, share: float) -> None:
        """`share`: the share of `capacity` records that each namespace may have retained."""
        self.limit = int(share * capacity)
        """Records of one namespace that can be retained."""
        self.together = int(max(share, MOST_TOGETHER) * capacity)
        """Records of all namespaces that can be retained."""
        self.by_namespace: Counter[str] = Counter()
        """Records that were retained at the last look."""
        self._until_s = np.zeros((RETENTION_PRIORITIES, capacity))
        """When a record's priority falls below each of 1, 2, ...: never ascending."""
        self._priority = np.zeros(capacity, dtype=np.int8)
        self._priority_at = self._priority.data
        self._number = np.zeros(capacity, dtype=np.int32)
        """Number of the namespace."""
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._next_look_s = 0.0

    def __len__(self) -> int:
        """Number of retained records."""
        return self.by_namespace.total()

    def retain(self, records: RecordArray, now: float, claim: Claim) -> bool:
        """Let records of a path have at least that priority from `now` on.

        False, and nothing has changed, when the namespace would have more than its share, or all of them more than theirs. Call
        `decay` at `now` first.
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
        """Let priorities fall whose time is over, and return the records whose priority has fallen."""
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
        """Return the additions to the ranks of records by their priorities."""
        found: npt.NDArray[np.float64] = np.maximum(self._priority[records], 0) * PRIORITY_RANK
        return found

    def reasons(self, records: RecordArray) -> Counter[Evicted]:
        """Count the reasons why these records go, whose pages others need."""
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

    def check_integrity(self) -> None:
        """Count again. Raises IntegrityError."""
        numbers, counts = np.unique(self._number[self._priority > 0], return_counts=True)
        found = {self._names[number]: count for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)}
        if found != {name: count for name, count in self.by_namespace.items() if count}:
            raise IntegrityError(f"retained records are {found}, counted as {dict(self.by_namespace)}")
        if (self._until_s[1:] > self._until_s[:-1]).any():
            raise IntegrityError("a higher priority of a record lasts longer than a lower one")
        over = [name for name, count in found.items() if count > self.limit]
        if over or len(self) > self.together:
            raise IntegrityError(
                f"namespaces {over} have more than {self.limit} retained records, or all more than {self.together}"
            )

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
