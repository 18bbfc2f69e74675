"""The pump: a thread that pushes transfers until each has ended, whatever becomes of it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import TransferState
from kvbridge.transport.windowed import DONE, PENDING, Check, Pump, Submitter, Window, WindowedTransfer, WindowLimits
from tests.contract.harness import wait

LIMIT_S = 20.0
LIMITS = WindowLimits(operations=4, bytes=1 << 20, quiet_timeout_s=0.05)


class Library(Submitter[int]):
    """Batches end when `gate` is open; every call says which thread made it."""

    def __init__(self, answer: Check = DONE) -> None:
        self.gate, self.answer = threading.Event(), answer
        self.started: list[int] = []
        self.threads: set[str] = set()

    def start(self, first: int, stop: int) -> int:
        self.threads.add(threading.current_thread().name)
        self.started += range(first, stop)
        return first

    def check(self, handle: int) -> Check:
        self.threads.add(threading.current_thread().name)
        return self.answer if self.gate.is_set() else PENDING


def operations(count: int) -> Operations:
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    return Operations(numbers, numbers, np.full(count, 8, dtype=np.uint64))


def pumped(library: Library, window: Window, count: int = 10, deadline_s: float = 30.0) -> WindowedTransfer:
    return WindowedTransfer(operations(count), library, window, peer="p", deadline_s=deadline_s)


@pytest.fixture
def pump():
    made = Pump("test")
    yield made
    made.close(timeout_s=LIMIT_S)


def test_abort_waits_for_what_is_in_flight(pump: Pump) -> None:
    library, window = Library(), Window(WindowLimits(operations=4, bytes=1 << 20, quiet_timeout_s=30.0))
    transfer = pumped(library, window)
    transfer.abort("before it began")
    pump.add(transfer)
    assert "before it began" in wait(transfer, LIMIT_S).error
    assert library.started == []
    second = pumped(library, window)
    pump.add(second)
    while window.operations < 4:
        assert not second.poll().state.terminal
    second.abort("the test said so")
    second.abort("again")
    library.gate.set()
    status = wait(second, LIMIT_S)
    assert status.state is TransferState.FAILED_QUIET
    assert "the test said so" in status.error
    assert len(library.started) < 10


def test_a_library_that_does_not_return_makes_close_fail(pump: Pump) -> None:
    class Stuck(Library):
        def check(self, handle: int) -> Check:
            entered.set()
            self.gate.wait(LIMIT_S)
            return DONE

    entered, library = threading.Event(), Stuck()
    pump.add(pumped(library, Window(LIMITS)))
    assert entered.wait(LIMIT_S)
    with pytest.raises(TransportError, match="did not end within"):
        pump.close(timeout_s=0.01)
    library.gate.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_thread_ends_every_transfer_not_quiet() -> None:
    class Broken(Library):
        def check(self, handle: int) -> Check:
            raise RuntimeError("defect")

    pump = Pump("test")
    broken, innocent = pumped(Broken(), Window(LIMITS)), pumped(Library(), Window(LIMITS))
    with pump._changed:
        pump.add(broken)
        pump.add(innocent)
    assert wait(broken, LIMIT_S).state is TransferState.FAILED_NOT_QUIET
    assert wait(innocent, LIMIT_S).state is TransferState.FAILED_NOT_QUIET
    assert pump._thread is not None
    pump._thread.join(LIMIT_S)
    with pytest.raises(TransportError):
        pump.add(innocent)


def test_a_thread_that_does_not_start_fails_what_was_to_be_pushed_alone(pump: Pump, monkeypatch) -> None:
    """Nothing is queued for a thread that is not there, and the next one may get it."""
    library, window = Library(), Window(LIMITS)
    library.gate.set()

    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="can't start new thread"):
            pump.add(pumped(library, window))
    transfer = pumped(library, window)
    pump.add(transfer)
    assert wait(transfer, LIMIT_S).state is TransferState.DONE
    assert library.started == list(range(10)), "what was refused is not pushed later"
