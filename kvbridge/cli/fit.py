"""`kvbridge fit`: what requests cost on a decode node, and how many fit at once.

Owns: the command and its tables. Must not know: the arithmetic (`core/geometry/costs`), how memory is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, ValidationError
from rich.console import Console
from rich.table import Table

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED, FileOption, SetOption, fail, load_or_exit
from kvbridge.cli.fit_trace import DEFAULT_POOLS, draw_trace_fit, fit_trace, print_trace_fit
from kvbridge.cli.pictures import require_plots
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
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive, Rank
from kvbridge.daemon.memory import NodeLayout, plan_memory
from kvbridge.daemon.model import load_geometry

DEFAULT_TOKENS = "1024,8192,32768,131072"


class _Memory(FrozenModel):
    """Memory that is not divided into pools yet."""

    device_bytes: ByteSize
    host_bytes: ByteSize

    def __str__(self) -> str:
        return f"{readable(self.device_bytes)} and {readable(self.host_bytes)}"


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
    plot_file: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="With --trace: draw it, too; needs the extra 'plot'."),
    ] = None,
) -> None:
    """Print what requests of some lengths cost on a decode node, and how many of each fit, by its configuration.

    With --trace: how much of the prompts of a trace would be found in pools of some sizes, without moving a byte.
    """
    loaded = load_or_exit(DecodeConfig, config, overrides)
    if trace is not None or plot_file is not None:
        _trace(loaded, trace, pools, as_json=as_json, plot_file=plot_file)
        return
    try:
        lengths = _lengths(tokens)
        geometry = load_geometry(loaded.model)
        layout = plan_memory(loaded, geometry)
        whole = DecodePlan(geometry=geometry, host=layout.host_kinds, sparse=loaded.sparse)
        rank, plan = _heaviest(loaded, layout, whole)
        memory = _memory(device_memory, host_memory)
        found = [_length(plan, each, new_tokens, layout, memory) for each in lengths]
    except BridgeError as error:
        fail(error, EXIT_CONFIG if isinstance(error, InvalidInputError) else EXIT_FAILED)
    if as_json:
        typer.echo(_report(loaded, layout, rank, plan, new_tokens, found).model_dump_json(indent=2))
        return
    console = Console()
    console.print(_pools(loaded, layout, rank, plan))
    console.print(_requests(plan, found, memory))
    console.print(_explanation(new_tokens, rank, plan), style="dim")


def _trace(config: DecodeConfig, trace: Path | None, pools: str, *, as_json: bool, plot_file: Path | None) -> None:
    try:
        if trace is None:
            raise InvalidInputError("--plot: draws what --trace finds, which is not given")
        if plot_file is not None:
            require_plots()
        report = fit_trace(load_geometry(config.model), trace, pools)
        if plot_file is not None:
            draw_trace_fit(report, plot_file)
    except BridgeError as error:
        fail(error, EXIT_CONFIG if isinstance(error, InvalidInputError) else EXIT_FAILED)
    except OSError as error:
        fail(BridgeError(f"--plot {plot_file}: {error.strerror or error}"), EXIT_FAILED)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
    else:
        print_trace_fit(report, Console())


def _length(
    plan: DecodePlan, prompt_tokens: int, new_tokens: int, layout: NodeLayout, memory: _Memory | None
) -> LengthFit:
    cost = request_cost(plan, prompt_tokens=prompt_tokens, max_new_tokens=new_tokens)
    would_fit = None
    if memory is not None:
        would_fit = fit_memory(plan, cost, device_bytes=memory.device_bytes, host_bytes=memory.host_bytes)
    return LengthFit(
        prompt_tokens=prompt_tokens,
        cost=cost,
        device_bytes=cost.device_bytes,
        host_bytes=cost.host_bytes,
        fits=fit_pools(plan, cost, pages=layout.owned),
        would_fit=would_fit,
    )


def _report(
    config: DecodeConfig, layout: NodeLayout, rank: Rank, plan: DecodePlan, new_tokens: int, found: list[LengthFit]
) -> FitReport:
    placement = layout.device.get(rank)
    return FitReport(
        instance=config.instance,
        node=config.node,
        model=plan.geometry.name,
        rank=str(rank),
        new_tokens=new_tokens,
        pages=layout.owned,
        device_pool_bytes=None if placement is None else placement.total_bytes,
        host_pool_bytes=0 if layout.host is None else layout.host.total_bytes,
        twin_bytes=0 if layout.twins is None else layout.twins.total_bytes,
        hot_buffer_bytes=0 if plan.sparse is None else plan.sparse.max_requests * hot_slot_bytes(plan).total,
        lengths=tuple(found),
    )


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInputError(f"--tokens: whole numbers separated by commas are needed, got '{text}'") from None
    if min(lengths) < 1:
        raise InvalidInputError(f"--tokens: a prompt has at least one token, got {min(lengths)}")
    return lengths


def _memory(device: str, host: str) -> _Memory | None:
    if not device and not host:
        return None
    try:
        return _Memory.model_validate({"device_bytes": device, "host_bytes": host})
    except ValidationError as error:
        raise InvalidInputError(
            f"--device-memory and --host-memory: two sizes such as 60GiB and 1TiB are needed, got '{device}' and '{host}'"
        ) from error


def _heaviest(config: DecodeConfig, layout: NodeLayout, whole: DecodePlan) -> tuple[Rank, DecodePlan]:
    """The rank on which a request takes the most device memory, and what it holds."""
    tp_size, one_page = config.parallelism.tp_size, whole.geometry.tokens_per_page
    plans = {
        rank: whole.model_copy(update={"layers": frozenset(part.layers), "tp_size": tp_size})
        for rank, part in layout.parts.items()
    }
    return max(
        plans.items(),
        key=lambda found: request_cost(found[1], prompt_tokens=one_page, max_new_tokens=0).device_bytes,
    )


def _pools(config: DecodeConfig, layout: NodeLayout, rank: Rank, plan: DecodePlan) -> Table:
    table = Table(title=f"Memory of {config.instance}/{config.node}, {plan.geometry.name}", title_justify="left")
    table.add_column("what")
    table.add_column("pages or slots", justify="right")
    table.add_column("bytes", justify="right")
    placement = layout.device.get(rank)
    if placement is None:
        table.add_row(f"device pool of rank {rank}", "the engine's own", "")
    else:
        counts = ", ".join(f"{count} {space}" for space, count in sorted(placement.page_counts().items()))
        table.add_row(f"device pool of rank {rank}", counts, readable(placement.total_bytes))
    if layout.host is not None:
        table.add_row("host pool", str(layout.owned[IndexSpace.HOST]), readable(layout.host.total_bytes))
    if layout.twins is not None:
        table.add_row(
            "prefixes on the host", str(layout.owned[IndexSpace.FULL_TWIN]), readable(layout.twins.total_bytes)
        )
    if plan.sparse is not None:
        slots, each = plan.sparse.max_requests, hot_slot_bytes(plan)
        table.add_row(f"hot buffer of rank {rank}", str(slots), readable(slots * each.total))
        for part, size in each.model_dump().items():
            table.add_row(f"  {part.replace('_', ' ')}", "", readable(slots * size))
    return table


def _requests(plan: DecodePlan, found: list[LengthFit], memory: _Memory | None) -> Table:
    """A column for each length, so that the width does not depend on the model."""
    table = Table(title="A request of", title_justify="left")
    table.add_column("tokens in the prompt")
    for each in found:
        table.add_column(f"{each.prompt_tokens:,}", justify="right")
    costs = [each.cost for each in found]
    for kind in costs[0].device:
        table.add_row(str(kind), *(readable(cost.device[kind]) for cost in costs))
    if plan.sparse is not None:
        table.add_row("hot buffer", *(readable(cost.sparse.total if cost.sparse else 0) for cost in costs))
    table.add_row("on the device", *(readable(cost.device_bytes) for cost in costs), style="bold")
    for kind in costs[0].host:
        table.add_row(f"{kind} on the host", *(readable(cost.host[kind]) for cost in costs), style="bold")
    for title, fits in (
        ("fit at once", [each.fits for each in found]),
        (f"would fit into {memory}", [each.would_fit for each in found if each.would_fit]),
    ):
        if fits:
            table.add_section()
            table.add_row(title, *(str(each.requests) for each in fits), style="bold")
            table.add_row("limited by", *(each.limit for each in fits))
    return table


def _explanation(new_tokens: int, rank: Rank, plan: DecodePlan) -> str:
    hot = "; the hot buffer is allocated whole at start, by the engine, beside the pools" if plan.sparse else ""
    return (
        f"What a request takes from its admission to its end, with room for {new_tokens} new tokens. Device: of rank "
        f"{rank}, which holds most{hot}. Fit: so many at once, if all are of that length."
    )


def readable(size_bytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves one digit before the point."""
    return ByteSize(size_bytes).human_readable(separator=" ")
