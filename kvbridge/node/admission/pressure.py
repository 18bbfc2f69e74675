"""When pages will be available: an estimate from how they have been released.

Owns: the rates and the arithmetic. Must not know: who waits, what is refused. Pure but for the clock that it is given.

What is known, in this order:

- Pages of owners that are ending come back by themselves. When they are enough, it takes as long as that usually takes.
- Pages that were released lately, weighted by age (`WINDOW_S`), give a rate: what lacks divided by it.
- With no rate (nothing was released for long, or ever), the best guess is: as long again as nothing has been released.

Rooms that end unless a prefill engine begins them (`Reservation`) bound the last two: by then their pages are back.
Quarantined pages count for nothing: nobody knows when they come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner

WINDOW_S = 30.0
"""A release counts e times less after this time; after a minute it hardly counts."""
IDLE_WINDOWS = 3
"""After so many windows without a release a rate begins anew: what was before says nothing about now."""
USUAL_WEIGHT = 0.2
"""Weight of the latest release in the usual time of one."""
JITTER = 0.25
"""Callers that were refused together are told to come back spread over this part of the time."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a room has that ends in `ends_in_s` seconds unless a prefill engine begins it."""

    ends_in_s: float
    pages: Mapping[IndexSpace, int]
    client: str


def first_end(reserved: Sequence[Reservation]) -> str:
    """Say which rooms will give back what they have, and by when; `reserved`: those that end first in front."""
    if not reserved:
        return ""
    return f"; {len(reserved)} rooms there have been begun by no prefill engine, the first ends in {reserved[0].ends_in_s:.1f} s"


class _Rate:
    """Things a second, the latest counting most. The first one only starts the measurement."""

    def __init__(self) -> None:
        self._begun_s = 0.0
        self._at_s: float | None = None
        self._weighted = 0.0

    def add(self, count: int, now_s: float) -> None:
        if self._at_s is None or now_s - self._at_s > IDLE_WINDOWS * WINDOW_S:
            self._begun_s, self._weighted = now_s, 0.0
        else:
            self._weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S) + count
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        if self._at_s is None or not self._weighted or now_s <= self._begun_s:
            return 0.0
        measured_s = WINDOW_S * -math.expm1((self._begun_s - now_s) / WINDOW_S)
        return self._weighted * math.exp((self._at_s - now_s) / WINDOW_S) / measured_s

    def quiet_s(self, now_s: float) -> float | None:
        """Seconds since the last one; None when there was none."""
        return None if self._at_s is None else now_s - self._at_s


class ReleaseRates:
    """What has been released lately. Implements the page book's PageWatcher."""

    def __init__(self, clock: Clock, on_freed: Callable[[], None] = lambda: None) -> None:
        """`on_freed()` hears that pages have become available, in the middle of the call that does it."""
        self._clock = clock
        self._on_freed = on_freed
        self._pages: dict[IndexSpace, _Rate] = {}
        self._owners = _Rate()
        self._ending_since: dict[Owner, float] = {}
        self._first_lack_s: float | None = None
        self.usual_release_s: float | None = None
        """How long an ending owner usually keeps its pages; None before the first one has given them back."""

    def ending(self, owner: Owner) -> None:
        """See PageWatcher."""
        self._ending_since[owner] = self._clock()

    def quarantined(self, owner: Owner) -> None:
        """See PageWatcher."""
        self._ending_since.pop(owner, None)

    def freed(self, pages: Mapping[IndexSpace, int]) -> None:
        """See PageWatcher."""
        now_s = self._clock()
        for space, count in pages.items():
            if count:
                self._pages.setdefault(space, _Rate()).add(count, now_s)
        self._on_freed()

    def gone(self, owner: Owner) -> None:
        """See PageWatcher. That a copy between tiers has ended makes no room for another request."""
        if owner.room == NO_ROOM:
            return
        now_s = self._clock()
        self._owners.add(1, now_s)
        since_s = self._ending_since.pop(owner, None)
        if since_s is not None:
            took_s, usual_s = now_s - since_s, self.usual_release_s
            self.usual_release_s = took_s if usual_s is None else usual_s + USUAL_WEIGHT * (took_s - usual_s)

    def pages_per_s(self) -> dict[IndexSpace, float]:
        """Pages of each space released a second, lately."""
        now_s = self._clock()
        return {space: rate.per_s(now_s) for space, rate in self._pages.items()}

    def seconds_until(
        self,
        lacking: Mapping[IndexSpace, int],
        soon: Mapping[IndexSpace, int],
        reserved: Sequence[Reservation] = (),
    ) -> float:
        """Estimate when the pages that lack will be available.

        `soon`: pages of ending owners; `reserved`: of rooms that nobody has begun, those that end first in front.
        """
        waits = (self._space_s(space, count, soon.get(space, 0), reserved) for space, count in lacking.items())
        return max(waits, default=0.0)

    def seconds_until_a_room_ends(self, *, of: int, rooms: int, reserved: Sequence[Reservation] = ()) -> float:
        """Estimate when the first of somebody's `of` rooms ends, when there are `rooms` in all.

        `reserved`: his own that nobody has begun, those that end first in front.
        """
        rate_s = self._time_s(self._owners, rooms / max(1, of), self._clock())
        return min(rate_s, reserved[0].ends_in_s) if reserved else rate_s

    def _space_s(self, space: IndexSpace, lacking: int, soon: int, reserved: Sequence[Reservation]) -> float:
        if lacking <= soon:
            return self.usual_release_s or 0.0
        rate_s = self._time_s(self._pages.setdefault(space, _Rate()), lacking, self._clock())
        for reservation in reserved:
            if reservation.ends_in_s >= rate_s:
                break
            soon += reservation.pages.get(space, 0)
            if lacking <= soon:
                return reservation.ends_in_s
        return rate_s

    def _time_s(self, rate: _Rate, count: float, now_s: float) -> float:
        per_s = rate.per_s(now_s)
        if per_s > 0:
            return count / per_s
        quiet_s = rate.quiet_s(now_s)
        if quiet_s is not None:
            return quiet_s
        if self._first_lack_s is None:
            self._first_lack_s = now_s
        return now_s - self._first_lack_s


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
