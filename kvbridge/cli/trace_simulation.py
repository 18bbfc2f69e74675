"""A run of the prompts of a trace against pools of some size, by the index and the page runs that nodes have; no byte moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.allocator import RunAllocator
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys

DEVICE, HOST = IndexSpace.FULL, IndexSpace.FULL_TWIN


@dataclass(slots=True)
class CacheRun:
    """What happened to the prompts of a trace."""

    hit_pages: int = 0
    """That a prompt found."""
    host_hit_pages: int = 0
    """Of these, those that were on the host only."""
    evicted_pages: int = 0
    """From the device."""
    too_long: int = 0
    """Requests whose prompt has more pages than the device, or the host."""
    late_pages: int = 0
    """Taken since pages were evicted from the device for the first time: from a pool that is full."""
    late_runs: int = 0
    """Of consecutive pages among those."""


def run_cache(prompts: Iterable[tuple[float, Keys]], page_count: int, *, host_pages: int = 0) -> CacheRun:
    """Let prompts (when each comes, and the keys of its whole pages) come one after the other to a pool of so many pages.

    `host_pages`: below it is a host tier of so many, to which every page is copied when it comes, and back when it is missed. Each
    prompt is over before the next one comes, so nothing is pinned for longer, and copies are done at once.
    """
    most = min(page_count, host_pages or page_count)
    pools = _Pools(page_count, host_pages)
    for now, keys in prompts:
        if len(keys) > most:
            pools.found.too_long += 1
        else:
            pools.request(now, keys)
    return pools.found


@dataclass(slots=True)
class _Pools:
    page_count: int
    host_pages: int
    found: CacheRun = field(default_factory=CacheRun)
    _index: PrefixIndex = field(init=False)
    _free: dict[IndexSpace, RunAllocator] = field(init=False)

    def __post_init__(self) -> None:
        self._free = {DEVICE: RunAllocator(self.page_count)}
        if self.host_pages:
            self._free[HOST] = RunAllocator(self.host_pages)
        capacity = self.page_count + self.host_pages
        self._index = PrefixIndex([DEVICE], capacity, has_twins=bool(self.host_pages))

    def request(self, now: float, keys: Keys) -> None:
        """One prompt: what is on the host only comes to the device, the rest is computed, and all of it is copied to the host."""
        index, found = self._index, self.found
        known = index.match(keys)
        there = index.device.depth(known)
        on_host = len(known) if there < len(known) else 0
        found.hit_pages += len(known)
        found.host_hit_pages += len(known) - there
        index.pin(known, device=there, host=on_host)
        pages = self._take(DEVICE, len(keys) - there)
        if found.evicted_pages and len(pages):
            found.late_pages += len(pages)
            found.late_runs += 1 + int(np.count_nonzero(np.diff(pages) != 1))
        restored = len(known) - there
        if restored:
            index.add_device(known, there, {DEVICE: pages[:restored]})
        index.insert(keys, len(known), {DEVICE: pages[restored:]}, now=now)
        index.unpin(known, device=there, host=on_host)
        if index.host is not None:
            self._back_up(keys)

    def _back_up(self, keys: Keys) -> None:
        index = self._index
        assert index.host is not None
        path = index.match(keys)
        start = index.host.depth(path)
        index.pin(path, host=start)
        twins = self._take(HOST, len(path) - start)
        if len(twins):
            index.add_twins(path, start, {HOST: twins})
        index.unpin(path, host=start)

    def _take(self, space: IndexSpace, count: int) -> PageIdArray:
        pool = self._free[space]
        if count > pool.free:
            self._give_back(self._index.evict({space: count - pool.free}))
        return pool.take(count)

    def _give_back(self, evicted: Mapping[IndexSpace, PageIdArray]) -> None:
        self.found.evicted_pages += len(evicted.get(DEVICE, ()))
        for space, pool in self._free.items():
            if len(evicted.get(space, ())):
                pool.give(evicted[space])
