"""The copier: slices in turn, aborts and deadlines between them, and never a transfer without an end."""

from __future__ import annotations

import threading
import weakref

import numpy as np
import pytest

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import copier as local_copier
from kvbridge.transport.local.copier import POPULATE_STEP_BYTES, Copier, CopyTransfer
from tests.contract.harness import wait
from tests.helpers.manual_clock import ManualClock

SLICE = 1 << 16
LIMIT_S = 10.0
KEPT: list[np.ndarray] = []
"""Operations are bare addresses, so what they point to has to be kept until a test is over."""


@pytest.fixture(autouse=True)
def keep():
    yield
    KEPT.clear()


def blocks(count: int, size: int = SLICE) -> tuple[Operations, np.ndarray, np.ndarray]:
    source = np.random.default_rng(0).integers(1, 256, count * size, dtype=np.uint8)
    target = np.zeros_like(source)
    KEPT.extend((source, target))
    steps = np.arange(count, dtype=np.uint64) * np.uint64(size)
    lengths = np.full(count, size, dtype=np.uint64)
    return (
        Operations(steps + np.uint64(source.ctypes.data), steps + np.uint64(target.ctypes.data), lengths),
        source,
        target,
    )


def finish(transfer: CopyTransfer) -> TransferState:
    return wait(transfer, LIMIT_S).state


def test_slices_hold_as_many_operations_as_fit() -> None:
    operations, source, target = blocks(10)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5)
    transfer.advance(3 * SLICE)
    assert (target[: 3 * SLICE] == source[: 3 * SLICE]).all()
    assert not target[3 * SLICE :].any()
    for _ in range(2):
        transfer.advance(3 * SLICE)
        assert transfer.active
    transfer.advance(3 * SLICE)
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()


def test_operation_longer_than_a_slice_still_moves() -> None:
    operations, source, target = blocks(2)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5)
    transfer.advance(1)
    assert transfer.active
    transfer.advance(1)
    assert transfer.poll().state is TransferState.DONE
    assert (target == source).all()


def test_slices_are_bounded_by_operations_too() -> None:
    operations, _, target = blocks(local_copier.SLICE_OPERATIONS + 1, size=1)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5)
    transfer.advance(SLICE)
    assert np.count_nonzero(target) == local_copier.SLICE_OPERATIONS


def test_abort_takes_effect_before_the_next_slice_and_drops_the_mapping() -> None:
    operations, _, target = blocks(4)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5, keep_alive=object())
    transfer.advance(SLICE)
    transfer.abort("first")
    transfer.abort("second")
    transfer.advance(SLICE)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "aborted: first" in status.error
    assert "1 of 4" in status.error
    assert not target[SLICE:].any()
    assert transfer.keep_alive is None


def test_deadline_by_the_clock_that_was_given() -> None:
    clock = ManualClock()
    operations, _, _ = blocks(4)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5, clock=clock)
    clock.advance(4.9)
    transfer.advance(SLICE)
    clock.advance(0.1)
    transfer.advance(SLICE)
    assert "deadline of 5 s" in transfer.poll().error


def test_abort_after_the_last_byte_changes_nothing() -> None:
    operations, _, _ = blocks(1)
    transfer = CopyTransfer(operations, peer="p", deadline_s=5)
    transfer.advance(SLICE)
    transfer.abort("late")
    transfer.advance(SLICE)
    assert transfer.poll().state is TransferState.DONE


def test_thread_copies_and_small_ones_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    original = CopyTransfer.advance

    def recorded(self: CopyTransfer, slice_bytes: int) -> None:
        order.append(self._peer)
        original(self, slice_bytes)

    monkeypatch.setattr(CopyTransfer, "advance", recorded)
    copier = Copier(slice_bytes=SLICE)
    (long, source, target), (short, _, _) = blocks(50), blocks(1)
    first, second = CopyTransfer(long, peer="long", deadline_s=5), CopyTransfer(short, peer="short", deadline_s=5)
    with copier._changed:  # both are queued before the thread takes its first slice
        copier.add(first)
        copier.add(second)
    assert finish(first) is TransferState.DONE
    assert finish(second) is TransferState.DONE
    assert (target == source).all()
    assert order.index("short") <= 1
    copier.close(timeout_s=LIMIT_S)


def test_close_ends_what_is_left_and_nothing_can_be_added() -> None:
    copier = Copier(slice_bytes=SLICE)
    operations, _, target = blocks(100)
    gate, entered = threading.Event(), threading.Event()

    class Held(CopyTransfer):
        def advance(self, slice_bytes: int) -> None:
            entered.set()
            gate.wait(LIMIT_S)
            super().advance(slice_bytes)

    held, waiting = Held(operations, peer="p", deadline_s=60), CopyTransfer(operations, peer="p", deadline_s=60)
    copier.add(held)
    copier.add(waiting)
    assert entered.wait(LIMIT_S)
    with pytest.raises(TransportError, match="close_timeout_s"):
        copier.close(timeout_s=0.01)
    gate.set()
    copier.close(timeout_s=LIMIT_S)
    assert held.poll().state is waiting.poll().state is TransferState.FAILED_QUIET
    before = target.copy()
    assert (target == before).all()
    with pytest.raises(TransportError, match="closed"):
        copier.add(waiting)
    copier.close(timeout_s=LIMIT_S)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_the_thread_ends_every_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("defect")

    monkeypatch.setattr(local_copier, "copy_operations", broken)
    copier = Copier(slice_bytes=SLICE)
    transfer = CopyTransfer(blocks(1)[0], peer="p", deadline_s=5)
    copier.add(transfer)
    assert finish(transfer) is TransferState.FAILED_QUIET
    assert copier._thread is not None
    copier._thread.join(LIMIT_S)
    with pytest.raises(TransportError):
        copier.add(transfer)


def test_populating_keeps_the_bytes() -> None:
    import mmap

    mapping = mmap.mmap(-1, 1 << 20)
    mapping[:3] = b"abc"
    view = np.frombuffer(mapping, dtype=np.uint8)
    copier = Copier(slice_bytes=SLICE)
    copier.populate(int(view.ctypes.data), len(view), mapping)
    transfer = CopyTransfer(blocks(1)[0], peer="p", deadline_s=5)
    copier.add(transfer)
    assert finish(transfer) is TransferState.DONE
    copier.close(timeout_s=LIMIT_S)
    assert mapping[:4] == b"abc\0"


def test_pages_that_are_forgotten_while_they_are_populated_stay_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps them mapped holds the lock by which their owner sees a writer."""
    inside, go_on, steps = threading.Event(), threading.Event(), []

    class Libc:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            steps.append(address)
            inside.set()
            go_on.wait(LIMIT_S)
            return 0

    class Kept:
        pass

    monkeypatch.setattr(local_copier, "_libc", Libc)
    copier, kept = Copier(slice_bytes=SLICE), Kept()
    seen = weakref.ref(kept)
    copier.populate(1 << 30, 1_000 * POPULATE_STEP_BYTES, kept)
    assert inside.wait(LIMIT_S)
    copier.abort_to(kept, "the peer was disconnected")
    del kept
    go_on.set()
    transfer = CopyTransfer(blocks(1)[0], peer="p", deadline_s=5)
    copier.add(transfer)
    assert finish(transfer) is TransferState.DONE
    assert (steps, seen()) == ([1 << 30], None)
    copier.close(timeout_s=LIMIT_S)
