"""Transfers that a device makes, and the streams that they share.

Owns: slices of a transfer in flight, its abort, deadline and end; all streams of a transport. Must not know: files,
endpoints, how a stream copies.

There is no thread: a device copies by itself, so a poll looks at what is done, starts the next slices and returns. A
slice that was started cannot be taken back; after a failure nothing further is started, and the transfer is quiet when
the device has passed its last slice. A device that never does is broken: the transfer ends not quiet after the quiet
timeout, and `close` raises, since only the end of the process stops such a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda.runtime import Event
from kvbridge.transport.base import Transfer, TransferState, TransferStatus
from kvbridge.transport.local.access import DeviceAccess
from kvbridge.transport.local.streams import STREAM_SLICES, CopyStream
from kvbridge.transport.local.ways import Route

POLL_BUDGET_S = 0.001
"""A poll starts nothing further after so long."""
CLOSE_PAUSE_S = 0.0002

_abandoned: list[object] = []
"""Transfers that a device may still be working on although their transport is gone: kept until the process ends."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is started at a time, and how long is waited for it."""

    slice_bytes: int
    quiet_timeout_s: float


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """What is to be copied on one stream, between addresses of this process."""

    operations: Operations
    peer: str
    """Whose memory it is written to, for messages."""
    deadline_s: float
    """From now."""
    accesses: Sequence[DeviceAccess] = ()
    """Nothing is started before every one is ready; one that has failed fails the transfer."""
    keep_alive: object = None
    """Whatever keeps both ends mapped."""


class DeviceTransfer(Transfer):
    """Copies on one stream. What keeps its memory mapped is dropped when nothing is on its way any more."""

    def __init__(self, job: DeviceJob, stream: CopyStream, limits: CopyLimits, *, clock: Clock = monotonic) -> None:
        self.keep_alive = job.keep_alive
        self._operations = job.operations
        self._ends_bytes = np.cumsum(job.operations.length, dtype=np.uint64)
        self._stream = stream
        self._limits = limits
        self._peer = job.peer
        self._accesses = list(job.accesses)
        self._clock = clock
        self._deadline_s = job.deadline_s
        self._ends_at_s = clock() + job.deadline_s
        self._next = 0
        self._done = 0
        self._slices: deque[tuple[Event, int]] = deque()
        """On their way: each with the operations that are done when it is."""
        self._stop = ""
        self._quiet_by_s = 0.0
        """Once stopped: when the transfer counts as not quiet."""
        self.broken = False
        """Whether the device has failed, and will not finish anything any more."""
        self._status = TransferStatus(TransferState.ACTIVE)
        stream.transfers += 1

    def __repr__(self) -> str:
        return f"<DeviceTransfer to {self._peer}: {self._status.state.value}, {self._how_far()}>"

    @property
    def active(self) -> bool:
        """Whether it is not terminal."""
        return not self._status.state.terminal

    def poll(self) -> TransferStatus:
        """See `Transfer.poll`."""
        if self.active:
            try:
                self._collect()
                self._go_on()
            except BridgeError as error:  # the device itself has failed, and says so of every later call
                self._stop = f"{self._stop}; then {error}" if self._stop else str(error)
                self.broken = True
                self._end(TransferState.FAILED_NOT_QUIET)
        return self._status

    def drained(self) -> bool:
        """Whether nothing of it is on its way, for one that has ended without being quiet as well."""
        if not self.active and not self.broken:
            try:
                self._collect()
            except BridgeError:
                self.broken = True
        if not self.active and not self._slices:
            self.keep_alive = None
        return not self._slices

    def abort(self, reason: str) -> None:
        """See `Transfer.abort`."""
        self._halt(f"aborted: {reason}")

    def _collect(self) -> None:
        while self._slices and self._slices[0][0].reached():
            mark, self._done = self._slices.popleft()
            self._stream.release(mark)
            self._stream.slices -= 1

    def _go_on(self) -> None:
        now_s = self._clock()
        if self._done == len(self._operations):
            self._end(TransferState.DONE)
            return
        if now_s >= self._ends_at_s:
            waits = next((access for access in self._accesses if not access.ready), None)
            while_waiting = f" while it waited for {waits!r}" if waits is not None else ""
            self._halt(f"deadline of {self._deadline_s:g} s passed{while_waiting}")
        if not self._stop and self._accessible():
            self._refill()
        if self._stop and not self._slices:
            self._end(TransferState.FAILED_QUIET)
        elif self._stop and now_s >= self._quiet_by_s:
            self._end(TransferState.FAILED_NOT_QUIET)

    def _accessible(self) -> bool:
        for access in self._accesses:
            if access.error:
                self._halt(access.error)
        self._accesses = [access for access in self._accesses if not access.ready]
        return not self._accesses

    def _refill(self) -> None:
        share = max(1, STREAM_SLICES // self._stream.transfers)
        pause_at_s = self._clock() + POLL_BUDGET_S
        while (
            not self._stop
            and self._clock() < pause_at_s
            and self._next < len(self._operations)
            and len(self._slices) < share
            and self._stream.slices < STREAM_SLICES
        ):
            self._start_slice()

    def _start_slice(self) -> None:
        stop = self._slice_stop()
        try:
            self._stream.start(self._operations[self._next : stop])
        except BridgeError as error:
            self._halt(str(error))  # a part of it may be on its way, so it is waited for like any other
        self._slices.append((self._stream.mark(), stop if not self._stop else self._done_so_far()))
        self._stream.slices += 1
        self._next = stop

    def _done_so_far(self) -> int:
        return self._slices[-1][1] if self._slices else self._done

    def _slice_stop(self) -> int:
        before = int(self._ends_bytes[self._next - 1]) if self._next else 0
        limit = np.uint64(before + self._limits.slice_bytes)
        by_bytes = int(np.searchsorted(self._ends_bytes, limit, side="right"))
        most = self._stream.slice_operations if self._next else self._stream.first_operations
        return max(self._next + 1, min(by_bytes, self._next + most))

    def _halt(self, reason: str) -> None:
        """Start nothing further."""
        if not self._stop:
            self._stop = reason
            self._quiet_by_s = self._clock() + self._limits.quiet_timeout_s

    def _how_far(self) -> str:
        return f"{self._done} of {len(self._operations)} operations done"

    def _end(self, state: TransferState) -> None:
        error = ""
        if state is not TransferState.DONE:
            error = f"transfer to {self._peer}: {self._stop} ({self._how_far()})"
        self._status = TransferStatus(state, error)
        self._stream.transfers -= 1
        if not self._slices:
            self.keep_alive = None


class DeviceCopier:
    """The streams of one transport, each made when it is first needed, and what is on them."""

    def __init__(self, make_stream: Callable[[Route], CopyStream], limits: CopyLimits) -> None:
        self._make_stream = make_stream
        self._limits = limits
        self._streams: dict[Route, CopyStream] = {}
        self._transfers: list[DeviceTransfer] = []

    def __repr__(self) -> str:
        active = sum(transfer.active for transfer in self._transfers)
        return f"<DeviceCopier: {active} transfers on {len(self._streams)} streams>"

    def prepare(self, routes: Iterable[Route]) -> None:
        """Make streams now, which may compile a kernel and takes up to a second, instead of with the first transfer."""
        for route in routes:
            self._stream(route)

    def begin(self, route: Route, job: DeviceJob, *, clock: Clock) -> DeviceTransfer:
        """Return a transfer; its first slices are started by its first poll."""
        self._transfers = [transfer for transfer in self._transfers if transfer.active or not transfer.drained()]
        made = DeviceTransfer(job, self._stream(route), self._limits, clock=clock)
        self._transfers.append(made)
        return made

    def close(self, *, timeout_s: float) -> None:
        """Start nothing further, wait for what was started, and end. Raises TransportError after `timeout_s`."""
        ends_at_s = time.monotonic() + timeout_s
        for transfer in self._transfers:
            transfer.abort("the transport was closed")
        left = self._left()
        while left and time.monotonic() < ends_at_s and not all(transfer.broken for transfer in left):
            time.sleep(CLOSE_PAUSE_S)
            left = self._left()
        if left:
            _abandoned.extend(left)
            raise TransportError(
                f"a device has not finished what {len(left)} transfers had started, and either has failed or takes longer than "
                f"transports.local.close_timeout_s ({timeout_s:g} s): {left[0].poll().error or left[0]}. It may still write, so "
                "the pages of these transfers must not be used again before this process has ended"
            )
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._transfers.clear()

    def _left(self) -> list[DeviceTransfer]:
        return [
            transfer for transfer in self._transfers if not transfer.poll().state.terminal or not transfer.drained()
        ]

    def _stream(self, route: Route) -> CopyStream:
        if route not in self._streams:
            self._streams[route] = self._make_stream(route)
        return self._streams[route]
