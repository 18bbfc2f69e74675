"""The streams of a cache on its device: the engine's own, and others beside it for copies that nobody should wait for.

*Compute* is torch's current stream at the time of a call, which is the engine's. A *side stream* is one of ours. Events make
one stream wait for another on the device; the host waits only in `synchronize`. The classes with public names are those of a CPU,
where every call has done its work when it returns, so that nothing waits; those of a CUDA device derive from them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from kvbridge.core.errors import DeadlineError

POLL_S = 0.0002


class Point:
    """A point in a stream. Before it is marked it counts as reached."""

    def reached(self) -> bool:
        """Whether everything before the last mark is done; never waits."""
        return True

    def synchronize(self) -> None:
        """The host waits for the last mark."""


class SideStream:
    """A stream beside compute."""

    def handle(self) -> int:
        """The stream's handle, as launches take it."""
        return 0

    def follow_compute(self) -> None:
        """Begin later work here only after all that compute has been given so far."""

    def follow(self, other: SideStream) -> None:
        """Begin later work here only after all that another side stream has been given so far."""

    def mark(self, point: Point) -> None:
        """Mark this stream's present end."""

    def running(self) -> AbstractContextManager[object]:
        """A context in which torch's own operations go to this stream."""
        return nullcontext()


class Streams:
    """Compute and its side streams, on one device."""

    @staticmethod
    def on(device: torch.device) -> Streams:
        """The streams of a device, `cpu` or `cuda:N`."""
        return _CudaStreams(device) if device.type == "cuda" else Streams()

    def handle(self) -> int:
        """The compute stream's handle, as launches take it."""
        return 0

    def point(self) -> Point:
        """A new point."""
        return Point()

    def side_stream(self) -> SideStream:
        """A new side stream."""
        return SideStream()

    def mark(self, point: Point) -> None:
        """Mark compute's present end."""

    def wait(self, point: Point) -> None:
        """Compute goes on only after a point; the host does not wait."""

    def synchronize(self) -> None:
        """The host waits for everything on the device."""


class PendingCopies:
    """Copies between a request's hot rows and its host pages that may still be under way."""

    def __init__(self, point: Point, label: str) -> None:
        self._point = point
        self._label = label

    def reached(self) -> bool:
        """Whether all of them have ended; never waits."""
        return self._point.reached()

    def wait(self, timeout_s: float) -> None:
        """Wait until then. Raises DeadlineError after `timeout_s`: the pages must then not be given back."""
        deadline_s = time.monotonic() + timeout_s
        while not self.reached():
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{self._label}: copies of its rows are still under way after {timeout_s:g} s")
            time.sleep(POLL_S)


class Staging:
    """A ring of int32 buffers: the device reads one while the host fills the next.

    A buffer is filled again only when the device has read it. So the host waits when it is ahead of the device by all buffers,
    and only then.
    """

    def __init__(self, streams: Streams, *, words: int, count: int, pinned: bool) -> None:
        self._streams = streams
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(count)]
        self._points: list[Point] = [streams.point() for _ in range(count)]
        self._next = 0

    @contextmanager
    def buffer(self, stream: SideStream | None = None) -> Iterator[torch.Tensor]:
        """A buffer, int32 [words], to fill and to give to the device inside: to a side stream, or else to compute."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self._points[number].synchronize()
        yield self._buffers[number]
        if stream is None:
            self._streams.mark(self._points[number])
        else:
            stream.mark(self._points[number])


class _Event(Point):
    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()


class _CudaSideStream(SideStream):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._edge = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def handle(self) -> int:
        return int(self.stream.cuda_stream)

    def follow_compute(self) -> None:
        self._edge.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._edge)

    def follow(self, other: SideStream) -> None:
        assert isinstance(other, _CudaSideStream)
        self._edge.record(other.stream)
        self.stream.wait_event(self._edge)

    def mark(self, point: Point) -> None:
        assert isinstance(point, _Event)
        point.event.record(self.stream)

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)


class _CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def handle(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def point(self) -> Point:
        return _Event()

    def side_stream(self) -> SideStream:
        return _CudaSideStream(self._device)

    def mark(self, point: Point) -> None:
        assert isinstance(point, _Event)
        point.event.record(torch.cuda.current_stream(self._device))

    def wait(self, point: Point) -> None:
        assert isinstance(point, _Event)
        torch.cuda.current_stream(self._device).wait_event(point.event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
