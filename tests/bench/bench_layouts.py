"""How many operations a request of DeepSeek-V4-Flash takes in pools of either layout, and what that does to a short request.

Owns: both measurements. Run as `python -m tests.bench --only layouts`; `run` gives the same as JSON-able data.

Operations are counted, not timed: one prefill rank to one decode rank that keeps C4 in its host pool, pages in one run or in runs
of 16 that lie elsewhere on each side. *Live rows* is what any backend gets that is told to send nothing else; *with dead bytes*
what Mooncake's TCP gets unless told otherwise (`transports.mooncake.operation_cost_bytes`).

Then one-page requests go through pairs of real daemons over Mooncake's TCP, a pair for each layout, all of them up all the time and
taking turns, so that the machine's moods meet each. A ratio is that of two requests of one turn.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from statistics import median
from typing import Any

import httpx
import numpy as np

from kvbridge.config.pools import HostLayout
from kvbridge.config.transports import TCP_OPERATION_COST_BYTES, MooncakeSettings
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, fingerprint
from kvbridge.core.geometry.pages import first_window_page, pages_needed
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.pool.memory.layout import RankPart, device_placement, host_placement
from tests.bench.bench_overhead import request
from tests.helpers.cluster import cluster, live_rows_only

FLASH = preset("deepseek-v4-flash")
C4 = frozenset({ComponentKind.C4_KV})
LAYOUTS = ("layer_first", "page_first")
BUDGETS = {256: 10, 8_192: 30, 32_768: 60}
"""Operations by tokens, pages in one run, both sides `page_first`."""
RUN_PAGES = 16
PAGES = 256
"""Of each space, in the pools whose operations are counted."""
WARM_UP = 5
WAYS = {
    "layer_first, live rows": ("layer_first", True),
    "page_first, live rows": ("page_first", True),
    "page_first, with dead bytes": ("page_first", False),
}
"""By name: the layout, and whether nothing but live rows is sent."""


def run(*, requests: int = 40) -> dict[str, Any]:
    """Count and measure; "load" is how many processes wanted the machine's cores, before and after."""
    load = [os.getloadavg()[0]]
    counted = count_operations()
    timed = time_requests(requests)
    return {"load": [*load, os.getloadavg()[0]], "operations": counted, "requests": timed}


def count_operations() -> list[dict[str, Any]]:
    """Return [{layout, tokens, pool, live: {operations, bytes}, dead: {operations, bytes}, budget}, ...]."""
    cases = []
    for layout in LAYOUTS:
        pairing = Pairing.create(
            FLASH,
            _manifest(layout, host=frozenset(), base=1 << 40),
            _manifest(layout, host=C4, base=1 << 50),
            destination_ordinal=0,
            destination_count=1,
        )
        for tokens, budget in BUDGETS.items():
            for pool, run_pages in (("one run", PAGES), ("runs of 16", RUN_PAGES)):
                tables = [_tables(tokens, host, run_pages, seed) for seed, host in enumerate((frozenset(), C4))]
                case = {"layout": layout, "tokens": tokens, "pool": pool}
                for name, dead_bytes in (("live", 0), ("dead", TCP_OPERATION_COST_BYTES)):
                    operations = plan(
                        pairing,
                        Section(prompt_tokens=tokens, start_token=0, stop_token=tokens),
                        *tables,
                        max_operation_bytes=MooncakeSettings().max_operation_bytes,
                        operation_cost_bytes=dead_bytes,
                    ).operations
                    case[name] = {"operations": len(operations), "bytes": operations.total_bytes}
                case["budget"] = budget if (layout, pool) == ("page_first", "one run") else None
                cases.append(case)
    return cases


def _manifest(layout: str, *, host: frozenset[ComponentKind], base: int) -> RankManifest:
    rank = Rank(pp=0, tp=0)
    part = RankPart.of(FLASH, rank, pp_size=1, tp_size=1)
    counts = dict.fromkeys((IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST), PAGES)
    pools = [device_placement(FLASH, part, page_counts=counts, exclude=host, page_first=layout == "page_first")]
    if host:
        pools.append(host_placement(FLASH, host, page_count=PAGES, layout=HostLayout(layout)))
    regions = [
        region
        for number, pool in enumerate(pools)
        for region in pool.regions_at([base + (number << 44)] * len(pool.mappings))
    ]
    return RankManifest(fingerprint=fingerprint(FLASH), rank=rank, pp_size=1, tp_size=1, regions=tuple(regions))


def _tables(tokens: int, host: frozenset[ComponentKind], run_pages: int, seed: int) -> Tables:
    """Pages in runs of so many, in an order of their own on each side."""
    rng = np.random.default_rng(seed)
    tables = {}
    for space, count in pages_needed(FLASH, tokens=tokens, host=host).items():
        runs = np.split(np.arange(PAGES, dtype=np.int32), range(run_pages, PAGES, run_pages))
        ids = np.concatenate([runs[place] for place in rng.permutation(len(runs))])[:count]
        first = first_window_page(FLASH, tokens) if space is IndexSpace.SWA else 0
        tables[space] = PageTable(space, ids, first)
    return tables


def time_requests(requests: int) -> dict[str, Any]:
    """Return {"requests", "ways": {way: {figure: [ms, ...]}}}: one-page requests by turns."""
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(timeout=20))
        ends = {}
        for way, (layout, exact) in WAYS.items():
            running = stack.enter_context(
                cluster(
                    {"preset": "deepseek-v4-flash"},
                    transport="mooncake",
                    pages={"full": 8, "swa": 4, "request": 2},
                    device_layout=layout,
                    prefill=live_rows_only("mooncake") if exact else {},
                    decode={"pools": _decode_pools(layout)},
                )
            )
            prefill = stack.enter_context(PrefillEngine.attach(running.prefill.runtime_dir))
            decode = stack.enter_context(DecodeEngine.attach(running.decode.runtime_dir))
            ends[way] = (running, client, prefill, decode)
        found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
        for number in range(1, WARM_UP + requests + 1):
            for way, end in ends.items():
                figures = request(*end, number)
                for name in ("http_admit_to_claim_ms", "offer_to_commit_ms", "overhead_ms"):
                    if number > WARM_UP:
                        found[way].setdefault(name, []).append(figures[name])
    return {"requests": requests, "ways": found}


def _decode_pools(layout: str) -> dict[str, Any]:
    return {
        "device": {"full": 8, "swa": 4, "request": 2},
        "device_layout": layout,
        "host": {"pages": 8, "layout": layout},
    }


def ratios(timed: dict[str, Any], name: str) -> dict[str, list[float]]:
    """Of each way but the first: its figure against that of the first, turn by turn."""
    (_, first), *others = ((way, figures[name]) for way, figures in timed["ways"].items())
    return {way: [ours / theirs for ours, theirs in zip(values, first, strict=True)] for way, values in others}


def table(result: dict[str, Any]) -> str:
    """The result as plain text."""
    lines = [
        f"{'layout':<12} {'tokens':>7} {'pool':<11} {'live rows':>9} {'MB':>7}  {'with dead':>9} {'MB':>7}  budget"
    ]
    for case in result["operations"]:
        counts = "  ".join(
            f"{case[name]['operations']:>9,} {case[name]['bytes'] / 1e6:>7.2f}" for name in ("live", "dead")
        )
        lines.append(
            f"{case['layout']:<12} {case['tokens']:>7,} {case['pool']:<11} {counts}  {case['budget'] or ''}".rstrip()
        )
    timed = result["requests"]
    for name in ("http_admit_to_claim_ms", "offer_to_commit_ms"):
        against = ratios(timed, name)
        for way, figures in timed["ways"].items():
            ratio = f"  {median(against[way]):.2f} of the first" if way in against else ""
            spread = f"{min(figures[name]):.1f}-{max(figures[name]):.1f}"
            lines.append(
                f"{name.removesuffix('_ms'):<22} {way:<28} {median(figures[name]):6.1f} ms {spread:>11}{ratio}"
            )
    before, after = result["load"]
    return "\n".join([*lines, f"load {before:.1f} before, {after:.1f} after"])
