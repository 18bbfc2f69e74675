"""Backups and load-backs of DeepSeek-V4-Flash pages on the processor, against plain copies of the same pieces, in the same run.

Run as `python -m tests.bench.bench_twin_copies`; `run` gives the same as JSON-able data. What a GPU does is measured by
`python -m tests.bench.gpu --only twin_copies`.

All components of a prefill rank, scattered pages on both sides, in the shared files that a node makes. The plain copy is libc's
`memmove`, called for each piece of each page with addresses that are known beforehand; both take turns. `busy` is the ratio by
processor time, which says more on a machine that others use too. Bytes a token are those of prefixes of 32,768 tokens with one
checkpoint each, in a pool of 64.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.presets import preset
from kvbridge.core.geometry.twins import twin_components, twin_pieces
from kvbridge.core.ids import TWINS, IndexSpace, PageMoves, Rank
from kvbridge.kernels import reference
from kvbridge.kernels.places import PageMemory
from kvbridge.pool.memory.layout import RankPart, device_placement, twin_placement
from kvbridge.pool.memory.pools import MappedPool
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.tier.copies import CopyMeans, Direction, TwinCopier
from tests.helpers.twin_pools import COMBINATIONS

MODEL = "deepseek-v4-flash"
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
PAGES = (8, 64, 512)
CHECKPOINTS = 8
SPARE_PAGES = 64
"""More pages than are copied, so that those that are lie apart."""
PREFIXES, PREFIX_TOKENS = 64, 32_768
TURNS = 9
BUDGET = 0.85
BYTES_BUDGET = 4_150

Work = Callable[[], object]


def run(*, turns: int = TURNS, pages: tuple[int, ...] = PAGES) -> dict[str, Any]:
    """Measure and return {"turns", "model", "budget", "cases": [...], "bytes_a_token"}; rates in GB/s."""
    cases = []
    legal = [each for each in COMBINATIONS if each[2] is CopyBackend.KERNEL]
    for host, device, _, direction in legal:
        with ExitStack() as stack:
            bed = _Bed(host, device, most=max(pages), stack=stack)
            cases += [bed.case(direction, {FULL: count}, turns) for count in pages]
            cases.append(bed.case(direction, {SWA: CHECKPOINTS}, turns))
    return {"turns": turns, "model": MODEL, "budget": BUDGET, "cases": cases, "bytes_a_token": bytes_a_token()}


def bytes_a_token() -> float:
    """Host bytes of each token of prefixes that are kept, all that a pool takes for them."""
    geometry = preset(MODEL)
    part = RankPart.of(geometry, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
    pages = PREFIXES * PREFIX_TOKENS // geometry.tokens_per_page
    counts = {IndexSpace.FULL_TWIN: pages, IndexSpace.SWA_TWIN: PREFIXES}
    twins = twin_placement(geometry, [part], twin_components(geometry, (), checkpoints=True), page_counts=counts)
    return twins.total_bytes / (PREFIXES * PREFIX_TOKENS)


class _Bed:
    """A rank's device pool and its twins."""

    def __init__(self, host: HostLayout, device: DeviceLayout, *, most: int, stack: ExitStack) -> None:
        self._layouts = host, device
        self._geometry = geometry = preset(MODEL)
        part = RankPart.of(geometry, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
        self._counts = {FULL: most + SPARE_PAGES, SWA: 2 * CHECKPOINTS}
        page_first = device is DeviceLayout.PAGE_FIRST
        counts = self._counts | {IndexSpace.REQUEST: 1}
        twins = twin_placement(
            geometry,
            [part],
            twin_components(geometry, (), checkpoints=True),
            page_counts={TWINS[space]: count for space, count in self._counts.items()},
            layout=host,
        )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvb-bench-", dir=DEFAULT_DIRECTORY)))
        self._regions: list[tuple[Region, ...]] = []
        for name, placement in (
            ("device", device_placement(geometry, part, page_counts=counts, page_first=page_first)),
            ("twins", twins),
        ):
            pool = stack.enter_context(MappedPool.create(placement, folder, name))
            self._regions.append(pool.regions())
        self._random = np.random.default_rng(5)

    def case(self, direction: Direction, counts: dict[IndexSpace, int], turns: int) -> dict[str, Any]:
        """Copy so many pages by `TwinCopier` and by bare copies, in turns."""
        moves: PageMoves = {
            space: tuple(self._random.permutation(self._counts[space])[:count].astype(np.int32) for _ in range(2))
            for space, count in counts.items()
        }
        columns = self._pieces(moves, direction)
        with TwinCopier(self._geometry, *self._regions, direction=direction, means=CopyMeans()) as copier:
            ways: dict[str, Work] = {
                "copier": lambda: copier.copy(moves),
                "memmove": lambda: deque(map(reference._memmove, *columns), maxlen=0),
            }
            wall, busy = _in_turns(ways, turns)
        size = sum(columns[2])
        host, device = self._layouts
        return {
            "host_layout": host.value,
            "device_layout": device.value,
            "direction": direction.value,
            "space": next(iter(counts)).value,
            "pages": sum(counts.values()),
            "pieces": len(columns[2]),
            "bytes": size,
            "gb_s": {name: size / statistics.median(seconds) / 1e9 for name, seconds in wall.items()},
            "ratio": statistics.median(b / a for a, b in zip(wall["copier"], wall["memmove"], strict=True)),
            "busy": statistics.median(b / a for a, b in zip(busy["copier"], busy["memmove"], strict=True)),
        }

    def _pieces(self, moves: PageMoves, direction: Direction) -> tuple[list[int], list[int], list[int]]:
        """Destination, source and bytes of what twins keep of each page in each layer, layer after layer."""
        twins = {(region.component, region.layer): region for region in self._regions[1]}
        columns: tuple[list[int], list[int], list[int]] = ([], [], [])
        for region in self._regions[0]:
            twin = twins.get((region.component, region.layer))
            if twin is None or region.space not in moves:
                continue
            here, there = moves[region.space]
            for piece in twin_pieces(self._geometry, self._geometry.component(region.component), (0, 1), (0, 1)):
                device = PageMemory.of(region).addresses(here) + np.uint64(piece.offset_bytes)
                host = PageMemory.of(twin).addresses(there) + np.uint64(piece.twin_offset_bytes)
                both = (host, device) if direction is Direction.BACKUP else (device, host)
                columns[0].extend(both[0].tolist())
                columns[1].extend(both[1].tolist())
                columns[2].extend([piece.length_bytes] * len(here))
        return columns


def _in_turns(ways: dict[str, Work], turns: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds on the clock, and of the processor, that each way takes; the first turn warms up."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    busy: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 1):
        for name, way in ways.items():
            begun = time.perf_counter(), time.thread_time()
            way()
            ended = time.perf_counter(), time.thread_time()
            if turn:
                wall[name].append(ended[0] - begun[0])
                busy[name].append(ended[1] - begun[1])
    return wall, busy


def table(figures: dict[str, Any]) -> str:
    """The figures of `run` for a reader."""
    lines = [
        f"{'host':<17} {'device':<12} {'way':<10} {'space':<5} {'pages':>5} {'MB':>7} {'GB/s':>6} {'memmove':>7} ratio  busy"
    ]
    lines += [
        f"{case['host_layout']:<17} {case['device_layout']:<12} {case['direction']:<10} {case['space']:<5} {case['pages']:>5} "
        f"{case['bytes'] / 1e6:>7.1f} {case['gb_s']['copier']:>6.2f} {case['gb_s']['memmove']:>7.2f} {case['ratio']:>5.2f} "
        f"{case['busy']:>5.2f}"
        for case in figures["cases"]
    ]
    lines.append(
        f"budget {figures['budget']}; {figures['bytes_a_token']:.1f} host bytes a token (budget {BYTES_BUDGET})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
