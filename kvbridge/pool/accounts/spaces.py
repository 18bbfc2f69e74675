"""One index space's account: pages that we choose ourselves, or pages that an engine names.

Owns: which ids of one space are in use. Must not know: by whom, in which state, in which memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.allocator import RunAllocator


class OwnedSpace(RunAllocator):
    """A space whose ids we give out."""

    what = "a space that this node allocates from"

    def __init__(self, space: IndexSpace, page_count: int) -> None:
        super().__init__(page_count, name=str(space))

    def check_owners(self, owned: Sequence[PageIdArray]) -> None:
        """Check that the owners' pages are exactly those that are out, each once, and every inner structure."""
        self.check_integrity()
        _check_disjoint(self.name, owned, self.page_count - self.free)
        if any(self._is_free[ids].any() for ids in owned):
            raise IntegrityError(f"space '{self.name}': an owned page is also free in {self!r}")


class AdoptedSpace:
    """A space whose ids an engine gives out; [0, page_count) exist."""

    what = "an adopted space"

    def __init__(self, space: IndexSpace, page_count: int) -> None:
        if page_count < 1:
            raise InvalidInputError(f"adopted space '{space}' needs at least one page, got {page_count}")
        self.name = str(space)
        self.page_count = page_count
        self._is_used = np.zeros(page_count, dtype=np.bool_)
        self._used = 0

    @property
    def free(self) -> int:
        """Pages that have not been given to us; whether the engine could give them is its own affair."""
        return self.page_count - self._used

    def check(self, ids: npt.ArrayLike) -> PageIdArray:
        """Return ids that an engine named as our own int32 copy. Raises when one does not exist or is named twice."""
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
        """Those of `ids` that have been given to us before and not back."""
        return ids[self._is_used[ids]]

    def mark(self, ids: PageIdArray) -> None:
        """Note that the engine gave us these pages; they were checked before."""
        self._is_used[ids] = True
        self._used += len(ids)

    def give(self, ids: PageIdArray) -> None:
        """Note that the engine has these pages back. Raises IntegrityError when it never gave them."""
        if not self._is_used[ids].all():
            raise IntegrityError(f"pages of adopted space '{self.name}' are given back that were never in use")
        self._is_used[ids] = False
        self._used -= len(ids)

    def check_owners(self, owned: Sequence[PageIdArray]) -> None:
        """Check that the owners' pages are exactly those in use, each once."""
        _check_disjoint(self.name, owned, self._used)
        if int(self._is_used.sum()) != self._used or not all(self._is_used[ids].all() for ids in owned):
            raise IntegrityError(f"space '{self.name}': the map of used pages and the owners' pages differ")


def _check_disjoint(name: str, owned: Sequence[PageIdArray], expected: int) -> None:
    pages = np.concatenate([np.empty(0, dtype=np.int32), *owned])
    if len(np.unique(pages)) != len(pages):
        raise IntegrityError(f"space '{name}': a page has two owners")
    if len(pages) != expected:
        raise IntegrityError(f"space '{name}': owners have {len(pages)} pages, {expected} are out")
