"""Copies by the processor: slices in turn, aborts and deadlines between them, and pages populated when there is nothing to do."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest

from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import TransferState
from kvbridge.transport.local import peer as local_peer
from kvbridge.transport.local.transport import copy_transfer
from kvbridge.transport.pump import PumpedTransfer

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


def copying(operations: Operations, slice_bytes: int = SLICE, deadline_s: float = 5, **facts: object) -> PumpedTransfer:
    return copy_transfer(operations, peer="p", deadline_s=deadline_s, slice_bytes=slice_bytes, **facts)


def test_slices_hold_as_many_operations_as_fit() -> None:
    operations, source, target = blocks(10)
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
    """What keeps them mapped holds the lock by which their owner sees a writer."""
    inside, go_on, steps = threading.Event(), threading.Event(), []

    class Libc:
        @staticmethod
        def madvise(address: int, length: int, advice: int) -> int:
            steps.append(address)
            inside.set()
            go_on.wait(LIMIT_S)
            return 0

    class File:
        address, length_bytes = 1 << 30, 1_000 * local_peer.POPULATE_STEP_BYTES

    monkeypatch.setattr(local_peer, "_libc", Libc)
    file = File()
    seen = weakref.ref(file)
    local_peer.populate(file)
    assert inside.wait(LIMIT_S)
    del file
    assert seen() is not None, "while the kernel is at its pages"
    go_on.set()
    while seen() is not None:
        time.sleep(0.001)
    assert steps == [1 << 30]
