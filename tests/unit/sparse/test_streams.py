"""The order of waits that a GPU would be told, written down by a device that does everything at once."""

from contextlib import nullcontext

import pytest

from kvbridge.sparse import cache
from kvbridge.sparse.streams import Point, SideStream, Streams
from tests.helpers.sparse_simulation import SparseSimulation, settings


class Mark(Point):
    """A point that knows where it was marked last."""

    def __init__(self, log: list) -> None:
        self.log = log
        self.marked_on = ""
        self.done = True

    def reached(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if self.marked_on:
            self.log.append(("host waits", self.marked_on))


class WrittenSideStream(SideStream):
    def __init__(self, log: list, name: str) -> None:
        self.log, self.name = log, name

    def handle(self) -> int:
        self.log.append((self.name, "launches"))
        return 0

    def follow(self, other: SideStream | None = None) -> None:
        self.log.append((self.name, f"follows {other.name if other else 'compute'}"))

    def mark(self, point: Point) -> None:
        point.marked_on = self.name
        self.log.append((self.name, "marks", id(point)))

    def running(self):
        return nullcontext()


class WrittenStreams(Streams):
    def __init__(self) -> None:
        self.log: list = []
        self.side_streams = iter(("load", "backup"))

    def handle(self) -> int:
        self.log.append(("compute", "launches"))
        return 0

    def point(self) -> Point:
        return Mark(self.log)

    def side_stream(self) -> SideStream:
        return WrittenSideStream(self.log, next(self.side_streams))

    def mark(self, point: Point) -> None:
        point.marked_on = "compute"
        self.log.append(("compute", "marks", id(point)))

    def wait(self, point: Point) -> None:
        self.log.append(("compute", f"waits for {point.marked_on}", id(point)))

    def synchronize(self) -> None:
        pass


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(cache, "Streams", lambda device: WrittenStreams())
    return SparseSimulation(settings(max_requests=2))


def log_of(world: SparseSimulation, call) -> list:
    log = world.cache._streams.log
    log.clear()
    call()
    return list(log)


def test_both_side_streams_come_after_the_memory_was_set(world):
    follows = [name for name, what, *_ in world.cache._streams.log if what == "follows compute"]
    assert follows == ["load", "backup"]


def test_admission_comes_after_steps_and_backups_and_compute_waits_for_it_once(world):
    admission = log_of(world, lambda: world.admit(0, 1000, more_tokens=600))
    assert admission[:3] == [("load", "follows compute"), ("load", "follows backup"), ("load", "launches")]
    point = admission[-1]
    assert point[:2] == ("load", "marks")
    step = log_of(world, lambda: world.step([0]))
    assert step[0] == ("compute", "waits for load", point[2])
    assert not [entry for entry in log_of(world, lambda: world.step([0])) if entry[1].startswith("waits")]


@pytest.mark.slow
def test_a_backup_follows_the_step_that_completed_its_page_and_is_waited_for_two_pages_later(world):
    world.admit(0, 0, more_tokens=1600)
    marked, waited = {}, {}
    for tokens in range(1, 1500):
        log = log_of(world, lambda: world.step([0], verify=False))
        backup = [entry for entry in log if entry[0] == "backup"]
        if tokens % 256 == 0:
            assert [entry[1] for entry in backup] == ["follows compute", "launches", "marks"]
            assert max(at for at, one in enumerate(log) if one[:2] == ("compute", "launches")) < log.index(backup[0])
            marked[tokens // 256 - 1] = backup[-1][2]
        else:
            assert not backup
        for entry in log:
            if entry[1] == "waits for backup":
                waited[(tokens // 4 - 1) // 64 - 2] = entry[2]
                assert tokens % 256 == 4, "in the step of the first row that is written over it"
                assert log.index(entry) < log.index(("compute", "launches"))
    assert waited == {page: marked[page] for page in range(len(waited))}
    assert len(waited) == 4
    assert len(set(marked.values())) == 2, "each page of the ring has a point of its own"


def test_release_is_quiet_after_steps_and_backups(world):
    world.admit(0, 100)
    quiet = None

    def release():
        nonlocal quiet
        quiet = world.cache.release(0)

    log = log_of(world, release)
    assert [entry[:2] for entry in log] == [
        ("compute", "waits for load"),
        ("backup", "follows compute"),
        ("backup", "marks"),
    ]
    assert quiet.reached()


def test_no_host_wait_as_long_as_the_device_keeps_up(world):
    """Sixteen steps may be under way; the seventeenth uses the first one's buffer again and makes sure that it was read."""
    world.admit(0, 0, more_tokens=1000)
    log = log_of(world, lambda: [world.step([0]) for _ in range(16)])
    assert not [entry for entry in log if entry[0] == "host waits"]
    assert [entry for entry in log_of(world, lambda: world.step([0])) if entry[0] == "host waits"] == [
        ("host waits", "compute")
    ]
