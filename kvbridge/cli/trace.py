"""Request traces, and `kvbridge fit --trace`: how much of a trace's prompts a node would have kept, by the size of its pools.

A trace has one JSON object a line, as Mooncake's FAST'25 traces have them: {"timestamp": milliseconds since the trace began,
"input_length": tokens, "output_length": tokens, "hash_ids": one number for each block of 512 tokens of the prompt, equal where
prompts share a prefix}. Other keys are ignored, `hash_ids` may be missing. The simulation has the index and the pages of a node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from kvbridge.cli.config import aligned
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import IndexSpace, NonNegative, PageIdArray
from kvbridge.doctor.findings import size
from kvbridge.pool.accounts.allocator import RunAllocator
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys

BLOCK_TOKENS = 512
"""Tokens of the prompt that one of `hash_ids` stands for."""
MOST_TOKENS = 1 << 24
"""No request of any trace is as long; a larger number is a mistake in the file."""


class TraceRequest(BaseModel):
    """One request of a trace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """When it arrives, in milliseconds since the trace began."""
    input_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    """Tokens of its prompt."""
    output_length: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Tokens that are generated for it."""
    hash_ids: tuple[NonNegative, ...] = ()


def read_trace(path: Path, *, count: int = 0) -> tuple[TraceRequest, ...]:
    """Return the first `count` requests (0: all), in the order of the file. Lines behind them are not looked at.

    Raises InvalidInputError naming the file and the line that is wrong, or a file that has too few requests.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = tuple(islice(_requests(path, file), count or None))
    except OSError as error:
        raise InvalidInputError(f"--trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"--trace {path}: not a text file ({error.reason} at byte {error.start})") from error
    if len(requests) < max(1, count):
        raise InvalidInputError(f"--trace {path}: has {len(requests)} requests, {max(1, count)} are asked for")
    return requests


def prompt_tokens(request: TraceRequest, number: int) -> npt.NDArray[np.uint32]:
    """Return token ids for a prompt of which a trace tells no more than `hash_ids`: equal to those of others where these are.

    Blocks without an id are shared with no request of another `number`.
    """
    ids = np.full(
        -(-request.input_length // BLOCK_TOKENS), (1 << 63) + number, dtype="<u8"
    )  # no block of a trace has such an id
    told = request.hash_ids[: len(ids)]
    ids[: len(told)] = told
    return np.repeat(ids, BLOCK_TOKENS // 2).view("<u4")[: request.input_length]


def _requests(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    latest = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = TraceRequest.model_validate_json(line)
        except ValidationError as error:
            raise InvalidInputError(f"--trace {path}, line {number}: {_fault(error)}") from error
        if request.timestamp < latest:
            raise InvalidInputError(
                f"--trace {path}, line {number}: timestamp {request.timestamp:g} comes after {latest:g}; "
                "requests have to be in the order of their arrival"
            )
        latest = request.timestamp
        yield request


def _fault(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"has no '{where}'"
    got = f", got {first['input']!r}" if where and len(repr(first["input"])) <= 80 else ""
    return f"{where + ': ' if where else ''}{first['msg']}{got}"


DEFAULT_POOLS = "4GiB,16GiB,64GiB,256GiB"
DEVICE, HOST = IndexSpace.FULL, IndexSpace.FULL_COPY
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
    for pool_bytes, host_bytes in (*sizes, (0, 0)):
        pages = _pages(pool_bytes, page_bytes) if pool_bytes else max(1, sum(len(keys) for _, keys in prompts))
        cache = SimulatedCache(pages, _pages(host_bytes, page_bytes) if host_bytes else 0)
        for now, keys in prompts:
            cache.request(now, keys)
        name = " + ".join(size(each) for each in (pool_bytes, host_bytes) if each)
        rates = (f"{count * page_tokens / tokens:.1%}" for count in (cache.hit_pages, cache.host_hit_pages))
        rows.append((name or "endless", f"{pages:,}", *rates, f"{cache.too_long:,}"))
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
    return sorted({(int(pool), int(sum(host))) for pool, *host in sizes})


def _pages(pool_bytes: int, page_bytes: int) -> int:
    pages = pool_bytes // page_bytes
    if not pages:
        raise InvalidInputError(f"--pool {size(pool_bytes)}: one page has {page_bytes} bytes")
    return pages


@dataclass
class SimulatedCache:
    """A pool of so many pages, with a host tier of `host_pages` below it that gets a copy of every page.

    A prompt is over before the next one comes: nothing is pinned for longer, and copies are done at once.
    """

    page_count: int
    host_pages: int = 0
    hit_pages: int = 0
    """Pages that prompts found."""
    host_hit_pages: int = 0
    """Those of them that were on the host only."""
    too_long: int = 0
    """Requests whose prompt has more pages than the device, or the host."""

    def __post_init__(self) -> None:
        self._free = {DEVICE: RunAllocator(self.page_count)}
        if self.host_pages:
            self._free[HOST] = RunAllocator(self.host_pages)
        capacity = self.page_count + self.host_pages
        self._index = PrefixIndex([DEVICE], capacity, has_copies=bool(self.host_pages))

    def request(self, now: float, keys: Keys) -> None:
        """Take in a prompt: what only the host holds comes to the device, the rest is computed, all is copied to the host."""
        if len(keys) > min(self.page_count, self.host_pages or self.page_count):
            self.too_long += 1
            return
        index = self._index
        known = index.match(keys)
        there = index.device.depth(known)
        restored = len(known) - there
        on_host = len(known) if restored else 0
        self.hit_pages += len(known)
        self.host_hit_pages += restored
        index.pin(known, device=there, host=on_host)
        pages = self._take(DEVICE, len(keys) - there)
        if restored:
            index.add_device(known, there, {DEVICE: pages[:restored]})
        index.insert(keys, len(known), {DEVICE: pages[restored:]}, now=now)
        index.unpin(known, device=there, host=on_host)
        if index.host is not None:
            path = index.match(keys)
            start = index.host.depth(path)
            index.pin(path, host=start)
            twins = self._take(HOST, len(path) - start)
            if len(twins):
                index.add_copies(path, start, {HOST: twins})
            index.unpin(path, host=start)

    def _take(self, space: IndexSpace, count: int) -> PageIdArray:
        pool = self._free[space]
        if count > pool.free:
            evicted = self._index.evict({space: count - pool.free})
            for each, owner in self._free.items():
                if len(evicted.get(each, ())):
                    owner.give(evicted[each])
        return pool.take(count)
