"""Milliseconds of a small load between two engines of vLLM's adapter, hop by hop, beside a plain copy of as many bytes.

Two processes step as vLLM does while nothing is computed, each with its node. Prefill holds the prompt before decode has it:

- `load`: from decode's request until its worker reports the load;
- `engine`: of these, outside of decode's node: messages to and from the node, and steps;
- `offer`: decode's node until it has sent its offer;
- `nodes`: messages between the nodes and to the rank worker;
- `order`, `first_byte`, `move`: prefill's node, the worker until it has submitted, and the copy;
- `ratio`: the median of `load` over that of the plain copy over the same transport, before and after the loads.
"""

import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import torch

from kvbridge.core.ids import Role
from kvbridge.core.plan.operations import Operations
from tests.bench.bench_transport import LIBRARIES, SETTINGS, through_kvbridge
from tests.bench.output import percentile, table as text
from tests.contract.harness import Backend, PeerProcess
from tests.helpers.shared_buffer import SharedBuffer, connect
from tests.integration.test_vllm_roles import TOKENS, Vllm

KIB = 1 << 10
LAYERS, BLOCK_BYTES, MOST_BLOCKS = 4, 32 * KIB, 64
SIZES_BLOCKS = (1, 8, MOST_BLOCKS)
TRANSPORT = "mooncake"
LOADS, WARM_UP = 100, 10


def _engine(role: Role) -> Vllm:
    shape = (MOST_BLOCKS + 1, 4, TOKENS, BLOCK_BYTES // (2 * 4 * TOKENS))
    return Vllm(
        role, tensors={f"model.layers.{n}.attn": torch.ones(shape, dtype=torch.bfloat16) for n in range(LAYERS)}
    )


def _prefill(asked: Connection) -> None:
    """Hold a prompt for each number of blocks that comes, and answer what decode is to be told."""
    engine = _engine(Role.PREFILL)
    asked.send(None)
    while True:
        if asked.poll():
            blocks = asked.recv()
            if not blocks:
                break
            asked.send(engine.hold(list(range(1, 1 + blocks)), tokens=blocks * TOKENS)[1])
        engine.step()
    engine.close()


def run(*, quick: bool) -> dict[str, Any]:
    loads, sizes = (3, SIZES_BLOCKS[:2]) if quick else (LOADS, SIZES_BLOCKS)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with (
        tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home,
        mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": home}),
    ):
        prefill = spawn.Process(target=_prefill, args=(theirs,))
        prefill.start()
        engine = _engine(Role.DECODE)
        ours.recv()
        try:
            found = {}
            for blocks in sizes:
                plain = _plain_ms(blocks, loads)
                rooms = [_load(engine, ours, blocks) for _ in range(WARM_UP + loads)][WARM_UP:]
                plain += _plain_ms(blocks, loads)
                figures = {name: [room[name] for room in rooms] for name in rooms[0]} | {"plain_ms": plain}
                ratio = statistics.median(figures["load_ms"]) / statistics.median(plain)
                found[str(blocks * LAYERS * BLOCK_BYTES)] = figures | {"ratio": ratio}
        finally:
            engine.close()
            ours.send(0)
            prefill.join()
    return found


def _load(engine: Vllm, prefill: Connection, blocks: int) -> dict[str, float]:
    prefill.send(blocks)
    while not prefill.poll():
        engine.step()
    params = prefill.recv()
    begun_s = time.monotonic()
    request = engine.load(params, list(range(1, 1 + blocks)), tokens=blocks * TOKENS)
    while request not in engine.received:
        engine.step()
    load_s = time.monotonic() - begun_s
    assert not engine.failed
    url = engine.rooms(Role.DECODE).process.endpoint().http_url
    room = httpx.get(f"{url}/v1/requests/{params['kvbridge']['room']}").raise_for_status().json()
    phases_s = room["phases_s"]
    hops_s = {
        "load": load_s,
        "engine": load_s - phases_s["admit_to_commit"],
        "offer": phases_s["admit_to_offer"],
        "order": phases_s["offer_to_order"],
        "first_byte": phases_s["first_byte"],
        "move": phases_s["move"],
    }
    hops_s["nodes"] = phases_s["offer_to_commit"] - sum(hops_s[name] for name in ("order", "first_byte", "move"))
    return {f"{name}_ms": 1e3 * seconds for name, seconds in hops_s.items()}


def _plain_ms(blocks: int, times: int) -> list[float]:
    """Copy in a process of its own, since libraries are set up once a process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
        return own_process.submit(_copies_ms, blocks, times).result()


def _copies_ms(blocks: int, times: int) -> list[float]:
    """Copy one piece of each layer, to a process of its own."""
    size_bytes, took_ms = blocks * BLOCK_BYTES, []
    backend = Backend(TRANSPORT, TRANSPORT, SETTINGS, LIBRARIES[TRANSPORT])
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as path:
        source = SharedBuffer(Path(path) / "source", LAYERS * size_bytes)
        with PeerProcess(backend, Path(path) / "target", LAYERS * size_bytes) as target:
            transport = backend.create()
            try:
                transport.register([source.memory()])
                peer = connect(transport, target.endpoint)
                starts = np.arange(LAYERS, dtype=np.uint64) * np.uint64(size_bytes)
                sizes = np.full(LAYERS, size_bytes, dtype=np.uint64)
                to = starts + np.uint64(target.address)
                for _ in range(WARM_UP + times):
                    begun_s = time.perf_counter()
                    through_kvbridge(transport, peer, Operations(starts + np.uint64(source.address), to, sizes))
                    took_ms.append(1e3 * (time.perf_counter() - begun_s))
            finally:
                transport.close()
    return took_ms[WARM_UP:]


def table(found: dict[str, Any]) -> str:
    rows = [
        (int(size) // KIB, name.removesuffix("_ms"), statistics.median(ms), percentile(ms, 99))
        for size, figures in found.items()
        if size.isdecimal()
        for name, ms in figures.items()
        if name != "ratio"
    ]
    ratios = "\n".join(
        f"{int(size) // KIB} KiB: {found[size]['ratio']:.1f} times a plain copy" for size in found if size.isdecimal()
    )
    return f"{text(('KiB', 'figure', 'median ms', 'p99 ms'), rows)}\n{ratios}"
