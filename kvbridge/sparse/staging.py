"""Small arrays on their way to the device, without a wait of the host.

Owns: page-locked buffers that are used in turn. Must not know: what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvbridge.sparse.order import Lane, Order, Point


class Staging:
    """A ring of int32 buffers that the device reads while the host already fills the next one.

    A buffer is filled again only when the device has read it. With enough of them that is long ago; a host that is ahead of
    its device by all of them waits, which is the only wait there is.
    """

    def __init__(self, order: Order, *, words: int, count: int, pinned: bool) -> None:
        self._order = order
        self._buffers = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(count)]
        self._points: list[Point] = [order.point() for _ in range(count)]
        self._next = 0

    @contextmanager
    def buffer(self, lane: Lane | None = None) -> Iterator[torch.Tensor]:
        """A buffer, int32 [words], to fill and to give to the device inside: to a lane, or else to compute."""
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self._points[number].synchronize()
        yield self._buffers[number]
        if lane is None:
            self._order.mark(self._points[number])
        else:
            lane.mark(self._points[number])

    def memory_bytes(self) -> int:
        """Host memory of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)
