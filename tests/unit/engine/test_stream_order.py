from __future__ import annotations

from contextlib import contextmanager

import pytest

from kvbridge.core.errors import DeadlineError, InvalidInputError, NotReadyError, TransportError, UnknownRoomError
from kvbridge.core.ids import Rank
from kvbridge.engine import streams
from kvbridge.engine.streams import DeferredCalls, StreamOrder

R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)


class Views:
    def __init__(self, device: int | None) -> None:
        self.device = device


class Calls:
    """Deferred calls that note what was sent."""

    def __init__(self) -> None:
        self.deferred = DeferredCalls()
        self.sent: list[str] = []
        self.ready: dict[str, bool] = {}

    def ask(self, name: str, *, ready: bool = False) -> None:
        self.ready.setdefault(name, ready)
        self.deferred.send_when(lambda: self.ready[name], name, lambda: self.sent.append(name))


def test_an_error_is_the_callers_at_once_and_a_log_line_later():
    def refuse() -> None:
        raise UnknownRoomError("no such room")

    calls = Calls()
    with pytest.raises(UnknownRoomError):
        calls.deferred.send_when(lambda: True, "release of room 1", refuse)
    ready = []
    calls.deferred.send_when(lambda: bool(ready), "release of room 2", refuse)
    calls.ask("next", ready=True)
    ready.append(1)
    calls.deferred.send_due()
    assert (calls.sent, len(calls.deferred)) == (["next"], 0)


def test_a_gpu_that_fails_does_not_hold_the_others_up():
    def broken() -> bool:
        raise TransportError("CUDA: cudaEventQuery failed")

    calls = Calls()
    calls.ask("first")
    calls.deferred.send_when(broken, "release of room 1", lambda: calls.sent.append("never"))
    calls.ask("next", ready=True)
    calls.ready["first"] = True
    calls.deferred.send_due()
    assert calls.sent == ["first", "next"]
    with pytest.raises(TransportError, match="known to be through with: release of room 1; the node uses those pages"):
        calls.deferred.finish(5.0)


@pytest.mark.parametrize("error", [DeadlineError, NotReadyError])
def test_a_call_that_the_node_does_not_take_in_time_is_sent_again(error):
    calls, tries = Calls(), []

    def send() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise error("the daemon hangs")
        calls.sent.append("release of room 1")

    ready = []
    calls.deferred.send_when(lambda: bool(ready), "release of room 1", send)
    ready.append(1)
    for _ in range(2):
        with pytest.raises(error, match="the daemon hangs"):
            calls.ask("next", ready=True)
        assert len(calls.deferred) == 1
    calls.ask("last", ready=True)
    assert (calls.sent, len(calls.deferred)) == (["release of room 1", "last"], 0)


def test_finishing_waits_and_names_what_is_left():
    calls = Calls()
    asked = []

    def third_time() -> bool:
        asked.append(1)
        return len(asked) > 2

    calls.deferred.send_when(third_time, "release of room 1", lambda: calls.sent.append("1"))
    calls.deferred.finish(5.0)
    assert calls.sent == ["1"]
    calls.ask("release of room 2")
    with pytest.raises(DeadlineError, match=r"within 0.0 s; still to do: release of room 2"):
        calls.deferred.finish(0.0)


def test_host_pools_have_no_order_to_keep():
    order = StreamOrder({R0: Views(None)})
    assert (order.devices, order.points(None)) == ((), {})
    order.close()


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs whose points are fakes."""

    class Ring:
        def __init__(self, device: int) -> None:
            self.device, self.streams = device, []

        def record(self, stream: int) -> tuple[int, int]:
            self.streams.append(stream)
            return self.device, stream

        def close(self) -> None:
            pass

    class Current:
        def __init__(self, device: int) -> None:
            pass

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(streams.EventRing, "on", Ring)
    monkeypatch.setattr(streams, "current_gpu", Current)
    monkeypatch.setattr(
        streams.torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 100 + device})
    )


def test_each_rank_is_marked_on_its_own_gpu(gpus):
    order = StreamOrder({R0: Views(0), R1: Views(3)})
    assert order.devices == (0, 3)
    assert order.points(None) == {"pp0.tp0": (0, 100), "pp0.tp1": (3, 103)}
    with pytest.raises(InvalidInputError, match="cuda:0, cuda:3"):
        order.points(7)
    same = StreamOrder({R0: Views(2), R1: Views(2)})
    assert same.points(7) == {"pp0.tp0": (2, 7), "pp0.tp1": (2, 7)}


def test_what_waits_for_a_stream_asks_for_its_point_on_each_gpu(gpus, monkeypatch):
    order = StreamOrder({R0: Views(0), R1: Views(1)})
    asked, answers = [], [False, True]
    monkeypatch.setattr(order._marks, "reached", lambda points: asked.append(set(points)) or answers[len(asked) - 1])
    ready = order.reached(None)
    assert (ready(), ready()) == (False, True)
    assert asked == [{(0, 100), (1, 101)}] * 2
    order.close()


def test_looking_at_points_leaves_the_threads_gpu_as_it_was(monkeypatch):
    """Asking an event makes its GPU the current one; tensors that the engine makes next would lie there."""
    current = ["the engine's"]

    @contextmanager
    def kept(device):
        before = current[0]
        yield
        current[0] = before

    class Marks:
        def reached(self, points):
            current[0] = "the event's"
            return not points

    monkeypatch.setattr(streams, "current_gpu", kept)
    order = StreamOrder({R0: Views(0), R1: Views(1)})
    order._marks = Marks()
    assert order.passed(())
    assert not order.passed((object(),))
    assert current == ["the engine's"]
