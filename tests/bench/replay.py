"""Replay a trace of requests through one pair of real daemons and compare every byte: `python -m tests.bench.replay --trace FILE`.

Engines compute nothing: prefill writes bytes that say where they belong. The replay plays the router, and obeys Retry-After.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbridge.cli.fit import TraceRequest, read_trace
from kvbridge.cli.local_cluster import used_pages, wait_all_ready
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.geometry.tiers import needs_checkpoints
from kvbridge.core.ids import IndexSpace
from tests.bench.load import Load, RefusedError, RoomLostError, identity_of, load
from tests.bench.load_engine import Facts
from tests.bench.output import environment, percentile, table as text, write
from tests.helpers.cluster import Cluster, cluster, eventually

SPARE = 2
"""Pools hold so many times the requests in flight: bootstrap's knowledge of free pages is a heartbeat old."""
LONGEST_WAIT_S = 3600.0
START_S = 300.0
RETRY_FOR_S = 600.0
PAGES_PER_CHECKPOINT, LEAST_CHECKPOINTS = 32, 16
"""Pools and host tiers have one page for a checkpoint beside so many for tokens; a host tier has that many at least."""
PERCENTILES = (50, 90, 99, 100)


def run(given: argparse.Namespace) -> dict[str, Any]:
    geometry = preset(given.model)
    requests = read_trace(given.trace, count=given.count)
    with cluster({"preset": given.model}, wait=False, **_daemons(given, geometry, requests)) as running:
        wait_all_ready(running.all(), timeout_s=START_S)
        course = asyncio.run(_replay(running, given, requests))
        eventually("every page is free again", lambda: not _used(running), 20.0)
    whole = sum(
        len(each.layers) * each.sent_bytes(each.live_rows(n)) for n in course.arrived for each in geometry.components
    )
    return {
        "trace": given.trace.name,
        "settings": {name: value for name, value in vars(given).items() if name not in {"trace", "output"}},
        "cores": len(os.sched_getaffinity(0)),
        "requests": len(requests),
        "completed": len(course.arrived),
        "most_in_flight": course.most_in_flight,
        "arrived_tokens": sum(course.arrived),
        "checked_bytes": course.checked_bytes,
        "whole_bytes": whole,
        "amounts": {
            kind: dict(zip(("bytes", "operations"), each, strict=True)) for kind, each in course.amounts.items()
        },
        "found_tokens": dict(course.held),
        "refusals": dict(course.refusals),
        "unserved": course.unserved,
        "phases_s": {
            name: {f"p{p}": percentile(each, p) for p in PERCENTILES} for name, each in course.phases_s.items()
        },
    }


@dataclass
class _Course:
    arrived: list[int] = field(default_factory=list)
    checked_bytes: int = 0
    most_in_flight: int = 0
    amounts: dict[str, list[int]] = field(default_factory=dict)
    held: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts that prefill and decode held, what came back from host memory, and what an endless cache would hold."""
    refusals: Counter[str] = field(default_factory=Counter)
    unserved: list[str] = field(default_factory=list)
    phases_s: dict[str, list[float]] = field(default_factory=dict)


async def _replay(running: Cluster, given: argparse.Namespace, requests: Sequence[TraceRequest]) -> _Course:
    course, gate = _Course(), asyncio.Semaphore(given.max_in_flight)
    facts = Facts(1, prompts=str(given.trace) if given.prefixes else "", chunk_tokens=given.chunk_tokens)
    async with load(running, facts, identity_of(given.model)) as generator:
        begun_s = time.monotonic()
        endless = _endless(generator, len(requests))

        async def serve(number: int, request: TraceRequest) -> None:
            if given.speed:
                due_s = (request.timestamp - requests[0].timestamp) / 1000 / given.speed
                await asyncio.sleep(max(0.0, begun_s + due_s - time.monotonic()))
            async with gate:
                in_flight = given.max_in_flight - gate._value
                course.most_in_flight = max(course.most_in_flight, in_flight)
                await _serve(generator, course, number, request)
            course.held["endless"] += endless[number - 1]

        await asyncio.gather(*(serve(number, request) for number, request in enumerate(requests, start=1)))
    return course


async def _serve(generator: Load, course: _Course, number: int, request: TraceRequest) -> None:
    """Ask until the request is let in, and take its room through its life."""
    give_up_s = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            more = {"max_new_tokens": request.output_length}
            life = await generator.room("bootstrap", number, request.input_length, limit_s=LONGEST_WAIT_S, **more)
            break
        except RefusedError as error:
            course.refusals[error.code] += 1
            if time.monotonic() > give_up_s:
                course.unserved.append(f"request {number}: refused for {RETRY_FOR_S:g} s: {error}")
                return
            await asyncio.sleep(error.retry_after_s)
        except RoomLostError as error:
            course.unserved.append(f"request {number}: {error}")
            return
    course.arrived.append(request.input_length)
    course.checked_bytes += life.checked_bytes
    course.held.update(life.held)
    for kind, moved in life.amounts.items():
        course.amounts[kind] = [a + b for a, b in zip(course.amounts.get(kind, [0, 0]), moved, strict=True)]
    for name, seconds in life.phases_s.items():
        course.phases_s.setdefault(name, []).append(seconds)


def _endless(generator: Load, count: int) -> list[int]:
    """Return for each prompt how many tokens a cache would hold that forgets nothing, if requests came one after another."""
    known: set[bytes] = set()
    found = []
    for number in range(1, count + 1):
        keys = generator.keys(number).to_list()
        hit = next((page for page, key in enumerate(keys) if key not in known), len(keys))
        found.append(hit * generator.identity.tokens_per_page if generator.identity else 0)
        known.update(keys)
    return found


def _used(running: Cluster) -> int:
    return sum(sum(used_pages(daemon).values()) for daemon in (running.prefill, running.decode))


def _daemons(given: argparse.Namespace, geometry: ModelGeometry, requests: Sequence[TraceRequest]) -> dict[str, Any]:
    """Return the settings of the daemons. Rooms wait for one prefill engine: that is no fault here."""
    host = frozenset({ComponentKind.C4_KV} & {component.kind for component in geometry.components})
    ends = {(request.input_length, request.input_length + request.output_length) for request in requests}
    demands = [pages_needed(geometry, tokens=end, prompt_tokens=prompt, host=host) for prompt, end in ends]
    pages = {}
    for space in demands[0]:
        each = sorted(demand[space] for demand in demands)
        if space not in {
            IndexSpace.FULL,
            IndexSpace.HOST,
        }:  # counted generously, so that it is `full` pages that run out
            pages[space.value] = max(1, SPARE * SPARE * given.max_in_flight * each[-1])
        elif given.pool_tokens:
            pages[space.value] = -(-given.pool_tokens // geometry.tokens_per_page)
        else:
            pages[space.value] = sum(each[-SPARE * given.max_in_flight :])
    host_pages = pages.pop(IndexSpace.HOST.value, 0)
    timeouts = dict.fromkeys(("offer_s", "room_s", "claim_s"), LONGEST_WAIT_S)
    prefill: dict[str, Any] = {"timeouts": timeouts}
    decode: dict[str, Any] = {"timeouts": timeouts}
    if given.prefixes:
        tier = {"enabled": True, "model_name": given.model, "model_revision": "1"}
        twins = -(-given.host_tokens // geometry.tokens_per_page)
        if IndexSpace.SWA.value in pages:
            pages[IndexSpace.SWA.value] += pages[IndexSpace.FULL.value] // PAGES_PER_CHECKPOINT
        checkpoints = (LEAST_CHECKPOINTS + twins // PAGES_PER_CHECKPOINT) * needs_checkpoints(geometry)
        prefill["tier"] = tier | ({"host": {"pages": twins, "checkpoint_pages": checkpoints}} if twins else {})
        decode["tier"] = tier | ({"host": {"pages": twins}} if twins else {})
        host_pages += twins * bool(host_pages)
    bootstrap = {"timeouts": {"ticket_s": LONGEST_WAIT_S, "room_keep_s": 2 * LONGEST_WAIT_S}}
    settings = {"transport": given.transport, "pages": pages, "host_pages": host_pages, "bootstrap": bootstrap}
    return settings | {"prefill": prefill, "decode": decode}


def table(found: dict[str, Any]) -> str:
    lines = [
        text(("component", "bytes", "operations"), ((name, *each.values()) for name, each in found["amounts"].items()))
    ]
    phases = ((name, *(1e3 * each for each in taken.values())) for name, taken in found["phases_s"].items())
    lines.append(text(("phase", *(f"p{percent} ms" for percent in PERCENTILES)), phases))
    lines.append(f"tokens of prompts that were held: {found['found_tokens']}; of {found['arrived_tokens']:,}")
    lines += found["unserved"]
    verdict = "GOOD" if found["completed"] == found["requests"] else "BAD"
    lines.append(
        f"{verdict}: {found['completed']} of {found['requests']} requests served, {found['checked_bytes']:,} bytes compared"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.replay", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trace", type=Path, required=True, help="JSON lines: timestamp (ms), input_length, output_length, hash_ids"
    )
    parser.add_argument("--count", type=int, default=0, help="requests to replay; 0: all of the trace")
    parser.add_argument("--speed", type=float, default=1.0, help="1: as the trace says; 0: as fast as admission lets")
    parser.add_argument("--model", default="deepseek-v4-flash", help="whose geometry")
    parser.add_argument("--transport", default="mooncake", help="the only one that both sides may use")
    parser.add_argument("--chunk-tokens", type=int, default=4096, help="written and published at a time")
    parser.add_argument("--max-in-flight", type=int, default=4, help="requests asked for or admitted at once")
    parser.add_argument("--pool-tokens", type=int, default=0, help="that fit a pool; 0: twice what can be in flight")
    parser.add_argument("--host-tokens", type=int, default=0, help="of prefixes in host memory below device pools")
    parser.add_argument("--no-prefixes", dest="prefixes", action="store_false", help="send everything")
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the JSON goes")
    given = parser.parse_args()
    found = run(given)
    print(table(found))
    write(given.output, "replay", {"environment": environment(), "replay": found})
    return int(found["completed"] != found["requests"])


if __name__ == "__main__":
    sys.exit(main())
