"""Limits of requests under way, and of the bytes of their bodies.

A request takes its place before its body is read. Bytes count as they arrive, and a body's first ones do not, since the number of
requests bounds those: where long bodies have taken everything, short ones are still read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbridge.core.errors import CapacityError

UNCOUNTED_BYTES = 256 << 10
"""Of each body."""


class Places:
    """The places of one router. Used from the event loop's thread only."""

    def __init__(self, limit: int, limit_bytes: int) -> None:
        """`limit` and `limit_bytes` are the configuration keys of these names."""
        self._limit = limit
        self._limit_bytes = limit_bytes
        self.taken = 0
        self.held_bytes = 0

    @contextmanager
    def take(self) -> Iterator[Place]:
        """Yield a place, which is free again with the end of the context. Raises CapacityError."""
        if self.taken >= self._limit:
            raise CapacityError(
                f"{self.taken} requests are under way, as many as there may be (limit); come back later, or ask another router"
            )
        place = Place(self)
        self.taken += 1
        try:
            yield place
        finally:
            self.taken -= 1
            self.held_bytes -= place.counted_bytes

    def hold(self, more_bytes: int) -> None:
        """Count further bytes of some body. Raises CapacityError, and does not count them then."""
        if self.held_bytes + more_bytes > self._limit_bytes:
            raise CapacityError(
                f"bodies of {self.held_bytes} bytes are under way, and there may be {self._limit_bytes} (limit_bytes; the first "
                f"{UNCOUNTED_BYTES} of each are not counted); send a shorter body, come back later, or ask another router"
            )
        self.held_bytes += more_bytes


class Place:
    """The place of one request."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._arrived_bytes = 0
        self.counted_bytes = 0

    def hold(self, arrived_bytes: int) -> None:
        """Count what has arrived of the body. Raises CapacityError."""
        self._arrived_bytes += arrived_bytes
        more_bytes = max(0, self._arrived_bytes - UNCOUNTED_BYTES) - self.counted_bytes
        self._places.hold(more_bytes)
        self.counted_bytes += more_bytes
