"""What an open status page costs: rooms a second and processor time of the daemons with a page of each open, and without.

Turns with and without alternate through one pair, so that whatever else the machine does falls on both. A page is its stream of
events alone, read by a process of its own: the browser is not on the daemons' machine.

Run as `python -m tests.bench.bench_page [--turns 6] [--seconds 5]`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from typing import Any

from tests.bench.bench_load import MODEL, PAGES, TOKENS, _closed
from tests.bench.load import Load, Shape, load
from tests.helpers.cluster import Cluster, cluster

LEVEL = 64
DAEMONS = ("bootstrap", "prefill node", "decode node")


def run(*, turns: int = 6, seconds: float = 5.0) -> dict[str, Any]:
    """Measure: {"without" and "with": {"rooms_s", "daemon_ms_a_room"}, medians over the turns, and "share_lost"}."""
    pools = {"full": PAGES, "swa": 1, "request": 1}
    host = {"pools": {"device": pools, "host": {"components": []}}}
    with cluster({"preset": MODEL}, pages=pools, decode=host) as running:
        return asyncio.run(_measure(running, turns, seconds))


async def _measure(running: Cluster, turns: int, seconds: float) -> dict[str, Any]:
    numbers = itertools.count(1)
    taken: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    async with load(running, Shape(TOKENS)) as generator:
        await _closed(generator, "bootstrap", LEVEL, 2.0, numbers)
        for turn in range(2 * turns):
            name = ("without", "with", "with", "without")[turn % 4]
            pages = await _open_pages(generator) if name == "with" else []
            taken[name].append(await _closed(generator, "bootstrap", LEVEL, seconds, numbers))
            for page in pages:
                page.terminate()
                await page.wait()
    found = {name: _medians(cases) for name, cases in taken.items()}
    return {
        "turns": turns,
        "seconds": seconds,
        **found,
        "share_lost": 1 - found["with"]["rooms_s"] / found["without"]["rooms_s"],
    }


async def _open_pages(generator: Load) -> list[asyncio.subprocess.Process]:
    cluster = generator.cluster
    urls = [daemon.url for daemon in (cluster.bootstrap, cluster.prefill, cluster.decode)]
    quiet = asyncio.subprocess.DEVNULL
    return [
        await asyncio.create_subprocess_exec("curl", "--silent", "--no-buffer", f"{url}/v1/events", stdout=quiet)
        for url in urls
    ]


def _medians(cases: list[dict[str, Any]]) -> dict[str, float]:
    cost = [1e3 * sum(case["cpu"][name] for name in DAEMONS) / case["rooms_s"] for case in cases]
    return {
        "rooms_s": round(statistics.median(case["rooms_s"] for case in cases), 1),
        "daemon_ms_a_room": round(statistics.median(cost), 4),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=6, help="with and without, each")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each turn")
    given = parser.parse_args()
    print(json.dumps(run(turns=given.turns, seconds=given.seconds), indent=1))


if __name__ == "__main__":
    main()
