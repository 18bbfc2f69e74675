"""`kvbridge fit`: what requests cost on a decode node, and how many fit at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError

from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED, FileOption, SetOption, aligned, fail, load_or_exit
from kvbridge.cli.trace import DEFAULT_POOLS, fit_trace
from kvbridge.config.schema import DecodeConfig
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.geometry.costs import DecodePlan, Fit, fit_memory, fit_pools, hot_slot_bytes, request_cost
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.daemon.memory import NodeLayout, plan_memory
from kvbridge.daemon.model import load_geometry
from kvbridge.doctor.findings import size

DEFAULT_TOKENS = "1024,8192,32768,131072"
_SIZE = TypeAdapter(ByteSize)


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
    """Return memory that is not divided into pools yet: bytes of a device and of a host."""
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
Device: of rank {rank}, which holds most{hot}. Fit: so many at once, if all are of that length."""


def _fullest(config: DecodeConfig, layout: NodeLayout, whole: DecodePlan) -> tuple[Rank, DecodePlan]:
    """Return the rank on which a request takes the most device memory, and what the rank holds."""
    plans = {
        rank: whole.model_copy(update={"layers": frozenset(part.layers), "tp_size": config.parallelism.tp_size})
        for rank, part in layout.parts.items()
    }
    one_page = whole.geometry.tokens_per_page
    return max(
        plans.items(), key=lambda each: request_cost(each[1], prompt_tokens=one_page, max_new_tokens=0).device_bytes
    )


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
    if layout.twins is not None:
        yield "prefixes on the host", str(pages[IndexSpace.FULL_COPY]), size(layout.twins.total_bytes)
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
