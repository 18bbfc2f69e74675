"""For tests marked `gpu`: why they are skipped here, and their sizes. Importable without a GPU and without CUDA's libraries."""

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvbridge.core.process import Closing
from kvbridge.kernels.cuda import runtime

SMALL_VARIABLE = "KVBRIDGE_GPU_SMALL"
SMALL = os.environ.get(SMALL_VARIABLE) == "1"
"""Whether tests choose small sizes: under compute-sanitizer everything takes ten to fifty times as long."""


@cache
def reason_without_device() -> str:
    """Why tests marked `gpu` cannot run here; empty when they can."""
    return runtime.reason_without_device()


def skip_without_device(items: Iterable[pytest.Item]) -> None:
    """Mark every test that needs a GPU as skipped, with the reason, when there is none. For `pytest_collection_modifyitems`."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    if wanting and reason_without_device():
        mark = pytest.mark.skip(reason=f"needs a GPU: {reason_without_device()}")
        for item in wanting:
            item.add_marker(mark)


def environment_for(root: Path) -> dict[str, str]:
    """Environment of processes that run from a checkout that may not be installed: its root comes first on the path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}


def wait_value(device: int, address: int, value: int, stream: int) -> None:
    """Have a stream wait until the uint32 at a device address is `value` or later; numbers go round."""
    runtime.use(device)
    driver = runtime.library("cuda.bindings.driver")
    (code,) = driver.cuStreamWaitValue32(
        stream, address, value & 0xFFFFFFFF, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    )
    if int(code):
        raise RuntimeError(f"a stream of cuda:{device} cannot wait for a kernel's signal: {code.name}")


HOST, DEVICE = "host", "device"


class Bytes(Closing):
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


@dataclass(frozen=True)
class Form:
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
