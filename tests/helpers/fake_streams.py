"""Copy streams without a device: slices wait until the test, or the stream itself, lets them be copied by the processor.

Owns: `FakeStream`, `FakeMark`. What a slice is copied from is read when it is copied, as a device does.
"""

from __future__ import annotations

from collections import deque

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.copies import copy_operations
from kvbridge.transport.local.gpu import Route, Way

ANY_ROUTE = Route(Way.KERNEL, 0, over_host_link=True)


class FakeMark:
    """Reached once everything before it has been copied."""

    def __init__(self, stream: FakeStream, after: int) -> None:
        self._stream = stream
        self._after = after

    def reached(self) -> bool:
        self._stream.require_health()
        if self._stream.at_once:
            self._stream.run()
        return self._stream.copied >= self._after


class FakeStream:
    """Copies when `run` is called, or when it is asked after (`at_once`)."""

    def __init__(
        self,
        route: Route = ANY_ROUTE,
        *,
        at_once: bool = False,
        slice_operations: int = 8,
        first_operations: int = 0,
    ) -> None:
        self.route = route
        self.at_once = at_once
        self.slice_operations = slice_operations
        self.first_operations = first_operations or slice_operations
        self.started: list[Operations] = []
        self.copied = 0
        self.broken = False
        self.refusals: deque[str] = deque()
        """The next starts fail with these words."""
        self.marks = 0
        self.closed = False
        self._waiting: deque[Operations] = deque()

    def start(self, operations: Operations) -> None:
        self.require_health()
        if self.refusals:
            raise TransportError(self.refusals.popleft())
        self.started.append(operations)
        self._waiting.append(operations)

    def mark(self) -> FakeMark:
        self.require_health()
        self.marks += 1
        return FakeMark(self, len(self.started))

    def release(self, mark: object) -> None:
        self.marks -= 1

    def close(self) -> None:
        assert not self._waiting, "a stream was closed with copies on their way"
        self.closed = True

    def run(self, slices: int | None = None) -> None:
        """Copy the oldest slices, all by default."""
        for _ in range(len(self._waiting) if slices is None else slices):
            part = self._waiting.popleft()
            copy_operations(part.source, part.destination, part.length)
            self.copied += 1

    def require_health(self) -> None:
        if self.broken:
            raise TransportError("CUDA: an illegal memory access was encountered")
