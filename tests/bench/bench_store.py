"""Pages into stores and back, against the same bytes without keys and digests: 16 C4 pages of DeepSeek-V4-Flash, 786,240 B each.

`files` stands beside a file for each page in one call, in shared memory; `mooncake` beside the library's own batch call over TCP.
Ways take turns in changing order. Ratios are medians of each turn's, above 1 where the store was quicker.
"""

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

from kvbridge.config.tier import FileStoreSettings, MooncakeStoreSettings
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.pool.memory.layout import host_placement
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores import process as page_store
from kvbridge.tier.stores.files import FileStore
from kvbridge.tier.stores.mooncake import MooncakeStore
from kvbridge.tier.stores.objects import Answer, ObjectForm, Verb
from kvbridge.tier.stores.process import ObjectStore, PageStore
from tests.bench.output import table as text
from tests.helpers.local_servers import MooncakeServers

MODEL = "deepseek-v4-flash"
BATCH = 16
TURNS = 45
LIMIT_S = 120.0
BUDGETS = {"mooncake": 0.9, "files": 0.8, "digests": 0.9}
"""The last: a get with digests takes at most 10 % longer than one without."""

Pieces = list[tuple[int, int]]
"""Addresses and lengths in bytes."""


class BareFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def prepared(self, pieces: list[Pieces]) -> Any:
        return [[(ctypes.c_char * length).from_address(address) for address, length in each] for each in pieces]

    def put(self, names: list[str], prepared: Any) -> None:
        self._each(os.pwritev, os.O_WRONLY | os.O_CREAT | os.O_EXCL, names, prepared)

    def get(self, names: list[str], prepared: Any) -> None:
        self._each(os.preadv, os.O_RDONLY, names, prepared)

    def _each(self, call: Callable[..., int], flags: int, names: list[str], prepared: Any) -> None:
        for name, buffers in zip(names, prepared, strict=True):
            descriptor = os.open(self._folder / name, flags, 0o600)
            call(descriptor, buffers, 0)
            os.close(descriptor)

    def remove(self, names: list[str]) -> None:
        for name in names:
            (self._folder / name).unlink()


class BareMooncake:
    def __init__(self, store: MooncakeStore) -> None:
        self._library, self._config = store._library, store._config

    def prepared(self, pieces: list[Pieces]) -> Any:
        return tuple([[piece[column] for piece in each] for each in pieces] for column in (0, 1))

    def put(self, names: list[str], prepared: Any) -> None:
        assert not any(self._library.batch_put_from_multi_buffers(names, *prepared, self._config))

    def get(self, names: list[str], prepared: Any) -> None:
        assert min(self._library.batch_get_into_multi_buffers(names, *prepared)) > 0

    def remove(self, names: list[str]) -> None:
        self._library.batch_remove(names, True)


def run(*, quick: bool) -> dict[str, Any]:
    turns = 2 if quick else TURNS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-")))
        placement = host_placement(preset(MODEL), [ComponentKind.C4_KV], page_count=2 * BATCH)
        pool = stack.enter_context(MemoryPool.in_files(placement, folder, "pool"))
        memory = np.frombuffer(pool.mappings[0].buffer, dtype=np.uint8)
        memory[:] = np.random.default_rng(5).integers(0, 256, len(memory), dtype=np.uint8)
        del memory
        cases = []
        for kind in ("files", "mooncake"):
            with _store(kind, folder) as (store, bare):
                cases.append(_measure(kind, store, bare, pool, turns))
    return {"turns": turns, "batch": BATCH, "budgets": BUDGETS, "cases": cases}


@contextmanager
def _store(kind: str, folder: Path) -> Iterator[tuple[ObjectStore, BareFiles | BareMooncake]]:
    if kind == "files":
        settings = FileStoreSettings(directory=folder / "store", max_bytes=1 << 30)
        yield FileStore(settings), BareFiles(folder / "bare")
        return
    servers = MooncakeServers(folder, segment_bytes=512 << 20)
    try:
        servers.start()
        mooncake = MooncakeStore(MooncakeStoreSettings(master=servers.address))
        yield mooncake, BareMooncake(mooncake)
    finally:
        servers.stop()


def _measure(
    kind: str, store: ObjectStore, bare: BareFiles | BareMooncake, pool: MemoryPool, turns: int
) -> dict[str, Any]:
    pages = PageStore(store, [pool.regions])
    [form] = pages.forms
    source, target = (np.arange(first, first + BATCH, dtype=np.int32).reshape(-1, 1) for first in (0, BATCH))
    into, out_of = (
        bare.prepared([list(zip(one.tolist(), form.lengths, strict=True)) for one in form.addresses(rows)])
        for rows in (source, target)
    )
    random = np.random.default_rng()
    seconds: dict[str, list[float]] = {}

    def timed(way: str, call: Callable[[], Any], wanted: str = "") -> None:
        begun_s = time.perf_counter()
        found = call()
        seconds.setdefault(way, []).append(time.perf_counter() - begun_s)
        assert not wanted or set(found.outcomes) == {wanted}, found

    def steps(keys: Keys) -> list[tuple[str, Callable[[], Any], str]]:
        names = [form.object_name(key) for key in keys]
        bare_names = [f"bare-{name}" for name in names]
        until_s = time.monotonic() + LIMIT_S

        def without_digests() -> Answer:
            with (
                mock.patch.object(page_store, "checksum", return_value=0),
                mock.patch.object(ObjectForm, "read_trailer", return_value=0),
            ):
                return pages.ask(Verb.GET, 0, keys, target, until_s=until_s)

        return [
            ("put", lambda: pages.ask(Verb.PUT, 0, keys, source, until_s=until_s), "stored"),
            ("bare put", lambda: bare.put(bare_names, into), ""),
            ("get", lambda: pages.ask(Verb.GET, 0, keys, target, until_s=until_s), "hit"),
            ("bare get", lambda: bare.get(bare_names, out_of), ""),
            ("get without digests", without_digests, "hit"),
            ("remove", lambda: store.remove(names, until_s), "dropped"),
            ("remove", lambda: bare.remove(bare_names), ""),
        ]

    for turn in range(turns + 1):
        each = steps(Keys(random.bytes(16 * BATCH)))
        for way, call, wanted in each if turn % 2 else [each[index] for index in (1, 0, 4, 3, 2, 6, 5)]:
            timed(way, call, wanted)
    pages.close()
    taken = {way: turns[1:] for way, turns in seconds.items() if way != "remove"}  # the first turn warms up

    def ratio(way: str, against: str) -> float:
        return statistics.median(b / a for a, b in zip(taken[way], taken[against], strict=True))

    return {
        "kind": kind,
        "object_bytes": form.payload_bytes,
        "gb_s": {way: BATCH * form.payload_bytes / statistics.median(each) / 1e9 for way, each in taken.items()},
        "put_of_bare": ratio("put", "bare put"),
        "get_of_bare": ratio("get", "bare get"),
        "get_of_without_digests": ratio("get", "get without digests"),
    }


def table(found: dict[str, Any]) -> str:
    rows = []
    for case in found["cases"]:
        ratios = [case[name] for name in ("put_of_bare", "get_of_bare", "get_of_without_digests")]
        rates = ", ".join(f"{way} {rate:.2f}" for way, rate in case["gb_s"].items())
        rows.append((case["kind"], *ratios, BUDGETS[case["kind"]], rates))
    title = f"{found['batch']} objects of {found['cases'][0]['object_bytes']} bytes, {found['turns']} turns, medians"
    return text(("store", "put of bare", "get of bare", "of no digests", "budget", "GB/s"), rows, title)
