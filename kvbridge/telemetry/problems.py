"""Failures, and answers, of the last quarter of an hour, for `/status` and the status page."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.core.process import moment

LATELY_S = 900.0
MOST_KINDS = 50
_TALLY_S = 30.0

Moment = float
"""Wall-clock time in Unix seconds."""


@dataclass(slots=True)
class Problem:
    """Recent failures of one kind and cause."""

    at: Moment
    """The last one."""
    what: str
    whom: str
    """The room, peer, rank or engine of the last one."""
    reason: str
    count: int
    first_at: Moment


class Problems:
    """Failures by kind and cause: reasons that differ in numbers only count as one. Bounded."""

    def __init__(self, clock: Callable[[], Moment] = moment) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], Problem] = {}
        """The one without news for the longest time first."""

    def add(self, what: str, whom: str, reason: str) -> None:
        """Note a failure that has happened now."""
        now, kind = self._clock(), (what, re.sub(r"\d+", "0", reason))
        before = self._kinds.pop(kind, None)
        if before is not None and before.at < now - LATELY_S:
            before = None
        count, first_at = (before.count + 1, before.first_at) if before else (1, now)
        self._kinds[kind] = Problem(now, what, whom, reason, count, first_at)
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def lately(self) -> tuple[Problem, ...]:
        """Return the failures of the last quarter of an hour, the oldest kind first."""
        since = self._clock() - LATELY_S
        return tuple(one for one in self._kinds.values() if one.at >= since)


class Tally:
    """Counts by word over the last quarter of an hour, to half a minute."""

    def __init__(self, clock: Callable[[], Moment] = moment) -> None:
        self._clock = clock
        self._parts: deque[tuple[Moment, Counter[str]]] = deque()

    def add(self, word: str) -> None:
        """Count one now."""
        now = self._clock()
        if not self._parts or self._parts[-1][0] < now - _TALLY_S:
            self._forget(now)
            self._parts.append((now, Counter()))
        self._parts[-1][1][word] += 1

    def lately(self) -> dict[str, int]:
        """Return the counts."""
        self._forget(self._clock())
        found = Counter[str]()
        for _, counts in self._parts:
            found += counts
        return dict(found)

    def _forget(self, now: Moment) -> None:
        while self._parts and self._parts[0][0] < now - LATELY_S:
            self._parts.popleft()
