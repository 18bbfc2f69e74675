"""Which staging memory is used again, without a GPU."""

from __future__ import annotations

import pytest

from kvbridge.kernels.cuda import staging
from kvbridge.kernels.cuda.staging import SMALLEST_STAGING_BYTES, StagingPool


class FakeStaging:
    """Idle until a test says otherwise; counts how often it is asked."""

    def __init__(self, _: int, length_bytes: int) -> None:
        self.length_bytes = length_bytes
        self.busy = self.closed = False
        self.asked = 0

    def idle(self) -> bool:
        self.asked += 1
        return not self.busy

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> StagingPool:
    monkeypatch.setattr(staging, "Staging", FakeStaging)
    return StagingPool(0)


def test_the_one_used_longest_ago_is_used_again_and_no_other_is_asked(pool: StagingPool):
    pool.reserve(100, 4)
    order = [pool.take(100) for _ in range(4)]
    assert len(set(map(id, order))) == 4
    assert [pool.take(100) for _ in range(4)] == order
    assert [each.asked for each in order] == [2] * 4
    for each in order[:3]:
        each.busy = True
    assert pool.take(100) is order[3]


def test_more_are_made_while_all_are_in_use(pool: StagingPool):
    first = pool.take(100)
    first.busy = True
    second = pool.take(100)
    assert second is not first
    first.busy = False
    assert pool.take(100) is first
    pool.close()
    assert first.closed
    assert second.closed


def test_one_that_is_too_short_is_replaced(pool: StagingPool):
    short = pool.take(100)
    longer = pool.take(SMALLEST_STAGING_BYTES * 2)
    assert longer.length_bytes >= SMALLEST_STAGING_BYTES * 2
    assert short.closed
    longer.busy = True
    other = pool.take(SMALLEST_STAGING_BYTES * 2)
    assert other is not longer
