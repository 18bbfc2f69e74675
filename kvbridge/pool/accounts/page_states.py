"""The words of the page book: what may happen to a page, to whom it belongs, and who is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvbridge.core.ids import IndexSpace, PageIdArray


class PageState(StrEnum):
    """The state of a page says what may happen to it."""

    FREE = "free"
    HELD = "held"
    """The owner alone uses it: an engine, or a room before and after its transfer."""
    LEASED = "leased"
    """A transfer may read it (prefill) or a peer may write it (decode)."""
    QUARANTINED = "quarantined"
    """A transfer that ended badly may still touch it."""
    CACHED = "cached"
    """Whole, for several to read and for nobody to write: a prefix that stays. It has no owner, and no lease covers it."""


_F, _H, _L, _Q, _C = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED, PageState.CACHED

TRANSITIONS: Mapping[PageState, frozenset[PageState]] = {
    _F: frozenset({_H, _L}),
    _H: frozenset({_F, _L, _Q, _C}),
    _L: frozenset({_H, _Q}),
    _Q: frozenset({_F}),
    _C: frozenset({_F}),
}
"""The states that each state can become. Quarantine ends by `release_quarantined` only.

In an adopted space the engine decides. A page counts as cached there while some room reads the page and no room writes it,
whatever the page's state was before.
"""


class PageCache(Protocol):
    """Knows what cached pages hold and who reads them. Called in the middle of reserving; calls nothing back."""

    def evictable(self) -> Mapping[IndexSpace, int]:
        """Cached pages of each space that nobody reads, so that `evict` can give them up: at once, and all of them."""

    def evict(self, lacking: Mapping[IndexSpace, int]) -> Mapping[IndexSpace, PageIdArray]:
        """Forget pages, at least as many of each space as `lacking` says (never more than are evictable), and return them."""


NO_ROOM = -1


class Owner(NamedTuple):
    """One attempt at one request: a room with its generation. Or, with `NO_ROOM`, a copy between tiers, counted by generation."""

    room: int
    generation: int

    def __str__(self) -> str:
        return f"copy {self.generation}" if self.room == NO_ROOM else f"room {self.room} generation {self.generation}"


class PageWatcher(Protocol):
    """Told what becomes of pages, in the middle of the call that does it: takes note, and calls nothing back."""

    def freed(self, pages: Mapping[IndexSpace, int]) -> None:
        """These numbers of pages of each space have become available: free, or cached and not read by anybody any more."""

    def gone(self, owner: Owner) -> None:
        """The owner has no pages any more; `freed` has been told how many they were."""
