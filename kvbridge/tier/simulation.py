"""What a pool of some size would hold of the prompts of a trace, by the index and the page runs that nodes have; no byte moves.

Owns: that run, and what is counted in it. Must not know: traces' files, what is made of the figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvbridge.core.ids import IndexSpace
from kvbridge.pool.accounts.allocator import RunAllocator
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.policy import EvictionPolicy


@dataclass(slots=True)
class CacheRun:
    """What happened to the prompts of a trace in one pool."""

    hit_pages: int = 0
    """That a prompt found there."""
    evicted_pages: int = 0
    too_long: int = 0
    """Requests whose prompt has more pages than the pool."""
    late_pages: int = 0
    """Taken since pages were evicted for the first time: from a pool that is full."""
    late_runs: int = 0
    """Of consecutive pages among those."""


def run_cache(prompts: Iterable[tuple[float, Keys]], page_count: int, policy: EvictionPolicy) -> CacheRun:
    """Let prompts (when each comes, and the keys of its whole pages) come one after the other to a pool of so many pages.

    Each is over before the next one comes, so nothing is pinned for longer, and pages are there at once.
    """
    index = PrefixIndex([IndexSpace.FULL], page_count, policy=policy)
    pool = RunAllocator(page_count)
    found = CacheRun()
    for now, keys in prompts:
        path = index.match(keys)
        missing = len(keys) - len(path)
        if len(keys) > page_count:
            found.too_long += 1
            continue
        found.hit_pages += len(path)
        index.pin(path)
        if missing > pool.free:
            evicted = index.evict({IndexSpace.FULL: missing - pool.free})[IndexSpace.FULL]
            pool.give(evicted)
            found.evicted_pages += len(evicted)
        pages = pool.take(missing)
        if found.evicted_pages and missing:
            found.late_pages += missing
            found.late_runs += 1 + int(np.count_nonzero(np.diff(pages) != 1))
        index.insert(keys, len(path), {IndexSpace.FULL: pages}, now=now)
        index.unpin(path)
    return found
