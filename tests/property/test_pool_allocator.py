"""The allocator against a naive set of free pages, and against the fewest runs that any choice could have."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError
from kvbridge.pool.accounts.allocator import RunAllocator
from tests.helpers.examples import fewer

PAGES = 48


def run_lengths(pages: set[int]) -> list[int]:
    lengths: list[int] = []
    for page in sorted(pages):
        if page - 1 in pages:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def fewest_runs(free: set[int], count: int) -> int:
    used = 0
    for length in sorted(run_lengths(free), reverse=True):
        if count <= 0:
            break
        count -= length
        used += 1
    return used


class AllocatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = RunAllocator(PAGES)
        self.free = set(range(PAGES))
        self.out: list[int] = []

    @rule(count=st.integers(0, 20))
    def take(self, count):
        if count > len(self.free):
            with pytest.raises(CapacityError):
                self.allocator.take(count)
            return
        ids = self.allocator.take(count)
        pages = set(ids.tolist())
        assert len(pages) == count
        assert pages <= self.free
        assert (np.diff(ids) > 0).all()
        # Taken pages may lie side by side although they came from one free run only, never from more runs than needed.
        assert len(run_lengths(pages)) <= fewest_runs(self.free, count)
        self.free -= pages
        self.out += ids.tolist()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def take_after(self, data):
        page = data.draw(st.sampled_from(self.out))
        if not self.free:
            return
        ids = self.allocator.take(1, after=page)
        assert ids[0] == page + 1 or page + 1 not in self.free
        self.free -= set(ids.tolist())
        self.out += ids.tolist()

    @rule(count=st.integers(0, PAGES), scattered=st.integers(0, PAGES))
    def take_some_that_need_not_lie_together(self, count, scattered):
        if count > len(self.free) or scattered > count:
            with pytest.raises((CapacityError, InvalidInputError)):
                self.allocator.take(count, scattered=scattered)
            return
        fewest = fewest_runs(self.free, count - scattered)
        ids = self.allocator.take(count, scattered=scattered).tolist()
        together, apart = set(ids[: count - scattered]), set(ids[count - scattered :])
        assert together | apart <= self.free
        assert ids == sorted(together) + sorted(apart)
        assert len(run_lengths(together)) <= fewest
        self.free -= together
        left = sorted(run_lengths(self.free))
        while left and left[0] <= scattered:
            scattered -= left.pop(0)
        if scattered:
            left[0] -= scattered
        self.free -= apart
        assert sorted(run_lengths(self.free)) == sorted(left)
        self.out += ids

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data):
        ids = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        self.allocator.give(np.array(ids, dtype=np.int32))
        self.free |= set(ids)
        self.out = [page for page in self.out if page not in ids]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def give_what_is_free(self, data):
        page = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(IntegrityError):
            self.allocator.give([*self.out[:3], page])

    @invariant()
    def agrees_with_the_set(self):
        self.allocator.check_integrity()
        assert self.allocator.free == len(self.free)
        assert len(self.allocator._length_at_start) == len(run_lengths(self.free))
        assert self.allocator.largest_run == max(run_lengths(self.free), default=0)


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = fewer(2, stateful_step_count=40)
