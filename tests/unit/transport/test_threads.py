"""Threads of transports: calls that block and the bound on them, and the pump, which pushes transfers until each has ended."""

import threading
import time

import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport import threads
from kvbridge.transport.base import TransferState
from kvbridge.transport.threads import Call, Pump
from kvbridge.transport.windowed import DONE, PENDING, Check, Submitter, Window, WindowedTransfer, WindowLimits
from tests.contract.harness import wait
from tests.helpers.manual_clock import ManualClock

LIMIT_S = 20.0


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch):
    """The process may have as many threads as it has now, until the test undoes this."""

    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield patch


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def call(function, clock: ManualClock, *, timeout_s: float = 1.0, **more: object) -> Call:
    return Call(function, name="try it", timeout_s=timeout_s, late="too late", clock=clock, **more)


def ended(made: Call) -> object:
    while (found := made.poll()) is None:
        time.sleep(0.0005)
    return found


def test_a_defect_is_told_as_one(clock: ManualClock) -> None:
    with pytest.raises(TransportError, match="cannot try it: ZeroDivisionError"):
        ended(call(lambda: 1 // 0, clock))


def test_calls_that_do_not_return_are_bounded(clock: ManualClock, monkeypatch) -> None:
    monkeypatch.setattr(threads, "MOST_CALLS", 2)
    monkeypatch.setattr(threads, "_free", threading.BoundedSemaphore(2))
    answer = threading.Event()
    stuck = [call(lambda: answer.wait(LIMIT_S), clock) for _ in range(2)]
    others = [call(lambda: 3, clock, timeout_s=timeout_s) for timeout_s in (1.0, 10.0)]
    before = threading.active_count()
    assert [made.poll() for made in (*stuck, *others)] == [None] * 4
    assert threading.active_count() == before + 2
    clock.advance(2.0)
    for made in stuck:
        with pytest.raises(TransportError, match="too late"):
            ended(made)
    with pytest.raises(TransportError, match="2 calls of this process have not returned yet"):
        ended(others[0])
    answer.set()
    assert ended(others[1]) == 3


def test_a_thread_that_does_not_start_fails_its_call_and_gives_the_turn_back(clock, monkeypatch, no_threads):
    monkeypatch.setattr(threads, "MOST_CALLS", 1)
    monkeypatch.setattr(threads, "_free", threading.BoundedSemaphore(1))
    with pytest.raises(TransportError, match="can't start new thread"):
        ended(call(lambda: 3, clock))
    no_threads.undo()
    assert ended(call(lambda: 3, clock)) == 3


@pytest.mark.parametrize("when", ["under way", "ended"])
def test_a_result_that_nobody_waits_for_is_taken_back(clock: ManualClock, when: str) -> None:
    go_on, told = threading.Event(), []

    def work() -> int:
        assert go_on.wait(LIMIT_S)
        return 3

    made = call(work, clock, given_up=told.append)
    assert made.poll() is None
    if when == "ended":
        go_on.set()
        assert made._ended.wait(LIMIT_S)
    made.cancel()
    go_on.set()
    ends_at_s = time.monotonic() + LIMIT_S
    while 3 not in told and time.monotonic() < ends_at_s:
        time.sleep(0.0005)
    assert told == ([3] if when == "ended" else [None, 3])


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


def test_a_thread_that_does_not_start_fails_what_was_to_be_pushed_alone(pump: Pump, no_threads) -> None:
    """Nothing is queued for a thread that is not there, and the next one may get it."""
    library, window = Library(), Window(LIMITS)
    library.gate.set()
    with pytest.raises(TransportError, match="can't start new thread"):
        pump.add(pumped(library, window))
    no_threads.undo()
    transfer = pumped(library, window)
    pump.add(transfer)
    assert wait(transfer, LIMIT_S).state is TransferState.DONE
    assert library.started == list(range(10)), "what was refused is not pushed later"
