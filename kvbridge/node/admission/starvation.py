"""How long nothing at all could be admitted, not even one page of each space, and what has the pages: for `/ready`."""

from __future__ import annotations

from kvbridge.core.clock import Clock
from kvbridge.core.ids import REQUEST_SPACES, IndexSpace
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import PageState

SHOWN_REASONS = 3


class Starvation:
    """Watches a page book. `look` is called now and then and whenever pages became available."""

    def __init__(self, book: PageBook, *, unready_after_s: float, clock: Clock) -> None:
        self._book = book
        self._spaces = tuple(space for space in book.owned_spaces() if space in REQUEST_SPACES)
        self._unready_after_s = unready_after_s
        self._clock = clock
        self.since_s: float | None = None
        """Since when nothing fits; None while something does. What is admitted in between ends it."""

    def look(self) -> None:
        """Take note of what is available now."""
        available = self._book.available_pages()
        if all(available[space] for space in self._spaces):
            self.since_s = None
        elif self.since_s is None:
            self.since_s = self._clock()

    def seconds(self) -> float:
        """For how long nothing could be admitted; 0 while something can."""
        return 0.0 if self.since_s is None else self._clock() - self.since_s

    def problem(self) -> str:
        """Why this node is not ready; empty unless it has lasted for `admission.unready_after_s`."""
        if self.seconds() < self._unready_after_s:
            return ""
        available, reasons = self._book.available_pages(), list(self._book.quarantine_reasons())
        full = "; ".join(self._describe(space) for space in self._spaces if not available[space])
        more = f" and {len(reasons) - SHOWN_REASONS} more" if len(reasons) > SHOWN_REASONS else ""
        quarantined = f"; quarantined for: {'; '.join(reasons[:SHOWN_REASONS])}{more}" if reasons else ""
        return f"nothing could be admitted for {self.seconds():.0f} s (limit: admission.unready_after_s): {full}{quarantined}"

    def _describe(self, space: IndexSpace) -> str:
        states = self._book.counts()[space]
        names = {state: str(state) for state in states if state is not PageState.FREE} | {
            PageState.CACHED: "cached and read"
        }
        used = ", ".join(f"{states[state]} {name}" for state, name in names.items() if states[state])
        return f"space '{space}' has no available page of {sum(states.values())} ({used})"
