"""`kvbridge fit --trace`: how much of a trace's prompts a node would have kept, by the size of its pool and of its host tier.

The simulation has the index and the page runs of a node, and moves no byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvbridge.cli.config import aligned
from kvbridge.cli.trace import prompt_tokens, read_trace
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import IndexSpace, PageIdArray
from kvbridge.pool.accounts.allocator import RunAllocator
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys

DEFAULT_POOLS = "4GiB,16GiB,64GiB,256GiB"
DEVICE, HOST = IndexSpace.FULL, IndexSpace.FULL_TWIN
_READING = (
    "Hits: share of all prompt tokens whose pages were there when the request came. Pool: of all components that grow with the\n"
    "tokens, on device and host together; A + B: below a pool of A a host tier of B that gets a copy of every page. Left out:\n"
    "requests whose prompt is longer than the pool or the host tier."
)


def fit_trace(geometry: ModelGeometry, path: Path, pools: str) -> str:
    """Run a whole trace for each pool. Raises InvalidInputError for a trace or sizes that cannot be."""
    sizes, requests = _sizes(pools), read_trace(path)
    if not any(request.hash_ids for request in requests):
        raise InvalidInputError(f"--trace {path}: no request has 'hash_ids', so nothing is known of shared prefixes")
    growing = [component for component in geometry.components if component.liveness is Liveness.GROWING]
    page_bytes = sum(component.page_bytes() * len(component.layers) for component in growing)
    page_tokens = geometry.tokens_per_page
    identity = PrefixIdentity(
        model=geometry.name, revision="", fingerprint=fingerprint(geometry), tokens_per_page=page_tokens
    )
    prompts = [
        (request.timestamp / 1000, page_keys(identity, prompt_tokens(request, number)))
        for number, request in enumerate(requests)
    ]
    tokens = sum(request.input_length for request in requests)
    rows: list[tuple[str, ...]] = [("pool", "pages", "hits", "of them on the host", "left out")]
    for size, host_bytes in (*sizes, (0, 0)):
        pages = _pages(size, page_bytes) if size else max(1, sum(len(keys) for _, keys in prompts))
        run = run_cache(prompts, pages, host_pages=_pages(host_bytes, page_bytes) if host_bytes else 0)
        name = " + ".join(ByteSize(each).human_readable(separator=" ") for each in (size, host_bytes) if each)
        rates = (f"{count * page_tokens / tokens:.1%}" for count in (run.hit_pages, run.host_hit_pages))
        rows.append((name or "endless", f"{pages:,}", *rates, f"{run.too_long:,}"))
    return f"""\
{path.name}: {len(requests):,} requests, {tokens / 1e6:.1f} M prompt tokens
{geometry.name}, pages of {page_tokens} tokens and {page_bytes:,} bytes
{aligned(rows)}
{_READING}"""


def _sizes(text: str) -> list[tuple[int, int]]:
    """Return the bytes of each pool and of the host tier below it, 0 where there is none."""
    parse = TypeAdapter(ByteSize).validate_python
    try:
        sizes = [[parse(part.strip()) for part in pool.split("+")] for pool in text.split(",")]
    except ValidationError:
        raise InvalidInputError(
            f"--pool: sizes such as 16GiB, or 4GiB+60GiB for a device pool above a host tier, separated by commas, are needed, "
            f"got '{text}'"
        ) from None
    return sorted({(int(size), int(sum(host))) for size, *host in sizes})


def _pages(size: int, page_bytes: int) -> int:
    pages = size // page_bytes
    if not pages:
        raise InvalidInputError(f"--pool {ByteSize(size).human_readable()}: one page has {page_bytes} bytes")
    return pages


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
