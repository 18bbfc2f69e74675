"""Each fault does what it says, and keeps the promise of silence; over an inner transport that copies within the
process."""

from __future__ import annotations

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
