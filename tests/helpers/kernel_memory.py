"""Memory for tests of the copy kernels: the same bytes on the CPU for the reference and on the device for the kernel.

Without torch and importable without CUDA. Streams are kvbridge's own.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from kvbridge.kernels.cuda import runtime

HOST, DEVICE = "host", "device"


class Bytes:
    """A stretch of memory of one kind: "device", or "host" (registered with CUDA). `read` and `write` wait for the device."""

    def __init__(self, kind: str, content: np.ndarray, device: int = 0) -> None:
        content = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self.kind, self.device, self.length = kind, device, max(1, content.nbytes)
        if kind == DEVICE:
            self.address = runtime.allocate(device, self.length)
        else:
            self._array = np.frombuffer(mmap.mmap(-1, self.length), dtype=np.uint8)
            self.address = self._array.ctypes.data
            runtime.register_host(self.address, self.length, device=device)
        self.write(content)

    def write(self, content: np.ndarray) -> None:
        content = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        self._copy(self.address, content.ctypes.data, content.nbytes)

    def read(self) -> np.ndarray:
        found = np.empty(self.length, dtype=np.uint8)
        self._copy(found.ctypes.data, self.address, self.length)
        return found

    def close(self) -> None:
        runtime.synchronize(self.device)
        if self.kind == DEVICE:
            runtime.free(self.device, self.address)
        else:
            runtime.unregister_host(self.address)

    def _copy(self, destination: int, source: int, length: int) -> None:
        runtime.synchronize(self.device)
        with runtime.Stream.create(self.device) as stream:
            runtime.copy(destination, source, length, device=self.device, stream=stream.handle)
            stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Form:
    """How the pages of all layers lie in one stretch of memory, in extents with gaps between them."""

    layers: int
    pages: int
    page_bytes: int
    pages_per_extent: int = 0
    """0 for one extent."""
    page_first: bool = False
    gap_bytes: int = 48

    @property
    def each(self) -> int:
        return self.pages_per_extent or self.pages

    @property
    def extent_bytes(self) -> int:
        return self.each * self.layers * self.page_bytes + self.gap_bytes

    @property
    def total_bytes(self) -> int:
        return self.gap_bytes + -(-self.pages // self.each) * self.extent_bytes

    def offset(self, layer: int, page: int) -> int:
        extent, within = divmod(page, self.each)
        place = within * self.layers + layer if self.page_first else layer * self.each + within
        return self.gap_bytes + extent * self.extent_bytes + place * self.page_bytes


def random_bytes(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)
