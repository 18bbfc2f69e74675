"""`kvbridge fit --trace`: how much of a trace's prompts a node would have kept, by the size of its pools.

Owns: the sizes, the table, the document and the picture. Must not know: how prefixes are found and evicted (`tier/`).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from kvbridge.cli.pictures import BLUE, GREY, INK, ORANGE, QUIET, picture
from kvbridge.cli.trace import TraceRequest, prompt_tokens, read_trace
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from kvbridge.tier.policy import POLICIES
from kvbridge.tier.simulation import run_cache

DEFAULT_POOLS = "4GiB,16GiB,64GiB,256GiB"
TITLES = {"lru": "least recently used goes first", "greedy_dual": "size, age and uses are weighed"}
COLOURS = {"lru": (BLUE, "o"), "greedy_dual": (ORANGE, "s")}
SIZE_INCHES = (10.0, 4.2)
GIB = 1 << 30


class PoolFit(FrozenModel):
    """What one pool would have kept by one policy."""

    pool_bytes: NonNegative | None
    """None: a pool in which everything fits."""
    host_bytes: NonNegative = 0
    """Of a host tier below it; 0: there is none."""
    pages: Positive
    policy: str
    hit_tokens: NonNegative
    """Of all prompts, in whole pages that were there when their request came."""
    hit_rate: float
    """`hit_tokens` among the tokens of all prompts."""
    host_hit_tokens: NonNegative = 0
    """Of `hit_tokens`, those that were in the host tier only."""
    evicted_pages: NonNegative
    """From the pool itself."""
    pages_in_a_run: float | None
    """Consecutive pages that requests got from the full pool, on average; None: it was never full."""
    too_long: NonNegative
    """Requests whose prompt has more pages than the pool, or than the host tier: they were left out."""

    @property
    def sizes(self) -> tuple[int | None, int]:
        """Bytes of the pool and of the host tier below it."""
        return self.pool_bytes, self.host_bytes

    @property
    def gib(self) -> float:
        """GiB of both; only for a pool that has a size."""
        return ((self.pool_bytes or 0) + self.host_bytes) / GIB


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
    seconds: float
    """Processor time of all of it."""


def fit_trace(geometry: ModelGeometry, path: Path, pools: str) -> TraceFit:
    """Run a whole trace for each pool and policy. Raises InvalidInputError for a trace or sizes that cannot be."""
    begun_s = time.process_time()
    sizes = _sizes(pools)
    requests = read_trace(path)
    if not any(request.hash_ids for request in requests):
        raise InvalidInputError(f"--trace {path}: no request has 'hash_ids', so nothing is known of shared prefixes")
    page_bytes = sum(
        component.page_bytes() * len(component.layers)
        for component in geometry.components
        if component.liveness is Liveness.GROWING
    )
    prompts = _prompts(geometry, requests)
    tokens = sum(request.input_length for request in requests)
    everything = max(1, sum(len(keys) for _, keys in prompts))
    found = []
    for size, host_bytes in (*sizes, (None, 0)):
        pages = everything if size is None else _pages(size, page_bytes)
        host_pages = _pages(host_bytes, page_bytes) if host_bytes else 0
        for name, policy in POLICIES.items():
            if size is None and name != "lru":
                continue  # nothing is evicted
            run = run_cache(prompts, pages, policy(), host_pages=host_pages)
            hit_tokens = run.hit_pages * geometry.tokens_per_page
            found.append(
                PoolFit(
                    pool_bytes=size,
                    host_bytes=host_bytes,
                    pages=pages,
                    policy=name,
                    hit_tokens=hit_tokens,
                    hit_rate=hit_tokens / tokens,
                    host_hit_tokens=run.host_hit_pages * geometry.tokens_per_page,
                    evicted_pages=run.evicted_pages,
                    pages_in_a_run=run.late_pages / run.late_runs if run.late_runs else None,
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
        seconds=time.process_time() - begun_s,
    )


def print_trace_fit(report: TraceFit, console: Console) -> None:
    """Print the table, and below it how to read it."""
    table = Table(
        title=f"{report.trace}: {report.requests:,} requests, {report.prompt_tokens / 1e6:.1f} M prompt tokens\n"
        f"{report.model}, pages of {report.tokens_per_page} tokens and {report.page_bytes:,} bytes",
        title_justify="left",
    )
    table.add_column("pool", justify="right")
    table.add_column("pages", justify="right")
    for name in POLICIES:
        table.add_column(f"hits, {TITLES[name]}", justify="right", max_width=20)
    for name in POLICIES:
        table.add_column(f"pages in a run, {name}", justify="right", max_width=16)
    rows: dict[tuple[int | None, int], dict[str, PoolFit]] = {}
    for pool in report.pools:
        rows.setdefault(pool.sizes, {})[pool.policy] = pool
    for (size, host_bytes), by_policy in rows.items():
        first = by_policy["lru"]
        hits = [f"{by_policy.get(name, first).hit_rate:.1%}" for name in POLICIES]
        runs = [by_policy.get(name, first).pages_in_a_run for name in POLICIES]
        said = [f"{run:.1f}" if run else "never full" for run in runs]
        table.add_row(_name(size, host_bytes), f"{first.pages:,}", *hits, *said, end_section=size is None)
    console.print(table)
    left_out = max(pool.too_long for pool in report.pools)
    more = f" Up to {left_out} requests were left out: their prompts are longer than a pool." if left_out else ""
    if _has_tiers(report):
        more += " A + B: a pool of A on the device, and below it a host tier of B that gets a copy of every page."
    console.print(
        "Hits: share of all prompt tokens whose pages were there when the request came. A pool: all components that grow with "
        "the tokens, on device and host together. Pages in a run: consecutive pages that a request got from the full pool, on "
        f"average; transfers are faster with longer runs.{more}",
        style="dim",
    )


def draw_trace_fit(report: TraceFit, path: Path) -> None:
    """Write the picture as PNG. Raises UnsupportedError without matplotlib, OSError when the file cannot be written."""
    endless = next(pool for pool in report.pools if pool.pool_bytes is None)
    with picture(path, SIZE_INCHES) as figure:
        hits, runs = figure.subplots(1, 2)
        hits.axhline(100 * endless.hit_rate, color=GREY, linestyle="--", linewidth=1.2)
        hits.annotate(
            f"everything kept: {endless.hit_rate:.1%}",
            (0.02, 100 * endless.hit_rate),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
            color=QUIET,
        )
        for name, (colour, marker) in COLOURS.items():
            style: dict[str, Any] = {"color": colour, "marker": marker}
            ours = [pool for pool in report.pools if pool.policy == name and pool.pool_bytes]
            alone, tiered = ([pool for pool in ours if bool(pool.host_bytes) is wanted] for wanted in (False, True))
            hollow = style | {"linestyle": "none", "markerfacecolor": "white"}
            for shown, form in ((alone, style | {"label": TITLES[name]}), (tiered, hollow)):
                sizes = [pool.gib for pool in shown]
                hits.plot(sizes, [100 * pool.hit_rate for pool in shown], **form)
                runs.plot(sizes, [pool.pages_in_a_run or float("nan") for pool in shown], **form)
        _label(hits, report.pools)
        ticks = sorted({pool.gib for pool in report.pools if pool.pool_bytes})
        for axes in (hits, runs):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_xlabel("pool, GiB" + ("; hollow: most of it on the host" if _has_tiers(report) else ""))
            axes.set_ylim(bottom=0)
            axes.margins(x=0.08)
        hits.set_ylim(top=100 * endless.hit_rate * 1.2)
        hits.set_title("Prompt tokens found in the pool, %")
        runs.set_title("Consecutive pages that requests get from the full pool")
        runs.legend(loc="upper right")
        figure.suptitle(
            f"Prefixes that stay: {report.trace}, {report.requests:,} requests, {report.model}", fontsize=12
        )


def _label(axes: Any, pools: tuple[PoolFit, ...]) -> None:  # noqa: ANN401 - of matplotlib, an extra
    """Write the rates beside their points, the higher of two above and the lower below."""
    for size in sorted({pool.gib for pool in pools if pool.pool_bytes}):
        rates = sorted(pool.hit_rate for pool in pools if pool.pool_bytes and pool.gib == size)
        for rate, above in ((rates[-1], 7), (rates[0], -14)):
            axes.annotate(
                f"{rate:.1%}",
                (size, 100 * rate),
                xytext=(0, above),
                textcoords="offset points",
                ha="center",
                color=INK,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )


def _prompts(geometry: ModelGeometry, requests: tuple[TraceRequest, ...]) -> list[tuple[float, Keys]]:
    identity = PrefixIdentity(
        model=geometry.name,
        revision="",
        fingerprint=fingerprint(geometry),
        tokens_per_page=geometry.tokens_per_page,
    )
    return [
        (request.timestamp / 1000, page_keys(identity, prompt_tokens(request, number)))
        for number, request in enumerate(requests)
    ]


def _sizes(text: str) -> list[tuple[int, int]]:
    """Bytes of each pool and of the host tier below it, if any."""
    try:
        sizes = [
            [TypeAdapter(ByteSize).validate_python(part.strip()) for part in pool.split("+")]
            for pool in text.split(",")
        ]
        return sorted({(int(size), int(sum(host))) for size, *host in sizes})
    except ValidationError:
        raise InvalidInputError(
            f"--pool: sizes such as 16GiB, or 4GiB+60GiB for a device pool above a host tier, separated by commas, are needed, "
            f"got '{text}'"
        ) from None


def _pages(size: int, page_bytes: int) -> int:
    pages = size // page_bytes
    if not pages:
        raise InvalidInputError(f"--pool {ByteSize(size).human_readable()}: one page has {page_bytes} bytes")
    return pages


def _has_tiers(report: TraceFit) -> bool:
    return any(pool.host_bytes for pool in report.pools)


def _name(size: int | None, host_bytes: int) -> str:
    sizes = [ByteSize(each).human_readable(separator=" ") for each in (size, host_bytes) if each]
    return " + ".join(sizes) or "endless"
