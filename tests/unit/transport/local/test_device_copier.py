"""Transfers that a device makes: bounded slices, and silence only when the device has passed the last one."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import TransferState
from kvbridge.transport.local.access import DeviceAccess
from kvbridge.transport.local.device_copier import CopyLimits, DeviceCopier, DeviceJob, DeviceTransfer
from kvbridge.transport.local.streams import STREAM_SLICES
from kvbridge.transport.local.ways import Route, Way
from tests.helpers.fake_streams import FakeStream
from tests.helpers.manual_clock import ManualClock

SIZE = 64
LIMITS = CopyLimits(slice_bytes=4 * SIZE, quiet_timeout_s=2.0)
ROUTE = Route(Way.KERNEL, 0, over_host_link=True)
KEPT: list[np.ndarray] = []
"""Operations are bare addresses, so what they point to has to be kept until a test is over."""


@pytest.fixture(autouse=True)
def keep():
    yield
    KEPT.clear()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def blocks(count: int) -> tuple[Operations, np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(1, 256, count * SIZE, dtype=np.uint8)
    target = np.zeros_like(source)
    KEPT.extend((source, target))
    steps = np.arange(count, dtype=np.uint64) * np.uint64(SIZE)
    lengths = np.full(count, SIZE, dtype=np.uint64)
    return (
        Operations(steps + np.uint64(source.ctypes.data), steps + np.uint64(target.ctypes.data), lengths),
        source,
        target,
    )


def begin(stream: FakeStream, operations: Operations, clock: ManualClock, **job: object) -> DeviceTransfer:
    facts = {"operations": operations, "peer": "p", "deadline_s": 5.0, "keep_alive": object(), **job}
    return DeviceTransfer(DeviceJob(**facts), stream, LIMITS, clock=clock)


def test_slices_are_bounded_by_bytes_and_by_operations_and_the_stream_by_slices(clock: ManualClock) -> None:
    stream = FakeStream()
    operations, source, target = blocks(100)
    transfer = begin(stream, operations, clock)
    assert transfer.poll().state is TransferState.ACTIVE
    assert [len(part) for part in stream.started] == [4] * STREAM_SLICES
    stream.run(1)
    transfer.poll()
    assert len(stream.started) == STREAM_SLICES + 1
    while transfer.poll().state is TransferState.ACTIVE:
        stream.run()
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()
    assert stream.slices == stream.transfers == stream.marks == 0
    assert transfer.keep_alive is None
    narrow = FakeStream(slice_operations=3)
    begin(narrow, operations, clock).poll()
    assert {len(part) for part in narrow.started} == {3}
    prompt = FakeStream(slice_operations=3, first_operations=1)
    begin(prompt, operations, clock).poll()
    assert [len(part) for part in prompt.started] == [1, 3, 3, 3], "few first, so that the device begins at once"


def test_an_operation_longer_than_a_slice_is_a_slice(clock: ManualClock) -> None:
    stream = FakeStream()
    operations, source, target = blocks(10)
    one = Operations(operations.source[:1], operations.destination[:1], np.array([10 * SIZE], dtype=np.uint64))
    transfer = begin(stream, one, clock)
    transfer.poll()
    stream.run()
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()


def test_transfers_share_a_stream(clock: ManualClock) -> None:
    stream = FakeStream()
    first, second = (begin(stream, blocks(100)[0], clock) for _ in range(2))
    first.poll()
    second.poll()
    assert len(stream.started) == STREAM_SLICES
    assert (len(first._slices), len(second._slices)) == (STREAM_SLICES // 2, STREAM_SLICES // 2)


def test_abort_starts_nothing_further_and_is_quiet_when_the_device_is(clock: ManualClock) -> None:
    stream = FakeStream()
    operations, _, target = blocks(100)
    transfer = begin(stream, operations, clock)
    transfer.poll()
    transfer.abort("first")
    transfer.abort("second")
    assert transfer.poll().state is TransferState.ACTIVE  # the device may still read the source
    stream.run(STREAM_SLICES - 1)
    assert transfer.poll().state is TransferState.ACTIVE
    assert transfer.keep_alive is not None
    stream.run()
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert f"aborted: first ({4 * STREAM_SLICES} of 100" in status.error
    assert len(stream.started) == STREAM_SLICES
    assert not target[STREAM_SLICES * 4 * SIZE :].any()
    assert transfer.keep_alive is None


def test_abort_after_the_last_byte_changes_nothing(clock: ManualClock) -> None:
    stream = FakeStream()
    transfer = begin(stream, blocks(4)[0], clock)
    transfer.poll()
    transfer.abort("late")
    stream.run()
    assert transfer.poll().state is TransferState.DONE


def test_deadline_by_the_clock_that_was_given(clock: ManualClock) -> None:
    stream = FakeStream()
    transfer = begin(stream, blocks(100)[0], clock)
    transfer.poll()
    clock.advance(5.0)
    assert transfer.poll().state is TransferState.ACTIVE
    stream.run()
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "deadline of 5 s" in status.error


def test_a_device_that_does_not_finish_is_not_quiet_and_keeps_its_memory(clock: ManualClock) -> None:
    stream = FakeStream()
    transfer = begin(stream, blocks(100)[0], clock)
    transfer.poll()
    transfer.abort("enough")
    transfer.poll()
    clock.advance(2.0)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    assert transfer.keep_alive is not None
    assert not transfer.drained()
    stream.run()
    assert transfer.drained()
    assert transfer.keep_alive is None
    assert transfer.poll() == status


def test_a_device_that_has_failed_is_not_quiet_at_once(clock: ManualClock) -> None:
    stream = FakeStream()
    transfer = begin(stream, blocks(100)[0], clock)
    transfer.poll()
    stream.broken = True
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    assert "illegal memory access" in status.error
    assert not transfer.drained()


def test_a_slice_that_was_refused_is_waited_for(clock: ManualClock) -> None:
    """Of a batch that an engine refuses, a part may have been taken."""
    stream = FakeStream()
    transfer = begin(stream, blocks(100)[0], clock)
    stream.run()
    stream.refusals.append("no such way")
    transfer.poll()
    assert stream.slices == 1
    assert transfer.poll().state is TransferState.FAILED_QUIET
    assert "no such way (0 of 100" in transfer.poll().error
    again = begin(stream, blocks(100)[0], clock)
    again.poll()
    stream.refusals.append("only now")
    stream.run(1)
    again.poll()
    assert again.poll().state is TransferState.ACTIVE
    stream.run()
    status = again.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert f"only now ({4 * STREAM_SLICES} of 100" in status.error


def test_nothing_is_started_before_the_memory_is_registered(clock: ManualClock) -> None:
    gate = threading.Event()

    def register(_: object):
        assert gate.wait(10)
        return lambda: None

    access = DeviceAccess(1, 2, register, label="pool")
    stream = FakeStream()
    transfer = begin(stream, blocks(4)[0], clock, accesses=[access], deadline_s=50.0)
    late = begin(stream, blocks(4)[0], clock, accesses=[access])
    assert transfer.poll().state is TransferState.ACTIVE
    assert not stream.started
    clock.advance(5.0)
    status = late.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "while it waited for <DeviceAccess to pool: 0 of 2 bytes, being registered>" in status.error
    gate.set()
    access.wait(10)
    transfer.poll()
    stream.run()
    assert transfer.poll().state is TransferState.DONE


def test_memory_that_cannot_be_registered_fails_the_transfer(clock: ManualClock) -> None:
    def register(_: object):
        raise TransportError("raise the memlock limit")

    access = DeviceAccess(1, 2, register, label="pool")
    access.wait(10)
    status = begin(FakeStream(), blocks(4)[0], clock, accesses=[access]).poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "raise the memlock limit" in status.error


class World:
    """A copier whose streams copy only when told to."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.copier = DeviceCopier(self.make, LIMITS)

    def make(self, route: Route) -> FakeStream:
        self.streams.append(FakeStream(route))
        return self.streams[-1]

    def begin(self, clock: ManualClock, count: int = 4, route: Route = ROUTE):
        job = DeviceJob(blocks(count)[0], "p", 5.0)
        return self.copier.begin(route, job, clock=clock)


def test_one_stream_a_route_made_once(clock: ManualClock) -> None:
    world = World()
    other = Route(Way.ENGINES, 0)
    world.copier.prepare([ROUTE, other])
    world.begin(clock)
    world.begin(clock, route=other)
    assert [stream.route for stream in world.streams] == [ROUTE, other]


def test_closing_waits_for_what_was_started_and_ends_the_rest(clock: ManualClock) -> None:
    world = World()
    transfer = world.begin(clock, 100)
    transfer.poll()
    world.streams[0].at_once = True
    world.copier.close(timeout_s=10.0)
    assert transfer.poll().state is TransferState.FAILED_QUIET
    assert "closed" in transfer.poll().error
    assert world.streams[0].closed
    world.copier.close(timeout_s=10.0)


def test_closing_says_so_when_a_device_does_not_finish(clock: ManualClock) -> None:
    world = World()
    transfer = world.begin(clock, 100)
    transfer.poll()
    with pytest.raises(TransportError, match="before this process has ended"):
        world.copier.close(timeout_s=0.01)
    assert not world.streams[0].closed
    world.streams[0].run()
    world.copier.close(timeout_s=10.0)
    assert world.streams[0].closed


def test_closing_does_not_forget_a_transfer_that_was_not_quiet(clock: ManualClock) -> None:
    world = World()
    transfer = world.begin(clock, 100)
    transfer.poll()
    transfer.abort("enough")
    clock.advance(2.0)
    assert transfer.poll().state is TransferState.FAILED_NOT_QUIET
    world.begin(clock)  # which forgets those that have ended
    with pytest.raises(TransportError, match="1 transfers"):
        world.copier.close(timeout_s=0.01)


def test_closing_does_not_wait_for_a_device_that_has_failed(clock: ManualClock) -> None:
    world = World()
    world.begin(clock, 100).poll()
    world.streams[0].broken = True
    with pytest.raises(TransportError, match="illegal memory access"):
        world.copier.close(timeout_s=1000.0)
