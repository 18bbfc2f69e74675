from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.pool.accounts.allocator import RunAllocator


def runs(ids: np.ndarray) -> int:
    return int(len(ids) > 0) + int((np.diff(np.sort(ids)) != 1).sum())


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
