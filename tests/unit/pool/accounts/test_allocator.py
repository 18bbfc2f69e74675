from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.pool.accounts.allocator import RunAllocator


def runs(ids: np.ndarray) -> int:
    return int(len(ids) > 0) + int((np.diff(np.sort(ids)) != 1).sum())


def fragmented(free_runs: list[tuple[int, int]], page_count: int) -> RunAllocator:
    """An allocator in which exactly the runs (start, length) are free."""
    allocator = RunAllocator(page_count)
    allocator.take(page_count)
    for start, length in free_runs:
        allocator.give(np.arange(start, start + length))
    return allocator


def test_the_shortest_run_that_fits_is_taken():
    allocator = fragmented([(0, 10), (20, 4), (30, 6)], 40)
    assert allocator.take(4).tolist() == [20, 21, 22, 23]
    assert allocator.take(5).tolist() == [30, 31, 32, 33, 34]
    assert allocator.largest_run == 10


def test_without_a_run_that_fits_the_longest_are_used_and_the_rest_fits_best():
    allocator = fragmented([(0, 2), (10, 8), (20, 1), (30, 5)], 40)
    ids = allocator.take(10)
    assert ids.tolist() == [0, 1, *range(10, 18)]


def test_growing_goes_on_behind_the_last_page():
    allocator = RunAllocator(64)
    first = allocator.take(10)
    allocator.give(allocator.take(4)[:2])
    assert first[-1] == 9
    assert allocator.take(2, after=9).tolist() == [10, 11]
    assert allocator.take(3, after=9).tolist() == [14, 15, 16]


def test_growing_takes_what_follows_and_the_rest_elsewhere():
    allocator = fragmented([(10, 3), (20, 8)], 40)
    assert allocator.take(5, after=9).tolist() == [10, 11, 12, 20, 21]


def test_neighbours_join_when_given_back():
    allocator = RunAllocator(30)
    a, b, c = allocator.take(10), allocator.take(10), allocator.take(10)
    allocator.give(a)
    allocator.give(c)
    assert (allocator.largest_run, len(allocator._length_at_start)) == (10, 2)
    allocator.give(b)
    assert (allocator.largest_run, len(allocator._length_at_start)) == (30, 1)
    allocator.check_integrity()


@pytest.mark.parametrize("wrong", [[3, 3], [3, 9], [9]])
def test_a_page_that_is_not_out_cannot_be_given_and_nothing_changes(wrong):
    allocator = RunAllocator(16)
    allocator.take(8)
    with pytest.raises(IntegrityError):
        allocator.give(wrong)
    assert allocator.free == 8
    allocator.check_integrity()


@pytest.mark.parametrize("wrong", [[-1], [16], [0, 99]])
def test_a_page_that_does_not_exist_is_refused(wrong):
    allocator = RunAllocator(16)
    allocator.take(16)
    with pytest.raises(PageOutOfBoundsError):
        allocator.give(wrong)


def test_bad_sizes_are_refused():
    for bad in (0, -1, 2**31):
        with pytest.raises(InvalidInputError):
            RunAllocator(bad)
    with pytest.raises(InvalidInputError):
        RunAllocator(4).take(-1)


def test_nothing_is_a_valid_amount():
    allocator = RunAllocator(4)
    assert allocator.take(0).tolist() == []
    allocator.give([])
    assert allocator.free == 4


def test_integrity_check_finds_a_lost_page():
    allocator = RunAllocator(16)
    allocator._is_free[3] = False
    with pytest.raises(IntegrityError, match="runs by start"):
        allocator.check_integrity()
