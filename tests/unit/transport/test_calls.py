"""Calls that block, and the bound on how many there are."""

from __future__ import annotations

import threading
import time

import pytest

from kvbridge.core.errors import TransportError
from kvbridge.transport import calls
from kvbridge.transport.calls import Call
from tests.helpers.manual_clock import ManualClock

LIMIT_S = 20.0


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
    monkeypatch.setattr(calls, "MOST_CALLS", 2)
    monkeypatch.setattr(calls, "_free", threading.BoundedSemaphore(2))
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


def test_a_thread_that_does_not_start_fails_its_call_and_gives_the_turn_back(clock: ManualClock, monkeypatch) -> None:
    """The process may have as many threads as it is allowed now, and fewer soon."""
    monkeypatch.setattr(calls, "MOST_CALLS", 1)
    monkeypatch.setattr(calls, "_free", threading.BoundedSemaphore(1))

    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="can't start new thread"):
            ended(call(lambda: 3, clock))
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
