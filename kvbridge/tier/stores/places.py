"""Where the parts of an object lie in a pool.

Owns: that arithmetic, and which requests name anything. Must not know: memory, stores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.base import BATCH_LIMIT
from kvbridge.tier.stores.objects import ObjectForm, region_order

PageIds = npt.NDArray[np.int32]


class PagePlaces:
    """Where the parts of a page are: the regions of one form, in this process. Pure arithmetic."""

    def __init__(self, regions: Sequence[Region]) -> None:
        """Raises InvalidInputError for regions that cannot be one object, UnsupportedError for memory that is not the host's."""
        if any(region.memory is not MemoryKind.DRAM for region in regions):
            raise UnsupportedError("a store takes pages of host memory; copy them there first")
        self.form = ObjectForm.of_regions(regions)
        ordered = sorted(regions, key=region_order)
        self.spaces: tuple[IndexSpace, ...] = tuple(sorted({region.space for region in ordered}))
        """The spaces that a page has an id in, in the order in which requests name them."""
        self._columns = np.array([self.spaces.index(region.space) for region in ordered])
        self._per_extent = np.array([region.pages_per_extent for region in ordered], dtype=np.int64)
        self._strides = np.array([region.page_stride_bytes for region in ordered], dtype=np.uint64)
        counts = [len(region.extent_addresses) for region in ordered]
        self._first_extents = np.cumsum([0, *counts[:-1]])
        self._addresses = np.array([one for region in ordered for one in region.extent_addresses], dtype=np.uint64)
        self._page_counts = [
            min(region.page_count for region in ordered if region.space is space) for space in self.spaces
        ]

    def check(self, pages: PageIds, count: int) -> None:
        """Raise InvalidInputError unless `pages` has a row for each of `count` objects, with the id of a page in each space."""
        if pages.shape != (count, len(self.spaces)):
            raise InvalidInputError(
                f"each of {count} objects needs a page id of each of {', '.join(self.spaces)}, got ids of shape {pages.shape}"
            )
        for column, (space, existing) in enumerate(zip(self.spaces, self._page_counts, strict=True)):
            wrong = (pages[:, column] < 0) | (pages[:, column] >= existing)
            if wrong.any():
                page = pages[wrong, column][0]
                raise PageOutOfBoundsError(f"page {page} of space {space} does not exist; there are {existing}")

    def addresses(self, page: PageIds) -> npt.NDArray[np.uint64]:
        """Return where each part of a page begins; `page` is its id in each space."""
        extents, indexes = np.divmod(page[self._columns].astype(np.int64), self._per_extent)
        found: npt.NDArray[np.uint64] = (
            self._addresses[self._first_extents + extents] + indexes.astype(np.uint64) * self._strides
        )
        return found


def check_request(places: Sequence[PagePlaces], form: int, keys: Keys) -> PagePlaces:
    """Return the places of a form. Raises InvalidInputError when there is none, and for keys that cannot be one request."""
    if not 0 <= form < len(places):
        raise InvalidInputError(f"there is no form {form} of objects here, only {len(places)}")
    if not 1 <= len(keys) <= BATCH_LIMIT:
        raise InvalidInputError(f"a request is about 1 to {BATCH_LIMIT} objects, got {len(keys)}")
    if len(set(keys.to_list())) != len(keys):
        raise InvalidInputError("a request names a page key twice; ask for each page once")
    return places[form]
