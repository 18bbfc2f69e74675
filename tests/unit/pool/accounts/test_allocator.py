from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import IntegrityError
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
