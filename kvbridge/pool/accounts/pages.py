"""The states and owners of pages, and the account of one index space: ids that this node chooses, or that an engine names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.allocator import RunAllocator

Counts = Mapping[IndexSpace, int]
NO_ROOM = -1
_NO_PAGES: PageIdArray = np.empty(0, dtype=np.int32)


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
"""The states that each state can become. Only `release_quarantined` ends a quarantine.

In an adopted space the engine decides. A page counts as cached there while some room reads the page and no room writes it,
whatever the page's state was before.
"""


class Owner(NamedTuple):
    """One attempt at one request: a room with its generation. With `NO_ROOM`, a copy between tiers, counted by generation."""

    room: int
    generation: int

    def __str__(self) -> str:
        return f"copy {self.generation}" if self.room == NO_ROOM else f"room {self.room} generation {self.generation}"


class PageCache(Protocol):
    """Knows what cached pages hold and who reads them. The book calls it in the middle of a reservation; it calls nothing back."""

    def evictable(self) -> Counts:
        """Return the number of cached pages of each space that `evict` can give up at once, all of them together."""

    def evict(self, lacking: Counts) -> Mapping[IndexSpace, PageIdArray]:
        """Forget at least `lacking` pages of each space, which are evictable, and return what was forgotten."""


class PageWatcher(Protocol):
    """Hears what becomes of pages in the middle of the call that does it; it calls nothing back."""

    def freed(self, pages: Counts) -> None:
        """These numbers of pages of each space have become available: free, or cached and without a reader."""

    def gone(self, owner: Owner) -> None:
        """The owner has no pages any more; `freed` has told how many they were."""


class OwnedSpace(RunAllocator):
    """A space whose ids this node gives out. A page that is out belongs to an owner or is cached."""

    what = "a space that this node allocates from"

    def __init__(self, space: IndexSpace, page_count: int) -> None:
        super().__init__(page_count, name=str(space))
        self._is_cached = np.zeros(page_count, dtype=np.bool_)
        self.cached = 0
        """Pages that have no owner and are not free."""

    def keep(self, ids: PageIdArray) -> None:
        """Note that these pages, which an owner had until now, are cached."""
        self._is_cached[ids] = True
        self.cached += len(ids)

    def drop(self, ids: PageIdArray) -> None:
        """Make cached pages free, all or nothing. Raises IntegrityError for one that is not cached, or is named twice."""
        outside = (ids < 0) | (ids >= self.page_count)
        if outside.any() or len(np.unique(ids)) != len(ids) or not self._is_cached[ids].all():
            raise IntegrityError(
                f"space '{self.name}': pages are to leave the cache that are not in it, or twice: {ids.tolist()}"
            )
        self._is_cached[ids] = False
        self.cached -= len(ids)
        self.give(ids)

    def cached_ids(self) -> PageIdArray:
        """Return all cached pages."""
        return np.flatnonzero(self._is_cached).astype(np.int32)

    def check_owners(self, owned: Sequence[PageIdArray], shared: Sequence[PageIdArray] = ()) -> None:
        """Raise IntegrityError unless the owners have exactly the pages that are out and not cached, each page once."""
        self.check_integrity()
        if len(shared):
            raise IntegrityError(f"space '{self.name}': who reads its cached pages is not for its owners to say")
        _check_disjoint(self.name, owned, self.page_count - self.free - self.cached)
        if any(self._is_free[ids].any() or self._is_cached[ids].any() for ids in owned):
            raise IntegrityError(f"space '{self.name}': an owned page is also free or cached in {self!r}")
        if int(self._is_cached.sum()) != self.cached or (self._is_free & self._is_cached).any():
            raise IntegrityError(f"space '{self.name}': cached pages are counted wrongly, or free as well, in {self!r}")


class AdoptedSpace:
    """A space whose ids an engine gives out; pages [0, page_count) exist.

    The engine says of each page whether a room writes the page, or only reads what the engine's own prefix cache has in the page.
    A page has at most one writer, and gets a writer only while nobody reads the page; any number of rooms may read a written page.
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
        """Pages that nobody has given to the bridge; only the engine knows whether it could give them."""
        return self.page_count - self._written - self.cached

    def check(self, ids: npt.ArrayLike) -> PageIdArray:
        """Return ids that an engine named as an int32 copy. Raises when one does not exist or is named twice."""
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
        """Return the `ids` that have a writer or readers: nobody else may write them."""
        return ids[self._is_written[ids] | (self._readers[ids] > 0)]

    def written(self, ids: PageIdArray) -> PageIdArray:
        """Return the `ids` that a room writes, or has written and still holds."""
        return ids[self._is_written[ids]]

    def mark(self, ids: PageIdArray) -> None:
        """Note that a room writes these pages; `in_use` has none of them."""
        self._is_written[ids] = True
        self._written += len(ids)

    def read(self, ids: PageIdArray) -> None:
        """Note that one more room reads these pages, and does not write them."""
        self.cached += int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))
        self._readers[ids] += 1

    def give(self, ids: PageIdArray) -> None:
        """Note that a room does not write these pages any more. Raises IntegrityError when no room did."""
        if not self._is_written[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' are given back that were never in use")
        self._is_written[ids] = False
        self._written -= len(ids)
        self.cached += int(np.count_nonzero(self._readers[ids]))

    def read_no_more(self, ids: PageIdArray) -> None:
        """Note that one room fewer reads these pages. Raises IntegrityError when no room did."""
        if not self._readers[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' lose a reader that they never had")
        self._readers[ids] -= 1
        self.cached -= int(np.count_nonzero(~self._is_written[ids] & (self._readers[ids] == 0)))

    def check_owners(self, owned: Sequence[PageIdArray], shared: Sequence[PageIdArray] = ()) -> None:
        """Raise IntegrityError unless the owners have exactly the written pages, each once, and readers add up."""
        _check_disjoint(self.name, owned, self._written)
        if int(self._is_written.sum()) != self._written or not all(self._is_written[ids].all() for ids in owned):
            raise IntegrityError(f"space '{self.name}': the map of written pages and the owners' pages differ")
        readers = np.bincount(np.concatenate([_NO_PAGES, *shared]), minlength=self.page_count)
        if not np.array_equal(readers, self._readers):
            raise IntegrityError(f"space '{self.name}': readers of pages do not add up to what the owners share")
        if self.cached != np.count_nonzero((readers > 0) & ~self._is_written):
            raise IntegrityError(
                f"space '{self.name}': {self.cached} cached pages in the book are not those that are only read"
            )


def _check_disjoint(name: str, owned: Sequence[PageIdArray], expected: int) -> None:
    pages = np.concatenate([_NO_PAGES, *owned])
    if len(np.unique(pages)) != len(pages):
        raise IntegrityError(f"space '{name}': a page has two owners")
    if len(pages) != expected:
        raise IntegrityError(f"space '{name}': owners have {len(pages)} pages, {expected} are out")
