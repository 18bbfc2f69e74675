"""Proofs that two processes share a host, false ones refused with words; and the transport between two of one process."""

import errno
import io
import os
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.messages import FileOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.local.host import FileIdentity, HostClaim, Proof, SharedExtent, require_same_host, shared_file
from kvbridge.transport.local.memory import LocalEndpoint, PeerMemory
from kvbridge.transport.local.transport import LocalTransport
from tests.helpers.shared_buffer import SharedBuffer, connect
from tests.unit.transport.local.conftest import check_revocation


@pytest.fixture
def proof(tmp_path: Path):
    made = Proof(tmp_path)
    yield made
    made.close()


def reach(proof: Proof, files: list[FileIdentity], *extents: SharedExtent) -> PeerMemory:
    content = LocalEndpoint(claim=proof.claim, files=files, extents=extents, epoch=0, private=())
    return PeerMemory(content, device=None)


def written(path: Path, content: bytes) -> FileIdentity:
    path.write_bytes(content)
    found = shared_file(Extent(address=1, length_bytes=len(content), origin=FileOrigin(path=str(path))))
    assert found is not None
    return found.identity


def altered(told: HostClaim, **changes: object) -> HostClaim:
    return told.model_copy(update={"file": told.file.model_copy(update=changes)})


def test_proof_is_readable_by_its_owner_only_and_removed(tmp_path: Path) -> None:
    made = Proof(tmp_path)
    path = Path(made.claim.file.path)
    assert path.stat().st_mode & 0o777 == 0o600
    made.close()
    assert not path.exists()
    with pytest.raises(TransportError, match="not on this host, or has ended"):
        require_same_host(made.claim)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("boot_id", "boot id elsewhere"),
        ("secret", "does not hold here"),
        *((number, "another file here") for number in ("device", "inode", "owner")),
    ],
)
def test_another_boot_secret_or_file_is_another_host(proof: Proof, change: str, words: str) -> None:
    claim = proof.claim
    whole = {"boot_id": "elsewhere", "secret": "0" * 64}
    if change in whole:
        told = claim.model_copy(update={change: whole[change]})
    else:
        told = altered(claim, **{change: getattr(claim.file, change) + 1})
    with pytest.raises(TransportError, match=words):
        require_same_host(told)


def test_a_process_that_no_longer_holds_its_lock_has_ended(proof: Proof) -> None:
    copy = Path(proof.claim.file.path).with_name("copy")
    identity = written(copy, proof.claim.secret.encode())
    with pytest.raises(TransportError, match="has ended"):
        require_same_host(proof.claim.model_copy(update={"file": identity}))


def test_what_is_no_file_is_refused_without_blocking(proof: Proof, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    found = fifo.stat()
    with pytest.raises(TransportError, match="another file"):
        require_same_host(altered(proof.claim, path=str(fifo), device=found.st_dev, inode=found.st_ino))


def test_extent_beyond_its_file_is_refused(proof: Proof, tmp_path: Path) -> None:
    files = [written(tmp_path / "a", b"x" * 8192)]
    for extent in (
        SharedExtent(address=1, length_bytes=8192, origin=0, offset_bytes=1),
        SharedExtent(address=1, length_bytes=1, origin=1, offset_bytes=0),
    ):
        with pytest.raises(TransportError, match="does not have"):
            reach(proof, files, extent)


def test_file_of_another_user_is_refused(proof: Proof, tmp_path: Path) -> None:
    """A peer must not make this process write into files that are not the peer's own."""
    identity = written(tmp_path / "a", b"x" * 4096)
    foreign = identity.model_copy(update={"owner": identity.owner + 1})
    with pytest.raises(TransportError, match="another user"):
        reach(proof, [identity, foreign])


def test_replaced_file_is_refused(proof: Proof, tmp_path: Path) -> None:
    identity = written(tmp_path / "a", b"x" * 4096)
    (tmp_path / "new").write_bytes(b"y" * 4096)
    (tmp_path / "new").rename(tmp_path / "a")
    with pytest.raises(TransportError, match="another file here"):
        reach(proof, [identity])


def test_shared_memory_must_lie_within_its_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * 4096)
    with pytest.raises(RegistrationError, match="do not fit"):
        shared_file(
            Extent(address=1, length_bytes=4096, origin=FileOrigin(path=str(path)), offset_bytes=1, label="pool")
        )
    with pytest.raises(RegistrationError, match="pool: the shared file cannot be reached"):
        shared_file(Extent(address=1, length_bytes=1, origin=FileOrigin(path=str(tmp_path / "none")), label="pool"))
    assert shared_file(Extent(address=1, length_bytes=1)) is None


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
    writer.register([Extent(address=int(source.ctypes.data), length_bytes=source.nbytes, label="scratch")])
    old, new = (LocalTransport(LocalSettings(), epoch=epoch) for epoch in (3, 4))
    check_revocation(writer, old, new, buffer.memory(0, 65536))
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
