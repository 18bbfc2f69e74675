"""Pressure on a node's pages: when lacking pages will be available, and how long none have been."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbridge.core.clock import Clock
from kvbridge.core.ids import REQUEST_SPACES, IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner, PageState

WINDOW_S = 30.0
"""A release counts e times less after this time; after a minute it hardly counts."""
JITTER = 0.25
"""Callers that were refused together are told to come back spread over this part of the time."""
SHOWN_REASONS = 3


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
        """Estimate how long `count` more take; 0 before the first measurement, so that the caller soon asks again."""
        if self._begun_s is None or now_s <= self._begun_s or not self._weighted:
            return 0.0
        measured_s = WINDOW_S * -math.expm1((self._begun_s - now_s) / WINDOW_S)
        weighted = self._weighted * math.exp((self._at_s - now_s) / WINDOW_S)
        return count * measured_s / weighted if weighted else math.inf


class ReleaseRates:
    """The releases of the last half minute. Implements the page book's PageWatcher."""

    def __init__(self, clock: Clock, on_freed: Callable[[], None] = lambda: None) -> None:
        """`on_freed()` is called when pages have become available, inside the call that frees them."""
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
        """Estimate when the lacking pages will be available. `soon`: pages of owners that are ending."""
        now_s, never = self._clock(), _Rate()
        more = {space: max(0, count - soon.get(space, 0)) for space, count in lacking.items()}
        waits = (self._pages.get(space, never).seconds_for(count, now_s) for space, count in more.items())
        return max(waits, default=0.0)

    def seconds_until_a_room_ends(self, *, of: int, rooms: int) -> float:
        """Estimate when the first of a client's `of` rooms ends, when there are `rooms` in all."""
        return self._owners.seconds_for(rooms / max(1, of), self._clock())


@dataclass(frozen=True)
class RetryAfter:
    """Turns an estimate into a Retry-After within bounds, and not the same for everybody."""

    min_s: float
    max_s: float
    draw: Callable[[], float]
    """Returns a number in [0, 1): `random.random`, or a constant in tests."""

    def __call__(self, seconds: float) -> float:
        """Return `seconds` or a little more, from `min_s` to `max_s`."""
        spread = 1 + JITTER * self.draw()
        return min(self.max_s, max(self.min_s, min(seconds, self.max_s / (1 + JITTER))) * spread)


class Starvation:
    """How long nothing could be admitted, not even one page of each space. Ask `look` now and then and whenever pages come free."""

    def __init__(self, book: PageBook, *, unready_after_s: float, clock: Clock) -> None:
        self._book = book
        self._spaces = tuple(space for space in book.owned_spaces() if space in REQUEST_SPACES)
        self._unready_after_s = unready_after_s
        self._clock = clock
        self.since_s: float | None = None
        """The start of the shortage; None while there is none. An admission ends it."""

    def look(self) -> None:
        """Note whether every space has an available page now."""
        available = self._book.available_pages()
        if all(available[space] for space in self._spaces):
            self.since_s = None
        elif self.since_s is None:
            self.since_s = self._clock()

    def seconds(self) -> float:
        """Return how long nothing could be admitted; 0 while something can."""
        return 0.0 if self.since_s is None else self._clock() - self.since_s

    def problem(self) -> str:
        """Say what has the pages, for `/ready`; empty unless it has lasted for `admission.unready_after_s`."""
        if self.seconds() < self._unready_after_s:
            return ""
        available, reasons = self._book.available_pages(), list(self._book.quarantine_reasons())
        full = "; ".join(self._describe(space) for space in self._spaces if not available[space])
        more = f" and {len(reasons) - SHOWN_REASONS} more" if len(reasons) > SHOWN_REASONS else ""
        quarantined = f"; quarantined for: {'; '.join(reasons[:SHOWN_REASONS])}{more}" if reasons else ""
        return f"nothing could be admitted for {self.seconds():.0f} s (limit: admission.unready_after_s): {full}{quarantined}"

    def _describe(self, space: IndexSpace) -> str:
        states = self._book.counts()[space]
        names = {state: str(state) for state in states if state is not PageState.FREE}
        names[PageState.CACHED] = "cached and read"
        used = ", ".join(f"{states[state]} {name}" for state, name in names.items() if states[state])
        return f"space '{space}' has no available page of {sum(states.values())} ({used})"
