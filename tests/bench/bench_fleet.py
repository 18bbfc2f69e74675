"""A thousand instances on virtual time, by how pairs are chosen: waiting, refusals, imbalance, and what stale figures cost.

Owns: the cases. Run as `python -m tests.bench.bench_fleet --trace FILE [--instances 1000] [--json]`; the fleet is that of
`tests/helpers/fleet_simulation.py`, the choosing that of bootstrap. Arrivals are those of many users: pieces of a trace from as
many moments of it, laid over one another and not made faster. Without a trace they are made up.

`drawn` is how many instances of each role are looked at first; "all" looks at every one and takes the best. What is `fresh` is told
at once, the rest by heartbeats. With `failures` instances die, and are drained and started again in turn (of a thousand one dies
every two seconds, and four a second are drained).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import structlog

from kvbridge.bootstrap import looks
from kvbridge.cli.trace import TraceRequest, read_trace
from tests.bench import page
from tests.helpers.fleet_simulation import Fleet, Simulation

DRAWN = looks.DRAWN[0]
CASES = (
    ("all", True, False),
    ("all", False, False),
    (2, False, False),
    (DRAWN, False, False),
    (DRAWN, True, False),
    (DRAWN, False, True),
    ("all", False, True),
)
"""How many are drawn, whether what is known is fresh, whether instances fail."""
LIFE_S, RELEASE_S = 2000.0, 250.0
"""With failures: between two deaths of one instance, and from one of its rolling restarts to the next."""
COPIES_PER_INSTANCE = 0.17
"""Users of the trace for each instance; two thirds of decode's pages are then in use."""
SECONDS = 20.0


def run(*, trace: Path | None = None, instances: int = 1000, seconds: float = SECONDS) -> dict[str, Any]:
    """Simulate: {"instances", "requests_s", "trace", "cases": [{drawn, fresh, failures, and what `Outcome.summary` has}]}."""
    requests = read_trace(trace) if trace else made_up()
    arrivals = overlaid(requests, copies=round(instances * COPIES_PER_INSTANCE), seconds=seconds)
    cases = []
    failures = {"dies_each_s": LIFE_S / instances, "drained_each_s": RELEASE_S / instances}
    for drawn, fresh, fails in CASES:
        fleet = Fleet(instances, fresh=fresh, **(failures if fails else {}))
        simulation = Simulation(fleet, all_seeing=drawn == "all")
        counts = (drawn, looks.DRAWN[1]) if isinstance(drawn, int) else looks.DRAWN
        with patch.object(looks, "DRAWN", counts):
            outcome = asyncio.run(simulation.run(arrivals))
        cases.append({"drawn": drawn, "fresh": fresh, "failures": fails, **outcome.summary()})
    return {
        "instances": instances,
        "seconds": seconds,
        "requests_s": len(arrivals) / seconds,
        "trace": trace.name if trace else "",
        "cases": cases,
    }


def overlaid(trace: Sequence[TraceRequest], *, copies: int, seconds: float) -> list[tuple[float, TraceRequest]]:
    """The arrivals of so many users: each copy is `seconds` of the trace from another moment on, at the trace's own speed."""
    whole_s = trace[-1].timestamp / 1e3
    times_s = [one.timestamp / 1e3 for one in trace]
    found: list[tuple[float, TraceRequest]] = []
    for copy in range(copies):
        begun_s = copy * (whole_s - seconds) / max(1, copies - 1)
        found += [
            (at_s - begun_s, one)
            for at_s, one in zip(times_s, trace, strict=True)
            if begun_s <= at_s < begun_s + seconds
        ]
    return sorted(found, key=lambda pair: pair[0])


def made_up(count: int = 4000) -> tuple[TraceRequest, ...]:
    """Requests as a trace has them: three a second, most of them short, few of them very long."""
    chance = random.Random(1)
    now_ms, found = 0.0, []
    for _ in range(count):
        now_ms += chance.expovariate(1 / 300)
        prompt = min(120_000, int(chance.lognormvariate(8.8, 1.1)) + 1)
        found.append(
            TraceRequest(timestamp=now_ms, input_length=prompt, output_length=int(chance.expovariate(1 / 350)))
        )
    return tuple(found)


def table(found: dict[str, Any]) -> str:
    """The result as a table."""
    return page.fleets(found)


def main() -> None:
    """Print a table, or with --json the whole result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="requests, as `tests.bench.replay` takes them; made up without it")
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found = run(trace=given.trace, instances=given.instances, seconds=given.seconds)
    print(json.dumps(found, indent=1) if given.json else table(found))


if __name__ == "__main__":
    main()
