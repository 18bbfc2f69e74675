"""`kvbridge fit`: what requests cost on a decode node, and how many fit at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED, FileOption, SetOption, fail, load_or_exit
from kvbridge.cli.fit_trace import DEFAULT_POOLS, fit_trace, trace_table
from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.costs import (
    DecodePlan,
    Fit,
    RequestCost,
    fit_memory,
    fit_pools,
    hot_slot_bytes,
    request_cost,
)
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive
from kvbridge.daemon.memory import NodeLayout, plan_memory
from kvbridge.daemon.model import load_geometry
from kvbridge.doctor.findings import size

DEFAULT_TOKENS = "1024,8192,32768,131072"
_SIZE = TypeAdapter(ByteSize)


class LengthFit(FrozenModel):
    """What requests of one length cost, and how many fit."""

    prompt_tokens: Positive
    cost: RequestCost
    device_bytes: NonNegative
    """All that one takes on the device of the rank, its slot of the hot buffer included."""
    host_bytes: NonNegative
    fits: Fit
    """Into the pools of the configuration."""
    would_fit: Fit | None = None
    """Into the memory that was named."""


class FitReport(FrozenModel):
    """The answer as a document."""

    instance: str
    node: str
    model: str
    rank: str
    """On which a request takes the most device memory; what is said of a device is said of its own."""
    new_tokens: NonNegative
    pages: dict[IndexSpace, NonNegative]
    """That the node owns, of each index space."""
    device_pool_bytes: NonNegative | None
    """None: the engine's own."""
    host_pool_bytes: NonNegative
    twin_bytes: NonNegative
    """Of `tier.host`, whose pages keep prefixes and are no request's."""
    hot_buffer_bytes: NonNegative
    hot_slots: NonNegative
    hot_buffer_parts: dict[str, NonNegative]
    lengths: tuple[LengthFit, ...]


def fit(  # noqa: PLR0913, PLR0917 - an argument for each option
    config: FileOption = None,
    overrides: SetOption = None,
    tokens: Annotated[str, typer.Option("--tokens", help="Lengths of prompts, separated by commas.")] = DEFAULT_TOKENS,
    new_tokens: Annotated[
        int, typer.Option("--new-tokens", min=0, help="Tokens that each request may generate.")
    ] = 1024,
    device_memory: Annotated[
        str, typer.Option("--device-memory", help="With --host-memory: what would fit into so much, as 60GiB.")
    ] = "",
    host_memory: Annotated[str, typer.Option("--host-memory", help="See --device-memory; of the node, as 1TiB.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document in place of tables.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="In place of all that: how much of a trace's prompts would be kept, by pool size."
        ),
    ] = None,
    pools: Annotated[
        str,
        typer.Option(
            "--pool", help="With --trace: sizes, separated by commas; 4GiB+60GiB is a host tier below a pool."
        ),
    ] = DEFAULT_POOLS,
) -> None:
    """Print what requests of some lengths cost on a decode node, and how many of each fit, by its configuration.

    With --trace: how much of the prompts of a trace would be found in pools of some sizes, without moving a byte.
    """
    loaded = load_or_exit(DecodeConfig, config, overrides)
    try:
        if trace is not None:
            kept = fit_trace(load_geometry(loaded.model), trace, pools)
            tables = [trace_table(kept)]
            document = kept.model_dump_json(indent=2)
        else:
            memory = _memory(device_memory, host_memory)
            report = _report(loaded, _lengths(tokens), new_tokens, memory)
            tables = [_pools(report), _requests(report, memory)]
            document = report.model_dump_json(indent=2)
    except BridgeError as error:
        fail(error, EXIT_CONFIG if isinstance(error, InvalidInputError) else EXIT_FAILED)
    if as_json:
        typer.echo(document)
    else:
        Console().print(*tables, sep="\n")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--tokens: whole numbers separated by commas are needed, got '{text}'") from None
    if min(lengths) < 1:
        raise InvalidInputError(f"--tokens: a prompt has at least one token, got {min(lengths)}")
    return lengths


def _memory(device: str, host: str) -> tuple[int, int] | None:
    """Return memory that is not divided into pools yet: bytes of a device and of a host."""
    if not device and not host:
        return None
    try:
        return _SIZE.validate_python(device), _SIZE.validate_python(host)
    except ValidationError as error:
        raise InvalidInputError(
            f"--device-memory and --host-memory: two sizes such as 60GiB and 1TiB are needed, got '{device}' and '{host}'"
        ) from error


def _report(config: DecodeConfig, lengths: list[int], new_tokens: int, memory: tuple[int, int] | None) -> FitReport:
    geometry = load_geometry(config.model)
    layout = plan_memory(config, geometry)
    whole = DecodePlan(geometry=geometry, host=layout.host_kinds, sparse=config.sparse)
    plans = {
        rank: whole.model_copy(update={"layers": frozenset(part.layers), "tp_size": config.parallelism.tp_size})
        for rank, part in layout.parts.items()
    }
    one_page = geometry.tokens_per_page
    rank, plan = max(
        plans.items(), key=lambda found: request_cost(found[1], prompt_tokens=one_page, max_new_tokens=0).device_bytes
    )
    placement = layout.device.get(rank)
    slots = 0 if plan.sparse is None else plan.sparse.max_requests
    hot_parts = {part: slots * each for part, each in hot_slot_bytes(plan).model_dump().items()} if slots else {}
    return FitReport(
        instance=config.instance,
        node=config.node,
        model=geometry.name,
        rank=str(rank),
        new_tokens=new_tokens,
        pages=layout.owned,
        device_pool_bytes=None if placement is None else placement.total_bytes,
        host_pool_bytes=0 if layout.host is None else layout.host.total_bytes,
        twin_bytes=0 if layout.twins is None else layout.twins.total_bytes,
        hot_buffer_bytes=sum(hot_parts.values()),
        hot_slots=slots,
        hot_buffer_parts=hot_parts,
        lengths=tuple(_length(plan, each, new_tokens, layout, memory) for each in lengths),
    )


def _length(
    plan: DecodePlan, prompt_tokens: int, new_tokens: int, layout: NodeLayout, memory: tuple[int, int] | None
) -> LengthFit:
    cost = request_cost(plan, prompt_tokens=prompt_tokens, max_new_tokens=new_tokens)
    return LengthFit(
        prompt_tokens=prompt_tokens,
        cost=cost,
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        fits=fit_pools(plan, cost, pages=layout.owned),
        would_fit=fit_memory(plan, cost, device_bytes=memory[0], host_bytes=memory[1]) if memory else None,
    )


def _pools(report: FitReport) -> Table:
    table = Table(title=f"Memory of {report.instance}/{report.node}, {report.model}", title_justify="left")
    table.add_column("what")
    table.add_column("pages or slots", justify="right")
    table.add_column("bytes", justify="right")
    name, pages = f"device pool of rank {report.rank}", report.pages
    if report.device_pool_bytes is None:
        table.add_row(name, "the engine's own", "")
    else:
        spaces = sorted(pages.keys() & {IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST})
        table.add_row(name, ", ".join(f"{pages[space]} {space}" for space in spaces), size(report.device_pool_bytes))
    if report.host_pool_bytes:
        table.add_row("host pool", str(pages[IndexSpace.HOST]), size(report.host_pool_bytes))
    if report.twin_bytes:
        table.add_row("prefixes on the host", str(pages[IndexSpace.FULL_TWIN]), size(report.twin_bytes))
    if report.hot_buffer_bytes:
        table.add_row(f"hot buffer of rank {report.rank}", str(report.hot_slots), size(report.hot_buffer_bytes))
        for part, each in report.hot_buffer_parts.items():
            table.add_row(f"  {part.replace('_', ' ')}", "", size(each))
    return table


def _requests(report: FitReport, memory: tuple[int, int] | None) -> Table:
    """A column for each length, so that the width does not depend on the model."""
    hot = "; the hot buffer is allocated whole at start, by the engine, beside the pools" * bool(report.hot_slots)
    table = Table(
        title="A request of",
        title_justify="left",
        caption=f"What a request takes from admission to end, with room for {report.new_tokens} new tokens. Device: of rank "
        f"{report.rank}, which holds most{hot}. Fit: so many at once, if all are of that length.",
        caption_justify="left",
    )
    table.add_column("tokens in the prompt")
    for each in report.lengths:
        table.add_column(f"{each.prompt_tokens:,}", justify="right")
    costs = [each.cost for each in report.lengths]
    for kind in costs[0].device:
        table.add_row(str(kind), *(size(cost.device[kind]) for cost in costs))
    if report.hot_slots:
        table.add_row("hot buffer", *(size(cost.sparse.total if cost.sparse else 0) for cost in costs))
    table.add_row("on the device", *(size(cost.device_bytes) for cost in costs), style="bold")
    for kind in costs[0].host:
        table.add_row(f"{kind} on the host", *(size(cost.host[kind]) for cost in costs), style="bold")
    named = f"would fit into {' and '.join(map(size, memory or ()))}"
    for title, fits in (
        ("fit at once", [each.fits for each in report.lengths]),
        (named, [each.would_fit for each in report.lengths if each.would_fit]),
    ):
        if fits:
            table.add_section()
            table.add_row(title, *(str(each.requests) for each in fits), style="bold")
            table.add_row("limited by", *(each.limit for each in fits))
    return table
