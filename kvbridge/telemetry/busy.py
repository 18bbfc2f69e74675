"""The length of the union of time intervals: for how long at least one of several things was under way."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

KEPT_INTERVALS = 1_024
"""Of intervals that were added, the latest are kept apart; what is added of the time before them is not counted."""


class BusyTime:
    """The union of overlapping intervals, in seconds. Times are the caller's clock.

    Either `begin` and `end` come in pairs as things happen, or `add` tells of intervals that are over, in any order.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._total_s = 0.0
        self._begins_s: list[float] = []
        self._ends_s: list[float] = []
        """Of the intervals that were added, disjoint and in order."""
        self._horizon_s = -math.inf

    def begin(self, now_s: float) -> None:
        """One more thing is under way."""
        if self._under_way == 0:
            self._since_s = now_s
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """One thing has ended."""
        if self._under_way == 0:
            raise ValueError("nothing is under way")
        self._under_way -= 1
        if self._under_way == 0:
            self._total_s += now_s - self._since_s

    def add(self, begin_s: float, end_s: float) -> None:
        """Something was under way from `begin_s` to `end_s`."""
        begins_s, ends_s = self._begins_s, self._ends_s
        begin_s = max(begin_s, self._horizon_s)
        first, last = bisect_left(ends_s, begin_s), bisect_right(begins_s, end_s)  # those that it touches
        touched_s = 0.0
        if first < last:
            touched_s = sum(ends_s[first:last]) - sum(begins_s[first:last])
            begin_s, end_s = min(begin_s, begins_s[first]), max(end_s, ends_s[last - 1])
        if begin_s < end_s:
            begins_s[first:last], ends_s[first:last] = [begin_s], [end_s]
            self._total_s += end_s - begin_s - touched_s
        if len(begins_s) > KEPT_INTERVALS:
            half = KEPT_INTERVALS // 2
            self._horizon_s = ends_s[half - 1]
            del begins_s[:half], ends_s[:half]

    def total_s(self, now_s: float) -> float:
        """Busy seconds so far, what is still under way included."""
        return self._total_s + (now_s - self._since_s if self._under_way else 0.0)
