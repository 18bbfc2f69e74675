"""The local transport between two transports of one process; other processes are the contract suite's matter."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.local.transport import LocalTransport
from tests.helpers.shared_buffer import SharedBuffer, connect

SIZE = 1 << 20


@pytest.fixture
def reader():
    made = LocalTransport(LocalSettings())
    yield made
    made.close()


@pytest.fixture
def writer():
    made = LocalTransport(LocalSettings())
    yield made
    made.close()


def private(array: np.ndarray) -> Extent:
    return Extent(address=int(array.ctypes.data), length_bytes=array.nbytes, label="scratch")


def test_removed_pool_is_refused_and_a_mapped_one_outlives_it(reader, writer, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    reader.register([buffer.memory()])
    writer.register([SharedBuffer(tmp_path / "own", SIZE).memory()])
    endpoint = reader.endpoint()
    connect(writer, endpoint)
    buffer.path.unlink()
    with pytest.raises(TransportError, match="pool"):
        connect(writer, endpoint)


def test_device_memory_without_a_device_is_refused(writer, monkeypatch) -> None:
    monkeypatch.setattr(runtime, "reason_without_device", lambda: "the driver is on holiday")
    with pytest.raises(RegistrationError, match="cannot use a GPU: the driver is on holiday"):
        writer.register([Extent(address=4096, length_bytes=4096, kind=MemoryKind.VRAM)])


def test_an_endpoint_is_revoked_once_nobody_has_it_mapped(writer, tmp_path: Path) -> None:
    buffer, source = SharedBuffer(tmp_path / "pool", SIZE), np.full(4096, 9, np.uint8)
    writer.register([private(source)])
    old = LocalTransport(LocalSettings(), epoch=3)
    old.register([buffer.memory(0, 65536)])
    peer, stale = connect(writer, old.endpoint()), old.endpoint()
    new = LocalTransport(LocalSettings(), epoch=4)
    new.register([buffer.memory(0, 65536)])
    old.close()
    assert new.revoked(3)
    assert not new.revoked(4)  # closing the reader's side stops no writer
    with pytest.raises(TransportError, match="has ended"):
        connect(writer, stale)
    connect(writer, new.endpoint())
    assert not new.revoked(4)
    writer.disconnect(peer)
    assert new.revoked(4), "whoever still has the handle keeps nothing mapped by it"
    assert not new.revoked(5)
    writer.close()
    assert new.revoked(5), "nor does whoever still has the transport"
    new.close()


def test_asking_for_writers_opens_nothing(writer, tmp_path: Path, monkeypatch) -> None:
    """A process that has no descriptors left can still say whether an endpoint is revoked."""
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    reader = LocalTransport(LocalSettings(), epoch=3)
    reader.register([buffer.memory()])
    peer = connect(writer, reader.endpoint())

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(io, "open", refuse)
        assert not reader.revoked(4)
        writer.disconnect(peer)
        assert reader.revoked(4)
        assert reader.revoked(4), "nor does a question leave a lock behind"
    connect(writer, reader.endpoint())
    assert not reader.revoked(4)
    reader.close()
