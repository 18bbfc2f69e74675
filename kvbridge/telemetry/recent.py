"""The recent past, for `/status` and the status page: problems, answers, traffic with each peer, the facts of each room."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbridge.core.process import moment
from kvbridge.telemetry.facts import RoomEntered, RoomFact

LATELY_S = 900.0
MOST_KINDS = 50
_TALLY_S = 30.0

Moment = float
"""Wall-clock time in Unix seconds."""


@dataclass(slots=True)
class PeerTraffic:
    """Traffic between this node and one peer since the peer was first seen."""

    name: str = ""
    """`instance/node`; empty before a handshake."""
    sent_bytes: int = 0
    received_bytes: int = 0
    rooms_completed: int = 0
    rooms_failed: int = 0
    last_at: Moment = 0.0
    """Time of the last change of a room with the peer."""


@dataclass(slots=True)
class CopySums:
    """Copies in one direction between device and host memory since the daemon was started."""

    pages: int = 0
    """Pages that arrived."""
    bytes: int = 0
    failed: int = 0
    """Failed orders."""
    last_failure: str = ""
    longest_s: float = 0.0
    """Duration of the slowest order."""


@dataclass(slots=True)
class Timeline:
    """One attempt at one room. Times are monotonic seconds."""

    admitted_s: float
    asked_s: float
    """Arrival of the request that admitted the room."""
    entered: RoomEntered
    """The change into the present state."""
    entered_s: float
    peer: str = ""
    """Incarnation of the last node at the other end, also when that node is gone."""
    facts: list[tuple[float, RoomFact]] = field(default_factory=list)
    counts: Counter[type[RoomFact]] = field(default_factory=Counter)
    """Number of facts of each kind, dropped facts included."""


@dataclass(slots=True)
class Problem:
    """Recent failures of one kind and cause."""

    at: Moment
    """The last failure."""
    what: str
    whom: str
    """Room, peer, rank or engine of the last failure."""
    reason: str
    count: int
    first_at: Moment


class Problems:
    """Failures of the last quarter of an hour by kind and cause, bounded. Reasons that differ only in numbers count as one."""

    def __init__(self, clock: Callable[[], Moment] = moment) -> None:
        self._clock = clock
        self._kinds: dict[tuple[str, str], Problem] = {}
        """In the order of the last failure, the oldest first."""

    def add(self, what: str, whom: str, reason: str) -> None:
        """Note a failure that has happened now."""
        now, kind = self._clock(), (what, re.sub(r"\d+", "0", reason))
        before = self._kinds.pop(kind, None)
        count, first_at = (before.count + 1, before.first_at) if before and before.at >= now - LATELY_S else (1, now)
        self._kinds[kind] = Problem(now, what, whom, reason, count, first_at)
        if len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def lately(self) -> tuple[Problem, ...]:
        """Return the failures, the oldest kind first."""
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
        return dict(sum((counts for _, counts in self._parts), Counter[str]()))

    def _forget(self, now: Moment) -> None:
        while self._parts and self._parts[0][0] < now - LATELY_S:
            self._parts.popleft()
