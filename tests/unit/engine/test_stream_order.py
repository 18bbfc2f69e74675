"""Calls that wait for a GPU, and the points that they wait for. The GPUs are this test's."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from kvbridge.core.errors import DeadlineError, InvalidInputError, NotReadyError, TransportError, UnknownRoomError
from kvbridge.core.ids import Rank
from kvbridge.engine import streams
from kvbridge.engine.streams import DeferredCalls, StreamOrder

R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)


class Calls:
    """Deferred calls that note what was sent."""

    def __init__(self) -> None:
        self.deferred = DeferredCalls()
        self.sent: list[str] = []
        self.ready: dict[str, bool] = {}

    def ask(self, name: str, *, ready: bool = False, send=None) -> None:
        self.ready[name] = ready
        self.deferred.send_when(lambda: self.ready[name], name, send or (lambda: self.sent.append(name)))


def test_an_error_is_the_callers_at_once_and_a_log_line_later():
    def refuse() -> None:
        raise UnknownRoomError("no such room")

    calls = Calls()
    with pytest.raises(UnknownRoomError):
        calls.ask("release of room 1", ready=True, send=refuse)
    calls.ask("release of room 2", send=refuse)
    calls.ask("next", ready=True)
    calls.ready["release of room 2"] = True
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
    with pytest.raises(TransportError, match="known to have finished: release of room 1; the node uses those pages"):
        calls.deferred.finish(5.0)


@pytest.mark.parametrize("error", [DeadlineError, NotReadyError])
def test_a_call_that_the_node_does_not_take_in_time_is_sent_again(error):
    calls, left = Calls(), [error("the daemon hangs")] * 2

    def send() -> None:
        if left:
            raise left.pop()
        calls.sent.append("release")

    calls.ask("release", send=send)
    calls.ready["release"] = True
    for _ in range(2):
        with pytest.raises(error, match="the daemon hangs"):
            calls.ask("next", ready=True)
        assert len(calls.deferred) == 1
    calls.ask("last", ready=True)
    assert (calls.sent, len(calls.deferred)) == (["release", "last"], 0)


def test_finishing_waits_and_names_what_is_left():
    calls, answers = Calls(), iter([False, False, True])
    calls.deferred.send_when(lambda: next(answers), "release of room 1", lambda: calls.sent.append("1"))
    calls.deferred.finish(5.0)
    assert calls.sent == ["1"]
    calls.ask("release of room 2")
    with pytest.raises(DeadlineError, match=r"within 0.0 s; still to do: release of room 2"):
        calls.deferred.finish(0.0)


def order_of(*devices: int | None) -> StreamOrder:
    return StreamOrder({rank: SimpleNamespace(device=device) for rank, device in zip((R0, R1), devices, strict=False)})


@pytest.fixture
def gpus(monkeypatch):
    """GPUs whose points are (device, stream)."""
    ring = lambda device: SimpleNamespace(record=lambda stream: (device, stream), close=lambda: None)  # noqa: E731
    monkeypatch.setattr(streams.EventRing, "on", ring)
    monkeypatch.setattr(streams, "current_gpu", lambda device: nullcontext())
    current = lambda device: SimpleNamespace(cuda_stream=100 + device)  # noqa: E731
    monkeypatch.setattr(streams.torch.cuda, "current_stream", current)


def test_each_rank_is_marked_on_its_own_gpu_and_host_pools_nowhere(gpus):
    order = order_of(0, 3)
    assert order.devices == (0, 3)
    assert order.points(None) == {"pp0.tp0": (0, 100), "pp0.tp1": (3, 103)}
    with pytest.raises(InvalidInputError, match="cuda:0, cuda:3"):
        order.points(7)
    assert order_of(2, 2).points(7) == {"pp0.tp0": (2, 7), "pp0.tp1": (2, 7)}
    assert (order_of(None).devices, order_of(None).points(None)) == ((), {})


def test_what_waits_for_a_stream_asks_for_its_point_on_each_gpu(gpus, monkeypatch):
    order, asked, answers = order_of(0, 1), [], iter([False, True])
    monkeypatch.setattr(order._marks, "reached", lambda points: asked.append(set(points)) or next(answers))
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

    def reached(points) -> bool:
        current[0] = "the event's"
        return not points

    monkeypatch.setattr(streams, "current_gpu", kept)
    order = order_of(0, 1)
    order._marks = SimpleNamespace(reached=reached)
    assert order.passed(())
    assert not order.passed((object(),))
    assert current == ["the engine's"]
