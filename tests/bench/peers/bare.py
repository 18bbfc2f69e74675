"""The bytes of one request through the bare library: what is left of `move` when nothing is above it.

Owns: the two processes and the figures. Must not know: daemons, rooms, SGLang.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.core.plan.operations import Operations
from tests.bench.bench_transport import BACKENDS, Bed, _bare_mooncake, through_kvbridge
from tests.bench.bench_used_pools import _busy_s
from tests.contract.harness import PeerProcess
from tests.helpers.connecting import connect
from tests.helpers.shared_buffer import SharedBuffer

POOL_BYTES = 256 << 20
"""Of each end. Operations go from anywhere to anywhere in it, since pages of a request are in nobody's cache either."""


def run(size_bytes: int, counts: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    """Send so many bytes as so many operations of one length, over Mooncake's TCP, in turns.

    Returns {"operations", "ms": {way: [...]}, "processor_ms": {way: [...]}} for each count; processor time is that of both ends.
    """
    backend = BACKENDS["mooncake"]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as path:
        source = SharedBuffer(Path(path) / "source", POOL_BYTES)
        source.bytes[:] = 7
        with PeerProcess(backend, Path(path) / "target", POOL_BYTES) as target:
            target.buffer.bytes[:] = 1
            endpoint = target.endpoint
            transport = backend.create()
            try:
                transport.register([source.memory()])
                bed = Bed(transport, connect(transport, endpoint), source, target)
                return _measure(bed, size_bytes, counts, turns)
            finally:
                transport.close()


def _measure(bed: Bed, size_bytes: int, counts: tuple[int, ...], turns: int) -> list[dict[str, Any]]:
    ways = {"kvbridge": lambda operations: through_kvbridge(bed, operations), **_bare_mooncake(bed)}
    processes = os.getpid(), bed.target.pid
    rng = np.random.default_rng(5)
    found = {count: {way: ([], []) for way in ways} for count in counts}
    for turn in range(turns + 1):
        for count, each in found.items():
            for way, (ms, processor_ms) in each.items():
                operations = _operations(bed, size_bytes, count, rng)
                begun_s, busy_s = time.perf_counter(), _busy_s(processes)
                ways[way](operations)
                if turn:  # the first opens connections
                    ms.append(round(1e3 * (time.perf_counter() - begun_s), 3))
                    processor_ms.append(round(1e3 * (_busy_s(processes) - busy_s), 3))
    return [
        {
            "operations": count,
            "ms": {way: ms for way, (ms, _) in each.items()},
            "processor_ms": {way: ms for way, (_, ms) in each.items()},
        }
        for count, each in found.items()
    ]


def _operations(bed: Bed, size_bytes: int, count: int, rng: np.random.Generator) -> Operations:
    length = size_bytes // count
    source, destination = (
        rng.permutation(POOL_BYTES // length)[:count].astype(np.uint64) * np.uint64(length) + np.uint64(base)
        for base in (bed.source.address, bed.target.address)
    )
    return Operations(source, destination, np.full(count, length, dtype=np.uint64))
