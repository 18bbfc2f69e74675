"""Transfers that a device makes: streams, slices of transfers on them, and host memory that devices use.

A device copies by its copy engines where operations are long, by a kernel where they are short and many (37,440-byte pages to the
host on one H200: engines 20 GB/s, kernel 49; 786 KB rows: engines 51). A device has four streams (engines and kernel, over the host
link and between devices), so that copies over NVLink do not wait for those over PCIe. The copies on a stream are bounded. This
bounds how long an aborted transfer takes to become quiet, how long a short transfer waits behind long ones, and how much still
arrives from a process that was killed.

There is no thread: a poll looks at which slices are done, starts the next ones and returns. A slice that was started cannot be
taken back. After a failure nothing further is started, and the transfer is quiet when the device has passed its last slice. A
device that never does is broken: the transfer ends not quiet after the quiet timeout, and `close` raises, since only the end of the
process stops such a device.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, Closing, monotonic
from kvbridge.kernels.copies import StretchCopier
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.runtime import Event
from kvbridge.pool.memory.gpu_memory import HostRegistration, registered_range
from kvbridge.pool.memory.layout import Extent, Progress as Report
from kvbridge.pool.memory.shared_mapping import SharedMapping
from kvbridge.transport.threads import apart, start_thread
from kvbridge.transport.windowed import (
    DONE,
    PENDING,
    Check,
    PartlyStartedError,
    Progress,
    Submitter,
    Window,
    WindowedTransfer,
    WindowLimits,
)

log = structlog.get_logger(__name__)

HOST = -1
"""In place of a device: host memory."""
CLOSE_PAUSE_S = 0.0002
UNBOUNDED = 1 << 62

_abandoned: list[object] = []
"""Transfers that a device may still be working on although their transport is gone: kept until the process ends."""


class Way(Enum):
    """The part of a device that copies."""

    ENGINES = "copy engines"
    KERNEL = "copy kernel"


STREAM_SLICES = 4
"""Slices on a stream at a time, over all transfers: half a GiB at the default size, 10 ms over a PCIe 5 link."""
SLICE_OPERATIONS = {Way.ENGINES: 128, Way.KERNEL: 8192}
"""The engines' queue holds about a thousand copies, and a call waits when it is full."""
FIRST_OPERATIONS = {Way.ENGINES: 16, Way.KERNEL: 256}
"""In a transfer's first slice: few, so that the device begins at once and copies these while it is given the next ones."""


@dataclass(frozen=True, slots=True)
class Route:
    """The key of a stream. Routes of one device run beside each other."""

    way: Way
    device: int
    over_host_link: bool = False
    """Whether either end is host memory. Such copies must not hold up copies between devices."""


class CopyStream:
    """Copies slices one after another; the caller does not wait."""

    def __init__(self, route: Route, *, kernel_blocks: int) -> None:
        """`kernel_blocks`: blocks for copies to and from the host; between devices every multiprocessor works.

        Raises UnsupportedError or KernelBuildError when the device cannot copy this way.
        """
        self.slice_operations = SLICE_OPERATIONS[route.way]
        """The most in one slice, so that starting it takes a fraction of a millisecond."""
        self.first_operations = FIRST_OPERATIONS[route.way]
        """The most in a transfer's first slice."""
        self._route = route
        self._stream = runtime.Stream.create(route.device)
        self._free: list[Event] = []
        self._kernel: StretchCopier | None = None
        if route.way is Way.KERNEL:
            all_blocks = runtime.device_facts(route.device).multiprocessors
            self._kernel = StretchCopier(route.device, blocks=kernel_blocks if route.over_host_link else all_blocks)
            self._kernel.reserve(self.slice_operations, STREAM_SLICES)  # later it would stop an engine of this process

    def start(self, operations: Operations) -> None:
        """Give operations to the device. After an error it may have some of them."""
        if self._kernel is not None:
            self._kernel.submit(operations, stream=self._stream.handle)
        else:
            runtime.copy_batch(operations, device=self._route.device, stream=self._stream.handle)

    def mark(self) -> Event:
        """Mark the present end of the stream."""
        event = self._free.pop() if self._free else Event.create(self._route.device)
        event.record(self._stream.handle)
        return event

    def release(self, mark: Event) -> None:
        """Take back a mark that the device has reached."""
        self._free.append(mark)

    def close(self) -> None:
        """Free everything. Nothing is on its way."""
        for event in self._free:
            event.close()
        self._free.clear()
        if self._kernel is not None:
            self._kernel.close()
        self._stream.close()


@dataclass(slots=True, eq=False)
class _Slice:
    mark: Event | None
    """None when the device failed before there was one."""
    operations: int
    size_bytes: int
    refused: str = ""
    """Why the device refused it; the device may have taken a part."""


class DeviceWrites(Submitter[_Slice]):
    """The slices of one transfer. They keep its memory mapped until the device has passed the last slice."""

    def __init__(
        self,
        operations: Operations,
        stream: CopyStream,
        window: Window,
        *,
        accesses: Sequence[DeviceAccess],
        keep_alive: object,
    ) -> None:
        self._operations = operations
        self._keep_alive = keep_alive
        self._accesses = list(accesses)
        self._stream = stream
        self._window = window
        self._slices: deque[_Slice] = deque()
        self.broken = ""
        """How the device has failed; it finishes nothing any more."""

    def waits_for(self) -> str:
        for access in self._accesses:
            if access.error:
                raise TransportError(access.error)
        self._accesses = [access for access in self._accesses if not access.ready]
        return repr(self._accesses[0]) if self._accesses else ""

    def start(self, first: int, stop: int) -> _Slice:
        """Give a slice to the device. A refused slice is waited for like any other."""
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
        """Ask the device. After a failure of the device every later call fails, and nobody can say when its copies end."""
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

    def end(self) -> None:
        self.drained()  # lets go of the memory, unless the device still uses it

    def drained(self) -> bool:
        """Whether a transfer that has ended has nothing on its way. Its slices leave the window as they end."""
        while self._slices:
            oldest = self._slices[0]
            if self.check(oldest).progress not in {Progress.DONE, Progress.FAILED}:
                return False
            self._window.count(oldest.operations, oldest.size_bytes, batches=-1)
        self._keep_alive = None
        return True


DeviceTransfer = WindowedTransfer[_Slice]


class DeviceCopier:
    """The streams of one transport, each made when it is first needed, and the transfers on them."""

    def __init__(
        self,
        make_stream: Callable[[Route], CopyStream],
        *,
        slice_bytes: int,
        quiet_timeout_s: float,
        clock: Clock = monotonic,
    ) -> None:
        """`slice_bytes`: most bytes of a slice."""
        self._make_stream = make_stream
        self._slice_bytes = slice_bytes
        self._quiet_timeout_s = quiet_timeout_s
        self._clock = clock
        self._streams: dict[Route, tuple[CopyStream, Window]] = {}
        """Streams, each with the window that all its transfers share."""
        self._begun: list[tuple[DeviceTransfer, DeviceWrites]] = []

    def stream(self, route: Route) -> tuple[CopyStream, Window]:
        """Return the stream of a route. Making it may compile a kernel, and takes up to a second."""
        if route not in self._streams:
            made = self._make_stream(route)
            quiet_s, most, first = self._quiet_timeout_s, made.slice_operations, made.first_operations
            limits = WindowLimits(UNBOUNDED, UNBOUNDED, quiet_s, most, self._slice_bytes, STREAM_SLICES, first)
            self._streams[route] = made, Window(limits)
        return self._streams[route]

    def begin(
        self,
        route: Route,
        operations: Operations,
        *,
        peer: str,
        deadline_s: float,
        accesses: Sequence[DeviceAccess] = (),
        keep_alive: object = None,
    ) -> DeviceTransfer:
        """Return a transfer between addresses of this process; its first poll starts its first slices.

        Nothing is started before all `accesses` are ready; a failed access fails the transfer. `keep_alive` keeps both ends mapped.
        """
        self._begun = [each for each in self._begun if not _has_ended(*each)]
        stream, window = self.stream(route)
        writes = DeviceWrites(operations, stream, window, accesses=accesses, keep_alive=keep_alive)
        made = WindowedTransfer(operations, writes, window, peer=peer, deadline_s=deadline_s, clock=self._clock)
        self._begun.append((made, writes))
        return made

    def close(self, *, timeout_s: float) -> None:
        """Start nothing further, and wait for the slices that were started. Raises TransportError after `timeout_s`."""
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
                f"a device has not finished what {len(self._begun)} transfers had started: it has failed, or takes longer than "
                f"transports.local.close_timeout_s ({timeout_s:g} s): {writes.broken or transfer.poll().error or transfer}. "
                "It may still write, so the pages of these transfers must not be used again before this process has ended"
            )
        for stream, _ in self._streams.values():
            stream.close()
        self._streams.clear()


def _has_ended(transfer: DeviceTransfer, writes: DeviceWrites) -> bool:
    return transfer.state.terminal and writes.drained()


# ------------------------------------------------------------------------------------------- host memory that devices use


class _CancelledError(Exception):
    """Ends a registration from its progress report."""


class DeviceAccess:
    """Host memory that is being registered with CUDA; devices may use it once it is `ready`. `error` says why they never may.

    Registering takes 0.05 to 0.4 s for each GiB, minutes for a large pool, and a rank worker must not stop for so long. Therefore
    connecting waits for a short time only, and transfers that need the memory wait for the rest. Other CUDA calls of the process
    may be held up while the driver pins a piece.
    """

    def __init__(
        self, length_bytes: int, register: Callable[[Report], Closing], *, label: str, at_once: bool = False
    ) -> None:
        """`at_once`: the memory is registered already, so `register` takes no time."""
        self.length_bytes = length_bytes
        self.error = ""
        self._label = label
        self._at_once = at_once
        self._done_bytes = 0
        self._ended = threading.Event()
        self._registration: Closing | None = None
        self._cancelled = False
        if at_once:
            self._run(register)
            return
        log.info("registering_memory", memory=label, bytes=length_bytes)
        try:
            start_thread(self._run, register, name="kvbridge-register")
        except TransportError as error:
            self.error = f"{label}: {error}"
            self._ended.set()

    def __repr__(self) -> str:
        state = "failed" if self.error else "ready" if self.ready else "being registered"
        return f"<DeviceAccess to {self._label}: {self._done_bytes} of {self.length_bytes} bytes, {state}>"

    @property
    def ready(self) -> bool:
        """Whether devices may use the memory."""
        return self._ended.is_set() and not self.error

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is ready or has failed, for at most `timeout_s`; return whether it is either."""
        return self._ended.wait(timeout_s)

    def close(self, then: Callable[[], None] = lambda: None) -> None:
        """End the registration after its present piece, then call `then`, on another thread. No device uses the memory."""
        self._cancelled = True
        end = partial(self._end, then)
        if self._at_once:
            end()
        else:
            apart(end, name="kvbridge-unregister")

    def _run(self, register: Callable[[Report], Closing]) -> None:
        try:
            self._registration = register(self._report)
        except _CancelledError:
            self.error = f"{self._label}: nobody needs it any more"
        except Exception as error:
            self.error = str(error) or repr(error)
            known = isinstance(error, BridgeError)
            log.error("memory_not_registered", memory=self._label, reason=self.error, exc_info=None if known else error)
        self._ended.set()

    def _report(self, done_bytes: int, _: int) -> None:
        self._done_bytes = done_bytes
        if self._cancelled:
            raise _CancelledError

    def _end(self, then: Callable[[], None]) -> None:
        self._ended.wait()
        registration, self._registration = self._registration, None
        try:
            if registration is not None:
                registration.close()
        except BridgeError as error:
            log.error("memory_not_unregistered", memory=self._label, reason=str(error))
        then()


def device_access(
    memory: Sequence[SharedMapping | Extent], device: int, extents: Sequence[Extent], *, label: str
) -> DeviceAccess:
    """Have memory registered with CUDA in the background. No operation crosses the borders of `extents`."""
    known = all(registered_range((each.address, each.length_bytes)) is not None for each in memory)
    return DeviceAccess(
        sum(each.length_bytes for each in memory),
        lambda report: HostRegistration(memory, extents=extents, device=device, on_progress=report),
        label=label,
        at_once=known,
    )
