"""How long it takes to plan one request, by length, model and state of the pools."""

import statistics
import time
from typing import Any

import numpy as np

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import IndexSpace, PageTable, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from tests.bench.output import cases_table
from tests.helpers.geometries import flash, pro
from tests.helpers.manifests import Instance, Layout

EXTENT_BYTES = MAX_OPERATION_BYTES = 1 << 30
POOL_PAGES = {IndexSpace.FULL: 60_000, IndexSpace.SWA: 512, IndexSpace.REQUEST: 64, IndexSpace.HOST: 100_000}
LENGTHS = (1_048_576, 131_072, 8_192)
POOLS = ("fragmented", "used", "contiguous")
MODELS = {"flash": flash, "pro": pro}
USED_RUN_PAGES = 16
"""Mean length of a run of free pages in a pool that has been in use for a while."""
BUDGETS_MS = {("flash", 1_048_576, "fragmented"): 15.0, ("flash", 1_048_576, "contiguous"): 1.0}


def _manifest(geometry: ModelGeometry, *, host: frozenset[ComponentKind], base: int) -> RankManifest:
    layouts = {
        component.kind: Layout(pages_per_extent=EXTENT_BYTES // component.page_bytes())
        for component in geometry.components
    }
    return Instance(geometry, POOL_PAGES, host=host, layouts=layouts, base=base).manifests()[0]


def _ids(rng: np.random.Generator, pool: str, count: int, page_count: int) -> np.ndarray:
    if pool == "contiguous":
        return np.arange(count, dtype=np.int32) + int(rng.integers(0, page_count - count + 1))
    if pool == "fragmented":
        return (rng.permutation(page_count // 2)[:count] * 2).astype(np.int32)
    lengths = rng.geometric(1 / USED_RUN_PAGES, size=page_count)
    starts = np.cumsum(lengths + 1) - lengths
    runs = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    runs = [run for run in runs if run[-1] < page_count]
    return np.concatenate([runs[index] for index in rng.permutation(len(runs))])[:count].astype(np.int32)


def _tables(geometry: ModelGeometry, tokens: int, pool: str, rng: np.random.Generator) -> Tables:
    pages = -(-tokens // geometry.tokens_per_page)
    first = (tokens - 128) // geometry.tokens_per_page
    held = {IndexSpace.FULL: (pages, 0), IndexSpace.HOST: (pages, 0)}
    held |= {IndexSpace.SWA: (pages - first, first), IndexSpace.REQUEST: (1, 0)}
    return {
        space: PageTable(space, _ids(rng, pool, count, POOL_PAGES[space]), first_page)
        for space, (count, first_page) in held.items()
    }


def _case(model: str, tokens: int, pool: str, repeats: int) -> dict[str, Any]:
    """Plan one request as one section, from one rank to one rank, C4 in the host pool; the median of several times."""
    geometry = MODELS[model]()
    rng = np.random.default_rng(7)
    pairing = Pairing.create(
        geometry,
        _manifest(geometry, host=frozenset(), base=1 << 40),
        _manifest(geometry, host=frozenset({ComponentKind.C4_KV}), base=1 << 45),
        destination_ordinal=0,
        destination_count=1,
    )
    source, destination = (_tables(geometry, tokens, pool, rng) for _ in range(2))
    section = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
    times_s = []
    for _ in range(repeats):
        begun_s = time.perf_counter()
        planned = plan(pairing, section, source, destination, max_operation_bytes=MAX_OPERATION_BYTES)
        times_s.append(time.perf_counter() - begun_s)
    return {
        "model": model,
        "tokens": tokens,
        "pool": pool,
        "operations": len(planned.operations),
        "gb": planned.operations.total_bytes / 1e9,
        "median_ms": statistics.median(times_s) * 1e3,
        "best_ms": min(times_s) * 1e3,
        "budget_ms": BUDGETS_MS.get((model, tokens, pool)),
    }


def run(*, quick: bool) -> dict[str, Any]:
    repeats = 1 if quick else 15
    return {"cases": [_case(model, tokens, pool, repeats) for model in MODELS for tokens in LENGTHS for pool in POOLS]}


def table(found: dict[str, Any]) -> str:
    return cases_table(found["cases"])
