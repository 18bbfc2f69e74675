"""What a store costs beyond what is below it: pages into stores and back, against the same bytes without keys, headers and digests.

Run as `python -m tests.bench.bench_store`; `run` gives the same as JSON-able data.

An object is one page of DeepSeek-V4-Flash's C4 cache: 21 layers, apart from each other in a layer-first pool, 786,240 bytes.
`files` stands against a file for each page, written and read in one call each (in shared memory, so that no disk's mood is in it);
`mooncake` against the library's own batch calls with the same pieces, over TCP on this host. `without digests` is the same
get without looking at what came. `process` is the same get by way of a store process. All ways of a kind take turns; ratios are
medians of each turn's, above 1 where the store was quicker.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvbridge.config.stores import FileStoreSettings, MooncakeStoreSettings, StoreSettings
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.pool.memory.layout import host_placement
from kvbridge.pool.memory.mapped_pool import MappedPool
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores import pages as page_store
from kvbridge.tier.stores.base import Answer, ObjectStore
from kvbridge.tier.stores.client import StoreClient
from kvbridge.tier.stores.files import FileStore
from kvbridge.tier.stores.mooncake import MooncakeStore
from kvbridge.tier.stores.objects import object_name
from kvbridge.tier.stores.pages import PageStore
from tests.helpers.mooncake_servers import MooncakeServers

MODEL = "deepseek-v4-flash"
BATCH = 16
TURNS = 15
LIMIT_S = 120.0
BUDGETS = {"mooncake": 0.9, "files": 0.8, "digests": 0.9}
"""The last: a get with digests takes at most 10 % longer than one without."""

Pieces = list[tuple[int, int]]
"""Addresses and lengths in bytes."""
Bare = tuple[Callable[[list[str], list[Pieces]], None], Callable[[list[str], list[Pieces]], None]]
"""Put and get of the same pieces without anything above."""


def run(*, turns: int = TURNS) -> dict[str, Any]:
    """Measure and return {"turns", "batch", "object_bytes", "cases": [...]}; rates in GB/s."""
    cases: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-")))
        placement = host_placement(preset(MODEL), [ComponentKind.C4_KV], page_count=2 * BATCH)
        pool = stack.enter_context(MappedPool.create(placement, folder, "pool"))
        memory = np.frombuffer(pool.mappings[0].buffer, dtype=np.uint8)
        memory[:] = np.random.default_rng(5).integers(0, 256, len(memory), dtype=np.uint8)
        del memory
        for kind in ("files", "mooncake"):
            with _store(kind, folder) as (store, settings, bare):
                cases.append(_measure(kind, store, settings, bare, pool, turns))
        object_bytes = cases[0].pop("object_bytes")
        cases[1].pop("object_bytes")
    return {"turns": turns, "batch": BATCH, "object_bytes": object_bytes, "budgets": BUDGETS, "cases": cases}


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[tuple[ObjectStore, StoreSettings, Bare]]:
    if kind == "files":
        settings = FileStoreSettings(directory=folder / "store", max_bytes=1 << 30)
        bare_folder = folder / "bare"
        bare_folder.mkdir()
        store = FileStore(settings)
        yield store, settings, (_bare_call(bare_folder, os.pwritev), _bare_call(bare_folder, os.preadv))
        return
    servers = MooncakeServers(folder, segment_bytes=512 << 20)
    try:
        servers.start()
        mooncake_settings = MooncakeStoreSettings(master=servers.address)
        mooncake = MooncakeStore(mooncake_settings)
        library, config = mooncake._library, mooncake._config

        def put(names: list[str], pieces: list[Pieces]) -> None:
            addresses, lengths = ([[piece[column] for piece in each] for each in pieces] for column in (0, 1))
            assert not any(library.batch_put_from_multi_buffers(names, addresses, lengths, config))

        def get(names: list[str], pieces: list[Pieces]) -> None:
            addresses, lengths = ([[piece[column] for piece in each] for each in pieces] for column in (0, 1))
            assert min(library.batch_get_into_multi_buffers(names, addresses, lengths)) > 0

        yield mooncake, mooncake_settings, (put, get)
    finally:
        servers.stop()


def _bare_call(folder: Path, call: Callable[..., int]) -> Callable[[list[str], list[Pieces]], None]:
    flags = os.O_RDWR | (os.O_CREAT if call is os.pwritev else 0)

    def act(names: list[str], pieces: list[Pieces]) -> None:
        for name, each in zip(names, pieces, strict=True):
            buffers = [(ctypes.c_char * length).from_address(address) for address, length in each]
            descriptor = os.open(folder / name, flags, 0o600)
            assert call(descriptor, buffers, 0) == sum(length for _, length in each)
            os.close(descriptor)

    return act


def _measure(
    kind: str, store: ObjectStore, settings: StoreSettings, bare: Bare, pool: MappedPool, turns: int
) -> dict[str, Any]:
    pages = PageStore(store, [pool.regions()])
    [form] = pages.forms
    source, target = (np.arange(first, first + BATCH, dtype=np.int32).reshape(-1, 1) for first in (0, BATCH))
    pieces: dict[int, list[Pieces]] = {
        id(rows): [list(zip(form.addresses(row), form.lengths, strict=True)) for row in rows]
        for rows in (source, target)
    }
    random = np.random.default_rng()
    seconds: dict[str, list[tuple[float, float]]] = {}

    def timed(way: str, call: Callable[[], Any], wanted: str = "") -> None:
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        found = call()
        taken = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        seconds.setdefault(way, []).append(taken)
        assert not wanted or set(found.outcomes) == {wanted}, found

    def steps(keys: Keys, ask: Callable[[Keys, np.ndarray], Any]) -> list[tuple[str, Callable[[], Any], str]]:
        names = [object_name(form, key) for key in keys]
        bare_names = [f"bare-{name}" for name in names]
        until_s = time.monotonic() + LIMIT_S

        def without_digests() -> Answer:
            """All that a get does but looking at the bytes."""
            with (
                mock.patch.object(page_store, "checksum", return_value=0),
                mock.patch.object(page_store, "read_header", return_value=0),
            ):
                return pages.get(0, keys, target, until_s)

        return [
            ("put", lambda: pages.put(0, keys, source, until_s), "stored"),
            ("bare put", lambda: bare[0](bare_names, pieces[id(source)]), ""),
            ("get", lambda: pages.get(0, keys, target, until_s), "hit"),
            ("bare get", lambda: bare[1](bare_names, pieces[id(target)]), ""),
            ("get without digests", without_digests, "hit"),
            ("process get", lambda: ask(keys, target), "hit"),
            ("remove", lambda: store.remove([*names, *(bare_names if kind == "mooncake" else [])], until_s), "dropped"),
        ]

    with _process(settings, pool) as ask:
        for turn in range(turns + 1):
            each = steps(Keys(random.bytes(16 * BATCH)), ask)
            for way, call, wanted in each if turn % 2 else [each[index] for index in (1, 0, 5, 4, 3, 2, 6)]:
                timed(way, call, wanted)
    pages.close()
    return {"kind": kind, "object_bytes": form.payload_bytes} | _figures(seconds, form.payload_bytes)


@contextmanager
def _process(settings: StoreSettings, pool: MappedPool) -> Iterator[Callable[[Keys, np.ndarray], Any]]:
    """Gets by way of a store process."""
    loop = asyncio.new_event_loop()

    async def start() -> StoreClient:
        client = StoreClient(settings, [pool.shared_regions()], log_level="warning")
        client.start()
        ends_s = time.monotonic() + LIMIT_S
        while client.process.capabilities is None:
            assert time.monotonic() < ends_s, "the store process is not ready"
            await asyncio.sleep(0.01)
        return client

    client = loop.run_until_complete(start())

    async def ask(keys: Keys, pages: np.ndarray) -> Any:
        return await client.get(0, keys, pages, timeout_s=LIMIT_S)

    try:
        yield lambda keys, pages: loop.run_until_complete(ask(keys, pages))
    finally:
        loop.run_until_complete(client.close(6.0))
        loop.close()


def _figures(seconds: dict[str, list[tuple[float, float]]], page_bytes: int) -> dict[str, Any]:
    """By the clock of the wall, and by the time of this process's processors, which a busy machine changes less."""
    figures: dict[str, Any] = {}
    for column, clock in enumerate(("wall", "processor")):
        # The first turn warms up.
        taken = {way: [each[column] for each in turns[1:]] for way, turns in seconds.items() if way != "remove"}

        def ratio(way: str, against: str, taken: dict[str, list[float]] = taken) -> float:
            return statistics.median(b / a for a, b in zip(taken[way], taken[against], strict=True))

        figures[clock] = {
            "gb_s": {way: BATCH * int(page_bytes) / statistics.median(each) / 1e9 for way, each in taken.items()},
            "put_of_bare": ratio("put", "bare put"),
            "get_of_bare": ratio("get", "bare get"),
            "get_of_without_digests": ratio("get", "get without digests"),
        }
        if clock == "wall":
            figures[clock]["process_get_of_get"] = ratio("process get", "get")
    return figures


def table(figures: dict[str, Any]) -> str:
    """The figures of `run` for a reader."""
    lines = [f"{figures['batch']} objects of {figures['object_bytes']} bytes, medians of {figures['turns']} turns"]
    for case in figures["cases"]:
        for clock in ("wall", "processor"):
            found = case[clock]
            rates = ", ".join(f"{way} {rate:.2f}" for way, rate in found["gb_s"].items())
            lines += [
                f"{case['kind']}, {clock} time: {rates} GB/s",
                f"  of bare: put {found['put_of_bare']:.2f}, get {found['get_of_bare']:.2f} (budget {BUDGETS[case['kind']]})",
                f"  get, of one without digests: {found['get_of_without_digests']:.2f} (budget {BUDGETS['digests']})",
            ]
        lines.append(f"  get by way of a process, of a direct one: {case['wall']['process_get_of_get']:.2f}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(run()))
