"""Every backend keeps the promise of silence: peers that die, freeze or come back, and transfers that are given up.

The frozen peer is the heart of it. Both libraries went on delivering a source page's *new* contents after they had reported its
transfer as failed, which hands one request's cache to another. After FAILED_QUIET no byte written into the source later may arrive;
after FAILED_NOT_QUIET none may once the transport has been closed.
"""

import contextlib
import time
from pathlib import Path

import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.transport.base import Endpoint, TransferState, TransferStatus
from tests.contract.conftest import BUFFER_BYTES, MIB, OLD, new_pair
from tests.contract.harness import Backend, Pair, PeerProcess, any_local_memory, any_memory, wait
from tests.helpers.shared_buffer import connect

LEFT_OUT = ("faulty",)
"""It fails as what it wraps."""
DONE = TransferStatus(TransferState.DONE)
NEW = 0x22
OBSERVE_S = 0.4
"""How long stray bytes are watched for; a resumed peer receives what is on its way within some milliseconds."""


def assert_failed(backend: Backend, status: TransferStatus) -> None:
    """Failed and quiet, with words; or done, if the backend does not need the peer's process."""
    if backend.outlives_peer and status.state is TransferState.DONE:
        return
    assert status.state is TransferState.FAILED_QUIET, status
    assert len(status.error) > 20, status
    assert not (backend.outlives_peer and status.in_transit), "a copy is there or not, never on its way"


@any_local_memory
def test_peer_killed_before(backend: Backend, owned: Pair, shm: Path) -> None:
    with PeerProcess(backend, shm / "other", BUFFER_BYTES) as other:
        other_peer = connect(owned.transport, other.endpoint)
        assert owned.move(owned.blocks(4_096, 8)) == DONE
        owned.process.kill()
        for _ in range(3):
            assert_failed(backend, owned.move(owned.blocks(4_096, 64), deadline_s=2.0))
        to_other = Pair(owned.transport, owned.source, other, other_peer)
        assert to_other.move(to_other.blocks(4_096, 64)) == DONE
        assert (other.buffer.read(0, 64 * 4_096) == OLD).all()


@any_memory
def test_peer_killed_during_and_restarted(backend: Backend, owned: Pair, shm: Path) -> None:
    transfer = owned.transport.submit(owned.peer, owned.blocks(16_384, BUFFER_BYTES // 16_384), deadline_s=10.0)
    transfer.poll()
    owned.process.kill()
    status = wait(transfer, 10.0)
    assert_failed(backend, status)
    assert transfer.poll() == status
    if not backend.needs_device:  # what it does not count as unconfirmed has arrived
        arrived = owned.process.buffer.read().reshape(-1, 16_384).copy()
        for part in status.unconfirmed:
            arrived[part] = OLD
        assert (arrived == OLD).all()
    owned.transport.disconnect(owned.peer)
    with PeerProcess(backend, shm / "restarted", BUFFER_BYTES) as restarted:
        again = Pair(owned.transport, owned.source, restarted, connect(owned.transport, restarted.endpoint))
        assert again.move(again.blocks(MIB, 8)) == DONE
        assert (restarted.buffer.read(0, 8 * MIB) == OLD).all()


@any_memory
@pytest.mark.parametrize("patience", ["patient", "impatient"])
def test_frozen_peer_receives_nothing_written_after_the_report(backend: Backend, shm: Path, patience: str) -> None:
    transport = backend.create() if patience == "patient" else backend.impatient()
    try:
        with PeerProcess(backend, shm / "peer", BUFFER_BYTES) as process:
            pair = new_pair(backend, transport, shm, process)
            assert pair.move(pair.blocks(4_096, 8)) == DONE
            process.stop()
            status = pair.move(pair.blocks(MIB, BUFFER_BYTES // MIB), deadline_s=1.0)
            if status.state is TransferState.FAILED_NOT_QUIET:
                transport.close()
            pair.source.fill(NEW)
            process.resume()
            if backend.name == "nixl" and backend.needs_device and (words := process.ended_by_itself()):
                # With device memory UCX ends a process whose endpoint ran out of time; nothing arrives in it then.
                assert "Endpoint timeout" in words
                return
            process.ask("checksum")  # it runs again
            assert count_of_new_bytes(process) == 0, status
            if status.state is TransferState.DONE:
                assert (process.buffer.read() == OLD).all()
            else:
                assert len(status.error) > 20, status
                assert status.in_transit is not backend.outlives_peer, "what the peer's kernel holds arrives later"
            if backend.label == "mooncake":  # otherwise one of the two branches above would never be tested
                patient = patience == "patient"
                assert status.state is (TransferState.FAILED_QUIET if patient else TransferState.FAILED_NOT_QUIET)
    finally:
        transport.close()


def count_of_new_bytes(process: PeerProcess) -> int:
    """Watch the peer's memory for bytes of the refilled source, for a while."""
    ends_at_s = time.monotonic() + OBSERVE_S
    found = 0
    while time.monotonic() < ends_at_s and not found:
        found = int(np.count_nonzero(process.buffer.read() == NEW))
    return found


def test_transport_serves_others_after_a_frozen_peer(backend: Backend, owned: Pair, shm: Path) -> None:
    with PeerProcess(backend, shm / "other", BUFFER_BYTES) as other:
        to_other = Pair(owned.transport, owned.source, other, connect(owned.transport, other.endpoint))
        assert owned.move(owned.blocks(4_096, 8)) == DONE
        owned.process.stop()
        stuck = owned.transport.submit(owned.peer, owned.blocks(4_096, 64), deadline_s=0.3)
        stuck.poll()
        assert to_other.move(to_other.blocks(MIB, 8)) == DONE
        assert wait(stuck).state.terminal


def test_connecting_to_a_dead_peer_fails_or_its_first_transfer_does(backend: Backend, owned: Pair) -> None:
    endpoint: Endpoint = owned.process.endpoint
    owned.process.kill()
    owned.transport.disconnect(owned.peer)
    with contextlib.suppress(TransportError):
        owned.peer = connect(owned.transport, endpoint)
        assert_failed(backend, owned.move(owned.blocks(4_096, 8), deadline_s=3.0))


@any_memory
def test_abort_ends_a_transfer_early_and_quietly(backend: Backend, owned: Pair) -> None:
    transfer = owned.transport.submit(owned.peer, owned.blocks(4_096, BUFFER_BYTES // 4_096), deadline_s=10.0)
    transfer.poll()
    transfer.abort("the test said so")
    status = wait(transfer)
    assert status.state is TransferState.FAILED_QUIET or (backend.outlives_peer and status == DONE)
    if status != DONE:
        assert "the test said so" in status.error
        assert not status.in_transit, "what was started has been waited for"
    arrived = owned.process.buffer.read().copy()
    owned.source.fill(NEW)
    assert count_of_new_bytes(owned.process) == 0
    np.testing.assert_array_equal(owned.process.buffer.read(), arrived)
    transfer.abort("again")
    assert transfer.poll() == status
    assert owned.move(owned.blocks(4_096, 8)) == DONE


@any_memory
def test_closing_ends_active_transfers(backend: Backend, owned: Pair) -> None:
    transfer = owned.transport.submit(owned.peer, owned.blocks(4_096, BUFFER_BYTES // 4_096), deadline_s=10.0)
    transfer.poll()
    owned.transport.close()
    owned.source.fill(NEW)
    status = transfer.poll()
    assert status.state.terminal
    if status != DONE:
        assert len(status.error) > 20
    assert count_of_new_bytes(owned.process) == 0
    assert transfer.poll() == status


@any_local_memory
def test_two_lives_of_a_transport_in_one_process(backend: Backend, owned: Pair, shm: Path) -> None:
    """As the rank worker after FAILED_NOT_QUIET: close, build again, register the same memory, connect again."""
    endpoint = owned.process.endpoint
    owned.transport.close()
    rebuilt = backend.create()
    try:
        rebuilt.register([owned.source.memory()])
        again = Pair(rebuilt, owned.source, owned.process, connect(rebuilt, endpoint))
        assert again.move(again.blocks(MIB, 8)) == DONE
    finally:
        rebuilt.close()


@any_local_memory
def test_a_successor_beside_its_predecessor(backend: Backend, owned: Pair) -> None:
    """As the rank worker for the sake of other peers: the old one ends its transfers, and the new one begins."""
    count = BUFFER_BYTES // 4_096
    begun = owned.transport.submit(owned.peer, owned.blocks(4_096, count), deadline_s=30.0)
    begun.poll()
    successor = backend.create()
    try:
        successor.register([owned.source.memory()])
        again = Pair(successor, owned.source, owned.process, connect(successor, owned.process.endpoint))
        assert again.move(again.blocks(MIB, 8)) == DONE
        assert wait(begun, 30.0) == DONE
        owned.transport.close()
        assert again.move(again.blocks(4_096, count)) == DONE
        assert (owned.process.buffer.read() == OLD).all()
    finally:
        successor.close()
