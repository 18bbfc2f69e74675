"""Pairings a second of one bootstrap, by store and by the number of registered instances.

Daemons are not there: they admit at once, in this process, so that what is measured is the directory, the choice and the store.
`concurrent` keeps 16 pairings under way; `alone` one, so it is the time that one caller waits. Every room is cancelled again,
outside of the measured time, and every node sends its heartbeat every so many pairings as it would.

`heartbeats` is what a daemon spends on a fleet that only its heartbeats are of: processor time for each heartbeat over HTTP, and
the share of a core that it takes, without any, to know what is there (the overview, what has expired).

`page keys` are the same pairings of requests with page keys (conversations of some turns over one system prompt, at nodes that keep
prefixes), in the same run and by turns with the others, so the quotient is what pairing by overlap costs. `cpu_us` is the time of
this process for one of many pairings. `prefixes` is what the rest costs at a million pages: what each heartbeat says more, how
long it takes to know it, and what a note takes in memory.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest, Ticket, TicketEnd
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.stores.base import Claim, RoomTimes
from kvbridge.bootstrap.stores.memory import MemoryStore
from kvbridge.bootstrap.stores.redis import RedisStore
from kvbridge.bootstrap.stores.redis_connection import RedisSettings
from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.config.schema import PairingConfig
from kvbridge.config.timeouts import BootstrapTimeouts
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.session.states import RoomState
from kvbridge.http.client import DirectoryClient
from kvbridge.pool.accounts.book import PageBook
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import KEY_BYTES, Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.redis_server import redis_server

INSTANCES = (10, 1000)
PAIRINGS = 600
TURNS = 5
"""Of these the middle one counts, by processor time."""
WARM_UP = 50
CONCURRENT = 16
BEAT_EVERY = 300
PAGES = 100_000
CONVERSATIONS = 16
INDEX_PAGES, PATH_PAGES, NOTES = 1_000_000, 500, 20_000
TIMES = RoomTimes(claim_s=30.0, keep_s=600.0, max_rooms=100_000)
LIMITS = {"config": PairingConfig(), "timeouts": BootstrapTimeouts()}


class WillingDaemons:
    """Every daemon at once; each admits whatever it is asked."""

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        role = Role.DECODE if request.prefill else Role.PREFILL
        assert request.room is not None
        return RoomReport(
            room=request.room,
            generation=request.generation,
            role=role,
            state=RoomState.ADMITTED,
            prompt_tokens=request.prompt_tokens,
        )

    async def incarnation(self, url: str) -> str:
        return ""

    async def report(self, url: str, room: int) -> RoomReport:
        raise NotImplementedError

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        raise NotImplementedError


class Uncounted:
    """Nobody reads the counters of a benchmark; a failure ends it."""

    def store_value_refused(self, reason: str) -> None:
        raise AssertionError(reason)

    def store_failed(self, reason: str) -> None:
        raise AssertionError(reason)


def run(*, pairings: int = PAIRINGS) -> dict[str, Any]:
    """Return pairings a second and milliseconds, by store and number of instances."""
    return asyncio.run(_run(pairings)) | {"prefixes": hint_costs(), "heartbeats": asyncio.run(heartbeat_costs())}


async def _run(pairings: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for instances in INSTANCES:
        for kind in ("memory", "redis"):
            async with _store(kind) as store:
                case = await _measure(store, instances, pairings)
            for with_keys, name in ((False, ""), (True, ", page keys")):
                results[f"{kind}, {instances} instances{name}"] = case[with_keys]
    return results


@asynccontextmanager
async def _store(kind: str) -> AsyncIterator[MemoryStore | RedisStore]:
    if kind == "memory":
        yield MemoryStore(expire_after_s=600.0, rooms=TIMES)
        return
    with redis_server() as server:
        settings = RedisSettings(url=server.url, password=lambda: "", namespace="bench", timeout_s=5.0)
        store = RedisStore(settings, expire_after_s=600.0, rooms=TIMES, observer=Uncounted())
        try:
            yield store
        finally:
            await store.close()


async def _measure(store: MemoryStore | RedisStore, instances: int, pairings: int) -> dict[bool, dict[str, float]]:
    directory = Directory(store, WillingDaemons())
    nodes = [_node(number) for number in range(instances)]
    for node in nodes:
        await directory.register(node)
    service = PairingService(directory, store, WillingDaemons(), **LIMITS)
    plain, keyed = [PairRequest(prompt_tokens=4096, max_new_tokens=512)], _conversations()
    for request in [*plain * WARM_UP, *keyed]:
        await service.pair(request)
    waits_ms: dict[bool, list[float]] = {False: [], True: []}
    for number in range(pairings):
        if number % BEAT_EVERY == 0:
            await _beats(directory, nodes)
        for with_keys, requests in ((False, plain), (True, keyed)):
            begun_s = time.perf_counter()
            await service.pair(requests[number % len(requests)])
            waits_ms[with_keys].append((time.perf_counter() - begun_s) * 1e3)
    found: dict[bool, dict[str, float]] = {}
    for with_keys, requests in ((False, plain), (True, keyed)):
        turns = []
        for _ in range(TURNS):
            await _beats(directory, nodes)
            turns.append(await _many(service, requests, pairings))
        found[with_keys] = sorted(turns, key=lambda turn: turn["cpu_us"])[TURNS // 2] | _alone(waits_ms[with_keys])
    return found


async def _many(service: PairingService, requests: list[PairRequest], pairings: int) -> dict[str, float]:
    left = iter(range(pairings))
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()

    async def keep_pairing() -> None:
        for number in left:
            await service.pair(requests[number % len(requests)])

    await asyncio.gather(*(keep_pairing() for _ in range(CONCURRENT)))
    cpu_s = time.process_time() - begun_cpu_s
    return {"per_s": pairings / (time.perf_counter() - begun_s), "cpu_us": cpu_s / pairings * 1e6}


def _alone(waits_ms: list[float]) -> dict[str, float]:
    return {
        "alone_median_ms": statistics.median(waits_ms),
        "alone_p99_ms": sorted(waits_ms)[-max(1, len(waits_ms) // 100)],
    }


def _conversations() -> list[PairRequest]:
    """Some turns of some conversations over one system prompt of four pages, the longest of 128 pages."""
    found = []
    for _ in range(CONVERSATIONS):
        pages = [secrets.token_bytes(KEY_BYTES) for _ in range(128)]
        pages[:4] = [bytes([page]) * KEY_BYTES for page in range(4)]
        turns = (8, 32, 128)
        found += [PairRequest(prompt_tokens=turn * 256, page_hashes=b"".join(pages[:turn])) for turn in turns]
    return found


def hint_costs() -> dict[str, float]:
    """What a node of a million pages tells, how long it takes to know it, and what a note takes at bootstrap."""
    index = PrefixIndex((IndexSpace.FULL,), INDEX_PAGES)
    cache = PrefixCache(PageBook({IndexSpace.FULL: INDEX_PAGES}), index)
    for start in range(0, INDEX_PAGES, PATH_PAGES):
        keys = Keys(secrets.token_bytes(PATH_PAGES * KEY_BYTES))
        ids = np.arange(start, start + PATH_PAGES, dtype=np.int32)
        index.insert(keys, 0, {IndexSpace.FULL: ids}, now=float(start))
    times = 1000
    begun_s = time.perf_counter()
    for _ in range(times):
        cache.kept_s()
    asked_us = (time.perf_counter() - begun_s) / times * 1e6
    beat = NodeHeartbeat(incarnation="i", ready=True)
    told = beat.model_copy(update={"load": Load(prefixes_kept_s=12345.678)})
    return {
        "index_pages": len(index),
        "heartbeat_bytes": len(told.model_dump_json(exclude_defaults=True))
        - len(beat.model_dump_json(exclude_defaults=True)),
        "kept_s_us": asked_us,
        "note_bytes": asyncio.run(_note_bytes()),
    }


async def heartbeat_costs(instances: int = INSTANCES[-1], rounds: int = 3, idle_s: float = 5.0) -> dict[str, float]:
    """Processor time of a bootstrap process with so many nodes of one instance each."""
    with tempfile.TemporaryDirectory(prefix="kvb-") as name:
        folder = Path(name)
        config = {"http": {"port": 0}, "directory": {"expire_after_s": 600.0}}
        daemon = DaemonProcess("bootstrap", "bootstrap", folder, config, ends_with_us=True)
        daemon.arguments = ("--endpoint-dir", str(daemon.runtime_dir))
        daemon.start()
        client = DirectoryClient(daemon.url, timeout_s=60.0)
        try:
            nodes = [_node(number) for number in range(instances)]
            spent = _spent_s(daemon.process.pid)
            for node in nodes:
                await client.register(node)
            registered_s = _spent_s(daemon.process.pid) - spent
            begun_s, spent = time.monotonic(), _spent_s(daemon.process.pid)
            await asyncio.sleep(idle_s)
            idle = (_spent_s(daemon.process.pid) - spent) / (time.monotonic() - begun_s)
            begun_s, spent = time.monotonic(), _spent_s(daemon.process.pid)
            for node in nodes * rounds:
                beat = NodeHeartbeat(incarnation=node.incarnation, ready=True, load=node.load)
                await client.heartbeat(node.instance, node.node, beat)
            told_s = _spent_s(daemon.process.pid) - spent - idle * (time.monotonic() - begun_s)
        finally:
            await client.close()
            daemon.stop()
    return {
        "instances": instances,
        "registration_us": registered_s / instances * 1e6,
        "heartbeat_us": told_s / (instances * rounds) * 1e6,
        "idle_cores": idle,
    }


def _spent_s(pid: int) -> float:
    """Processor time of a process until now."""
    spent = psutil.Process(pid).cpu_times()
    return float(spent.user + spent.system)


async def _note_bytes() -> float:
    store, ends = MemoryStore(expire_after_s=600.0, rooms=TIMES), [_end(name) for name in ("prefill-0", "decode-0")]
    claim = await store.claim(1, generations=1)
    assert isinstance(claim, Claim)
    ticket = Ticket(room=1, generation=1, prefill=ends[0], decode=ends[1], expires_in_s=60.0)
    keys = [secrets.token_bytes(KEY_BYTES) for _ in range(NOTES)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    await store.settle(claim, ticket, keys)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return taken / NOTES + sys.getsizeof(keys[0])  # the keys were there before


def _end(name: str) -> TicketEnd:
    return TicketEnd(instance=name, http_urls=(f"http://{name}",))


async def _beats(directory: Directory, nodes: list[NodeRegistration]) -> None:
    for node in nodes:
        beat = NodeHeartbeat(incarnation=node.incarnation, ready=True, load=node.load)
        await directory.heartbeat(node.instance, node.node, beat)


def _node(number: int) -> NodeRegistration:
    """Prefill and decode by turns, of the real model's geometry."""
    role = Role.DECODE if number % 2 else Role.PREFILL
    geometry = preset("deepseek-v4-flash")
    pages = dict.fromkeys(("full", "swa", "request", "host"), PAGES)
    return NodeRegistration(
        instance=f"{role}-{number}",
        node="node-0",
        role=role,
        incarnation=f"incarnation-{number}",
        http_url=f"http://node-{number}:7900",
        control=PeerAddress(endpoint=f"tcp://node-{number}:7901"),
        pp_size=1,
        tp_size=1,
        ranks=(Rank(pp=0, tp=0),),
        fingerprint=fingerprint(geometry),
        geometry=geometry,
        host=("c4_kv",) if role is Role.DECODE else (),
        model_identity=ModelIdentity(name="deepseek-v4-flash", revision="1"),
        load=Load(available_pages=pages, total_pages=pages, prefixes_kept_s=3600.0),
    )


def table(results: dict[str, Any]) -> str:
    """Lay the figures out for reading."""
    cases = {name: figures for name, figures in results.items() if name not in {"prefixes", "heartbeats"}}
    lines = [f"{'store':<32} {'pairings/s':>11} {'alone, median ms':>17} {'p99 ms':>8} {'cpu us':>8}"]
    lines += [
        f"{name:<32} {figures['per_s']:>11.0f} {figures['alone_median_ms']:>17.2f} {figures['alone_p99_ms']:>8.2f} "
        f"{figures['cpu_us']:>8.0f}"
        for name, figures in cases.items()
    ]
    costs = results["prefixes"]
    lines += [
        f"a node of {costs['index_pages']:,} pages: {costs['heartbeat_bytes']} bytes a heartbeat",
        f"known in {costs['kept_s_us']:.1f} us",
        f"a note at bootstrap: {costs['note_bytes']:.0f} bytes",
    ]
    beats = results["heartbeats"]
    lines.append(
        f"{beats['instances']} nodes: {beats['registration_us']:.0f} us a registration, {beats['heartbeat_us']:.0f} us a heartbeat "
        f"over HTTP, {beats['idle_cores']:.1%} of a core without any"
    )
    return "\n".join(lines)
