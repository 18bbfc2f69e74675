"""The streams of a cache on its device: the engine's own, and others beside it for copies that the engine need not wait for.

*Compute* is torch's current stream at the time of a call, which is the engine's. A *side stream* is the cache's. Events make one
stream wait for another on the device; the host waits only in `synchronize`. On a CPU every call has done its work when it returns:
there are no events and no streams, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Point:
    """A point in a stream. Before it is marked it counts as reached."""

    def __init__(self, event: Any = None) -> None:  # noqa: ANN401 - torch.cuda.Event, whose methods are untyped
        self.event = event

    def reached(self) -> bool:
        """Whether everything before the last mark is done; never waits."""
        return self.event is None or bool(self.event.query())

    def synchronize(self) -> None:
        """Let the host wait for the last mark."""
        if self.event is not None:
            self.event.synchronize()


class Streams:
    """Compute and its side streams, on one device, `cpu` or `cuda:N`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def handle(self) -> int:
        """Return the compute stream's handle, as launches take it."""
        return int(self.compute().cuda_stream) if self._is_cuda else 0

    def compute(self) -> torch.cuda.Stream:
        """Return the compute stream of a CUDA device."""
        return torch.cuda.current_stream(self._device)

    def point(self) -> Point:
        """Return a new point."""
        return Point(torch.cuda.Event() if self._is_cuda else None)  # type: ignore[no-untyped-call]

    def side_stream(self) -> SideStream:
        """Return a new side stream."""
        return SideStream(self, torch.cuda.Stream(self._device) if self._is_cuda else None)  # type: ignore[no-untyped-call]

    def mark(self, point: Point) -> None:
        """Mark compute's present end."""
        if self._is_cuda:
            point.event.record(self.compute())

    def wait(self, point: Point) -> None:
        """Let compute wait for a point; the host does not wait."""
        if self._is_cuda:
            self.compute().wait_event(point.event)

    def synchronize(self) -> None:
        """Let the host wait for everything on the device."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


class SideStream:
    """A stream beside compute."""

    def __init__(self, streams: Streams, stream: torch.cuda.Stream | None) -> None:
        self._streams, self.stream, self._edge = streams, stream, streams.point().event

    def handle(self) -> int:
        """Return the stream's handle, as launches take it."""
        return 0 if self.stream is None else int(self.stream.cuda_stream)

    def follow(self, other: SideStream | None = None) -> None:
        """Begin later work here only after the present work of another side stream, or else of compute."""
        if self.stream is not None:
            self._edge.record(self._streams.compute() if other is None else other.stream)
            self.stream.wait_event(self._edge)

    def mark(self, point: Point) -> None:
        """Mark this stream's present end."""
        if self.stream is not None:
            point.event.record(self.stream)

    def running(self) -> AbstractContextManager[object]:
        """Return a context in which torch's own operations go to this stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Staging:
    """A ring of int32 buffers: the device reads one while the host fills the next; the host waits when all are unread."""

    def __init__(self, streams: Streams, *, words: int, count: int, pinned: bool) -> None:
        self._streams = streams
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(count)]
        self._points = [streams.point() for _ in range(count)]
        self._next = 0

    @contextmanager
    def buffer(self, stream: SideStream | None = None) -> Iterator[torch.Tensor]:
        """Yield a buffer, int32 [words], to fill and to give to the device inside: to a side stream, or else to compute."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self._points[number].synchronize()
        yield self._buffers[number]
        (stream or self._streams).mark(self._points[number])
