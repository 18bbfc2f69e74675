"""When a device began and ended the slices of a transfer, beside what its process did meanwhile.

Owns: events around each slice of this process's local transports. Must not know: what is moved.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from cuda.bindings import runtime as library

from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.transport.local.streams import CopyStream
from tests.bench.gpu.timing import checked


@dataclass(frozen=True)
class Timeline:
    """Seconds from the beginning."""

    began_s: float
    """The device had the first slice."""
    ended_s: float
    """It was through with the last one."""
    busy_s: float
    """All slices together; the rest of the time between these two it waited for the next one."""
    slices: int


class CopyTimeline:
    """Watches one device of this process, from its making on. `begin` forgets; `read` waits for the device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._stream = runtime.Stream.create(device)
        self._origin = self._event()
        self._slices: list[tuple[Any, Any]] = []
        self._spare: list[tuple[Any, Any]] = []
        start = CopyStream.start

        def watched(stream: CopyStream, operations: Operations) -> None:
            first, last = self._spare.pop() if self._spare else (self._event(), self._event())
            checked(library.cudaEventRecord(first, stream._stream.handle))
            start(stream, operations)
            checked(library.cudaEventRecord(last, stream._stream.handle))
            self._slices.append((first, last))

        CopyStream.start = watched  # type: ignore[method-assign]

    def begin(self) -> float:
        """The beginning is now, for the device as for the clock: returns the moment (CLOCK_MONOTONIC)."""
        runtime.use(self._device)
        self._spare += self._slices
        self._slices = []
        checked(library.cudaEventRecord(self._origin, self._stream.handle))
        while int(library.cudaEventQuery(self._origin)[0]):
            pass
        return time.monotonic()

    def read(self) -> Timeline:
        """What the device did since."""
        runtime.synchronize(self._device)
        moments = [(self._seconds(first), self._seconds(last)) for first, last in self._slices]
        return Timeline(
            began_s=min(first for first, _ in moments),
            ended_s=max(last for _, last in moments),
            busy_s=sum(last - first for first, last in moments),
            slices=len(moments),
        )

    def _seconds(self, event: object) -> float:
        return float(checked(library.cudaEventElapsedTime(self._origin, event))) / 1e3

    def _event(self) -> Any:
        runtime.use(self._device)
        return checked(library.cudaEventCreateWithFlags(0))
