"""Points in the work of a GPU that another process waits for: interprocess events, recorded by engines, asked by workers.

An engine publishes pages that its GPU has yet to write. So it records an event behind that work and names it in the
publication, and the rank worker reads nothing before the event is reached. Asking never waits.

Events are recycled, since there are only so many. Recording an event again that somebody still waits for can only delay that
waiter. To keep this rare, an event is used again only when half of all events, the oldest ones, have been reached.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Self

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.kernels.cuda.runtime import Event
from kvbridge.pool.memory.gpu_memory import device_by_uuid, device_uuid

FEWEST_EVENTS = 64
MOST_EVENTS = 4_096
MOST_RINGS = 64
"""Rings that a process keeps open; the one that was asked for longest ago is closed then."""


@dataclass(frozen=True, slots=True)
class _Entry:
    event: Event
    point: StreamPoint


_own: dict[tuple[str, bytes], Event] = {}
"""Events of this process, by ring and handle: CUDA cannot open them here, and a rank worker may be one of our threads."""
_own_lock = threading.Lock()


class EventRing:
    """The events by which one process says how far one of its GPUs has come. Used by one thread."""

    def __init__(self, device_uuid: str, create: Callable[[], Event]) -> None:
        """`create` makes an event of the device that `device_uuid` names."""
        self.name = secrets.token_hex(8)
        self._device_uuid = device_uuid
        self._create = create
        self._entries: deque[_Entry] = deque()
        """The one that was recorded longest ago first."""

    @classmethod
    def on(cls, device: int) -> Self:
        """A ring on a CUDA device of this process."""
        return cls(device_uuid(device), lambda: Event.create(device, interprocess=True))

    def record(self, stream: int) -> StreamPoint:
        """Mark the present end of a stream (its handle) and name that point."""
        entry = self._entries.popleft() if self._may_reuse() else self._new()
        entry.event.record(stream)
        self._entries.append(entry)
        return entry.point

    def _may_reuse(self) -> bool:
        count = len(self._entries)
        if count < FEWEST_EVENTS:
            return False
        return count >= MOST_EVENTS or (self._entries[0].event.reached() and self._entries[count // 2].event.reached())

    def _new(self) -> _Entry:
        event = self._create()
        point = StreamPoint(ring=self.name, handle=event.export(), device_uuid=self._device_uuid)
        with _own_lock:
            _own[self.name, point.handle] = event
        return _Entry(event, point)

    def close(self) -> None:
        """Name no further points. The events stay until this process ends.

        Others may still ask for them, and what they would see of one that was destroyed is not defined.
        """
        for entry in self._entries:
            with _own_lock:
                _own.pop((self.name, entry.point.handle), None)
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class StreamPoints:
    """Points that others have named, and whether they are reached. Used by one thread."""

    def __init__(self, open_event: Callable[[StreamPoint], Event] | None = None) -> None:
        self._open = open_event or _open_event
        self._rings: dict[str, dict[bytes, Event]] = {}
        """The ring that was asked for longest ago first."""

    def reached(self, points: Iterable[StreamPoint]) -> bool:
        """Return whether all are reached. Raises TransportError for one that cannot be asked, as when its process is gone."""
        return all(self._is_reached(point) for point in points)

    def _is_reached(self, point: StreamPoint) -> bool:
        try:
            with _own_lock:
                own = _own.get((point.ring, point.handle))
            return (self._opened(point) if own is None else own).reached()
        except BridgeError as error:
            raise TransportError(
                f"the engine's GPU cannot be asked how far it has come: {error}; the engine process has probably ended"
            ) from error

    def _opened(self, point: StreamPoint) -> Event:
        ring = self._rings.pop(point.ring, None)
        if ring is None:
            ring = {}
            while len(self._rings) >= MOST_RINGS:
                self._close_ring(next(iter(self._rings)))
        self._rings[point.ring] = ring
        if point.handle not in ring:
            ring[point.handle] = self._open(point)
        return ring[point.handle]

    def _close_ring(self, name: str) -> None:
        for event in self._rings.pop(name).values():
            event.close()

    def close(self) -> None:
        """Let every event go."""
        for name in list(self._rings):
            self._close_ring(name)


def _open_event(point: StreamPoint) -> Event:
    return Event.open(device_by_uuid(point.device_uuid), point.handle)
