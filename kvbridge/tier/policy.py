"""Which cached prefixes go first when pages are needed.

Owns: the rank that a use gives to the pages it touched; the index evicts the leaf of the lowest rank. Must not know: pages, keys,
how the index finds a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ranks = npt.NDArray[np.float64]
Uses = npt.NDArray[np.int32]


class EvictionPolicy(Protocol):
    """Gives ranks. One object serves one index: it may remember what it has seen."""

    rank_is_time: bool
    """Whether a rank is the time of the last use, so that whatever was used later is still there."""

    def rank(self, now: float, uses: Uses) -> float | Ranks:
        """Return the rank of each page of a path that is used at `now`, or one for all; the lowest goes first.

        `uses`: how often each has been used, this time and its arrival included; their number is the length of the path.
        """

    def evicted(self, rank: float) -> None:
        """Pages of this rank have been evicted: the lowest there was."""


class LeastRecentlyUsed:
    """What was used longest ago goes first."""

    rank_is_time = True

    def rank(self, now: float, uses: Uses) -> float:
        """See EvictionPolicy."""
        del uses
        return now

    def evicted(self, rank: float) -> None:
        """See EvictionPolicy."""


class GreedyDual:
    """Weighs size, age and uses (Cherkasova's Greedy-Dual-Size with Frequency, softened): for pools that are small for their load.

    A path of n pages that was used k times counts k / sqrt(n), and as much more as the rank of what had to go last: so what is
    never used again goes in the end, a long prompt that came once goes soon, and a short one that many share stays.
    """

    rank_is_time = False

    def __init__(self) -> None:
        self._age = 0.0

    def rank(self, now: float, uses: Uses) -> Ranks:
        """See EvictionPolicy."""
        del now
        ranks: Ranks = self._age + uses / np.sqrt(len(uses))
        return ranks

    def evicted(self, rank: float) -> None:
        """See EvictionPolicy."""
        self._age = max(self._age, rank)


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "greedy_dual": GreedyDual}
"""By the names that configurations and commands have for them."""
