"""What being watched costs a pair under load: metrics, logs, scrapes and an open status page together.

Three states take turns, in one run, so that whatever else the machine does falls on all of them:

- `blind`: daemons that count nothing, write nothing and make no facts (`blind.py`), and nobody looks;
- `telling`: daemons as they are, and nobody looks;
- `watched`: the same daemons, each scraped every second in the form that Prometheus asks for, and each with a status page open (its
  document, asked for by a process of its own, since the browser is not on the daemons' machine).

The figure to go by is the daemons' processor time for each room; rooms a second are of everything on this machine, generator and
engines included. `BUDGET` is the share of rooms a second that watching may take; where all share the cores, that is what it adds to
the processor time of all processes.

Run as `python -m tests.bench.bench_watching [--turns 6] [--seconds 5] [--json]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.bench.bench_load import MODEL, PAGES, TOKENS, closed_loop
from tests.bench.blind import blind
from tests.bench.load import Load, Shape, load
from tests.helpers.cluster import Cluster, cluster

LEVEL = 64
BUDGET = 0.05
STATES = ("blind", "telling", "watched")
DAEMONS = ("bootstrap", "prefill node", "decode node")
OPEN_METRICS = "Accept: application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"
PAGES_OPEN = 'while sleep 2; do curl --silent --output /dev/null "$@"; done'
SCRAPES = 'while sleep 1; do curl --silent --output /dev/null --header "$0" "$@"; done'


def run(*, turns: int = 6, seconds: float = 5.0) -> dict[str, Any]:
    """Measure: {"turns", "seconds", state: {"rooms_s", "ms_a_room": {process: [...]}}}, one figure for each turn."""
    pools = {"full": PAGES, "swa": 1, "request": 1}
    host = {"pools": {"device": pools, "host": {"components": []}}}
    given: dict[str, Any] = {"pages": pools, "decode": host}
    with (
        cluster({"preset": MODEL}, **given) as telling,
        cluster({"preset": MODEL}, **given, change=blind) as unseen,
    ):
        found = asyncio.run(_measure(telling, unseen, turns, seconds))
    return {"turns": turns, "seconds": seconds, **found}


async def _measure(telling: Cluster, unseen: Cluster, turns: int, seconds: float) -> dict[str, Any]:
    numbers, shape = itertools.count(1), Shape(TOKENS)
    taken: dict[str, list[dict[str, Any]]] = {state: [] for state in STATES}
    async with load(telling, shape) as seen, load(unseen, shape) as blinded:
        for generator in (seen, blinded):
            await closed_loop(generator, "bootstrap", LEVEL, 3.0, numbers)
        for turn in range(turns):
            # Each turn goes the other way round: what grows in the course of the run weighs on none of them.
            for state in STATES[:: 1 if turn % 2 else -1]:
                generator = blinded if state == "blind" else seen
                async with _watchers(generator, state == "watched"):
                    taken[state].append(await closed_loop(generator, "bootstrap", LEVEL, seconds, numbers))
    return {state: _figures(cases) for state, cases in taken.items()}


@asynccontextmanager
async def _watchers(generator: Load, wanted: bool) -> AsyncIterator[None]:
    """A page open and a scrape a second on each daemon, if wanted."""
    cluster, quiet = generator.cluster, asyncio.subprocess.DEVNULL
    urls = [daemon.url for daemon in (cluster.bootstrap, cluster.prefill, cluster.decode)]
    commands = [
        ["sh", "-c", PAGES_OPEN, "page", *(f"{url}/v1/page" for url in urls)],
        ["sh", "-c", SCRAPES, OPEN_METRICS, *(f"{url}/metrics" for url in urls)],
    ]
    watchers = [
        await asyncio.create_subprocess_exec(*command, stdout=quiet, start_new_session=True)
        for command in (commands if wanted else ())
    ]
    try:
        yield
    finally:
        for watcher in watchers:
            assert watcher.returncode is None, "whoever watches has ended before the turn did"
            os.killpg(watcher.pid, signal.SIGTERM)
            await watcher.wait()


def _figures(cases: list[dict[str, Any]]) -> dict[str, Any]:
    lost = sum(sum(case["lost"].values()) for case in cases)
    cost = {name: [round(1e3 * case["cpu"][name] / case["rooms_s"], 4) for case in cases] for name in cases[0]["cpu"]}
    return {"rooms_s": [round(case["rooms_s"], 1) for case in cases], "ms_a_room": cost, "lost": lost}


def table(found: dict[str, Any]) -> str:
    """Medians, and the least and most of the turns."""
    states = [found[state] for state in STATES]
    everything = list(states[0]["ms_a_room"])
    rows = [("all daemons", DAEMONS), ("all processes", everything), *((name, (name,)) for name in everything)]
    lines = [f"{found['turns']} turns of {found['seconds']:g} s each; median (least to most)"]
    lines.append(f"{'':>20}" + "".join(f"{state:>24}" for state in STATES))
    lines.append(f"{'rooms/s':>20}" + "".join(f"{_spread(state['rooms_s'], '.0f'):>24}" for state in states))
    for title, names in rows:
        cells = [
            [sum(each) for each in zip(*(state["ms_a_room"][name] for name in names), strict=True)] for state in states
        ]
        lines.append(f"{title + ', ms':>20}" + "".join(f"{_spread(cell, '.3f'):>24}" for cell in cells))
    lines += [
        f"{state} against blind, of all processor time: {share(found, state):+.1%} (budget {BUDGET:.0%})"
        for state in STATES[1:]
    ]
    return "\n".join(lines)


def share(found: dict[str, Any], state: str) -> float:
    """What a state adds to the daemons' processor time for a room, as a share of what all processes take for it."""
    added = sum(
        statistics.median(found[state]["ms_a_room"][name]) - statistics.median(found["blind"]["ms_a_room"][name])
        for name in DAEMONS
    )
    return added / sum(statistics.median(each) for each in found["blind"]["ms_a_room"].values())


def _spread(figures: list[float], form: str) -> str:
    return f"{statistics.median(figures):{form}} ({min(figures):{form}} to {max(figures):{form}})"


def main() -> None:
    """Print a table, or with --json the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="of each state")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each turn")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = parser.parse_args()
    found = run(turns=given.turns, seconds=given.seconds)
    print(json.dumps(found, indent=1) if given.json else table(found))


if __name__ == "__main__":
    main()
