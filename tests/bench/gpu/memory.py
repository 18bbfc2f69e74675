"""Memory for benchmarks: registered host memory, device memory, and both as torch tensors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping

PAGE_BYTES = 37_440
"""A page of C4 rows: 64 values of 576 bytes, 64 scales of 8, padding."""
SLOTS = 64
ROW_BYTES = 584
VALUE_BYTES = 576
_TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.int64: "<i8"}
_FLUSH_BYTES = 256 << 20


class _Memory:
    """An address in the form that torch takes over without a copy."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": None,
            "typestr": _TYPES[dtype],
            "version": 3,
        }


def tensor_at(address: int, count: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """See memory that a device reaches, its own or registered host memory, as a tensor of that device."""
    return torch.as_tensor(_Memory(address, count, dtype), device=torch.device("cuda", device))


@contextmanager
def host_memory(length_bytes: int, device: int = 0) -> Iterator[SharedMapping]:
    """Shared memory as the host pool's, registered with CUDA, without a name that could outlive us."""
    name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
    threads = min(16, os.cpu_count() or 1)
    with SharedMapping.create(Path(DEFAULT_DIRECTORY), name, length_bytes, threads=threads) as mapping:
        mapping.path.unlink()
        runtime.register_host(mapping.address, length_bytes, device=device)
        try:
            yield mapping
        finally:
            runtime.synchronize(device)
            runtime.unregister_host(mapping.address)


@contextmanager
def device_memory(length_bytes: int, device: int = 0) -> Iterator[int]:
    """Device memory of undefined content; yields its address."""
    address = runtime.allocate(device, length_bytes)
    try:
        yield address
    finally:
        runtime.free(device, address)


def fill_random(address: int, length_bytes: int, device: int, *, seed: int = 0, chunk_bytes: int = 256 << 20) -> None:
    """Write random bytes, made on the device, no two stretches alike, and wait. Length in multiples of 8."""
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)
    words = tensor_at(address, length_bytes // 8, torch.int64, device)
    each = chunk_bytes // 8
    stream = torch.cuda.current_stream(device).cuda_stream
    made = torch.empty(min(each, len(words)), dtype=torch.int64, device=f"cuda:{device}")
    for first in range(0, len(words), each):
        part = words[first : first + each]
        made.random_(generator=generator)
        runtime.copy(part.data_ptr(), made.data_ptr(), 8 * len(part), device=device, stream=stream)
    runtime.synchronize(device)


class CacheFlush:
    """Pushes everything out of a device's second-level cache."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._bytes = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=f"cuda:{device}")

    def enqueue(self, stream: int) -> None:
        """Write 256 MiB in stream order."""
        runtime.fill(self._device, self._bytes.data_ptr(), _FLUSH_BYTES, 0, stream=stream)


def row_words(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows of C4 pages as int64 [rows, 73]: 72 words of value, one of scale.

    `pages`: int64 words of consecutive pages; `rows`: int64 numbers page * 64 + slot.
    """
    each = PAGE_BYTES // 8
    page, slot = rows // SLOTS, rows % SLOTS
    values = page * each + slot * (VALUE_BYTES // 8)
    scales = page * each + SLOTS * (VALUE_BYTES // 8) + slot
    offsets = torch.arange(VALUE_BYTES // 8, device=rows.device)
    return torch.cat([pages[values[:, None] + offsets], pages[scales][:, None]], dim=1)
