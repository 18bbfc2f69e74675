"""Checksums by the device against those of the CPU: every short length, long stretches, any alignment, many at once."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.digest import raw_checksums
from tests.helpers.gpu import DEVICE, HOST, SMALL, Bytes, random_bytes

pytestmark = pytest.mark.gpu


def compare(content: np.ndarray, offsets: np.ndarray, lengths: np.ndarray, device: int, kind: str = DEVICE) -> None:
    with Bytes(kind, content, device) as memory:
        found = raw_checksums((memory.address + offsets).astype(np.uint64), lengths, MemoryKind.VRAM, device=device)
    expected = raw_checksums((content.ctypes.data + offsets).astype(np.uint64), lengths, MemoryKind.DRAM)
    assert found.dtype == expected.dtype
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{len(wrong)} wrong, first at offset {offsets[wrong[0]]}, {lengths[wrong[0]]} bytes"


@pytest.mark.parametrize("shift", [0, 7, 127])
def test_every_length(device: int, shift: int):
    lengths = np.arange(1, 300 if SMALL else 9_000, 1 if SMALL else 7)
    compare(random_bytes(int(lengths.max()) + 128, shift), np.full(len(lengths), shift), lengths, device)


@pytest.mark.parametrize("length", [2_047, 2_049, 8_192, 16_384 + 127])
def test_lengths_about_rows_and_segments_at_every_alignment(device: int, length: int):
    offsets = np.arange(0, 300, 3)
    compare(random_bytes(length + 300, length), offsets, np.full(len(offsets), length), device)


def test_pages_of_all_components(device: int):
    rng = np.random.default_rng(0)
    lengths = np.repeat([37_440, 1_728, 8_448, 36_864, 512, 8, 576, 149_504, 524_288], 3 if SMALL else 40)
    content = random_bytes(8 << 20, 1)
    compare(content, rng.integers(0, len(content) - lengths + 1), lengths, device)


@pytest.mark.parametrize("length", [1_000_003] if SMALL else [1_000_003, 5 << 20, (64 << 20) + 77])
def test_long_stretches(device: int, length: int):
    compare(random_bytes(length + 3, 2), np.array([3, 0]), np.array([length, length + 1]), device)


def test_the_last_bytes_of_an_allocation(device: int):
    """Nothing is read outside of the stretch; a memory checker sees it."""
    content = random_bytes(5_001, 3)
    compare(content, np.array([4_999, 5_000, 4_990, 0, 1]), np.array([2, 1, 11, 1, 5_000]), device)


def test_registered_host_memory_is_read_as_well(device: int):
    compare(random_bytes(100_000, 4), np.array([0, 5, 50_000]), np.array([100_000, 37_440, 3]), device, HOST)


@pytest.mark.skipif(SMALL, reason="compute-sanitizer can block between a free in one thread and a wait in another")
def test_several_threads_get_their_own_answers(device: int):
    content = random_bytes(1 << 20, 6)

    def one(seed: int) -> None:
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 40_000, 30)
        compare(content, rng.integers(0, 1_000_000, 30), lengths, device)

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(one, seed) for seed in range(8)]:
            done.result(timeout=60)
