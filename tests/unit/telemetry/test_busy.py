"""For how long at least one of several things was under way: as they happen, and told afterwards in any order."""

from __future__ import annotations

import random

import pytest

from kvbridge.telemetry.busy import KEPT_INTERVALS, BusyTime


def test_what_overlaps_counts_once():
    busy = BusyTime()
    busy.begin(100.0)
    busy.begin(101.0)
    busy.end(102.0)
    assert busy.total_s(102.5) == 2.5
    busy.end(102.5)
    assert busy.total_s(110.0) == 2.5
    with pytest.raises(ValueError, match="nothing is under way"):
        BusyTime().end(0.0)


def test_intervals_told_afterwards_are_the_union_whatever_their_order():
    draw = random.Random(7)
    for _ in range(200):
        intervals = [(begin, begin + draw.randrange(0, 6)) for begin in (draw.randrange(60) for _ in range(25))]
        busy, covered, former_s = BusyTime(), set(), 0.0
        for begin, end in intervals:
            busy.add(float(begin), float(end))
            covered |= set(range(begin, end))
            assert busy.total_s(0.0) == len(covered)
            assert busy.total_s(0.0) >= former_s, "a counter never falls"
            former_s = busy.total_s(0.0)


def test_what_lies_before_those_that_are_kept_is_not_counted_twice():
    busy = BusyTime()
    for number in range(3 * KEPT_INTERVALS):
        busy.add(2.0 * number, 2.0 * number + 1)
    assert busy.total_s(0.0) == 3 * KEPT_INTERVALS
    busy.add(0.0, 1.0)
    assert busy.total_s(0.0) == 3 * KEPT_INTERVALS
