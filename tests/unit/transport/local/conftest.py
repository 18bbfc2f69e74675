import numpy as np
import pytest

from kvbridge.core.plan.operations import Operations
from kvbridge.transport.local import gpu as local_gpu, transport as local_transport
from kvbridge.transport.local.host import LockFiles


@pytest.fixture(autouse=True)
def _nothing_of_an_earlier_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """LockFiles, and transfers that a device never finished, live as long as their process: each test plays one of its own."""
    monkeypatch.setattr(local_transport, "PROCESS_LOCK_FILES", LockFiles())
    monkeypatch.setattr(local_gpu, "_abandoned", [])


@pytest.fixture
def blocks():
    """Makes operations over blocks of memory, with both arrays; keeps the arrays, since operations are bare addresses."""
    kept: list[np.ndarray] = []

    def make(count: int, size: int = 64) -> tuple[Operations, np.ndarray, np.ndarray]:
        source = np.random.default_rng(0).integers(1, 256, count * size, dtype=np.uint8)
        target = np.zeros_like(source)
        kept.extend((source, target))
        steps = np.arange(count, dtype=np.uint64) * np.uint64(size)
        addresses = (steps + np.uint64(array.ctypes.data) for array in (source, target))
        return Operations(*addresses, np.full(count, size, dtype=np.uint64)), source, target

    return make
