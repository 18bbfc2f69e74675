"""Rooms a second through one pair of real daemons, at rising concurrency (closed loop) and at twice the best rate (open loop).

A prompt is one token, 768 bytes in 12 copies, so the control path is measured. All processes share the machine's cores.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.bench.load import WAYS, Life, Load, RefusedError, RoomLostError, load
from tests.bench.load_engine import Facts
from tests.bench.output import percentile, table as text
from tests.helpers.cluster import Cluster, cluster

MODEL = "tiny-gqa"
TOKENS = 1
PAGES = 512
"""Rooms that fit a pool at once: more than the closed loop ever has, fewer than the open loop would like."""
LEVELS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OVERLOAD = 2.0
FILLING_S = 10.0
"""How long the open loop runs before it counts: until queues and pools have filled."""
MOST_OUTSTANDING = 4096
"""Rooms that the open loop has under way at most; what is beyond is counted as dropped by the generator."""
BUDGET_ROOMS_S = 1000.0


@dataclass
class Tally:
    lives: list[Life] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    offered: int = 0

    def forward_to(self, later: Tally) -> None:
        self.lives, self.refused, self.lost = later.lives, later.refused, later.lost

    async def take(self, running: Load, way: str, number: int) -> bool:
        self.offered += 1
        try:
            life = await running.room(way, number, TOKENS)
        except RefusedError as error:
            self.refused[f"{error.status} {error.code}"] += 1
            return False
        except (RoomLostError, OSError, asyncio.IncompleteReadError) as error:
            self.lost[re.sub(r"\d{6,}", "N", str(error))[:200]] += 1
        else:
            self.lives.append(life)
        return True

    def summary(self, seconds: float) -> dict[str, Any]:
        phases = {name: [life.phases_s[name] for life in self.lives if name in life.phases_s] for name in PHASES}
        return {
            "seconds": seconds,
            "offered_s": self.offered / seconds,
            "rooms_s": len(self.lives) / seconds,
            "refused": dict(self.refused),
            "refused_share": self.refused.total() / max(1, self.refused.total() + len(self.lives) + self.lost.total()),
            "dropped": self.dropped,
            "lost": dict(self.lost.most_common(5)),
            "phases_ms": {
                name: {f"p{percent}": percentile(taken_s, percent) * 1e3 for percent in (50, 99)}
                for name, taken_s in phases.items()
                if taken_s
            },
        }


PHASES = ("admission", "offer_to_commit", "total")


def run(*, quick: bool) -> dict[str, Any]:
    """Measure each way of admission: {"cores", "ways": {way: {"levels": [...], "best_rooms_s", "overload": {...}}}}."""
    found = {}
    for way in WAYS:
        # A pair of its own for each: receipts of earlier rooms would weigh on later ones.
        pools = {"full": PAGES, "swa": 1, "request": 1}
        host = {"pools": {"device": pools, "host": {"components": []}}}
        with cluster({"preset": MODEL}, pages=pools, decode=host) as running:
            found[way] = asyncio.run(_measure(running, way, 0.5 if quick else 5.0, LEVELS[:5:2] if quick else LEVELS))
    return {"cores": len(os.sched_getaffinity(0)), "model": MODEL, "tokens": TOKENS, "pages": PAGES, "ways": found}


async def _measure(running: Cluster, way: str, seconds: float, levels: tuple[int, ...]) -> dict[str, Any]:
    numbers = itertools.count(1)
    async with load(running, Facts()) as generator:
        # Connections, first meetings, code that runs first.
        await _closed_loop(generator, way, 4, min(2.0, seconds), numbers)
        measured = [
            {"concurrency": level, **await _closed_loop(generator, way, level, seconds, numbers)} for level in levels
        ]
        best = max(case["rooms_s"] for case in measured)
        overload = await _open(generator, way, OVERLOAD * best, 2 * seconds, numbers)
        after = await _closed_loop(generator, way, 16, min(2.0, seconds), numbers)
    return {"levels": measured, "best_rooms_s": best, "overload": overload, "after_overload": after}


async def _closed_loop(
    generator: Load, way: str, level: int, seconds: float, numbers: itertools.count[int]
) -> dict[str, Any]:
    """Keep `level` rooms under way: what came of them, and the `cpu` of each process as shares of a core."""
    tally = Tally()
    usage = _Usage(generator)
    begun_s = time.perf_counter()

    async def slot() -> None:
        while time.perf_counter() - begun_s < seconds:
            if not await tally.take(generator, way, next(numbers)):
                await asyncio.sleep(0.01)

    await asyncio.gather(*(slot() for _ in range(level)))
    took_s = time.perf_counter() - begun_s
    return tally.summary(took_s) | {"cpu": usage.shares(took_s)}


async def _open(
    generator: Load, way: str, rate_s: float, seconds: float, numbers: itertools.count[int]
) -> dict[str, Any]:
    """Offer rooms at a rate. Counting begins when queues and pools have filled: it is the state that lasts."""
    filling, steady = Tally(), Tally()
    outstanding: set[asyncio.Task[bool]] = set()
    begun_s = time.perf_counter()
    usage, tally, sent = _Usage(generator), filling, 0
    while (now_s := time.perf_counter() - begun_s) < FILLING_S + seconds:
        if tally is filling and now_s >= FILLING_S:
            usage, tally = _Usage(generator), steady
            filling.forward_to(steady)
        while sent < rate_s * now_s:
            sent += 1
            if len(outstanding) >= MOST_OUTSTANDING:
                tally.dropped += 1
                continue
            task = asyncio.create_task(tally.take(generator, way, next(numbers)))
            outstanding.add(task)
            task.add_done_callback(outstanding.discard)
        await asyncio.sleep(0.001)
    summary = steady.summary(seconds) | {"cpu": usage.shares(seconds), "outstanding": len(outstanding)}
    if outstanding:
        await asyncio.wait(outstanding)
    drained_s = time.perf_counter() - begun_s - seconds - FILLING_S
    return summary | {"target_s": rate_s, "backlog_drained_s": drained_s, "lost_later": steady.lost.total()}


class _Usage:
    """Processor time of every process that takes part, as shares of one core."""

    def __init__(self, generator: Load) -> None:
        self._processes = {"generator": psutil.Process()}
        for name, engine in zip(("prefill engine", "decode engine"), generator.engines, strict=True):
            self._processes[name] = psutil.Process(engine.pid)
        self._processes |= {name: process for name, process, _ in generator.processes()}
        self._before_s = self._now_s()

    def _now_s(self) -> dict[str, float]:
        taken = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: times.user + times.system for name, times in taken.items()}

    def shares(self, seconds: float) -> dict[str, float]:
        return {name: round((now_s - self._before_s[name]) / seconds, 3) for name, now_s in self._now_s().items()}


def table(found: dict[str, Any]) -> str:
    lines = []
    for way, measured in found["ways"].items():
        overload = measured["overload"]
        cases = [(str(case["concurrency"]), case) for case in measured["levels"]]
        cases += [(f"open {overload['target_s']:.0f}/s", overload), ("16 afterwards", measured["after_overload"])]
        title = f"admission by {way}: rooms/s (budget {BUDGET_ROOMS_S:.0f}), then median / 99th percentile in ms"
        lines.append(text(("at once", "rooms/s", "refused", *PHASES), (_row(*each) for each in cases), title))
        busiest = max(measured["levels"], key=lambda case: float(case["rooms_s"]))
        lines.append(f"cores at {measured['best_rooms_s']:.0f} rooms/s: {busiest['cpu']}")
        lines.append(
            f"overload: {overload['refused'] or 'no refusal'}; {overload['lost_later']} lost {overload['lost']}; "
            f"{overload['outstanding']} under way at the end, gone after {overload['backlog_drained_s']:.1f} s; "
            f"{overload['dropped']} not asked for, since {MOST_OUTSTANDING} were under way"
        )
    return "\n".join(lines)


def _row(label: str, case: dict[str, Any]) -> tuple[str, ...]:
    phases = [case["phases_ms"].get(name) for name in PHASES]
    cells = [f"{phase['p50']:.1f} / {phase['p99']:.1f}" if phase else "-" for phase in phases]
    return (label, f"{case['rooms_s']:.0f}", f"{case['refused_share']:.1%}", *cells)
