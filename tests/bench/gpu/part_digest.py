"""CRC-32C of pages in device memory, beside merely reading as many bytes there.

Owns: the cases. A call computes and waits, as the rank worker's slices do, so its set-up is part of the figure.
"""

from __future__ import annotations

import numpy as np
import torch

from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.digest import raw_checksums
from tests.bench.gpu.memory import PAGE_BYTES, device_memory, fill_random, tensor_at
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.timing import spread, wall_s

POOL_PAGES = 16_384
CHECKED_PAGES = 64
READINGS = 10


def run(recorder: Recorder, *, quick: bool) -> None:
    """Measure everything."""
    torch.cuda.set_device(0)
    size = POOL_PAGES * PAGE_BYTES
    with device_memory(size) as address, torch.cuda.stream(torch.cuda.Stream()):
        fill_random(address, size, 0)
        words = tensor_at(address, size // 8, torch.int64, 0)
        read_gb_s = _reading(words)
        for pages in (64, 512) if quick else (1, 8, 64, 512, 4096, POOL_PAGES):
            chosen = np.random.default_rng(pages).permutation(POOL_PAGES)[:pages].astype(np.uint64)
            addresses = chosen * np.uint64(PAGE_BYTES) + np.uint64(address)
            lengths = np.full(pages, PAGE_BYTES, dtype=np.int64)
            took = wall_s(lambda addresses=addresses, lengths=lengths: _digest(addresses, lengths))
            us, total = 1e6 * spread(took)["median"], pages * PAGE_BYTES
            recorder.case(
                pages=pages,
                bytes=total,
                us=us,
                gb_s=total / us / 1e3,
                read_gb_s=read_gb_s,
                wrong=_wrong(addresses[:CHECKED_PAGES], lengths[:CHECKED_PAGES]),
            )


def _digest(addresses: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    return raw_checksums(addresses, lengths, MemoryKind.VRAM, device=0)


def _reading(words: torch.Tensor) -> float:
    """GB/s of summing up device memory."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    words.sum()
    begun.record()
    for _ in range(READINGS):
        words.sum()
    ended.record()
    ended.synchronize()
    return 8 * len(words) * READINGS / begun.elapsed_time(ended) / 1e6


def _wrong(addresses: np.ndarray, lengths: np.ndarray) -> str:
    """Compare with the processor's checksums of a copy."""
    here = np.empty((len(addresses), PAGE_BYTES), dtype=np.uint8)
    for row, address in zip(here, addresses.tolist(), strict=True):
        runtime.copy(row.ctypes.data, address, PAGE_BYTES, device=0, stream=0)
    runtime.synchronize(0)
    starts = np.array([row.ctypes.data for row in here], dtype=np.uint64)
    expected = raw_checksums(starts, lengths, MemoryKind.DRAM)
    wrong = int((expected != _digest(addresses, lengths)).sum())
    return f"{wrong} of {len(addresses)} digests are wrong" if wrong else ""
