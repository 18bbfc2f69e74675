"""Every backend: the right bytes at the right place, nothing else touched, and refusals that cost nothing."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import TransportName
from kvbridge.core.errors import InvalidInputError, TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import Endpoint, TransferState, TransferStatus, Transport
from tests.contract.conftest import MIB
from tests.contract.harness import BACKENDS, Backend, Pair, PeerProcess, any_memory, wait, wait_all
from tests.helpers.shared_buffer import SharedBuffer, connect

DONE = TransferStatus(TransferState.DONE)


@any_memory
def test_mixed_sizes_arrive_exactly_and_touch_nothing_else(pair: Pair) -> None:
    sizes = [1, 584, 4096, 37_440, MIB, 3 * MIB] * 2
    rng = np.random.default_rng(3)
    copies, offset = [], 0
    for size in sizes:
        copies.append((offset, size))
        offset += size + 7
    destination, placed = 0, []
    for index in rng.permutation(len(copies)):
        source, size = copies[index]
        placed.append((source, destination, size))
        destination += size + 13
    assert pair.move(pair.operations(placed)) == DONE
    expected = np.zeros(pair.process.buffer.length_bytes, dtype=np.uint8)
    content = pair.source.read()
    for source, target, size in placed:
        expected[target : target + size] = content[source : source + size]
    np.testing.assert_array_equal(pair.process.buffer.read(), expected)
    seen = pair.process.ask("checksum")["sha256"]
    assert seen == hashlib.sha256(expected).hexdigest(), "the peer itself sees other bytes"
    assert pair.move(pair.operations([])) == DONE, "no operation is done at once"
    assert pair.transport.max_operation_bytes >= 3 * MIB


@any_memory
def test_more_operations_than_a_library_queue_holds(pair: Pair) -> None:
    """Mooncake's queue takes about 2,050 and applies a larger batch in part."""
    assert pair.move(pair.blocks(584, 5_000)) == DONE
    length = 584 * 5_000
    np.testing.assert_array_equal(pair.process.buffer.read(0, length), pair.source.read(0, length))
    assert not pair.process.buffer.read(length).any()


@any_memory
def test_concurrent_transfers_to_one_peer(pair: Pair) -> None:
    parts = [pair.blocks(4_096, 100, first=100 * index) for index in range(12)]
    transfers = [pair.transport.submit(pair.peer, part, deadline_s=10.0) for part in parts]
    assert wait_all(transfers) == [DONE] * 12
    length = 12 * 100 * 4_096
    np.testing.assert_array_equal(pair.process.buffer.read(0, length), pair.source.read(0, length))


@any_memory
def test_source_outside_of_registered_memory_is_refused(pair: Pair) -> None:
    """Mooncake would send it on TCP."""
    private = np.full(8_192, 9, dtype=np.uint8)
    good = pair.blocks(4_096, 4)
    bad = Operations(
        np.append(good.source, np.uint64(private.ctypes.data)),
        np.append(good.destination, good.destination[-1] + np.uint64(4_096)),
        np.append(good.length, np.uint64(4_096)),
    )
    for operations in (bad, pair.operations([(pair.source.length_bytes - 10, 0, 11)])):
        with pytest.raises(InvalidInputError, match="register"):
            pair.transport.submit(pair.peer, operations, deadline_s=5.0)
    assert pair.move(pair.blocks(4_096, 1, first=2_000)) == DONE  # anything of the refused ones would have come first
    assert not pair.process.buffer.read(0, 5 * 4_096).any()


@any_memory
def test_refused_destinations_do_not_disturb_the_next_write(pair: Pair) -> None:
    """Mooncake closes one of four connections for each address that a peer rejects; the fifth write then fails or stalls."""
    end = pair.process.buffer.length_bytes
    for _ in range(6):
        for destination, length in ((end, 4_096), (end - 1, 2), (end + (1 << 40), 4_096)):
            with pytest.raises(InvalidInputError, match="register"):
                pair.transport.submit(pair.peer, pair.operations([(0, destination, length)]), deadline_s=5.0)
    assert pair.move(pair.blocks(4_096, 8), deadline_s=5.0) == DONE


def test_overlapping_registration_is_refused_and_harmless(pair: Pair) -> None:
    for memory in (pair.source.memory(), pair.source.memory(4_096, 4_096)):
        with pytest.raises(InvalidInputError, match="overlap"):
            pair.transport.register([memory])
    assert pair.move(pair.blocks(4_096, 4)) == DONE


def test_many_extents_are_registered_and_what_is_not_is_refused(transport: Transport, pair: Pair, shm: Path) -> None:
    pool = SharedBuffer(shm / "pool", 200 * 65_536)
    pool.bytes[:] = 77
    extents = [pool.memory(index * 65_536, 65_536) for index in range(200)]
    transport.register(extents[:-1])
    peer = connect(transport, pair.process.endpoint)

    def from_extent(index: int) -> Operations:
        columns = extents[index].address, pair.process.address, 65_536
        return Operations(*(np.array([column], dtype=np.uint64) for column in columns))

    assert wait(transport.submit(peer, from_extent(150), deadline_s=5.0)) == DONE
    assert (pair.process.buffer.read(0, 65_536) == 77).all()
    with pytest.raises(InvalidInputError, match="register"):
        transport.submit(peer, from_extent(199), deadline_s=5.0)
    transport.register(extents[-1:])
    assert wait(transport.submit(peer, from_extent(199), deadline_s=5.0)) == DONE
    transport.close()
    pool.close()


@any_memory
def test_endpoint_covers_what_was_registered_when_it_was_asked_for(backend: Backend, pair: Pair, shm: Path) -> None:
    """The peer registers more of its memory; whoever has connected by the older endpoint is refused it."""
    with PeerProcess(backend, shm / "other", 2 * MIB, extents=[(0, MIB)]) as process:
        other = Pair(pair.transport, pair.source, process, connect(pair.transport, process.endpoint))
        with pytest.raises(InvalidInputError, match="register"):
            pair.transport.submit(other.peer, other.operations([(0, MIB, 4_096)]), deadline_s=5.0)
        assert other.move(other.operations([(0, 0, 4_096)])) == DONE
        process.ask("register", offset=MIB, length=MIB)
        pair.transport.disconnect(other.peer)
        other.peer = connect(pair.transport, process.current_endpoint())
        assert other.move(other.operations([(0, MIB, 4_096)])) == DONE
        pair.transport.disconnect(other.peer)
    assert pair.move(pair.blocks(MIB, 4)) == DONE


def test_garbage_and_foreign_endpoints_are_refused(pair: Pair) -> None:
    name, good = pair.process.endpoint.transport, pair.process.endpoint.data
    for data in (b"", b"garbage", b"\x00" * 300, b"{}", b"[1, 2]", good[: len(good) // 2]):
        with pytest.raises(TransportError):
            connect(pair.transport, Endpoint(transport=name, data=data))
    with pytest.raises(TransportError):
        connect(pair.transport, Endpoint(transport="carrier-pigeon", data=good))
    assert pair.move(pair.blocks(4_096, 4)) == DONE


def test_unknown_peer_is_refused(backend: Backend, pair: Pair) -> None:
    former = connect(pair.transport, pair.process.endpoint)
    pair.transport.disconnect(former)
    with pytest.raises(InvalidInputError):
        pair.transport.submit(former, pair.blocks(4_096, 1), deadline_s=5.0)


def test_closing_twice_and_using_a_closed_transport(backend: Backend, shm) -> None:
    source = SharedBuffer(shm / "source", MIB)
    transport = backend.create()
    transport.register([source.memory(0, 4_096)])
    transport.close()
    transport.close()
    with pytest.raises(TransportError):
        transport.endpoint()
    with pytest.raises(TransportError):
        transport.register([source.memory(4_096, 4_096)])


def test_every_backend_is_in_the_suite() -> None:
    assert {backend.name for backend in BACKENDS.values()} == set(TransportName)
