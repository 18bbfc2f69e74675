"""Requests of many callers and the rest of a loop: who is read next, and who is not read any more.

A loop that serves every readable socket in turn gives a thousand callers a thousand times what it gives one engine: rooms that
are there already come to a halt while new ones are refused. So one request is read, then the loop looks at all its sockets
again, then the next one is read. What is on its way waits for one request of each kind at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from kvbridge.core.clock import Clock, monotonic


class Line(Enum):
    """Where a caller waits, by what it asks for."""

    OTHER = auto()
    """A health check, a report, the cancellation of a room."""
    CREATES = auto()
    """Something new: a POST."""
    GOES_ON = auto()
    """The rest of a request whose beginning was read in its turn: one for each of those at most, and none is turned away."""


MOST_WAITING = 128
LONGEST_WAIT_S = {Line.OTHER: 1.0, Line.CREATES: 0.1}
"""With so many in front, the first of them for so long already, one more is not read. As many as these may come at once, or wait
out a pause of the process, without anybody's being turned away. A caller who is refused something new is told to stay away for
0.1 s at least (`admission.retry_after_min_s`), so waiting longer for a refusal would do nobody good. Health checks are usually
given up after 1 s."""


class Reader(Protocol):
    """Somebody whose request has arrived."""

    def take_turn(self) -> None:
        """Read it."""


class Turns:
    """The requests of one server. Called from the event loop's thread only.

    Each line waits for itself only: a health check, a report or the cancellation of a room, which gives pages back, does not wait
    until many requests for rooms have been refused, nor until their bodies have been read.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock = monotonic) -> None:
        """`call_soon(do)` has `do` called when the loop has looked at its sockets once more."""
        self._call_soon = call_soon
        self._clock = clock
        self._lines: dict[Line, deque[tuple[float, Reader]]] = {line: deque() for line in Line}
        self._taken = False

    def wait(self, reader: Reader, line: Line) -> bool:
        """Have it read at once, or in its turn. False when it is not, since too many wait."""
        now_s, waiting = self._clock(), self._lines[line]
        longest_s = LONGEST_WAIT_S.get(line)
        if longest_s is not None and len(waiting) >= MOST_WAITING and now_s - waiting[0][0] >= longest_s:
            return False
        waiting.append((now_s, reader))
        if not self._taken:
            self._next()
        return True

    def _next(self) -> None:
        self._taken = any(self._lines.values())
        if not self._taken:
            return
        self._call_soon(self._next)
        for waiting in self._lines.values():
            if waiting:
                waiting.popleft()[1].take_turn()
