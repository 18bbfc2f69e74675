"""Small arrays on their way to the device, which the host does not wait for.

Owns: a ring of page-locked buffers. Must not know: what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvbridge.sparse.streams import Point, SideStream, Streams


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
