"""Transfers with bounded submission over libraries that have no bounds of their own.

Why a window: Mooncake's TCP queue takes about 2,050 operations of a peer and applies a larger batch in part; and neither library
can take back what it was given, so everything in flight has to be waited out after a failure. A transfer that fails submits nothing
further. It waits until everything in flight is terminal (FAILED_QUIET) or until the quiet timeout has passed (FAILED_NOT_QUIET).

Work is done for a batch, never for an operation. A poll asks after the oldest batch only, because asking takes a lock of the
library, and batches end about in the order in which they were started.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.transport.base import Transfer, TransferState, TransferStatus

POLL_BUDGET_S = 0.001
"""A poll starts nothing further after so long; the rest starts at the next poll."""

HandleT = TypeVar("HandleT")


class Progress(Enum):
    """A library's answer about one batch of operations."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    """Terminal: the batch neither reads its source nor writes its destination any more."""
    STALLED = "stalled"
    """Given up by the library but not terminal: the transfer fails, and the batch counts as in flight."""
    LOST = "lost"
    """Stalled, and the library will never say when the batch ends, so there is nothing to wait for."""


class Check(NamedTuple):
    """A batch's progress."""

    progress: Progress
    reason: str = ""
    """Why it failed or stalled."""


PENDING = Check(Progress.PENDING)
DONE = Check(Progress.DONE)


class PartlyStartedError(TransportError):
    """A part of a refused batch is under way, or may be. `handle` stands for the operations before `stop`."""

    def __init__(self, reason: str, handle: Any, stop: int) -> None:  # noqa: ANN401 - a handle of the submitter's own
        super().__init__(reason)
        self.handle = handle
        self.stop = stop


class Submitter(ABC, Generic[HandleT]):
    """A library's side of one transfer. No call blocks for longer than a fraction of a millisecond."""

    @abstractmethod
    def start(self, first: int, stop: int) -> HandleT:
        """Give the operations [first, stop) to the library. Each call begins where the previous one stopped.

        Raises TransportError when the library took none of them, PartlyStartedError when it took some, or may have.
        """

    @abstractmethod
    def check(self, handle: HandleT) -> Check:
        """Ask after the oldest pending batch, or a stalled one. Not called after DONE, FAILED or LOST."""

    def waits_for(self) -> str:
        """Name what is not ready yet, so that nothing can be started; else empty. Raises TransportError when it never will be."""
        return ""

    def end(self) -> None:
        """The transfer has become terminal."""


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """Limits of what is in flight to one peer, and of one batch; the time in which a failed transfer becomes quiet."""

    operations: int
    bytes: int
    quiet_timeout_s: float
    batch_operations: int = 1
    batch_bytes: int = 1 << 62
    batches: int = 1 << 62
    first_operations: int = 1 << 62
    """Most in a transfer's first batch: few, so that the copying begins at once."""


@dataclass(eq=False)
class Load:
    """Batches in flight, with their operations and bytes."""

    batches: int = 0
    operations: int = 0
    bytes: int = 0

    def count(self, operations: int, size_bytes: int, *, batches: int) -> None:
        """Count a started batch (`batches` 1) or a terminal one (-1)."""
        self.batches += batches
        self.operations += batches * operations
        self.bytes += batches * size_bytes


class Window(Load):
    """Everything in flight to one peer. All transfers to the peer share the window evenly, so that none starves."""

    def __init__(self, limits: WindowLimits) -> None:
        super().__init__()
        self.limits = limits
        self.transfers: weakref.WeakSet[WindowedTransfer[Any]] = weakref.WeakSet()
        """Transfers that are not terminal."""

    def admits(self, operations: int, size_bytes: int, held: Load) -> bool:
        """Whether a transfer that has `held` in flight may start one more batch. An empty window admits any batch."""
        if not self.batches:
            return True
        limits, sharers = self.limits, max(1, len(self.transfers))
        if (
            self.batches >= limits.batches
            or self.operations + operations > limits.operations
            or self.bytes + size_bytes > limits.bytes
        ):
            return False
        if not held.batches:
            return True
        return (
            (held.batches + 1) * sharers <= limits.batches
            and (held.operations + operations) * sharers <= limits.operations
            and (held.bytes + size_bytes) * sharers <= limits.bytes
        )


class _Batch(NamedTuple, Generic[HandleT]):
    handle: HandleT
    first: int
    operations: int
    size_bytes: int


class WindowedTransfer(Transfer, Generic[HandleT]):
    """A transfer that keeps to its peer's window.

    One thread pushes it: the polling thread, or the pump's. The caller's thread writes the reason to stop, the pushing thread
    everything else. Reason and status are single references, so no lock is needed.
    """

    def __init__(
        self,
        operations: Operations,
        submitter: Submitter[HandleT],
        window: Window,
        *,
        peer: str,
        deadline_s: float,
        clock: Clock = monotonic,
    ) -> None:
        """`peer` names the other side in errors; the transfer fails after `deadline_s`."""
        self.pumped = False
        """Whether a pump pushes the transfer, so that `poll` only looks."""
        self._count = len(operations)
        self._submitter: Submitter[HandleT] | None = submitter
        self._window = window
        self._peer = peer
        self._clock = clock
        self._deadline_s = deadline_s
        self._ends_at_s = clock() + deadline_s
        self._ends_bytes = np.cumsum(operations.length, dtype=np.uint64)
        self._next = 0
        self._started_bytes = 0
        self._done = 0
        self._in_flight: deque[_Batch[HandleT]] = deque()
        self._stalled: list[_Batch[HandleT]] = []
        """Batches that the library has given up; they count as in flight."""
        self._lost: list[_Batch[HandleT]] = []
        """Stalled batches that are not asked after again."""
        self._held = Load()
        self._stop: tuple[str, float] | None = None
        """Why and when the caller has aborted the transfer."""
        self._error = ""
        self._unconfirmed = False
        """A batch was started and its arrival never confirmed."""
        self._failed: list[slice] = []
        """The operations of batches that have ended badly."""
        self._quiet_by_s = 0.0
        self._status = TransferStatus(TransferState.ACTIVE)
        window.transfers.add(self)

    def __repr__(self) -> str:
        return (
            f"<WindowedTransfer to {self._peer}: {self._status.state.value}, "
            f"{self._done} of {self._count} operations done, {self._held.operations} in flight>"
        )

    @property
    def state(self) -> TransferState:
        """The state after the last push."""
        return self._status.state

    def poll(self) -> TransferStatus:
        if not self.pumped:
            self.push()
        return self._status

    def abort(self, reason: str) -> None:
        """Takes effect with the next push. The first reason counts."""
        self._stop = self._stop or (reason, self._clock())

    def push(self) -> bool:
        """Collect ended batches, and start those that the window admits. Returns whether any was started or has ended."""
        submitter, before = self._submitter, (self._next, self._held.operations)
        if submitter is None:
            return False
        if self._stop is not None and not self._error:
            reason, at_s = self._stop
            self._fail(f"aborted: {reason}", at_s)
        self._collect(submitter)
        if not self._error and self._done < self._count:
            self._go_on(submitter)
        self._settle()
        return self._submitter is None or before != (self._next, self._held.operations)

    def cut_off(self, reason: str, *, quiet: bool = True) -> None:
        """End now, because the transport has ended. Terminal states stay."""
        if not self.state.terminal:
            state = TransferState.FAILED_QUIET if quiet else TransferState.FAILED_NOT_QUIET
            self._end(state, self._error or self._told(reason))

    def _go_on(self, submitter: Submitter[HandleT]) -> None:
        try:
            missing = submitter.waits_for()
        except TransportError as error:
            self._fail(str(error))
            return
        if self._clock() >= self._ends_at_s:
            while_waiting = f" while it waited for {missing}" if missing else ""
            self._fail(f"deadline of {self._deadline_s:g} s passed{while_waiting}")
        elif not missing:
            self._refill(submitter)

    def _collect(self, submitter: Submitter[HandleT]) -> None:
        """Ask after what is in flight, as far as the first batch that is pending."""
        self._stalled = [batch for batch in self._stalled if self._has_stalled(batch, submitter.check(batch.handle))]
        waiting = self._in_flight
        while waiting and (found := submitter.check(waiting[0].handle)).progress is not Progress.PENDING:
            batch = waiting.popleft()
            if self._has_stalled(batch, found):
                self._stalled.append(batch)

    def _has_stalled(self, batch: _Batch[HandleT], found: Check) -> bool:
        """Note the progress of a batch. Returns whether it is in flight and has to be asked after again."""
        progress, reason = found
        if progress is Progress.DONE:
            self._done += batch.operations
        else:
            self._unconfirmed = True
            if not self._error:
                self._fail(reason)
            if progress is Progress.LOST:
                self._lost.append(batch)
                return False
            if progress is not Progress.FAILED:
                return True
            self._failed.append(slice(batch.first, batch.first + batch.operations))
        for load in (self._window, self._held):
            load.count(batch.operations, batch.size_bytes, batches=-1)
        return False

    def _refill(self, submitter: Submitter[HandleT]) -> None:
        """Start batches while the window admits them and the poll's budget lasts."""
        stop_at_s = self._clock() + POLL_BUDGET_S
        while self._next < self._count:
            stop, size_bytes = self._next_batch()
            if not self._window.admits(stop - self._next, size_bytes, self._held):
                return
            try:
                handle = submitter.start(self._next, stop)
            except PartlyStartedError as error:
                taken_bytes = int(self._ends_bytes[error.stop - 1]) - self._started_bytes
                self._note_started(error.handle, error.stop, taken_bytes)
                self._fail(str(error))
                return
            except TransportError as error:
                self._fail(str(error))
                return
            self._note_started(handle, stop, size_bytes)
            if self._clock() >= stop_at_s:
                return

    def _note_started(self, handle: HandleT, stop: int, size_bytes: int) -> None:
        first, count = self._next, stop - self._next
        self._next = stop
        self._started_bytes += size_bytes
        self._in_flight.append(_Batch(handle, first, count, size_bytes))
        for load in (self._window, self._held):
            load.count(count, size_bytes, batches=1)

    def _next_batch(self) -> tuple[int, int]:
        """Return where the next batch ends, and its bytes: one operation, and more as the batch limits allow."""
        limits, ends, first, before = self._window.limits, self._ends_bytes, self._next, self._started_bytes
        most = limits.batch_operations if first else min(limits.batch_operations, limits.first_operations)
        stop = min(first + most, self._count)
        size_bytes = int(ends[stop - 1]) - before
        if size_bytes > limits.batch_bytes:
            by_bytes = int(np.searchsorted(ends, np.uint64(before + limits.batch_bytes), side="right"))
            stop = max(first + 1, by_bytes)
            size_bytes = int(ends[stop - 1]) - before
        return stop, size_bytes

    def _fail(self, reason: str, at_s: float | None = None) -> None:
        """Keep the first cause, and start the time that is left to become quiet."""
        self._error = self._told(reason)
        self._quiet_by_s = (self._clock() if at_s is None else at_s) + self._window.limits.quiet_timeout_s

    def _told(self, reason: str) -> str:
        return f"transfer to {self._peer}: {reason} ({self._done} of {self._count} operations done)"

    def _settle(self) -> None:
        """Decide whether the transfer is over."""
        held, only = self._held.operations, "only closing the transport ends them"
        if not self._error:
            if self._done == self._count:
                self._end(TransferState.DONE)
        elif not held:
            self._end(TransferState.FAILED_QUIET, self._error)
        elif not self._in_flight and not self._stalled:
            never = f"of {held} operations nobody can say when they end"
            self._end(TransferState.FAILED_NOT_QUIET, f"{self._error}; {never}, so {only}")
        elif self._clock() >= self._quiet_by_s:
            late = f"{held} operations were still in flight {self._window.limits.quiet_timeout_s:g} s later"
            self._end(TransferState.FAILED_NOT_QUIET, f"{self._error}; {late}, so {only}")

    def _end(self, state: TransferState, error: str = "") -> None:
        """Become terminal; drop what refers to the library, so that a kept transfer does not keep an agent alive."""
        if state is TransferState.DONE:
            self._status = TransferStatus(state)
        else:
            in_transit = self._unconfirmed or self._held.operations > 0 or state is TransferState.FAILED_NOT_QUIET
            batches = (*self._in_flight, *self._stalled, *self._lost)
            held = [slice(batch.first, batch.first + batch.operations) for batch in batches]
            unconfirmed = (*self._failed, *held, slice(self._next, self._count))
            self._status = TransferStatus(state, error, in_transit, unconfirmed)
        submitter, self._submitter = self._submitter, None
        self._in_flight.clear()
        self._stalled.clear()
        self._lost.clear()
        self._window.transfers.discard(self)
        if submitter is not None:
            submitter.end()
