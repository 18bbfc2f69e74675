"""The reference copy against a plain loop over slices, for every mix of lengths that its two ways divide."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.kernels.copies import GATHER_AT_LEAST, GATHER_BELOW_BYTES, GATHER_BUFFER_BYTES, copy_operations

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
