"""Pairings a second of one bootstrap, by store and by the number of registered instances; daemons admit at once, in this process.

`per_s` keeps 16 pairings under way, `alone` one. `page keys`: the same for requests with page keys, by turns in the same run.
"""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.redis_store import RedisStore, redis_client
from kvbridge.bootstrap.store import MemoryStore, RoomTimes
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.core.session.tables import RoomState
from kvbridge.tier.keys import KEY_BYTES
from tests.bench.output import percentile, table as text
from tests.helpers.redis_server import redis_server
from tests.unit.bootstrap.fleet import LIMITS, node

INSTANCES = (10, 1000)
PAIRINGS = 600
TURNS = 5
"""The median counts, by processor time."""
WARM_UP = 50
CONCURRENT = 16
BEAT_EVERY = 300
PAGES = 100_000
CONVERSATIONS = 16
BUDGETS_PER_S = {"memory, 1000 instances": 5000, "redis, 1000 instances": 1500}
TIMES = RoomTimes(claim_s=30.0, keep_s=600.0, max_rooms=100_000)


async def _admit(_url: str, request: AdmissionRequest) -> RoomReport:
    assert request.room is not None
    return RoomReport(
        room=request.room,
        generation=request.generation,
        role=Role.DECODE if request.prefill else Role.PREFILL,
        state=RoomState.ADMITTED,
        prompt_tokens=request.prompt_tokens,
    )


async def _incarnation(_url: str) -> str:
    return ""


DAEMONS: Any = SimpleNamespace(admit=_admit, incarnation=_incarnation)


def _fail(_metric: object, reason: str) -> None:
    raise AssertionError(reason)


METRICS: Any = SimpleNamespace(count=_fail)
"""A failure ends the benchmark."""


def run(*, quick: bool) -> dict[str, Any]:
    return {"cases": asyncio.run(_run(32 if quick else PAIRINGS))}


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
        limits = {"timeout_s": 5.0, "expire_after_s": 600.0, "rooms": TIMES}
        store = RedisStore(redis_client(server.url, timeout_s=5.0), namespace="bench", metrics=METRICS, **limits)
        try:
            yield store
        finally:
            await store.close()


async def _measure(store: MemoryStore | RedisStore, instances: int, pairings: int) -> dict[bool, dict[str, float]]:
    directory = Directory(store, DAEMONS)
    nodes = [_node(number) for number in range(instances)]
    for each in nodes:
        await directory.register(each)
    service = PairingService(directory, store, DAEMONS, **LIMITS)
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
        found[with_keys] = sorted(turns, key=lambda turn: turn["cpu_us"])[TURNS // 2] | {
            "alone_median_ms": statistics.median(waits_ms[with_keys]),
            "alone_p99_ms": percentile(waits_ms[with_keys], 99),
        }
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


def _conversations() -> list[PairRequest]:
    """Some turns of some conversations over one system prompt of four pages, the longest of 128 pages."""
    found = []
    for _ in range(CONVERSATIONS):
        pages = [secrets.token_bytes(KEY_BYTES) for _ in range(128)]
        pages[:4] = [bytes([page]) * KEY_BYTES for page in range(4)]
        turns = (8, 32, 128)
        found += [PairRequest(prompt_tokens=turn * 256, page_hashes=b"".join(pages[:turn])) for turn in turns]
    return found


async def _beats(directory: Directory, nodes: list[NodeRegistration]) -> None:
    for each in nodes:
        beat = NodeHeartbeat(incarnation=each.incarnation, ready=True, load=each.load)
        await directory.heartbeat(each.instance, each.node, beat)


def _node(number: int) -> NodeRegistration:
    role = Role.DECODE if number % 2 else Role.PREFILL
    pages = dict.fromkeys(("full", "swa", "request", "host"), PAGES)
    return node(
        f"{role}-{number}",
        role,
        model="deepseek-v4-flash",
        host=("c4_kv",) if role is Role.DECODE else (),
        model_identity=ModelIdentity(name="deepseek-v4-flash", revision="1"),
        load=Load(available_pages=pages, total_pages=pages, prefixes_kept_s=3600.0),
    )


def table(found: dict[str, Any]) -> str:
    names = ("per_s", "alone_median_ms", "alone_p99_ms", "cpu_us")
    rows = [(name, *(case[each] for each in names), BUDGETS_PER_S.get(name)) for name, case in found["cases"].items()]
    return text(("store", "pairings/s", "alone, median ms", "p99 ms", "cpu us", "budget/s"), rows)
