"""Checksums by the processor, and the tables and the arithmetic of the kernel, followed by hand in Python."""

import numpy as np
import pytest
from crc32c import crc32c

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.digests import bytes_power, product
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.digest import BATCH_ROWS, BIAS_BYTES, LEVELS, ROW_BYTES, THREAD_BYTES, raw_checksums, tables


def test_each_stretch_has_the_raw_checksum_of_its_own_bytes():
    memory = np.random.default_rng(1).integers(0, 256, 100_000, dtype=np.uint8)
    offsets, lengths = np.array([0, 5, 5, 99_999, 30_000]), np.array([1, 1_728, 60_000, 1, 37_440])
    addresses = (memory.ctypes.data + offsets).astype(np.uint64)
    found = raw_checksums(addresses, lengths, MemoryKind.DRAM)
    assert found.dtype == np.uint32
    for value, offset, length in zip(found.tolist(), offsets.tolist(), lengths.tolist(), strict=True):
        # crc(a) ^ crc(b) of equally long a and b is the raw checksum of a ^ b: with b all zeros, that of a.
        piece = memory[offset : offset + length].tobytes()
        assert value == crc32c(piece) ^ crc32c(bytes(length))


def test_memory_that_cannot_be_read_here_is_refused_with_the_key_to_change(monkeypatch):
    monkeypatch.setattr(runtime, "reason_without_device", lambda: "the CUDA driver finds no device")
    one = np.array([4096], dtype=np.uint64)
    with pytest.raises(UnsupportedError, match=r"vram.*finds no device.*integrity\.digest"):
        raw_checksums(one, np.array([1]), MemoryKind.VRAM)


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
    """The kernel's work on one segment, lane by lane."""
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
