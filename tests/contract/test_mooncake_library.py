"""Transfers while the mooncake library fails in any place, over TCP and over RDMA, where no adapter is at hand.

The library is an imitation that behaves as the real one does, as measured and as its source says: what was submitted is read and
written when the network gets there, whatever was said of it meanwhile; a batch that has failed, or was refused, runs on; ids are
freed by the answer that ends them; destroying the engine ends everything. Nothing may arrive after FAILED_QUIET, or after `close`.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings
from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Peer, Transfer, TransferState, TransferStatus
from kvbridge.transport.mooncake import transport as mooncake
from kvbridge.transport.mooncake.transport import MooncakeTransport
from kvbridge.transport.windowed import WindowLimits
from tests.contract.conftest import BUFFER_BYTES, MIB
from tests.contract.harness import BACKENDS, Pair, PeerProcess, require_library, wait
from tests.helpers.manual_clock import ManualClock
from tests.helpers.shared_buffer import connect

TCP, RDMA = MooncakeProtocol.TCP, MooncakeProtocol.RDMA
QUIET, NOT_QUIET = TransferState.FAILED_QUIET, TransferState.FAILED_NOT_QUIET
BASE, SIZE_BYTES, COUNT = 1 << 40, 64, 40
OLD, NEW = 0x11, 0x22
LIMIT_S = 30.0
BLOCKED_S = 5.0
BLOCKS = "does not return"
"""A fault: the call goes on until it is released."""

SUBMIT, SUBMIT_BATCH, STATUS, STATUS_BATCH = "submit", "submit batch", "status", "batch status"


@dataclass
class Network:
    """The operations under way, in the order in which they were submitted. Lives longer than the engine."""

    source: np.ndarray = field(default_factory=lambda: np.full(COUNT * SIZE_BYTES, OLD, dtype=np.uint8))
    destination: np.ndarray = field(default_factory=lambda: np.zeros(COUNT * SIZE_BYTES, dtype=np.uint8))
    posted: dict[int, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Operations that have not arrived, by the id of their batch."""

    def deliver(self, most: int = 1 << 30) -> None:
        """Have some operations arrive, with what the source holds now."""
        for operations in self.posted.values():
            while operations and most:
                source, destination, length = operations.pop(0)
                source, destination = source - BASE, destination - BASE
                self.destination[destination : destination + length] = self.source[source : source + length]
                most -= 1

    @property
    def under_way(self) -> int:
        return sum(map(len, self.posted.values()))


class ImitatedMooncake:
    """The library over a network. `faults`: at which call of a kind, counted from 0, what happens instead."""

    def __init__(self, network: Network, faults: dict[tuple[str, int], object]) -> None:
        self.network = network
        self.faults = faults
        self.calls = dict.fromkeys((SUBMIT, SUBMIT_BATCH, STATUS, STATUS_BATCH), 0)
        self.released = threading.Event()
        self._known: set[int] = set()
        self._next_id = 1
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self.network.posted.clear()

    def get_rpc_port(self) -> int:
        return 15_000

    def send_probe(self, _: str) -> int:
        return 0

    def batch_register_memory(self, _addresses: list[int], _lengths: list[int]) -> int:
        return 0

    def transfer_submit_write(self, _: str, source: int, destination: int, length: int) -> int:
        if not length:  # by which `connect` has it fetch what a peer has
            return self._post([])
        fault = self._fault(SUBMIT)
        return self._post([(source, destination, length)]) if fault is None else int(fault)

    def batch_transfer_async_write(self, _, sources, destinations, lengths):
        fault = self._fault(SUBMIT_BATCH)
        posted = self._post(list(zip(sources, destinations, lengths, strict=True)))
        return posted if fault is None else int(fault)  # a part of it is under way all the same

    def transfer_check_status(self, single: int) -> int:
        assert single in self._known, "asked after an operation whose id had been freed"
        if not self.network.posted[single]:
            self._known.discard(single)
            return 1
        fault = self._fault(STATUS)
        if fault is None:
            return 0
        if fault == -1:  # of a single operation this means that it has ended
            self._known.discard(single)
            self.network.posted[single].clear()
        return int(fault)

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        (batch,) = batches
        assert batch in self._known, "asked after a batch whose id had been freed"
        fault = self._fault(STATUS_BATCH)
        if fault == BLOCKS:
            self.released.wait(LIMIT_S)
        elif fault is not None:
            self._known.discard(batch)
            return int(fault)
        ends_at_s = time.monotonic() + LIMIT_S
        while self.network.posted.get(batch) and time.monotonic() < ends_at_s:
            time.sleep(0.0001)
        self._known.discard(batch)
        return -1 if self.network.posted.get(batch) else 0

    def _post(self, operations: list[tuple[int, int, int]]) -> int:
        with self._lock:
            posted, self._next_id = self._next_id, self._next_id + 1
        self.network.posted[posted] = operations
        self._known.add(posted)
        return posted

    def _fault(self, kind: str) -> object:
        number, self.calls[kind] = self.calls[kind], self.calls[kind] + 1
        fault = self.faults.get((kind, number), self.faults.get((kind, -1)))
        if isinstance(fault, Exception):
            raise type(fault)(*fault.args)  # a new one: its traceback refers to this library
        return fault


class Bed:
    """A transport over the imitation, its clock, and a peer that is itself."""

    def __init__(self, protocol, faults, monkeypatch):
        self.network = Network()
        self.clock = ManualClock()
        self.most_under_way = 0
        self._libraries = [ImitatedMooncake(self.network, faults)]
        settings = MooncakeSettings(
            protocol=protocol, window_operations=8, batch_operations=6, quiet_timeout_s=5.0, connect_timeout_s=1
        )
        monkeypatch.setattr(mooncake, "create_library", lambda _: self._libraries.pop())
        self.released, self.calls = self._libraries[0].released, self._libraries[0].calls
        self.transport = MooncakeTransport(settings, clock=self.clock)
        self.transport.register([Extent(address=BASE, length_bytes=COUNT * SIZE_BYTES)])
        self.peer: Peer = connect(self.transport, self.transport.endpoint())

    def submit(self, *, deadline_s: float = 60.0) -> Transfer:
        address = np.arange(COUNT, dtype=np.uint64) * np.uint64(SIZE_BYTES) + np.uint64(BASE)
        operations = Operations(address, address, np.full(COUNT, SIZE_BYTES, dtype=np.uint64))
        return self.transport.submit(self.peer, operations, deadline_s=deadline_s)

    def poll(self, transfer: Transfer) -> TransferStatus:
        begun_s = time.monotonic()
        status = transfer.poll()
        assert time.monotonic() - begun_s < BLOCKED_S
        return status

    def end(self, transfer: Transfer, *, delivering: int = 5, patient: bool = True) -> TransferStatus:
        """Poll to the end, while some operations arrive after each poll. Not `patient`: time passes, too."""
        ends_at_s = time.monotonic() + LIMIT_S
        while not (status := self.poll(transfer)).state.terminal:
            assert time.monotonic() < ends_at_s, transfer
            self.most_under_way = max(self.most_under_way, self.network.under_way)
            self.network.deliver(delivering)
            time.sleep(0.0002)  # for the thread that asks after batches
            if not patient:
                self.clock.advance(0.05)
        return status

    def assert_silent(self) -> None:
        """Nothing that is written into the source from now on arrives."""
        self.network.source[:] = NEW
        self.network.deliver()
        assert not (self.network.destination == NEW).any()


@pytest.fixture
def beds(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Bed]]:
    """Makes them, and closes each."""
    made: list[Bed] = []

    class Closed(Bed):
        def __init__(self, protocol: MooncakeProtocol, faults: dict[tuple[str, int], object] | None = None) -> None:
            super().__init__(protocol, faults or {}, monkeypatch)
            made.append(self)

    yield Closed
    for bed in made:
        bed.released.set()
        with suppress(TransportError):
            bed.transport.close()


@pytest.mark.parametrize("protocol", [TCP, RDMA])
def test_everything_arrives(beds: type[Bed], protocol: MooncakeProtocol) -> None:
    bed = beds(protocol)
    assert bed.end(bed.submit()) == TransferStatus(TransferState.DONE)
    assert (bed.network.destination == OLD).all()
    in_batches = protocol is RDMA
    assert bed.most_under_way == (COUNT if in_batches else 8)  # eight batches would be more than all
    assert bool(bed.calls[SUBMIT_BATCH]) is in_batches
    assert bed.calls[SUBMIT] == (
        8 if in_batches else COUNT
    )  # the first operation of all, and the last one of each batch


JSON = RuntimeError("syntax error while parsing value")
FAULTS = [
    *((TCP, SUBMIT, number, answer, QUIET) for number in (0, 1, 5, COUNT - 1) for answer in (0, -1, 2**64 - 1, JSON)),
    *((TCP, STATUS, number, -1, QUIET) for number in (0, 3)),
    *((TCP, STATUS, -1, answer, NOT_QUIET) for answer in (-2, 7, MemoryError())),
    *((RDMA, SUBMIT, number, answer, QUIET) for number in (0, 1, 3) for answer in (0, -1, 2**64 - 1, JSON)),
    *((RDMA, SUBMIT_BATCH, number, answer, NOT_QUIET) for number in (0, 2) for answer in (0, -1, 2**64 - 1, JSON)),
    *((RDMA, STATUS, number, -1, QUIET) for number in (0, 1)),
    *((RDMA, STATUS, -1, answer, NOT_QUIET) for answer in (-2, 7, MemoryError())),
    *(
        (RDMA, STATUS_BATCH, number, answer, NOT_QUIET)
        for number in (0, 2)
        for answer in (-1, 3, RuntimeError("defect"))
    ),
]


@pytest.mark.parametrize(("protocol", "kind", "number", "answer", "expected"), FAULTS)
def test_a_call_that_fails(beds, protocol, kind, number, answer, expected):
    """Quiet means that nothing is under way; otherwise closing the transport ends what is. `number` -1: every call."""
    bed = beds(protocol, {(kind, number): answer})
    transfer = bed.submit()
    if expected is QUIET:
        status = bed.end(transfer)
        assert bed.network.under_way == 0
    else:  # what the library has lost sight of goes on for longer than anybody waits
        status = bed.end(transfer, delivering=1 if kind in {SUBMIT_BATCH, STATUS_BATCH} else 0, patient=False)
        assert status.in_transit
        bed.transport.close()
    assert status.state is expected, status
    assert len(status.error) > 20
    bed.assert_silent()
    assert transfer.poll() == status


def test_question_that_is_not_answered_holds_up_its_own_peer_only(beds: type[Bed]) -> None:
    """And `close` says so, as long as the library does not return: the engine lives until then."""
    bed = beds(RDMA, {(STATUS_BATCH, 0): BLOCKS})
    stuck = bed.submit(deadline_s=1.0)
    ends_at_s = time.monotonic() + LIMIT_S
    while not bed.calls[STATUS_BATCH]:
        assert time.monotonic() < ends_at_s
        bed.poll(stuck)
        bed.network.deliver(10)
    bed.peer = connect(bed.transport, bed.transport.endpoint())
    assert bed.end(bed.submit()).state is TransferState.DONE
    bed.clock.advance(10.0)
    assert bed.poll(stuck).state is TransferState.ACTIVE  # fails, and has time to become quiet
    bed.clock.advance(10.0)
    assert bed.poll(stuck).state is NOT_QUIET
    with pytest.raises(TransportError, match="must not be used again"):
        bed.transport.close()
    bed.released.set()
    bed.transport.close()
    assert bed.network.under_way == 0
    bed.assert_silent()


def drawn_faults(rng: random.Random) -> dict[tuple[str, int], object]:
    answers = {
        SUBMIT: (0, -1, JSON),
        SUBMIT_BATCH: (0, JSON),
        STATUS: (-1, -2, 9, MemoryError()),
        STATUS_BATCH: (-1, 3, RuntimeError("defect")),
    }
    return {(kind, rng.randrange(12)): rng.choice(some) for kind, some in answers.items() if rng.random() < 0.4}


def test_anything_may_fail_at_any_time(beds: type[Bed]) -> None:
    """Random faults, deliveries and ends: the promise holds, and no id is asked after that has been freed."""
    ends = set()
    for seed in range(100):
        rng = random.Random(seed)
        protocol = rng.choice([TCP, RDMA])
        bed = beds(protocol, drawn_faults(rng))
        transfer = bed.submit(deadline_s=rng.choice([0.05, 60.0]))
        if how := rng.choice(["", "", "", "aborted", "closed"]):
            for _ in range(rng.randrange(5)):
                bed.poll(transfer)
                bed.network.deliver(rng.randrange(8))
            calls = bed.calls[SUBMIT] + bed.calls[SUBMIT_BATCH]
            with suppress(TransportError):
                transfer.abort("the test said so") if how == "aborted" else bed.transport.close()
        status = bed.end(transfer, delivering=rng.choice([0, 1, 9]), patient=False)
        if how:
            assert bed.calls[SUBMIT] + bed.calls[SUBMIT_BATCH] == calls, "something was submitted after the end"
        ends.add(status.state)
        if status.state is not TransferState.DONE:  # the rest of what was given has been confirmed
            arrived = bed.network.destination.reshape(COUNT, SIZE_BYTES).copy()
            for part in status.unconfirmed:
                arrived[part] = OLD
            assert (arrived == OLD).all(), seed
        if status.state is TransferState.DONE:
            assert (bed.network.destination == OLD).all(), seed
        elif status.state is NOT_QUIET:
            bed.transport.close()
        assert bed.network.under_way == 0, (seed, status)
        bed.assert_silent()
    assert ends == {TransferState.DONE, QUIET, NOT_QUIET}


def test_the_library_itself_takes_batches(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP, where kvbridge makes none: the calls that RDMA needs, with a peer that dies in the end."""
    backend = BACKENDS["mooncake"]
    require_library(backend)
    limits = WindowLimits(
        operations=1024, bytes=4 * MIB, quiet_timeout_s=0.2, batch_operations=64, batch_bytes=MIB // 2
    )

    monkeypatch.setattr(mooncake, "_limits", lambda _: limits)
    transport = backend.create()
    source = backend.source_buffer(shm / "source", BUFFER_BYTES)
    try:
        with PeerProcess(backend, shm / "peer", BUFFER_BYTES) as process:
            transport.register([source.memory()])
            pair = Pair(transport, source, process, connect(transport, process.endpoint))
            assert isinstance(transport, MooncakeTransport)
            transport._settings = transport._settings.model_copy(update={"protocol": MooncakeProtocol.RDMA})
            pair.reset()
            for size_bytes, count in ((16_384, 1_000), (100, 300), (3 * MIB, 8)):
                status = pair.move(pair.blocks(size_bytes, count), deadline_s=60.0)
                assert status.state is TransferState.DONE, status
            np.testing.assert_array_equal(process.buffer.read(), source.read())
            transfer = transport.submit(pair.peer, pair.blocks(16_384, 1_000), deadline_s=60.0)
            transfer.poll()
            process.kill()
            assert wait(transfer).state in {QUIET, NOT_QUIET}
    finally:
        transport.close()
        source.close()
