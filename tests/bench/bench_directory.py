"""Pairings a second of one bootstrap, by store and by the number of registered instances.

Daemons are not there: they admit at once, in this process, so that what is measured is the directory, the choice and the store.
`concurrent` keeps 16 pairings under way; `alone` one, so it is the time that one caller waits. Every room is cancelled again,
outside of the measured time, and every node sends its heartbeat every so many pairings as it would.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.api.rooms import AdmissionRequest, PeerAddress, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.stores.base import RoomTimes
from kvbridge.bootstrap.stores.memory import MemoryStore
from kvbridge.bootstrap.stores.redis import RedisSettings, RedisStore
from kvbridge.config.schema import PairingConfig
from kvbridge.config.timeouts import BootstrapTimeouts
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.core.session.states import RoomState
from tests.helpers.redis_server import redis_server

INSTANCES = (2, 100)
PAIRINGS = 600
WARM_UP = 50
CONCURRENT = 16
BEAT_EVERY = 50
PAGES = 100_000
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
    return asyncio.run(_run(pairings))


async def _run(pairings: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for instances in INSTANCES:
        for kind in ("memory", "redis"):
            async with _store(kind) as store:
                results[f"{kind}, {instances} instances"] = await _measure(store, instances, pairings)
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


async def _measure(store: MemoryStore | RedisStore, instances: int, pairings: int) -> dict[str, float]:
    directory = Directory(store, WillingDaemons())
    nodes = [_node(number) for number in range(instances)]
    for node in nodes:
        await directory.register(node)
    service = PairingService(directory, store, WillingDaemons(), **LIMITS)
    request = PairRequest(prompt_tokens=4096, max_new_tokens=512)
    for _ in range(WARM_UP):
        await service.pair(request)
    waits_ms = []
    for number in range(pairings):
        if number % BEAT_EVERY == 0:
            await _beats(directory, nodes)
        begun_s = time.perf_counter()
        await service.pair(request)
        waits_ms.append((time.perf_counter() - begun_s) * 1e3)
    await _beats(directory, nodes)
    left = iter(range(pairings))
    begun_s = time.perf_counter()

    async def keep_pairing() -> None:
        for _ in left:
            await service.pair(request)

    await asyncio.gather(*(keep_pairing() for _ in range(CONCURRENT)))
    rate = pairings / (time.perf_counter() - begun_s)
    return {
        "per_s": rate,
        "alone_median_ms": statistics.median(waits_ms),
        "alone_p99_ms": sorted(waits_ms)[-pairings // 100],
    }


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
        load=Load(available_pages=pages, total_pages=pages),
    )


def table(results: dict[str, Any]) -> str:
    """Lay the figures out for reading."""
    lines = [f"{'store':<24} {'pairings/s':>11} {'alone, median ms':>17} {'p99 ms':>8}"]
    lines += [
        f"{name:<24} {figures['per_s']:>11.0f} {figures['alone_median_ms']:>17.2f} {figures['alone_p99_ms']:>8.2f}"
        for name, figures in results.items()
    ]
    return "\n".join(lines)
