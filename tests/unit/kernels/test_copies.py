"""Copies by the processor, and the arrays that a kernel is given."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.kernels.copies import GATHER_AT_LEAST, GATHER_BELOW_BYTES, GATHER_BUFFER_BYTES, copy_operations
from kvbridge.kernels.cuda import staging
from kvbridge.kernels.cuda.staging import SMALLEST_STAGING_BYTES, Segments, StagingPool

SMALL, LARGE = 584, GATHER_BELOW_BYTES


def scattered(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Offsets on both sides, in two different orders with gaps, and the bytes needed for either side."""
    rng = np.random.default_rng(seed)
    sides = []
    for _ in range(2):
        order = rng.permutation(len(lengths))
        offsets = np.zeros(len(lengths), dtype=np.uint64)
        at = 3
        for index in order:
            offsets[index] = at
            at += lengths[index] + int(rng.integers(1, 9))
        sides.append(offsets)
    return sides[0], sides[1], sum(lengths) + 9 * len(lengths) + 3


@pytest.mark.parametrize(
    "lengths",
    [
        [],
        [1],
        [SMALL] * (GATHER_AT_LEAST - 1),
        [SMALL] * GATHER_AT_LEAST,
        [SMALL] * (3 * (GATHER_BUFFER_BYTES // SMALL) + 1),
        [LARGE - 1] * 40,
        [LARGE] * 5,
        [LARGE + 1] * 20,
        [SMALL, LARGE] * 30,
        [1, 2, 3] * 40,
        list(range(1, 400)),
        [37_440] * 20 + [1_728] * 100 + [8, 576] * 20,
    ],
    ids=lambda lengths: f"{len(lengths)}x{sorted(set(lengths))[:3]}",
)
def test_copies_exactly_what_it_is_told(lengths: list[int]) -> None:
    source_at, target_at, size = scattered(lengths)
    source = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    target, expected = np.full(size, 255, np.uint8), np.full(size, 255, np.uint8)
    for start, stop, length in zip(source_at.tolist(), target_at.tolist(), lengths, strict=True):
        expected[stop : stop + length] = source[start : start + length]
    copy_operations(
        source_at + np.uint64(source.ctypes.data),
        target_at + np.uint64(target.ctypes.data),
        np.array(lengths, dtype=np.uint64),
    )
    np.testing.assert_array_equal(target, expected)


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


@given(st.lists(st.tuples(st.integers(4096, 1 << 47), st.integers(1, 100_000)), min_size=1, max_size=30))
def test_segments_begin_at_cache_lines_and_cover_every_byte(stretches):
    addresses = np.array([address for address, _ in stretches], dtype=np.uint64)
    lengths = np.array([length for _, length in stretches], dtype=np.int64)
    segments = Segments.of(addresses, lengths, 4096)
    ends = [*segments.first.tolist()[1:], segments.count]
    for (address, length), first, end in zip(stretches, segments.first.tolist(), ends, strict=True):
        begin = address // 128 * 128
        assert begin + (end - first) * 4096 >= address + length > begin + (end - first - 1) * 4096
