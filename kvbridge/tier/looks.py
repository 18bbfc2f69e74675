"""Who looks at cached pages to find out whether they still hold what they held when they came.

Owns: what is looked at, which stays where it is until that ends. Must not know: how digests are computed, what becomes of pages
that differ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.tier.index import DigestArray, PrefixIndex
from kvbridge.tier.readers import Reader
from kvbridge.tier.records import RecordArray
from kvbridge.tier.residence import Pages


@dataclass(frozen=True, slots=True, eq=False)
class PathPages:
    """Cached pages of a prompt, from its first one on, that stay where they are until `Looks.end`."""

    path: RecordArray
    pages: Pages


class Looks:
    """Those of one prefix cache that are under way."""

    def __init__(self, index: PrefixIndex, *, end: Callable[[Reader], None]) -> None:
        """`end`: is given every reader whose reading is over."""
        self._index, self._end = index, end
        self._readers: dict[PathPages, Reader] = {}

    @property
    def readers(self) -> list[Reader]:
        """What they read."""
        return list(self._readers.values())

    def begin(self, path: RecordArray) -> PathPages:
        """Let somebody look at a path that is on the device, until `end`, whatever becomes of those who read it."""
        looking, reader = PathPages(path, self._index.pages(path)), Reader(path, len(path))
        reader.pin(self._index)
        self._readers[looking] = reader
        return looking

    def end(self, looking: PathPages) -> None:
        """End what `begin` began; harmless when it has been ended."""
        if looking in self._readers:
            self._end(self._readers.pop(looking))

    def set_digests(self, looking: PathPages, start: int, digests: DigestArray) -> None:
        """Note what these pages from `start` on hold, as far as it is not known; one row each."""
        self._index.set_digests(looking.path[start:], digests)

    def changed(self, looking: PathPages, digests: DigestArray) -> npt.NDArray[np.bool_]:
        """Where these pages do not hold any more what they held when they came, by page and word of their digests."""
        expected, is_known = self._index.digests(looking.path)
        changed: npt.NDArray[np.bool_] = (expected != digests) & is_known[:, np.newaxis]
        return changed
