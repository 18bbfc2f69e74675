"""Transfers that a device makes: bounded slices, silence only when the last has passed; memory made usable by devices.

Windows, deadlines and aborts are those of every transfer (`test_windowed.py`).
"""

import threading
import time
import weakref

import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Closing
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import memory as local_memory
from kvbridge.transport.local.gpu import STREAM_SLICES, DeviceAccess, DeviceCopier, Route, Way
from kvbridge.transport.local.transport import copy_transfer
from kvbridge.transport.windowed import WindowedTransfer
from tests.helpers.fake_cuda import FakeStream
from tests.helpers.manual_clock import ManualClock

SIZE = 64
ROUTE = Route(Way.KERNEL, 0, over_host_link=True)


class Undone(Closing):
    def close(self) -> None:
        pass


class Kept:
    """An object that keeps memory mapped."""


class World:
    """A copier whose streams copy only when told to."""

    def __init__(self, **stream: int) -> None:
        self.streams: list[FakeStream] = []
        self.clock = ManualClock()
        self.copier = DeviceCopier(self.make, slice_bytes=4 * SIZE, quiet_timeout_s=2.0, clock=self.clock)
        self._facts = stream

    @property
    def stream(self) -> FakeStream:
        return self.streams[0]

    def make(self, route: Route) -> FakeStream:
        self.streams.append(FakeStream(route, **self._facts))
        return self.streams[-1]

    def begin(self, operations: Operations, route: Route = ROUTE, deadline_s: float = 5.0, **more: object):
        return self.copier.begin(route, operations, peer="p", deadline_s=deadline_s, **more)


def test_slices_are_bounded_by_bytes_and_by_operations_and_the_stream_by_slices(blocks) -> None:
    world = World()
    operations, source, target = blocks(100)
    transfer = world.begin(operations)
    assert transfer.poll().state is TransferState.ACTIVE
    stream = world.stream
    assert [len(part) for part in stream.started] == [4] * STREAM_SLICES
    stream.run(1)
    transfer.poll()
    assert len(stream.started) == STREAM_SLICES + 1
    while transfer.poll().state is TransferState.ACTIVE:
        stream.run()
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()
    assert stream.marks == 0
    prompt = World(slice_operations=3, first_operations=1)
    prompt.begin(operations).poll()
    assert [len(part) for part in prompt.stream.started] == [1, 3, 3, 3], "few first, so that the device begins at once"


def test_transfers_share_a_stream(blocks) -> None:
    world = World()
    for transfer in [world.begin(blocks(100)[0]) for _ in range(2)]:
        transfer.poll()
        assert transfer._held.operations == 4 * STREAM_SLICES // 2
    assert len(world.stream.started) == STREAM_SLICES


def test_abort_starts_nothing_further_and_memory_is_kept_until_the_device_is_quiet(blocks) -> None:
    world, kept = World(), Kept()
    seen = weakref.ref(kept)
    operations, _, target = blocks(100)
    transfer = world.begin(operations, keep_alive=kept)
    del kept
    transfer.poll()
    transfer.abort("first")
    assert transfer.poll().state is TransferState.ACTIVE  # the device may still read the source
    world.stream.run(STREAM_SLICES - 1)
    assert transfer.poll().state is TransferState.ACTIVE
    assert seen() is not None
    world.stream.run()
    status = transfer.poll()
    assert (status.state, status.in_transit) == (TransferState.FAILED_QUIET, False)
    assert "aborted: first (0 of 100" in status.error
    assert len(world.stream.started) == STREAM_SLICES
    assert not target[STREAM_SLICES * 4 * SIZE :].any()
    assert seen() is None


def test_a_device_that_does_not_finish_is_not_quiet_and_keeps_its_memory(blocks) -> None:
    world, kept = World(), Kept()
    seen = weakref.ref(kept)
    transfer = world.begin(blocks(100)[0], keep_alive=kept)
    del kept
    transfer.poll()
    transfer.abort("enough")
    world.clock.advance(2.0)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    another = world.begin(blocks(4)[0])
    another.poll()
    assert seen() is not None
    assert len(world.stream.started) == STREAM_SLICES, "what may be on its way counts"
    world.stream.run()
    world.begin(blocks(4)[0])
    assert seen() is None
    another.poll()
    assert len(world.stream.started) == STREAM_SLICES + 1
    assert transfer.poll() == status


def test_a_device_that_has_failed_is_not_quiet_at_once(blocks) -> None:
    world = World()
    transfer = world.begin(blocks(100)[0])
    transfer.poll()
    world.stream.broken = True
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    assert "illegal memory access" in status.error


def test_a_slice_that_was_refused_is_waited_for_and_not_confirmed(blocks) -> None:
    """An engine that refuses a batch may have taken a part of it."""
    world = World()
    transfer = world.begin(blocks(100)[0])
    transfer.poll()
    world.stream.refusals.append("only now")
    world.stream.run(1)
    transfer.poll()
    assert transfer.poll().state is TransferState.ACTIVE
    world.stream.run()
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "only now" in status.error
    assert sorted(index for part in status.unconfirmed for index in range(100)[part]) == [*range(16, 100)]


def test_nothing_is_started_before_the_memory_is_registered(blocks) -> None:
    gate, world = threading.Event(), World()

    def register(_: object):
        assert gate.wait(10)
        return Undone()

    access = DeviceAccess(2, register, label="pool")
    transfer = world.begin(blocks(4)[0], accesses=[access], deadline_s=50.0)
    late = world.begin(blocks(4)[0], accesses=[access])
    assert transfer.poll().state is TransferState.ACTIVE
    assert not world.stream.started
    world.clock.advance(5.0)
    status = late.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "while it waited for <DeviceAccess to pool: 0 of 2 bytes, being registered>" in status.error
    gate.set()
    access.wait(10)
    transfer.poll()
    world.stream.run()
    assert transfer.poll().state is TransferState.DONE


def test_closing_says_so_when_a_device_does_not_finish(blocks) -> None:
    """Also what a transfer had started that has ended without being quiet."""
    world = World()
    transfer = world.begin(blocks(100)[0])
    transfer.poll()
    transfer.abort("enough")
    world.clock.advance(2.0)
    assert transfer.poll().state is TransferState.FAILED_NOT_QUIET
    world.begin(blocks(4)[0])  # which forgets those that have ended
    with pytest.raises(TransportError, match=r"what \d transfers had started.* before this process has ended"):
        world.copier.close(timeout_s=0.01)
    assert not world.stream.closed
    world.stream.run()
    world.copier.close(timeout_s=10.0)
    assert world.stream.closed


def test_closing_does_not_wait_for_a_device_that_has_failed(blocks) -> None:
    world = World()
    world.begin(blocks(100)[0]).poll()
    world.stream.broken = True
    with pytest.raises(TransportError, match="illegal memory access"):
        world.copier.close(timeout_s=1000.0)


LIMIT_S = 10.0


class Registered(Closing):
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def close(self) -> None:
        self.told.append("undone")


def test_ready_when_registered_and_undone_before_what_follows() -> None:
    order: list[str] = []
    ended = threading.Event()

    def register(report):
        report(3, 3)
        order.append("registered")
        return Registered(order)

    access = DeviceAccess(3, register, label="pool")
    access.wait(LIMIT_S)
    assert access.ready
    assert repr(access) == "<DeviceAccess to pool: 3 of 3 bytes, ready>"
    access.close(then=lambda: (order.append("unmapped"), ended.set()))
    assert ended.wait(LIMIT_S)
    assert order == ["registered", "undone", "unmapped"]


def test_without_a_thread_memory_is_refused_in_words_and_given_back_all_the_same(monkeypatch) -> None:
    """A process may have no more threads for a while."""
    undone: list[str] = []
    access = DeviceAccess(3, lambda _: Registered(undone), label="pool")
    assert access.wait(LIMIT_S)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refused = DeviceAccess(3, lambda _: Registered(undone), label="another pool")
    assert not refused.ready
    assert refused.error.startswith("another pool: no thread can be started for 'kvbridge-register': can't start")
    refused.close(then=lambda: undone.append("after the refused one"))
    access.close(then=lambda: undone.append("unmapped"))
    assert undone == ["after the refused one", "undone", "unmapped"]


def test_closing_meanwhile_ends_it_with_the_present_piece() -> None:
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    pieces: list[int] = []

    def register(report):
        for done in (1, 2, 3):
            pieces.append(done)
            entered.set()
            assert go_on.wait(LIMIT_S)
            report(done, 3)
        return Registered([])

    access = DeviceAccess(3, register, label="pool")
    assert entered.wait(LIMIT_S)
    access.close(then=ended.set)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(LIMIT_S)
    assert pieces == [1]
    assert not access.ready


SLICE = 1 << 16


def copying(
    operations: Operations, slice_bytes: int = SLICE, deadline_s: float = 5, **facts: object
) -> WindowedTransfer:
    made = copy_transfer(operations, "p", deadline_s, slice_bytes=slice_bytes, **facts)
    made.pumped = True
    return made


def test_slices_hold_as_many_operations_as_fit(blocks) -> None:
    operations, source, target = blocks(10, SLICE)
    transfer = copying(operations, 3 * SLICE)
    transfer.push()
    assert (target[: 3 * SLICE] == source[: 3 * SLICE]).all()
    assert not target[3 * SLICE :].any()
    for _ in range(3):
        assert transfer.push()
        assert transfer.poll().state is TransferState.ACTIVE
    transfer.push()
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()


def test_pages_that_nobody_keeps_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that keeps them mapped holds the lock by which their owner sees a writer."""
    inside, go_on, steps = threading.Event(), threading.Event(), []

    class Libc:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            steps.append(address)
            inside.set()
            go_on.wait(LIMIT_S)
            return 0

    class File:
        address, length_bytes = 1 << 30, 1_000 * local_memory.POPULATE_STEP_BYTES

    monkeypatch.setattr(local_memory, "_libc", Libc)
    file = File()
    seen = weakref.ref(file)
    local_memory.populate(file)
    assert inside.wait(LIMIT_S)
    del file
    assert seen() is not None, "while the kernel is at its pages"
    go_on.set()
    while seen() is not None:
        time.sleep(0.001)
    assert steps == [1 << 30]
