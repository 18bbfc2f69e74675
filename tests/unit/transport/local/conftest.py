import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.local import gpu as local_gpu, transport as local_transport
from kvbridge.transport.local.host import LockFiles
from kvbridge.transport.local.transport import LocalTransport
from tests.helpers.cluster import eventually
from tests.helpers.shared_buffer import connect


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


def check_revocation(writer: LocalTransport, old: LocalTransport, new: LocalTransport, memory: Extent) -> None:
    """Close `old`, of epoch 3, in favour of `new`, of epoch 4: the writer counts until it has let go of each. Closes the writer."""
    old.register([memory])
    peer, stale = connect(writer, old.endpoint()), old.endpoint()
    new.register([memory])
    old.close()
    assert new.revoked(3)
    assert not new.revoked(4), "closing the reader's side stops no writer"
    with pytest.raises(TransportError, match="has ended"):
        connect(writer, stale)
    connect(writer, new.endpoint())
    assert not new.revoked(4)
    writer.disconnect(peer)
    assert new.revoked(4), "whoever still has the handle keeps nothing mapped by it"
    assert not new.revoked(5)
    writer.close()
    eventually("whoever still has the transport keeps nothing mapped either", lambda: new.revoked(5))
