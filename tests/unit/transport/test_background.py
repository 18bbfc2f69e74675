"""Calls that block, and the bound on how many there are."""

from __future__ import annotations

import threading

import pytest

from kvbridge.core.errors import TransportError
from kvbridge.transport import background
from kvbridge.transport.background import Call, take_turn
from kvbridge.transport.base import Pending, Steps
from tests.helpers.manual_clock import ManualClock

LIMIT_S = 20.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def call(function, clock: ManualClock, *, until_s: float = 1.0) -> Steps[object]:
    yield from take_turn("try it", until_s=until_s, clock=clock)
    return (yield from Call(function, name="try it").result(until_s=until_s, clock=clock, late="too late"))


def ended(pending: Pending[object]) -> object:
    found = None
    while found is None:
        found = pending.poll()
    return found


def test_a_defect_is_told_as_one(clock: ManualClock) -> None:
    with pytest.raises(TransportError, match="cannot try it: ZeroDivisionError"):
        ended(Pending(call(lambda: 1 // 0, clock)))


def test_calls_that_do_not_return_are_bounded(clock: ManualClock, monkeypatch) -> None:
    monkeypatch.setattr(background, "MOST_CALLS", 2)
    monkeypatch.setattr(background, "_free", threading.BoundedSemaphore(2))
    answer = threading.Event()
    stuck = [Pending(call(lambda: answer.wait(LIMIT_S), clock)) for _ in range(2)]
    others = [Pending(call(lambda: 3, clock, until_s=until_s)) for until_s in (1.0, 10.0)]
    before = threading.active_count()
    assert [pending.poll() for pending in (*stuck, *others)] == [None] * 4
    assert threading.active_count() == before + 2
    clock.advance(2.0)
    for pending in stuck:
        with pytest.raises(TransportError, match="too late"):
            pending.poll()
    with pytest.raises(TransportError, match="2 calls of this process have not returned yet"):
        others[0].poll()
    answer.set()
    assert ended(others[1]) == 3


def test_a_thread_that_does_not_start_fails_its_call_and_gives_the_turn_back(clock: ManualClock, monkeypatch) -> None:
    """The process may have as many threads as it is allowed now, and fewer soon."""
    monkeypatch.setattr(background, "MOST_CALLS", 1)
    monkeypatch.setattr(background, "_free", threading.BoundedSemaphore(1))

    def refuse(_) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(TransportError, match="can't start new thread"):
            ended(Pending(call(lambda: 3, clock)))
    assert ended(Pending(call(lambda: 3, clock))) == 3
