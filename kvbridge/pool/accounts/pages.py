"""The states and owners of pages, and the account of an index space whose page ids an engine names."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import IndexSpace, PageIdArray

Counts = Mapping[IndexSpace, int]
NO_ROOM = -1


class PageState(StrEnum):
    """The state of a page."""

    FREE = "free"
    HELD = "held"
    """The owner alone uses it: an engine, or a room before and after its transfer."""
    LEASED = "leased"
    """A transfer may read it (prefill) or a peer may write it (decode)."""
    QUARANTINED = "quarantined"
    """A transfer that ended badly may still read or write it."""
    CACHED = "cached"
    """It holds a prefix that several may read and nobody may write. It has no owner and no lease."""


_F, _H, _L, _Q, _C = PageState.FREE, PageState.HELD, PageState.LEASED, PageState.QUARANTINED, PageState.CACHED

TRANSITIONS: Mapping[PageState, frozenset[PageState]] = {
    _F: frozenset({_H, _L}),
    _H: frozenset({_F, _L, _Q, _C}),
    _L: frozenset({_H, _Q}),
    _Q: frozenset({_F}),
    _C: frozenset({_F}),
}
"""The states that each state can become. Only `release_quarantined` ends a quarantine.

In an adopted space the engine decides. A page counts as cached there while some room reads the page and no room writes it,
whatever the page's state was before.
"""


class Owner(NamedTuple):
    """One attempt at one request: a room with its generation. With `NO_ROOM`, the copy between tiers of that number."""

    room: int
    generation: int

    def __str__(self) -> str:
        return f"copy {self.generation}" if self.room == NO_ROOM else f"room {self.room} generation {self.generation}"


class PageCache(Protocol):
    """Knows the content and the readers of cached pages. The book calls it within a reservation; it calls nothing back."""

    def evictable(self) -> Counts:
        """Return the number of cached pages of each space that `evict` can give up at once, all of them together."""

    def evict(self, lacking: Counts) -> Mapping[IndexSpace, PageIdArray]:
        """Forget at least `lacking` evictable pages of each space, and return the forgotten pages."""


class PageWatcher(Protocol):
    """The book calls it within a change; it calls nothing back."""

    def freed(self, pages: Counts) -> None:
        """These numbers of pages of each space have become available: free, or cached without a reader."""

    def gone(self, owner: Owner) -> None:
        """The owner has no pages any more. The book has called `freed` with their numbers before."""


class AdoptedSpace:
    """A space of pages [0, page_count) whose ids an engine gives out.

    The engine says of each page whether a room writes it, or only reads what the engine's own prefix cache has there. A page has at
    most one writer, and gets a writer only while nobody reads the page; any number of rooms may read a written page.
    """

    what = "an adopted space"

    def __init__(self, space: IndexSpace, page_count: int) -> None:
        if page_count < 1:
            raise InvalidInputError(f"adopted space '{space}' needs at least one page, got {page_count}")
        self.name = str(space)
        self.page_count = page_count
        self._is_written = np.zeros(page_count, dtype=np.bool_)
        self._readers = np.zeros(page_count, dtype=np.int32)
        self._written = 0
        self.cached = 0
        """Pages that rooms read and none writes."""

    @property
    def free(self) -> int:
        """Pages that the engine has not given to kvbridge; only the engine knows whether it could."""
        return self.page_count - self._written - self.cached

    def check(self, ids: npt.ArrayLike) -> PageIdArray:
        """Return an engine's page ids as an int32 copy. Raises when a page does not exist or is named twice."""
        pages = np.array(ids)
        if pages.ndim != 1 or (len(pages) and not np.issubdtype(pages.dtype, np.integer)):
            raise InvalidInputError(
                f"pages of adopted space '{self.name}' are a one-dimensional list of integers, "
                f"got {pages.dtype} of shape {pages.shape}"
            )
        outside = pages[(pages < 0) | (pages >= self.page_count)]
        if len(outside):
            raise PageOutOfBoundsError(
                f"page {outside[0]} is not in [0, {self.page_count}) of adopted space '{self.name}'"
            )
        if len(np.unique(pages)) != len(pages):
            raise InvalidInputError(f"a page of adopted space '{self.name}' is named twice among {len(pages)}")
        return pages.astype(np.int32)

    def in_use(self, ids: PageIdArray) -> PageIdArray:
        """Return the `ids` that have a writer or readers; nobody else may write these."""
        return ids[self._is_written[ids] | (self._readers[ids] > 0)]

    def written(self, ids: PageIdArray) -> PageIdArray:
        """Return the `ids` that a room writes, or has written and still holds."""
        return ids[self._is_written[ids]]

    def mark(self, ids: PageIdArray) -> None:
        """Note that a room writes these pages; `in_use` has none of them."""
        self._is_written[ids] = True
        self._written += len(ids)

    def read(self, ids: PageIdArray) -> None:
        """Note that one more room reads these pages without writing them."""
        self.cached += int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))
        self._readers[ids] += 1

    def give(self, ids: PageIdArray) -> None:
        """Note that a room does not write these pages any more. Raises IntegrityError when no room did."""
        if not self._is_written[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' are given back that no room writes")
        self._is_written[ids] = False
        self._written -= len(ids)
        self.cached += int(np.count_nonzero(self._readers[ids]))

    def read_no_more(self, ids: PageIdArray) -> None:
        """Note that one room fewer reads these pages. Raises IntegrityError when no room did."""
        if not self._readers[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' lose a reader that they never had")
        self._readers[ids] -= 1
        self.cached -= int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))
