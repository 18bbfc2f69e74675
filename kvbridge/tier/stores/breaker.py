"""When a store is not asked: the breaker for all of it, and the short memory of single keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import StrEnum

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


class BreakerState(StrEnum):
    """The states of a breaker."""

    CLOSED = "closed"
    """It is."""
    OPEN = "open"
    """It is not: it has failed too often."""
    HALF_OPEN = "half_open"
    """One request tries whether it works again; all others are answered as if it were open."""


class Breaker:
    """Opens after `failures` in a row, lets one request through after a pause, and doubles the pause while that fails, too."""

    def __init__(self, failures: int = 3) -> None:
        self.state = BreakerState.CLOSED
        self._limit = failures
        self._failures = 0
        self._pause_s = FIRST_PAUSE_S
        self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<Breaker {self.state}: {self._failures} failures in a row, pause {self._pause_s:g} s>"

    def admits(self, now_s: float) -> bool:
        """Return whether a request goes to the store now. One that does is followed by `success` or `failure`."""
        if self.state is BreakerState.OPEN and now_s >= self._until_s:
            self.state = BreakerState.HALF_OPEN
            return True
        return self.state is BreakerState.CLOSED

    def success(self) -> None:
        """A request was answered, be it with a miss. While open, it is one from before, and proves nothing about now."""
        if self.state is not BreakerState.OPEN:
            self.state, self._failures, self._pause_s = BreakerState.CLOSED, 0, FIRST_PAUSE_S

    def failure(self, now_s: float) -> None:
        """A request was not answered, or the store has told that it cannot. While open, this is nothing new."""
        self._failures += 1
        if self.state is BreakerState.HALF_OPEN:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s)
        elif self.state is BreakerState.OPEN or self._failures < self._limit:
            return
        self.state, self._until_s = BreakerState.OPEN, now_s + self._pause_s


class FailedKeys:
    """Names whose objects were missing or bad a moment ago: they are not asked for again before `keep_s` has passed."""

    def __init__(self, keep_s: float = 5.0, most: int = 10_000) -> None:
        """At most `most` are remembered; the oldest go first."""
        self._keep_s, self._most = keep_s, most
        self._until_s: OrderedDict[str, float] = OrderedDict()

    def add(self, names: Iterable[str], now_s: float) -> None:
        """Their objects have just been found missing or bad."""
        for name in names:
            self._until_s[name] = now_s + self._keep_s
            self._until_s.move_to_end(name)
        while len(self._until_s) > self._most:
            self._until_s.popitem(last=False)

    def forget(self, names: Iterable[str]) -> None:
        """Their objects have been stored."""
        for name in names:
            self._until_s.pop(name, None)

    def has(self, name: str, now_s: float) -> bool:
        """Return whether it is still remembered."""
        return now_s < self._until_s.get(name, now_s)
