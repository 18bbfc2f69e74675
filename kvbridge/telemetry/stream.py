"""Facts as one stream: the only way by which they reach metrics, logs and `/status`.

Facts are emitted in the event loop's thread only; a reader is called at once, in the order in which readers were added, must
not raise, and must not emit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbridge.core.clock import Clock, monotonic
from kvbridge.telemetry.events import Fact, FrameRefused, MessagesResent

Reader = Mapping[type[Fact], Callable[[float, Any], None]]
"""By kind of fact (of all kinds below it, too): called with monotonic seconds and the fact. Must not raise."""


class EventStream:
    """Hands each fact to every reader. Used from the event loop's thread only."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._calls: dict[type[Fact], tuple[Callable[[float, Any], None], ...]] = {}
        """What a fact of each kind leads to, once there has been one. Most facts concern few readers, and a room has many facts."""

    def add_reader(self, reader: Reader) -> None:
        """Let `reader` have every fact that concerns it from now on."""
        self._readers.append(reader)
        self._calls.clear()

    def frame_refused(self, kind: str, detail: str) -> None:
        """Say that a frame or a connection was refused; the form in which sockets report it."""
        self.emit(FrameRefused(kind=kind, detail=detail))

    def messages_resent(self, count: int) -> None:
        """Say that control messages were sent again; the form in which sockets report it."""
        self.emit(MessagesResent(count=count))

    def emit(self, fact: Fact) -> None:
        """Say that something has happened, now."""
        kind, now_s = type(fact), self._clock()
        if kind not in self._calls:
            self._calls[kind] = tuple(
                call for reader in self._readers for known, call in reader.items() if issubclass(kind, known)
            )
        for call in self._calls[kind]:
            call(now_s, fact)
