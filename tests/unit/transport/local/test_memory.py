"""Memory made usable by devices in the background, pages of fresh mappings, and copies by the processor."""

import threading
import time
import weakref

import pytest

from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Closing
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import memory as local_memory
from kvbridge.transport.local.gpu import DeviceAccess
from kvbridge.transport.local.transport import copy_transfer
from kvbridge.transport.windowed import WindowedTransfer

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
