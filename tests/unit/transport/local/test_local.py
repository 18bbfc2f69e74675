"""The local transport between two transports of one process; other processes are the contract suite's matter."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import InvalidInputError, RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import peer as local_peer
from kvbridge.transport.local.host import HostClaim, require_same_host
from kvbridge.transport.local.transport import LocalTransport
from tests.contract.harness import wait
from tests.helpers.connecting import connect
from tests.helpers.shared_buffer import SharedBuffer

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


def one(source: int, destination: int, length: int) -> Operations:
    return Operations(*(np.array([value], dtype=np.uint64) for value in (source, destination, length)))


def private(array: np.ndarray) -> Extent:
    return Extent(address=int(array.ctypes.data), length_bytes=array.nbytes, label="scratch")


def test_private_source_to_part_of_a_shared_file(reader, writer, tmp_path: Path) -> None:
    buffer, source = SharedBuffer(tmp_path / "pool", SIZE), np.full(4096, 9, np.uint8)
    reader.register([buffer.memory(8192, 65536)])
    writer.register([private(source)])
    peer = connect(writer, reader.endpoint())
    operations = one(int(source.ctypes.data), buffer.address + 8192, 4096)
    assert wait(writer.submit(peer, operations, deadline_s=5.0)).state is TransferState.DONE
    assert (buffer.bytes[8192 : 8192 + 4096] == 9).all()
    assert np.count_nonzero(buffer.bytes) == 4096
    with pytest.raises(InvalidInputError, match="leave the registered memory of process"):
        writer.submit(peer, one(int(source.ctypes.data), buffer.address, 4096), deadline_s=5.0)
    writer.disconnect(peer)
    with pytest.raises(InvalidInputError, match="not connected"):
        writer.submit(peer, operations, deadline_s=5.0)


def test_peer_with_private_memory_is_refused_by_name(reader, writer, tmp_path: Path) -> None:
    reader.register([SharedBuffer(tmp_path / "pool", SIZE).memory(), private(np.zeros(4096, np.uint8))])
    with pytest.raises(TransportError, match="not shared \\(scratch\\)"):
        connect(writer, reader.endpoint())


def test_peer_without_shared_memory_is_refused(reader, writer) -> None:
    with pytest.raises(TransportError, match="no shared memory"):
        connect(writer, reader.endpoint())


def test_removed_pool_is_refused_and_a_mapped_one_outlives_it(reader, writer, tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    reader.register([buffer.memory()])
    writer.register([SharedBuffer(tmp_path / "own", SIZE).memory()])
    endpoint = reader.endpoint()
    connect(writer, endpoint)
    buffer.path.unlink()
    with pytest.raises(TransportError, match="pool"):
        connect(writer, endpoint)


def test_closed_peer_is_refused(reader, writer, tmp_path: Path) -> None:
    reader.register([SharedBuffer(tmp_path / "pool", SIZE).memory()])
    endpoint = reader.endpoint()
    assert len(list(tmp_path.glob(".kvbridge-*"))) == 1
    reader.close()
    assert not list(tmp_path.glob(".kvbridge-*"))
    with pytest.raises(TransportError, match="has ended"):
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


def test_a_writer_is_seen_before_the_peer_is_believed(writer, tmp_path: Path, monkeypatch) -> None:
    """A peer that revokes an endpoint just after its proof was found good sees the lock of whoever connects by it."""
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    old, new = LocalTransport(LocalSettings(), epoch=3), LocalTransport(LocalSettings(), epoch=4)
    for transport in (old, new):
        transport.register([buffer.memory(0, 65536)])
    revoked = []

    def believe_and_lose_time(claim: HostClaim) -> None:
        require_same_host(claim)
        old.close()
        revoked.append(new.revoked(4))

    monkeypatch.setattr(local_peer, "require_same_host", believe_and_lose_time)
    peer = connect(writer, old.endpoint())
    assert revoked == [False]
    assert not new.revoked(4)
    writer.disconnect(peer)
    del peer
    assert new.revoked(4)
    new.close()


@pytest.mark.parametrize("name", ["removed", "another file's"])
def test_a_pool_whose_name_is_gone_is_registered_again_and_its_writers_are_seen(
    writer, tmp_path: Path, name: str
) -> None:
    """Whoever tidies up shared memory takes names, not memory: the next transport goes on with the file that is mapped."""
    path = tmp_path / "pool"
    buffer = SharedBuffer(path, SIZE)
    old, new = LocalTransport(LocalSettings(), epoch=3), LocalTransport(LocalSettings(), epoch=4)
    old.register([buffer.memory(0, 65536), buffer.memory(131072, 65536)])
    peer = connect(writer, old.endpoint())
    path.unlink()
    if name != "removed":
        path.write_bytes(bytes(SIZE))
    new.register([buffer.memory(0, 65536), buffer.memory(131072, 65536)])
    old.close()
    assert not new.revoked(4), "who had it mapped before writes there still"
    with pytest.raises(TransportError, match="not on this host"):
        connect(writer, new.endpoint())
    writer.disconnect(peer)
    assert new.revoked(4)
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


def test_memory_of_a_closed_transport_is_not_kept(tmp_path: Path) -> None:
    """The memory of a removed pool goes back when its last mapping does: a closed transport holds no descriptor of it."""
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    transport = LocalTransport(LocalSettings())
    transport.register([buffer.memory()])
    assert descriptors_of(buffer.path) == 2, "the mapping's own, and the transport's"
    transport.close()
    assert descriptors_of(buffer.path) == 1


def descriptors_of(path: Path) -> int:
    """How many descriptors of this process lead to a file."""
    found = path.stat()
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            count += os.path.samestat(entry.stat(), found)
    return count


@pytest.mark.outside
def test_an_endpoint_is_revoked_by_the_end_of_the_writers_process(tmp_path: Path) -> None:
    buffer = SharedBuffer(tmp_path / "pool", SIZE)
    reader = LocalTransport(LocalSettings(), epoch=0)
    reader.register([buffer.memory(0, 65536)])
    code = (
        "import sys\n"
        "from kvbridge.config.transports import LocalSettings\n"
        "from kvbridge.transport.base import Endpoint\n"
        "from kvbridge.transport.local.transport import LocalTransport\n"
        "made = LocalTransport(LocalSettings())\n"
        "from tests.helpers.connecting import connect\n"
        "connect(made, Endpoint(transport='local', data=sys.stdin.readline().encode()))\n"
        "print('connected', flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(reader.endpoint().data.decode() + "\n")
        child.stdin.flush()
        assert child.stdout.readline() == "connected\n"
        assert not reader.revoked(1)
        child.kill()
        child.wait(10)
        assert reader.revoked(1)
    finally:
        child.kill()
        child.communicate()
        reader.close()
