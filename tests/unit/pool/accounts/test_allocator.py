from __future__ import annotations

import time

import numpy as np
import pytest

from kvbridge.core.errors import CapacityError, IntegrityError, InvalidInputError, PageOutOfBoundsError
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


def test_a_fresh_pool_gives_one_run_from_page_zero():
    allocator = RunAllocator(64, name="full")
    ids = allocator.take(10)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(range(10))
    assert allocator.free == 54


def test_the_shortest_run_that_fits_is_taken():
    allocator = fragmented([(0, 10), (20, 4), (30, 6)], 40)
    assert allocator.take(4).tolist() == [20, 21, 22, 23]
    assert allocator.take(5).tolist() == [30, 31, 32, 33, 34]
    assert allocator.largest_run == 10


def test_without_a_run_that_fits_the_longest_are_used_and_the_rest_fits_best():
    allocator = fragmented([(0, 2), (10, 8), (20, 1), (30, 5)], 40)
    ids = allocator.take(10)
    assert ids.tolist() == [0, 1, *range(10, 18)]


@pytest.mark.parametrize(
    ("free_runs", "count", "expected"),
    [([(0, 4), (8, 4), (16, 4)], 12, 3), ([(0, 4), (8, 4), (16, 4)], 5, 2), ([(0, 1), (2, 1), (4, 9)], 10, 2)],
)
def test_the_number_of_runs_is_minimal(free_runs, count, expected):
    assert runs(fragmented(free_runs, 32).take(count)) == expected


def test_ids_ascend_whatever_the_order_of_the_runs():
    allocator = fragmented([(0, 2), (10, 8), (20, 4)], 40)
    ids = allocator.take(14)
    assert (np.diff(ids) > 0).all()


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


def test_taking_is_all_or_nothing():
    allocator = RunAllocator(8)
    allocator.take(5)
    with pytest.raises(CapacityError, match="4 pages wanted, 3 of 8 are free"):
        allocator.take(4)
    assert allocator.free == 3
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


def test_repr_is_for_the_operator():
    assert repr(fragmented([(0, 5), (8, 7)], 64)) == "<pages pages: 12 of 64 free, longest run 7>"
    assert repr(RunAllocator(64, name="full")) == "<pages full: 64 of 64 free, longest run 64>"


def test_integrity_check_finds_a_lost_page():
    allocator = RunAllocator(16)
    allocator._is_free[3] = False
    with pytest.raises(IntegrityError, match="runs by start"):
        allocator.check_integrity()


def test_a_thousand_rooms_a_second_are_easy_in_a_large_fragmented_pool():
    """Single pages of 100,000, every second one out: the worst that a pool can come to. 20 pages a room."""
    allocator = RunAllocator(100_000)
    allocator.take(100_000)
    allocator.give(np.arange(0, 100_000, 2))
    assert len(allocator._length_at_start) == 50_000
    start = time.thread_time()  # whatever else the processor has to do
    for _ in range(1_000):
        allocator.give(allocator.take(20))
    assert time.thread_time() - start < 1.0
