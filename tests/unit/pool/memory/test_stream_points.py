import pytest

from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.wire.messages import StreamPoint
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import FEWEST_EVENTS, EventRing, StreamPoints
from tests.helpers.fake_cuda import FakeEvent

UUID = "ab" * 16


class Ring:
    """A ring whose events a test can see."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.ring = EventRing(UUID, self.create)

    def create(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def event(self, point: StreamPoint) -> FakeEvent:
        return next(event for event in self.events if event.handle == point.handle)


@pytest.fixture
def ring():
    made = Ring()
    yield made
    made.ring.close()
    assert not any(event.closed for event in made.events), "another process may still ask for them"
    assert gpu_memory._own_events == {}


class Others:
    """Events of another process, as they are opened here."""

    def __init__(self) -> None:
        self.events: dict[bytes, FakeEvent] = {}
        self.opened: list[bytes] = []

    def open(self, point: StreamPoint) -> FakeEvent:
        self.opened.append(point.handle)
        self.events[point.handle] = FakeEvent(point.handle)
        self.events[point.handle].done = False
        return self.events[point.handle]


def point(number: int = 0, ring: str = "their ring") -> StreamPoint:
    return StreamPoint(ring=ring, handle=bytes([number]) * 64, device_uuid=UUID)


def test_an_event_is_used_again_only_when_the_older_half_has_been_reached(ring):
    points = [ring.ring.record(1) for _ in range(FEWEST_EVENTS)]
    for one in points[: FEWEST_EVENTS // 2]:
        ring.event(one).done = True
    assert ring.ring.record(1).handle not in {one.handle for one in points}
    for one in points:
        ring.event(one).done = True
    assert ring.ring.record(1).handle == points[0].handle
    assert ring.ring.record(1).handle == points[1].handle
    assert len(ring.ring._entries) == len(ring.events) == FEWEST_EVENTS + 1


def test_points_are_reached_when_all_are(ring):
    theirs = Others()
    asked = StreamPoints(theirs.open)
    assert asked.reached(())
    both = [point(1), point(2)]
    assert not asked.reached(both)
    theirs.events[point(1).handle].done = True
    assert not asked.reached(both)
    theirs.events[point(2).handle].done = True
    assert asked.reached(both)
    assert theirs.opened == [point(1).handle, point(2).handle]
    asked.close()
    assert all(event.closed for event in theirs.events.values())


def test_points_of_this_very_process_are_not_opened(ring):
    def never(_: StreamPoint) -> FakeEvent:
        raise AssertionError("CUDA cannot open a process's own event")

    asked = StreamPoints(never)
    own = ring.ring.record(1)
    assert not asked.reached([own])
    ring.event(own).done = True
    assert asked.reached([own])


def test_one_that_cannot_be_asked_is_an_error_of_the_engine(ring):
    def gone(_: StreamPoint) -> FakeEvent:
        raise RegistrationError("cuda:0 cannot open another process's event")

    with pytest.raises(
        TransportError, match="cannot open another process's event; the engine process has probably ended"
    ):
        StreamPoints(gone).reached([point()])
    theirs = Others()
    asked = StreamPoints(theirs.open)
    assert not asked.reached([point()])
    theirs.events[point().handle].broken = TransportError("CUDA: cudaEventQuery failed")
    with pytest.raises(TransportError, match="cannot be asked"):
        asked.reached([point()])


def test_the_ring_that_was_asked_for_longest_ago_is_closed_when_there_are_many(ring, monkeypatch):
    monkeypatch.setattr(gpu_memory, "MOST_RINGS", 2)
    theirs = Others()
    asked = StreamPoints(theirs.open)
    for number, name in enumerate(["a", "b", "a", "c"]):
        asked.reached([point(number, name)])
    assert [theirs.events[point(number).handle].closed for number in range(4)] == [False, True, False, False]
    asked.reached([point(1, "b")])
    assert theirs.opened.count(point(1).handle) == 2
