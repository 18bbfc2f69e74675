"""The verbs of engines whose pools are on a GPU: what is said when. The node and the GPU are this test's."""

from __future__ import annotations

from collections import deque

import pytest

from kvbridge.core.errors import DeadlineError, DetachedError
from kvbridge.core.wire.engine_messages import Accepted, Begin, Finish, Pages, Publish, Release, RoomEvent
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.engine.attachment import Attachment
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine

POINT = StreamPoint(ring="ring", handle=bytes(64), device_uuid="0" * 32)


class Link:
    """A node that accepts everything."""

    def __init__(self) -> None:
        self.said: list[object] = []
        self.coming: deque[RoomEvent] = deque()
        self.lost = ""
        self.closed = False

    def number(self) -> int:
        return len(self.said) + 1

    def call(self, message, answer):
        assert not self.closed
        self.said.append(message)
        if answer is Pages:
            tokens = getattr(message, "prompt_tokens", 1200)  # a claim names none
            return Pages(call=message.call, room=message.room, generation=3, prompt_tokens=tokens, tables=())
        return answer(call=message.call) if answer is Accepted else None

    def events(self, timeout_s: float) -> list[RoomEvent]:
        found = list(self.coming)
        self.coming.clear()
        return found

    def close(self) -> None:
        self.closed = True


class Gpu:
    """A GPU that comes as far as the test says. `None` is its current stream."""

    devices = (0,)

    def __init__(self) -> None:
        self.streams: list[object] = []
        self.asked = 0
        self.reached_after = 10**9
        self.is_past = False
        self.closed = False

    def points(self, stream) -> dict[str, StreamPoint]:
        self.streams.append(stream)
        return {"pp0.tp0": POINT}

    def reached(self, stream, also=frozenset()):
        self.streams.append(stream)

        def ask() -> bool:
            self.asked += 1
            return self.asked > self.reached_after

        return ask

    def passed(self, points) -> bool:
        self.points_asked = points
        return self.is_past

    def close(self) -> None:
        self.closed = True


class Mapped:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


def engine(kind, *, gpu: Gpu | None = None):
    gpu = gpu or Gpu()
    made = kind(Attachment(Link(), None, Mapped(), {}, gpu), close_timeout_s=0.05)
    return made, made._link, gpu


def event(room: int, kind: str = "committed") -> RoomEvent:
    return RoomEvent(room=room, generation=1, kind=kind)


def test_a_publication_names_the_point_of_its_stream():
    prefill, link, gpu = engine(PrefillEngine)
    prefill.publish(1, 256)
    prefill.publish(1, 512, stream=7)
    assert [message.after for message in link.said if isinstance(message, Publish)] == [{"pp0.tp0": POINT}] * 2
    assert gpu.streams == [None, 7]


def test_a_finished_room_is_let_go_of_when_the_gpu_is_past_what_was_published():
    prefill, link, gpu = engine(PrefillEngine)
    prefill.begin(1, prompt_tokens=512)
    prefill.publish(1, 512)
    prefill.finish(1)
    assert [type(message) for message in link.said] == [Begin, Publish, Finish]
    assert (link.said[0].by_gpu, link.said[2].by_gpu) == (True, True)
    gpu.is_past = True
    prefill.events()
    assert isinstance(link.said[-1], Release)
    assert (link.said[-1].room, link.said[-1].generation, gpu.points_asked) == (1, 3, {POINT})
    assert not prefill._begun


def test_a_gpu_that_is_done_already_costs_no_delay():
    decode, link, gpu = engine(DecodeEngine)
    gpu.reached_after = 0
    decode.release(1)
    assert len(link.said) == 1


def test_every_call_sends_what_is_due_before_it():
    decode, link, gpu = engine(DecodeEngine)
    decode.release(1)
    gpu.reached_after = gpu.asked
    decode.provide(2, {})
    assert [message.room for message in link.said] == [1, 2]


def test_closing_waits_for_the_gpu_and_leaves_all_the_same():
    decode, link, gpu = engine(DecodeEngine)
    decode.release(1)
    gpu.reached_after = gpu.asked + 3
    decode.close()
    assert ([message.type for message in link.said], link.closed, gpu.closed) == (["release", "detach"], True, True)
    decode.close()
    stuck, link, gpu = engine(DecodeEngine)
    stuck.release(1)
    with pytest.raises(DeadlineError, match="release of room 1, close"):
        stuck.close()
    assert (link.said, link.closed, stuck._attachment.mapped.closed) == ([], True, True)


@pytest.mark.parametrize("kind", [PrefillEngine, DecodeEngine])
def test_an_engine_without_memory_hears_of_it_after_the_last_event(kind):
    made, link, gpu = engine(kind)
    gpu.reached_after = 0
    link.lost = "rank worker pp0.tp0 is gone"
    link.coming.append(event(5, "failed"))
    assert [found.room for found in made.events()] == [5]
    with pytest.raises(DetachedError, match=r"pp0\.tp0 is gone; close it and attach again"):
        made.events(1.0)
    made.abort(5, "lost")
    assert [message.room for message in link.said] == [5]
    made.close()
