"""In which order the device does things: the engine's own stream, and lanes beside it.

Owns: streams and events of a cache, and nothing's on a CPU. Must not know: what is done on them.

*Compute* is whatever stream is torch's current one when a verb is called: the engine's. A *lane* is a stream of ours beside it,
for copies that nobody should wait for. Order between them is made by events on the device; the host never waits, except where
`synchronize` says so. On a CPU everything is done when a call returns, so order is there already.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch

from kvbridge.core.errors import DeadlineError

POLL_S = 0.0002


class Point(ABC):
    """A point in the order of a stream. Before it is marked it counts as reached."""

    @abstractmethod
    def reached(self) -> bool:
        """Whether everything before the last mark is done; never waits."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits for the last mark."""


class Lane(ABC):
    """A sequence of work beside compute."""

    @abstractmethod
    def handle(self) -> int:
        """Its stream, as launches take it."""

    @abstractmethod
    def follow_compute(self) -> None:
        """What comes next on the lane comes after all that compute has been given so far."""

    @abstractmethod
    def follow(self, other: Lane) -> None:
        """What comes next on the lane comes after all that another lane has been given so far."""

    @abstractmethod
    def mark(self, point: Point) -> None:
        """Mark the lane's present end."""

    @abstractmethod
    def running(self) -> AbstractContextManager[object]:
        """Inside, torch's own operations go to the lane."""


class Order(ABC):
    """Compute, and what stands beside it, on one device."""

    @abstractmethod
    def handle(self) -> int:
        """The compute stream's handle, as launches take it."""

    @abstractmethod
    def point(self) -> Point:
        """A new point."""

    @abstractmethod
    def lane(self) -> Lane:
        """A new lane."""

    @abstractmethod
    def mark(self, point: Point) -> None:
        """Mark compute's present end."""

    @abstractmethod
    def wait(self, point: Point) -> None:
        """Compute goes on only after a point; the host does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """The host waits for everything on the device."""

    @staticmethod
    def on(device: torch.device) -> Order:
        """The order of a device, `cpu` or `cuda:N`."""
        return _DeviceOrder(device) if device.type == "cuda" else _HostOrder()


class Quiet:
    """Says when a released request's host pages are touched no more."""

    def __init__(self, point: Point, label: str) -> None:
        self._point = point
        self._label = label

    def reached(self) -> bool:
        """Whether no copy of ours reads or writes the host pages any more; never waits."""
        return self._point.reached()

    def wait(self, timeout_s: float) -> None:
        """Wait until then. Raises DeadlineError after `timeout_s`: the pages must then not be given back."""
        deadline_s = time.monotonic() + timeout_s
        while not self.reached():
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{self._label}: copies of its rows are still under way after {timeout_s:g} s")
            time.sleep(POLL_S)


# ------------------------------------------------------------------------------------------- a CPU


class _Now(Point):
    def reached(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


class _HostLane(Lane):
    def handle(self) -> int:
        return 0

    def follow_compute(self) -> None:
        return

    def follow(self, other: Lane) -> None:
        del other

    def mark(self, point: Point) -> None:
        del point

    def running(self) -> AbstractContextManager[object]:
        return nullcontext()


class _HostOrder(Order):
    def handle(self) -> int:
        return 0

    def point(self) -> Point:
        return _Now()

    def lane(self) -> Lane:
        return _HostLane()

    def mark(self, point: Point) -> None:
        del point

    def wait(self, point: Point) -> None:
        del point

    def synchronize(self) -> None:
        return


# ------------------------------------------------------------------------------------------- a CUDA device


class _Event(Point):
    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def reached(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self.event.synchronize()


class _DeviceLane(Lane):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._edge = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def handle(self) -> int:
        return int(self.stream.cuda_stream)

    def follow_compute(self) -> None:
        self._edge.record(torch.cuda.current_stream(self._device))
        self.stream.wait_event(self._edge)

    def follow(self, other: Lane) -> None:
        assert isinstance(other, _DeviceLane)
        self._edge.record(other.stream)
        self.stream.wait_event(self._edge)

    def mark(self, point: Point) -> None:
        assert isinstance(point, _Event)
        point.event.record(self.stream)

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)


class _DeviceOrder(Order):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def handle(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def point(self) -> Point:
        return _Event()

    def lane(self) -> Lane:
        return _DeviceLane(self._device)

    def mark(self, point: Point) -> None:
        assert isinstance(point, _Event)
        point.event.record(torch.cuda.current_stream(self._device))

    def wait(self, point: Point) -> None:
        assert isinstance(point, _Event)
        torch.cuda.current_stream(self._device).wait_event(point.event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)
