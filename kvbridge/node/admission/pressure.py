"""When pages will be available: what lacks, divided by the rate of the last releases. Pure but for the clock that it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.pages import NO_ROOM, Owner

WINDOW_S = 30.0
"""A release counts e times less after this time; after a minute it hardly counts."""
JITTER = 0.25
"""Callers that were refused together are told to come back spread over this part of the time."""


class _Rate:
    """Things a second, the latest counting most. The first one only starts the measurement."""

    def __init__(self) -> None:
        self._begun_s: float | None = None
        self._at_s = 0.0
        self._weighted = 0.0

    def add(self, count: int, now_s: float) -> None:
        if self._begun_s is None:
            self._begun_s = now_s
        else:
            self._weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S) + count
        self._at_s = now_s

    def seconds_for(self, count: float, now_s: float) -> float:
        """Estimate how long `count` more take; 0 while nothing is known, so that the caller soon asks again."""
        if self._begun_s is None or now_s <= self._begun_s or not self._weighted:
            return 0.0
        measured_s = WINDOW_S * -math.expm1((self._begun_s - now_s) / WINDOW_S)
        weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S)
        return count * measured_s / weighted if weighted else math.inf


class ReleaseRates:
    """What has been released lately. Implements the page book's PageWatcher."""

    def __init__(self, clock: Clock, on_freed: Callable[[], None] = lambda: None) -> None:
        """`on_freed()` hears that pages have become available, in the middle of the call that does it."""
        self._clock = clock
        self._on_freed = on_freed
        self._pages: dict[IndexSpace, _Rate] = {}
        self._owners = _Rate()

    def freed(self, pages: Mapping[IndexSpace, int]) -> None:
        """Count pages that have become available."""
        now_s = self._clock()
        for space, count in pages.items():
            if count:
                self._pages.setdefault(space, _Rate()).add(count, now_s)
        self._on_freed()

    def gone(self, owner: Owner) -> None:
        """Count a room that has ended. The end of a copy between tiers makes no room for another request."""
        if owner.room != NO_ROOM:
            self._owners.add(1, self._clock())

    def seconds_until(self, lacking: Mapping[IndexSpace, int], soon: Mapping[IndexSpace, int]) -> float:
        """Estimate when the pages that lack will be available. `soon`: those of owners that are ending."""
        now_s, never = self._clock(), _Rate()
        more = {space: max(0, count - soon.get(space, 0)) for space, count in lacking.items()}
        waits = (self._pages.get(space, never).seconds_for(count, now_s) for space, count in more.items())
        return max(waits, default=0.0)

    def seconds_until_a_room_ends(self, *, of: int, rooms: int) -> float:
        """Estimate when the first of somebody's `of` rooms ends, when there are `rooms` in all."""
        return self._owners.seconds_for(rooms / max(1, of), self._clock())


@dataclass(frozen=True)
class RetryAfter:
    """From an estimate to what a caller is told: within bounds, and not the same for everybody."""

    min_s: float
    max_s: float
    draw: Callable[[], float]
    """Returns a number in [0, 1): `random.random`, or a constant in tests."""

    def __call__(self, seconds: float) -> float:
        """Return `seconds` or a little more, from `min_s` to `max_s`."""
        spread = 1 + JITTER * self.draw()
        return min(self.max_s, max(self.min_s, min(seconds, self.max_s / (1 + JITTER))) * spread)
