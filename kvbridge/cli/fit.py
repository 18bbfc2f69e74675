"""`kvbridge fit`: the cost of requests on a decode node, how many fit at once, and how much of a trace its pools would keep.

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
import typer
from pydantic import BaseModel, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED, FileOption, SetOption, aligned, fail, load_or_exit
from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.costs import DecodePlan, Fit, fit_memory, fit_pools, hot_slot_bytes, request_cost
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import IndexSpace, NonNegative, PageIdArray, Rank
from kvbridge.daemon.layout import NodeLayout, load_geometry, plan_memory
from kvbridge.doctor.findings import size
from kvbridge.pool.accounts.spaces import RunAllocator
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys

DEFAULT_TOKENS = "1024,8192,32768,131072"
DEFAULT_POOLS = "4GiB,16GiB,64GiB,256GiB"
_SIZE = TypeAdapter(ByteSize)


def fit(  # noqa: PLR0913, PLR0917 - an argument for each option
    config: FileOption = None,
    overrides: SetOption = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Lengths of prompts, separated by commas.")] = DEFAULT_TOKENS,
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens that each request may generate.")] = 1024,
    device_memory: Annotated[
        str, typer.Option(help="With --host-memory: also show how many would fit into so much: 60GiB.")
    ] = "",
    host_memory: Annotated[str, typer.Option("--host-memory", help="See --device-memory; of the node: 1TiB.")] = "",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Print how much of this trace pools would keep instead."),
    ] = None,
    pools: Annotated[
        str, typer.Option("--pool", help="With --trace: sizes, by commas; 4GiB+60GiB is a host tier below a pool.")
    ] = DEFAULT_POOLS,
) -> None:
    """Print the cost of requests of some lengths on a decode node, and how many of each fit at once.

    With --trace: print the share of a trace's prompts that pools of some sizes would keep. No byte is moved.
    """
    loaded = load_or_exit(DecodeConfig, config, overrides)
    try:
        if trace is not None:
            text = fit_trace(load_geometry(loaded.model), trace, pools)
        else:
            text = _report(loaded, _lengths(tokens), new_tokens, _memory(device_memory, host_memory))
    except BridgeError as error:
        fail(error, EXIT_CONFIG if isinstance(error, InvalidInputError) else EXIT_FAILED)
    typer.echo(text)


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--tokens: whole numbers separated by commas are needed, got '{text}'") from None
    if min(lengths) < 1:
        raise InvalidInputError(f"--tokens: a prompt has at least one token, got {min(lengths)}")
    return lengths


def _memory(device: str, host: str) -> tuple[int, int] | None:
    """Return the bytes of a device and of a host that are not divided into pools yet."""
    if not device and not host:
        return None
    try:
        return _SIZE.validate_python(device), _SIZE.validate_python(host)
    except ValidationError as error:
        raise InvalidInputError(
            f"--device-memory and --host-memory: two sizes such as 60GiB and 1TiB are needed, got '{device}' and '{host}'"
        ) from error


def _report(config: DecodeConfig, lengths: list[int], new_tokens: int, memory: tuple[int, int] | None) -> str:
    geometry = load_geometry(config.model)
    layout = plan_memory(config, geometry)
    rank, plan = _fullest(config, layout, DecodePlan(geometry=geometry, host=layout.host_kinds, sparse=config.sparse))
    hot = "; the hot buffer is allocated whole at start, by the engine, beside the pools" if plan.sparse else ""
    return f"""\
Memory of {config.instance}/{config.node}, {geometry.name}
{aligned(_pools(rank, plan, layout))}

A request from its admission to its end, with room for {new_tokens} new tokens
{aligned(_requests(plan, lengths, new_tokens, layout, memory))}
Device: rank {rank}, which holds most{hot}. Fit at once: if all requests are of that length."""


def _fullest(config: DecodeConfig, layout: NodeLayout, whole: DecodePlan) -> tuple[Rank, DecodePlan]:
    """Return the rank on which a request takes the most device memory, and the rank's part of the plan."""
    plans = {
        rank: whole.model_copy(update={"layers": frozenset(part.layers), "tp_size": config.parallelism.tp_size})
        for rank, part in layout.parts.items()
    }
    one_page = whole.geometry.tokens_per_page
    cost = {rank: request_cost(plan, prompt_tokens=one_page, max_new_tokens=0) for rank, plan in plans.items()}
    return max(plans.items(), key=lambda each: cost[each[0]].device_bytes)


def _pools(rank: Rank, plan: DecodePlan, layout: NodeLayout) -> Iterator[tuple[str, ...]]:
    yield "", "pages or slots", "bytes"
    pages, placement = layout.owned, layout.device.get(rank)
    if placement is None:
        yield f"device pool of rank {rank}", "the engine's own", ""
    else:
        spaces = sorted(pages.keys() & {IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST})
        counts = ", ".join(f"{pages[space]} {space}" for space in spaces)
        yield f"device pool of rank {rank}", counts, size(placement.total_bytes)
    if layout.host is not None and layout.host.total_bytes:
        yield "host pool", str(pages[IndexSpace.HOST]), size(layout.host.total_bytes)
    if layout.copies is not None:
        yield "prefixes on the host", str(pages[IndexSpace.FULL_COPY]), size(layout.copies.total_bytes)
    if plan.sparse is not None:
        slots, slot = plan.sparse.max_requests, hot_slot_bytes(plan)
        yield f"hot buffer of rank {rank}", str(slots), size(slots * slot.total)
        for part, each in slot.model_dump().items():
            yield f"  {part.replace('_', ' ')}", "", size(slots * each)


def _requests(
    plan: DecodePlan, lengths: list[int], new_tokens: int, layout: NodeLayout, memory: tuple[int, int] | None
) -> Iterator[tuple[str, ...]]:
    """Yield a column for each length, so that the width does not depend on the model."""
    costs = [request_cost(plan, prompt_tokens=each, max_new_tokens=new_tokens) for each in lengths]
    yield "tokens in the prompt", *(f"{each:,}" for each in lengths)
    for kind in costs[0].device:
        yield str(kind), *(size(cost.device[kind]) for cost in costs)
    if plan.sparse is not None:
        yield "hot buffer", *(size(cost.sparse.total if cost.sparse else 0) for cost in costs)
    yield "on the device", *(size(cost.device_bytes) for cost in costs)
    for kind in costs[0].host:
        yield f"{kind} on the host", *(size(cost.host[kind]) for cost in costs)
    yield from _fits("fit at once", [fit_pools(plan, cost, pages=layout.owned) for cost in costs])
    if memory is not None:
        fits = [fit_memory(plan, cost, device_bytes=memory[0], host_bytes=memory[1]) for cost in costs]
        yield from _fits(f"would fit into {size(memory[0])} and {size(memory[1])}", fits)


def _fits(title: str, fits: list[Fit]) -> Iterator[tuple[str, ...]]:
    yield title, *(str(each.requests) for each in fits)
    yield "limited by", *(each.limit for each in fits)


# ---------------------------------------------------------------------------------------------- traces

BLOCK_TOKENS = 512
"""Tokens of the prompt that one of `hash_ids` stands for."""
MOST_TOKENS = 1 << 24
"""No request of any trace is as long; a larger number is a mistake in the file."""
DEVICE, HOST = IndexSpace.FULL, IndexSpace.FULL_COPY
_READING = (
    "Hits: share of all prompt tokens whose pages were there when the request came. Pool: of all components that grow with the\n"
    "tokens, on device and host together; A + B: a pool of A above a host tier of B that gets a copy of every page. Left out:\n"
    "requests whose prompt is longer than the pool or the host tier."
)


class TraceRequest(BaseModel):
    """One request of a trace."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Arrival, in milliseconds since the trace began."""
    input_length: Annotated[int, Field(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    hash_ids: tuple[NonNegative, ...] = ()


def read_trace(path: Path, *, count: int = 0) -> tuple[TraceRequest, ...]:
    """Return the first `count` requests (0: all), in the order of the file. Later lines are not read.

    Raises InvalidInputError with the file and its wrong line, or for a file that has too few requests.
    """
    try:
        with path.open(encoding="utf-8") as file:
            requests = tuple(islice(_read_requests(path, file), count or None))
    except OSError as error:
        raise InvalidInputError(f"--trace {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"--trace {path}: not a text file ({error.reason} at byte {error.start})") from error
    if len(requests) < max(1, count):
        raise InvalidInputError(f"--trace {path}: has {len(requests)} requests, {max(1, count)} are asked for")
    return requests


def _read_requests(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
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


def prompt_tokens(request: TraceRequest, number: int) -> npt.NDArray[np.uint32]:
    """Return token ids for a prompt of a trace: blocks have equal tokens where their `hash_ids` are equal.

    Blocks without an id are shared with no request of another `number`.
    """
    # No block of a trace has an id of 1 << 63 or more.
    ids = np.full(-(-request.input_length // BLOCK_TOKENS), (1 << 63) + number, dtype="<u8")
    told = request.hash_ids[: len(ids)]
    ids[: len(told)] = told
    return np.repeat(ids, BLOCK_TOKENS // 2).view("<u4")[: request.input_length]


def fit_trace(geometry: ModelGeometry, path: Path, pools: str) -> str:
    """Run a whole trace for each pool. Raises InvalidInputError for a wrong trace and for wrong sizes."""
    sizes, requests = _sizes(pools), read_trace(path)
    if not any(request.hash_ids for request in requests):
        raise InvalidInputError(f"--trace {path}: no request has 'hash_ids', so nothing is known of shared prefixes")
    growing = [component for component in geometry.components if component.liveness is Liveness.GROWING]
    page_bytes = sum(component.page_bytes() * len(component.layers) for component in growing)
    page_tokens = geometry.tokens_per_page
    shared = {"fingerprint": fingerprint(geometry), "tokens_per_page": page_tokens}
    identity = PrefixIdentity(model=geometry.name, revision="", **shared)
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
    try:
        sizes = [[_SIZE.validate_python(part.strip()) for part in pool.split("+")] for pool in text.split(",")]
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
    """Found pages that were on the host only."""
    too_long: int = 0
    """Requests whose prompt has more pages than the device, or the host."""

    def __post_init__(self) -> None:
        self._free = {DEVICE: RunAllocator(self.page_count)}
        if self.host_pages:
            self._free[HOST] = RunAllocator(self.host_pages)
        capacity = self.page_count + self.host_pages
        self._index = PrefixIndex([DEVICE], capacity, has_copies=bool(self.host_pages))

    def request(self, now: float, keys: Keys) -> None:
        """Take in a prompt: pages of the host come to the device, the others are computed, and all are copied to the host."""
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
            copies = self._take(HOST, len(path) - start)
            if len(copies):
                index.add_copies(path, start, {HOST: copies})
            index.unpin(path, host=start)

    def _take(self, space: IndexSpace, count: int) -> PageIdArray:
        pool = self._free[space]
        if count > pool.free:
            evicted = self._index.evict({space: count - pool.free})
            for each, owner in self._free.items():
                if len(evicted.get(each, ())):
                    owner.give(evicted[each])
        return pool.take(count)
