"""Each fault does what it says, and keeps the promise of silence; over an inner transport that copies within the
process."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from kvbridge.config.transports import TransportSettings
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import (
    Connection,
    Endpoint,
    Peer,
    Steps,
    Transfer,
    TransferState,
    TransferStatus,
    Transport,
)
from tests.helpers.connecting import connect
from tests.helpers.faulty_transport import FaultySettings, FaultyTransport, faulty_worker
from tests.helpers.manual_clock import ManualClock


class FakePeer(Peer):
    """Somewhere to write."""


class FakeTransfer(Transfer):
    """Done at its second poll."""

    def __init__(self, inner: FakeTransport, operations: Operations) -> None:
        self._inner, self._operations, self.polls, self.aborted = inner, operations, 0, ""

    def poll(self) -> TransferStatus:
        self.polls += 1
        if self.polls < 2:
            return TransferStatus(TransferState.ACTIVE)
        if not self._inner.closed:
            self._inner.delivered += [int(address) for address in self._operations.source]
        self._operations = self._operations[:0]
        return TransferStatus(TransferState.DONE)

    def abort(self, reason: str) -> None:
        self.aborted = reason


class FakeTransport(Transport):
    """Remembers which source addresses it has delivered, in order."""

    name = "fake"
    max_operation_bytes = 100

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.closed = False

    def register(self, memory: Sequence[Extent]) -> None: ...
    def endpoint(self) -> Endpoint:
        return Endpoint(transport="fake", data=b"here")

    def connect(self, endpoint: Endpoint) -> Connection:
        assert endpoint == self.endpoint()
        return Connection(self._connect())

    def _connect(self) -> Steps[Peer]:
        yield
        return FakePeer()

    def disconnect(self, peer: Peer) -> None: ...
    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        return FakeTransfer(self, operations)

    def close(self) -> None:
        self.closed = True


def operations(count: int, first: int = 1) -> Operations:
    address = np.arange(first, first + count, dtype=np.uint64)
    return Operations(address, address, np.ones(count, dtype=np.uint64))


class Bench:
    """A faulty transport around a fake one, connected, with a clock."""

    def __init__(self, **settings: object) -> None:
        self.inner, self.clock = FakeTransport(), ManualClock()
        self.transport = FaultyTransport(self.inner, FaultySettings.model_validate(settings), clock=self.clock)
        self.peer = connect(self.transport, self.transport.endpoint())

    def submit(self, count: int = 4, first: int = 1, deadline_s: float = 10.0) -> Transfer:
        return self.transport.submit(self.peer, operations(count, first), deadline_s=deadline_s)


def state(transfer: Transfer, polls: int = 3) -> TransferState:
    """Where the transfer stands after some polls."""
    return [transfer.poll().state for _ in range(polls)][-1]


def test_without_faults_it_is_the_inner_transport() -> None:
    bench = Bench()
    assert bench.transport.endpoint() == Endpoint(transport="fake", data=b"here")
    assert state(bench.submit()) is TransferState.DONE
    assert bench.inner.delivered == [1, 2, 3, 4]


@pytest.mark.outside
def test_a_rank_workers_process_makes_faulty_transports_and_no_configuration_does(tmp_path: Path) -> None:
    code = (
        faulty_worker({"fail_after_operations": 3})
        + """
from kvbridge.config.transports import TransportSettings
from kvbridge.worker import lifecycle
made = lifecycle.create_transport("local", TransportSettings(), epoch=2)
print(type(made).__name__, made.name, made._settings.fail_after_operations, made._inner._epoch)
made.close()
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "FaultyTransport local 3 2\n", done.stderr
    with pytest.raises(ValidationError):
        TransportSettings.model_validate({"order": ["faulty"]})


def test_reorder_delivers_all_in_an_order_of_the_seed() -> None:
    orders = []
    for seed in (1, 1, 2):
        bench = Bench(reorder=True, seed=seed)
        assert state(bench.submit(50)) is TransferState.DONE
        orders.append(bench.inner.delivered)
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(1, 51)) != orders[0]


def test_delay_hides_the_completion() -> None:
    bench = Bench(delay_s=2.0)
    transfer = bench.submit()
    assert state(transfer) is TransferState.ACTIVE
    bench.clock.advance(2.0)
    assert state(transfer) is TransferState.DONE


def test_delay_beyond_the_deadline_fails_quietly_as_does_an_abort() -> None:
    bench = Bench(delay_s=20.0)
    late, given_up = bench.submit(), bench.submit()
    assert state(late) is TransferState.ACTIVE
    given_up.abort("enough")
    assert state(given_up) is TransferState.FAILED_QUIET
    bench.clock.advance(10.0)
    assert state(late) is TransferState.FAILED_QUIET


def test_fails_after_so_many_operations_over_its_life() -> None:
    bench = Bench(fail_after_operations=6)
    assert state(bench.submit(4)) is TransferState.DONE
    assert state(bench.submit(4, first=5)) is TransferState.FAILED_QUIET
    assert bench.inner.delivered == [1, 2, 3, 4, 5, 6]
    assert state(bench.submit(1, first=9)) is TransferState.FAILED_QUIET
    assert len(bench.inner.delivered) == 6


def test_dropped_completion_ends_not_quiet() -> None:
    bench = Bench(drop_completion=True, quiet_timeout_s=1.0)
    transfer = bench.submit(deadline_s=5.0)
    bench.clock.advance(4.9)
    assert state(transfer) is TransferState.ACTIVE
    bench.clock.advance(0.2)
    assert state(transfer) is TransferState.ACTIVE
    bench.clock.advance(1.0)
    assert state(transfer) is TransferState.FAILED_NOT_QUIET
    assert bench.inner.delivered == [1, 2, 3, 4]


def test_late_delivery_is_reported_first_and_driven_by_later_calls() -> None:
    bench = Bench(late_delivery_s=3.0)
    transfer = bench.submit()
    assert state(transfer) is TransferState.FAILED_NOT_QUIET
    assert bench.inner.delivered == []
    bench.clock.advance(3.0)
    assert state(transfer) is TransferState.FAILED_NOT_QUIET
    assert bench.inner.delivered == [1, 2, 3, 4]


def test_close_ends_late_deliveries() -> None:
    bench = Bench(late_delivery_s=3.0)
    transfer = bench.submit()
    transfer.poll()
    bench.transport.close()
    bench.clock.advance(5.0)
    assert state(transfer) is TransferState.FAILED_NOT_QUIET
    assert bench.inner.delivered == []


@pytest.mark.outside
def test_dies_with_its_own_exit_code() -> None:
    code = """
from tests.unit.helpers.test_faulty_transport import Bench, state
from tests.helpers.connecting import connect
bench = Bench(die_after_operations=6)
print(state(bench.submit(4)).value, flush=True)
transfer = bench.submit(4)
print(transfer.poll().state.value, flush=True)
state(transfer)
print("survived")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (86, "done\nactive\n"), done.stderr


def test_one_bit_of_one_operation_flips_on_its_way_and_its_source_stays_as_it_is() -> None:
    bench = Bench(flip_bit_in_operation=6)
    memory = np.arange(40, dtype=np.uint8)
    base = memory.ctypes.data

    def delivered() -> list[int]:
        addresses = (base + np.arange(0, 40, 10)).astype(np.uint64)
        four = Operations(addresses, addresses, np.full(4, 10, dtype=np.uint64))
        assert state(bench.transport.submit(bench.peer, four, deadline_s=10.0)) is TransferState.DONE
        sources, bench.inner.delivered = bench.inner.delivered, []
        return [byte for source in sources for byte in ctypes.string_at(source, 10)]

    assert delivered() == memory.tolist(), "operations 1 to 4"
    assert delivered() == [*range(10), 10 ^ 1, *range(11, 40)], "operations 5 to 8"
    assert delivered() == memory.tolist() == list(range(40))
