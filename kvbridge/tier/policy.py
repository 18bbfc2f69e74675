"""Which cached prefixes go first when pages are needed.

Owns: the rank that a use gives to the pages it touched; the index evicts the leaf of the lowest rank. Must not know: pages, keys,
how the index finds a leaf.
"""

from __future__ import annotations

from typing import Protocol


class EvictionPolicy(Protocol):
    """Gives ranks. One object serves one index: it may remember what it has seen."""

    def rank(self, now: float, pages: int) -> float:
        """Return the rank that a path of so many pages has once it has been used at `now`; the lowest goes first."""

    def evicted(self, rank: float) -> None:
        """A page of this rank has been evicted: the lowest there was."""


class LeastRecentlyUsed:
    """What was used longest ago goes first."""

    def rank(self, now: float, pages: int) -> float:
        """See EvictionPolicy."""
        del pages
        return now

    def evicted(self, rank: float) -> None:
        """See EvictionPolicy."""
