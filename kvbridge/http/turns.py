"""Requests of many callers and the rest of a loop: who is read next, and who is not read any more.

Owns: the order of requests that have arrived, the bound on how many wait. Must not know: connections, HTTP. Pure but for the
clock and the loop's `call_soon` that it is given.

A loop that serves every readable socket in turn gives a thousand callers a thousand times what it gives one engine: rooms that
are there already come to a halt while new ones are refused. So one request is read, then the loop looks at all its sockets
again, then the next one is read. What is on its way (engines, workers, other nodes, answers to requests of this process) waits
for one request at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvbridge.core.clock import Clock, monotonic

MOST_WAITING = 128
LONGEST_WAIT_S = 0.1
"""With so many in front, the first of them for so long already, one more is not read. As long as this a caller who is refused is
told to stay away at least (`admission.retry_after_min_s`), so waiting longer for a refusal would do nobody good; and as many as
these may come at once, or wait out a pause of the process, without anybody's being turned away."""


class Reader(Protocol):
    """Somebody whose request has arrived."""

    def take_turn(self) -> None:
        """Read it."""


class Turns:
    """The requests of one server. Called from the event loop's thread only.

    Those that make a room wait behind each other only: a health check, a report or the cancellation of a room, which gives pages
    back, does not wait until many of them have been refused, and is read in any case.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object], clock: Clock = monotonic) -> None:
        """`call_soon(do)` has `do` called when the loop has looked at its sockets once more."""
        self._call_soon = call_soon
        self._clock = clock
        self._creating: deque[tuple[float, Reader]] = deque()
        self._others: deque[tuple[float, Reader]] = deque()
        self._taken = False

    def __repr__(self) -> str:
        return f"<Turns: {len(self._creating)} wait that create something, {len(self._others)} others>"

    def wait(self, reader: Reader, *, creates: bool) -> bool:
        """Have it read at once, or in its turn; `creates`: it asks for something new. False when it is not, since too many wait."""
        now_s = self._clock()
        line = self._creating if creates else self._others
        if creates and len(line) >= MOST_WAITING and now_s - line[0][0] >= LONGEST_WAIT_S:
            return False
        line.append((now_s, reader))
        if not self._taken:
            self._next()
        return True

    def _next(self) -> None:
        self._taken = bool(self._creating or self._others)
        if not self._taken:
            return
        self._call_soon(self._next)
        for line in (self._others, self._creating):
            if line:
                line.popleft()[1].take_turn()
