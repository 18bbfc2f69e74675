"""`kvbridge fit --trace`: how much of a trace's prompts a node would have kept, by the size of its pool and of its host tier."""

from __future__ import annotations

from pathlib import Path

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.table import Table

from kvbridge.cli.trace import prompt_tokens, read_trace
from kvbridge.cli.trace_simulation import run_cache
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.tier.keys import PrefixIdentity, page_keys

DEFAULT_POOLS = "4GiB,16GiB,64GiB,256GiB"


class PoolFit(FrozenModel):
    """What one pool would have kept."""

    pool_bytes: NonNegative | None
    """None: a pool in which everything fits."""
    host_bytes: NonNegative
    """Of a host tier below it; 0: there is none."""
    pages: Positive
    hit_tokens: NonNegative
    """Of all prompts, in whole pages that were there when their request came."""
    hit_rate: float
    """`hit_tokens` among the tokens of all prompts."""
    host_hit_tokens: NonNegative
    """Of `hit_tokens`, those that were in the host tier only."""
    too_long: NonNegative
    """Requests whose prompt has more pages than the pool, or than the host tier: they were left out."""


class TraceFit(FrozenModel):
    """The answer as a document."""

    trace: str
    requests: Positive
    prompt_tokens: Positive
    model: str
    tokens_per_page: Positive
    page_bytes: Positive
    """Of one page in all growing components and layers, wherever they live."""
    pools: tuple[PoolFit, ...]


def fit_trace(geometry: ModelGeometry, path: Path, pools: str) -> TraceFit:
    """Run a whole trace for each pool. Raises InvalidInputError for a trace or sizes that cannot be."""
    sizes, requests = _sizes(pools), read_trace(path)
    if not any(request.hash_ids for request in requests):
        raise InvalidInputError(f"--trace {path}: no request has 'hash_ids', so nothing is known of shared prefixes")
    growing = [component for component in geometry.components if component.liveness is Liveness.GROWING]
    page_bytes = sum(component.page_bytes() * len(component.layers) for component in growing)
    identity = PrefixIdentity(
        model=geometry.name,
        revision="",
        fingerprint=fingerprint(geometry),
        tokens_per_page=geometry.tokens_per_page,
    )
    prompts = [
        (request.timestamp / 1000, page_keys(identity, prompt_tokens(request, number)))
        for number, request in enumerate(requests)
    ]
    tokens = sum(request.input_length for request in requests)
    found = []
    for size, host_bytes in (*sizes, (None, 0)):
        pages = max(1, sum(len(keys) for _, keys in prompts)) if size is None else _pages(size, page_bytes)
        host_pages = _pages(host_bytes, page_bytes) if host_bytes else 0
        run = run_cache(prompts, pages, host_pages=host_pages)
        hit_tokens = run.hit_pages * geometry.tokens_per_page
        found.append(
            PoolFit(
                pool_bytes=size,
                host_bytes=host_bytes,
                pages=pages,
                hit_tokens=hit_tokens,
                hit_rate=hit_tokens / tokens,
                host_hit_tokens=run.host_hit_pages * geometry.tokens_per_page,
                too_long=run.too_long,
            )
        )
    return TraceFit(
        trace=path.name,
        requests=len(requests),
        prompt_tokens=tokens,
        model=geometry.name,
        tokens_per_page=geometry.tokens_per_page,
        page_bytes=page_bytes,
        pools=tuple(found),
    )


def trace_table(report: TraceFit) -> Table:
    """Return a line for each pool, and below them how to read it."""
    table = Table(
        title=f"{report.trace}: {report.requests:,} requests, {report.prompt_tokens / 1e6:.1f} M prompt tokens\n"
        f"{report.model}, pages of {report.tokens_per_page} tokens and {report.page_bytes:,} bytes",
        title_justify="left",
        caption="Hits: share of all prompt tokens whose pages were there when the request came. Pool: of all components that grow "
        "with the tokens, on device and host together; A + B: below a pool of A a host tier of B that gets a copy of every page. "
        "Left out: requests whose prompt is longer than the pool or the host tier.",
        caption_justify="left",
    )
    for column in ("pool", "pages", "hits", "of them on the host", "left out"):
        table.add_column(column, justify="right")
    for pool in report.pools:
        sizes = [ByteSize(each).human_readable(separator=" ") for each in (pool.pool_bytes, pool.host_bytes) if each]
        host_rate = pool.host_hit_tokens / report.prompt_tokens
        cells = (f"{pool.pages:,}", f"{pool.hit_rate:.1%}", f"{host_rate:.1%}", f"{pool.too_long:,}")
        table.add_row(" + ".join(sizes) or "endless", *cells)
    return table


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
