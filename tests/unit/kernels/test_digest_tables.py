"""The tables and the arithmetic of the digest kernel, followed by hand in Python."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.crc32c import bytes_power, product
from kvbridge.kernels.digest import BATCH_ROWS, BIAS_BYTES, LEVELS, ROW_BYTES, THREAD_BYTES, raw_checksums, tables

THREADS = ROW_BYTES // THREAD_BYTES


@pytest.mark.parametrize("distance", [0, 1, 4095, 4096, 4097, 1 << 20, 123_456_789, (1 << 33) + 5])
def test_powers_of_all_levels_make_any_distance(distance: int):
    powers = tables()[THREAD_BYTES * 256 :].reshape(LEVELS, 1024)
    found, left = 1 << 31, distance + BIAS_BYTES
    for level in range(LEVELS):
        found = product(found, int(powers[level][left & 1023]))
        left >>= 10
    assert found == bytes_power(distance)


@pytest.mark.parametrize("length", [1, 15, 16, 511, 2_048, 2_049, 5_000])
def test_lanes_together_have_the_checksum(length: int):
    """What the kernel does for one segment, lane by lane."""
    flat = tables()
    advance, powers = (
        flat[: THREAD_BYTES * 256].reshape(THREAD_BYTES, 256),
        flat[THREAD_BYTES * 256 :].reshape(LEVELS, 1024),
    )
    data = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
    rows = -(-length // (BATCH_ROWS * ROW_BYTES)) * BATCH_ROWS
    padded = np.zeros(rows * ROW_BYTES, dtype=np.uint8)
    padded[:length] = data
    words = padded.view("<u4").reshape(rows, THREADS, 4)
    found = 0
    for lane in range(THREADS):
        held = 0
        for row in range(rows):
            four = [int(word) for word in words[row, lane]]
            four[0] ^= held
            held = 0
            for byte in range(THREAD_BYTES):
                held ^= int(advance[byte][four[byte // 4] >> 8 * (byte % 4) & 255])
        left = length + BIAS_BYTES - rows * ROW_BYTES - lane * THREAD_BYTES
        for level in range(LEVELS):
            held = product(held, int(powers[level][left & 1023]))
            left >>= 10
        found ^= held
    address = np.array([data.ctypes.data], dtype=np.uint64)
    assert found == raw_checksums(address, np.array([length]), MemoryKind.DRAM)[0]
