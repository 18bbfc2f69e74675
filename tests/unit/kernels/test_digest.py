from __future__ import annotations

import numpy as np
import pytest
from crc32c import crc32c

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.digest import raw_checksums


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
