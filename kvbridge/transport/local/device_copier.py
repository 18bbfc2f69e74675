"""Transfers that a device makes: slices on a stream, and the streams of one transport.

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

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda.runtime import Event
from kvbridge.transport.base import TransferState
from kvbridge.transport.local.memory import DeviceAccess
from kvbridge.transport.local.streams import STREAM_SLICES, CopyStream
from kvbridge.transport.local.ways import Route
from kvbridge.transport.windowed import (
    DONE,
    PENDING,
    Check,
    PartlyStartedError,
    Progress,
    Window,
    WindowedTransfer,
    WindowLimits,
)

CLOSE_PAUSE_S = 0.0002
UNBOUNDED = 1 << 62

_abandoned: list[object] = []
"""Copies that a device may still be working on although their transport is gone: kept until the process ends."""


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """How much is started at a time, and how long is waited for it."""

    slice_bytes: int
    quiet_timeout_s: float


@dataclass(frozen=True, slots=True)
class DeviceJob:
    """Copies to make on one stream, between addresses of this process."""

    operations: Operations
    peer: str
    """Whose memory it is written to, for messages."""
    deadline_s: float
    """From now."""
    accesses: Sequence[DeviceAccess] = ()
    """Nothing is started before every one is ready; one that has failed fails the transfer."""
    keep_alive: object = None
    """Whatever keeps both ends mapped."""


@dataclass(slots=True, eq=False)
class _Slice:
    mark: Event | None
    """None when the device failed before there was one."""
    operations: int
    size_bytes: int
    refused: str = ""
    """Why it was refused; a part of it may have been taken all the same."""


class DeviceWrites:
    """The slices of one transfer. They keep their memory mapped until the device has passed the last one."""

    def __init__(self, job: DeviceJob, stream: CopyStream, window: Window) -> None:
        self._operations = job.operations
        self._keep_alive = job.keep_alive
        self._accesses = list(job.accesses)
        self._stream = stream
        self._window = window
        self._slices: deque[_Slice] = deque()
        self.broken = ""
        """How the device has failed, which then will not finish anything any more."""

    def waits_for(self) -> str:
        """Say which memory the device may not use yet; empty when it may use all. Raises TransportError when it never will."""
        for access in self._accesses:
            if access.error:
                raise TransportError(access.error)
        self._accesses = [access for access in self._accesses if not access.ready]
        return repr(self._accesses[0]) if self._accesses else ""

    def start(self, first: int, stop: int) -> _Slice:
        """Give a slice to the device. One that is refused is waited for like any other."""
        part = self._operations[first:stop]
        made = _Slice(None, stop - first, part.total_bytes)
        try:
            self._stream.start(part)
        except BridgeError as error:
            made.refused = str(error)
        self._slices.append(made)
        try:
            made.mark = self._stream.mark()
        except BridgeError as error:
            self.broken = str(error)
        if made.refused or self.broken:
            raise PartlyStartedError(made.refused or self.broken, made, stop)
        return made

    def check(self, handle: _Slice) -> Check:
        """Ask the device. One that has failed says so of every later call, and nobody can say when its copies end."""
        try:
            if not self.broken and handle.mark is not None and not handle.mark.reached():
                return PENDING
        except BridgeError as error:
            self.broken = str(error)
        if self.broken or handle.mark is None:
            return Check(Progress.LOST, self.broken)
        self._slices.remove(handle)
        self._stream.release(handle.mark)
        return Check(Progress.FAILED, handle.refused) if handle.refused else DONE

    def drained(self) -> bool:
        """Return whether nothing of a transfer that has ended is on its way; its slices leave the window as they end."""
        while self._slices:
            oldest = self._slices[0]
            if self.check(oldest).progress not in {Progress.DONE, Progress.FAILED}:
                return False
            self._window.give_back(oldest.operations, oldest.size_bytes)
        self._keep_alive = None
        return True


class DeviceTransfer(WindowedTransfer[_Slice]):
    """A transfer of `DeviceWrites`, which begins when the device may use all of its memory."""

    def _waits_for(self) -> str:
        return self._submitter.waits_for() if isinstance(self._submitter, DeviceWrites) else ""

    def _end(self, state: TransferState, error: str = "") -> None:
        writes = self._submitter
        super()._end(state, error)
        if isinstance(writes, DeviceWrites):
            writes.drained()


class DeviceCopier:
    """The streams of one transport, each made when it is first needed, and what is on them."""

    def __init__(self, make_stream: Callable[[Route], CopyStream], limits: CopyLimits) -> None:
        self._make_stream = make_stream
        self._limits = limits
        self._streams: dict[Route, CopyStream] = {}
        self._windows: dict[Route, Window] = {}
        """What is on each stream, over all transfers."""
        self._begun: list[tuple[DeviceTransfer, DeviceWrites]] = []

    def __repr__(self) -> str:
        return f"<DeviceCopier: {len(self._begun)} transfers on {len(self._streams)} streams>"

    def prepare(self, routes: Iterable[Route]) -> None:
        """Make streams now, which may compile a kernel and takes up to a second, instead of with the first transfer."""
        for route in routes:
            self._stream(route)

    def begin(self, route: Route, job: DeviceJob, *, clock: Clock = monotonic) -> DeviceTransfer:
        """Return a transfer; its first slices are started by its first poll."""
        self._begun = [each for each in self._begun if not _has_ended(*each)]
        stream = self._stream(route)
        writes, window = DeviceWrites(job, stream, self._windows[route]), self._windows[route]
        made = DeviceTransfer(job.operations, writes, window, peer=job.peer, deadline_s=job.deadline_s, clock=clock)
        self._begun.append((made, writes))
        return made

    def close(self, *, timeout_s: float) -> None:
        """Start nothing further, wait for what was started, and end. Raises TransportError after `timeout_s`."""
        ends_at_s = time.monotonic() + timeout_s
        for transfer, _ in self._begun:
            transfer.abort("the transport was closed")
        while self._begun and time.monotonic() < ends_at_s:
            for transfer, _ in self._begun:
                transfer.poll()
            self._begun = [each for each in self._begun if not _has_ended(*each)]
            if self._begun and all(writes.broken for _, writes in self._begun):
                break
            time.sleep(CLOSE_PAUSE_S)
        if self._begun:
            _abandoned.extend(self._begun)
            transfer, writes = self._begun[0]
            raise TransportError(
                f"a device has not finished what {len(self._begun)} transfers had started, and either has failed or takes longer "
                f"than transports.local.close_timeout_s ({timeout_s:g} s): {writes.broken or transfer.poll().error or transfer}. "
                "It may still write, so the pages of these transfers must not be used again before this process has ended"
            )
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

    def _stream(self, route: Route) -> CopyStream:
        if route not in self._streams:
            made = self._streams[route] = self._make_stream(route)
            self._windows[route] = Window(
                WindowLimits(
                    UNBOUNDED,
                    UNBOUNDED,
                    self._limits.quiet_timeout_s,
                    batch_operations=made.slice_operations,
                    batch_bytes=self._limits.slice_bytes,
                    batches=STREAM_SLICES,
                    first_operations=made.first_operations,
                )
            )
        return self._streams[route]


def _has_ended(transfer: DeviceTransfer, writes: DeviceWrites) -> bool:
    return transfer.state.terminal and writes.drained()
