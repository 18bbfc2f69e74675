"""One stream of what changes, to everybody who listens.

Owns: the listeners, their bounded queues, the comparison of one snapshot with the one before. Must not know: what is in a
snapshot, HTTP.

A listener gets a snapshot and then changes, each a JSON merge patch (RFC 7396). A snapshot is taken once for all of them, and not
at all while nobody listens. A listener that does not keep up is cut: it comes again and begins with a new snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from pydantic_core import to_json

from kvbridge.api.live import Document
from kvbridge.core.errors import CapacityError, NotReadyError

log = structlog.get_logger(__name__)

INTERVAL_S = 1.0
MAX_LISTENERS = 32
MAX_QUEUED = 8
"""Messages that wait for one listener, each of one interval."""


class Listener:
    """One who listens, and what has not been sent to it yet."""

    def __init__(self, first: bytes) -> None:
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_QUEUED)
        self._queue.put_nowait(first)

    async def next(self) -> bytes | None:
        """Return the next message; None when there will be no more."""
        return await self._queue.get()

    def offer(self, message: bytes) -> bool:
        """Queue a message; whether there was room for it."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    def end(self) -> None:
        """Let it be told that there will be no more, and drop what waits."""
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)


class Feed:
    """Takes snapshots while somebody listens. Used from the event loop's thread only."""

    def __init__(
        self,
        snapshot: Callable[[], Document],
        *,
        interval_s: float = INTERVAL_S,
        max_listeners: int = MAX_LISTENERS,
    ) -> None:
        self._snapshot = snapshot
        self._interval_s = interval_s
        self._max_listeners = max_listeners
        self._listeners: set[Listener] = set()
        self._last: Document = {}
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._listeners)

    def join(self) -> Listener:
        """Listen from now on. Raises NotReadyError when the daemon is ending, CapacityError when too many listen."""
        if self._closed:
            raise NotReadyError("the daemon is ending: its events end too")
        if len(self._listeners) >= self._max_listeners:
            raise CapacityError(f"{self._max_listeners} listen already: close a page that shows this daemon")
        if self._task is None or self._task.done():
            self._last = self._snapshot()
            self._task = asyncio.create_task(self._watch(), name="feed")
        listener = Listener(_message("snapshot", self._last))
        self._listeners.add(listener)
        return listener

    def leave(self, listener: Listener) -> None:
        """Forget a listener, and end it; harmless for one that was cut."""
        self._listeners.discard(listener)
        listener.end()

    def close(self) -> None:
        """End every listener, and let nobody in any more. Harmless when closed."""
        self._closed = True
        for listener in tuple(self._listeners):
            self.leave(listener)
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            while self._listeners:
                await asyncio.sleep(self._interval_s)
                self._tell()
        except Exception:
            log.exception("feed_failed", listeners=len(self._listeners))
            for listener in tuple(self._listeners):
                self.leave(listener)

    def _tell(self) -> None:
        now = self._snapshot()
        message = _message("change", difference(self._last, now))
        self._last = now
        for listener in tuple(self._listeners):
            if not listener.offer(message):
                log.info("listener_cut", reason="it does not keep up", messages=MAX_QUEUED)
                self.leave(listener)


def difference(before: Document, now: Document) -> Document:
    """Return the merge patch that makes `now` of `before`. A value that becomes null is removed, as merge patches do."""
    patch: Document = {key: None for key in before if key not in now}
    for key, value in now.items():
        former = before.get(key)
        if isinstance(value, dict) and isinstance(former, dict):
            if changed := difference(former, value):
                patch[key] = changed
        elif value != former or key not in before:
            patch[key] = value
    return patch


def _message(event: str, document: Document) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), to_json(document))
