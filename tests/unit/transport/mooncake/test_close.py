"""The end of a mooncake transport whose library does not return from calls; the library itself is the contract suite's matter."""

import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from kvbridge.config.transports import MooncakeSettings
from kvbridge.core.errors import TransportError
from kvbridge.transport.mooncake.library import Engine
from kvbridge.transport.mooncake.transport import MooncakeTransport
from kvbridge.transport.mooncake.writes import Batch, Waiter
from tests.helpers.manual_clock import ManualClock

TIMEOUT_S = 5


class Stuck:
    """A call that takes a while to return, or does not."""

    def __init__(self, clock: ManualClock, *, returns_at_s: float) -> None:
        self.clock, self.returns_at_s = clock, returns_at_s
        self.cut_off_s: list[float] = []

    def end(self, timeout_s: float) -> bool:
        self.cut_off_s.append(self.clock())
        self.clock.now_s = max(self.clock.now_s, min(self.clock() + timeout_s, self.returns_at_s))
        return self.clock() >= self.returns_at_s


def transport_with(clock: ManualClock, *calls: Stuck) -> MooncakeTransport:
    made = MooncakeTransport.__new__(MooncakeTransport)
    made._settings = MooncakeSettings(connect_timeout_s=TIMEOUT_S)
    made._clock, made._calls, made._engine = clock, weakref.WeakSet(calls), Engine(object())
    made._transfers, made._peers = {}, {}
    return made


@pytest.mark.parametrize("returns_after_s", [(1_000, 1_000, 1_000), (2, 4)])
def test_all_calls_have_one_limit_together(returns_after_s: tuple[int, ...]) -> None:
    clock = ManualClock()
    begun_s = clock()
    calls = [Stuck(clock, returns_at_s=begun_s + after_s) for after_s in returns_after_s]
    transport = transport_with(clock, *calls)
    late = max(returns_after_s) > TIMEOUT_S
    with pytest.raises(TransportError, match="did not return within 5 s") if late else nullcontext():
        transport.close()
    assert clock() - begun_s == min(TIMEOUT_S, max(returns_after_s))
    assert [call.cut_off_s[0] for call in calls] == [begun_s] * len(calls), "each is cut off before one is waited for"
    assert transport._engine._library is None


def test_a_thread_that_does_not_start_fails_one_question_and_keeps_no_transport_open(monkeypatch) -> None:
    def full(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    library = SimpleNamespace(get_batch_transfer_status=lambda _batches: 0)
    waiter, batch = Waiter(SimpleNamespace(library=library), "waiter"), Batch([], 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", full)
        with pytest.raises(TransportError, match="no thread can be started"):
            waiter.ask(batch)
        assert waiter.end(0.0)
    waiter = Waiter(SimpleNamespace(library=library), "waiter")
    waiter.ask(batch)
    assert waiter.end(20.0)
    assert batch.answer == 0
