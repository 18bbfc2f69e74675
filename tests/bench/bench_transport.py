"""Bytes a second through a transport, against its bare library moving the same operations in the same run.

Run as `python -m tests.bench --only transport`; `run` gives the same as JSON-able data.

For each backend and size: a target process owns the destination, this process the source, and both ways take turns over
the same operations (scattered on both sides), so the machine's moods meet both. The ratio of a turn is kvbridge's rate over that of
the best bare way, which is the one of the best median; reported is the median over the turns. Bare ways: mooncake
`batch_transfer_sync_write` in chunks of 1,024 and a window of 32 `transfer_submit_write`; nixl one request over everything, polled;
local a memmove for each operation into a mapping that exists already. `nixl-shm` is nixl with whatever UCX finds fastest between
two processes of a host. Each backend has a process of its own, since UCX reads its environment once.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbridge.config.transports import LocalSettings, MooncakeSettings, NixlSettings, TransportSettings
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import Peer, TransferState, Transport
from tests.bench.output import spread
from tests.bench.output import table as text
from tests.contract.harness import Backend, PeerProcess
from tests.helpers.connecting import connect
from tests.helpers.shared_buffer import SharedBuffer

MIB = 1 << 20
BUDGET = 0.95
"""Of the rate of the bare library."""
SIZES_BYTES = (37_440, 256 * 1024, MIB, 16 * MIB)
POLL_PAUSE_S = 0.0001
"""As the rank worker does between two rounds in which nothing moved."""
LIMIT_S = 60.0
MOONCAKE_CHUNK = 1024
MOONCAKE_WINDOW = 32

SETTINGS = TransportSettings(
    mooncake=MooncakeSettings(), nixl=NixlSettings(ucx_tls="tcp", ucx_net_devices="lo"), local=LocalSettings()
)
LIBRARIES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu12", "local": ""}
BACKENDS = {name: Backend(name, name, SETTINGS, module) for name, module in LIBRARIES.items()} | {
    "nixl-shm": Backend("nixl-shm", "nixl", TransportSettings(nixl=NixlSettings()), LIBRARIES["nixl"])
}

Way = Callable[[Operations], None]


@dataclass(frozen=True)
class _Bed:
    """A transport connected to a target process, with both buffers."""

    transport: Transport
    peer: Peer
    source: SharedBuffer
    target: PeerProcess


def run(
    *,
    backends: tuple[str, ...] = tuple(BACKENDS),
    sizes_bytes: tuple[int, ...] = SIZES_BYTES,
    total_bytes: int = 256 * MIB,
    turns: int = 7,
) -> dict[str, Any]:
    """Measure and return {"turns", "cpu_count", "cases": [{backend, operation_bytes, operations, gb_s: {way: [...]}, ...}]}."""
    cases = []
    for name in backends:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
            cases += own_process.submit(_run_backend, name, sizes_bytes, total_bytes, turns).result()
    return {"turns": turns, "cpu_count": os.cpu_count(), "cases": cases}


def _run_backend(name: str, sizes_bytes: tuple[int, ...], total_bytes: int, turns: int) -> list[dict[str, Any]]:
    backend = BACKENDS[name]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as path:
        directory = Path(path)
        source = SharedBuffer(directory / "source", total_bytes)
        source.bytes[:] = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
        with PeerProcess(backend, directory / "target", total_bytes) as target:
            target.buffer.bytes[:] = 1  # every page exists before anything is measured
            endpoint = target.endpoint
            transport = backend.create()
            try:
                transport.register([source.memory()])
                bed = _Bed(transport, connect(transport, endpoint), source, target)
                return [{"backend": name} | _run_case(bed, size, total_bytes // size, turns) for size in sizes_bytes]
            finally:
                transport.close()


def _run_case(bed: _Bed, size_bytes: int, count: int, turns: int) -> dict[str, Any]:
    rng = np.random.default_rng(size_bytes)
    orders = (rng.permutation(count).astype(np.uint64), rng.permutation(count).astype(np.uint64))
    step = np.uint64(size_bytes)
    operations = Operations(
        orders[0] * step + np.uint64(bed.source.address),
        orders[1] * step + np.uint64(bed.target.address),
        np.full(count, step, dtype=np.uint64),
    )
    cut = _cut(operations, size_bytes, bed.transport.max_operation_bytes)
    ways: dict[str, Way] = {"kvbridge": lambda _: _through_kvbridge(bed, cut), **BARE[bed.transport.name](bed)}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, move in ways.items():
            bed.target.buffer.bytes[::4096] = 0
            begun_s = time.perf_counter()
            move(operations)
            took_s = time.perf_counter() - begun_s
            _verify(bed, orders, size_bytes)
            if turn:  # the first turn opens connections and enters pages
                rates[way].append(operations.total_bytes / took_s / 1e9)
    best = max((way for way in rates if way != "kvbridge"), key=lambda way: statistics.median(rates[way]))
    ratios = [mine / bare for mine, bare in zip(rates["kvbridge"], rates[best], strict=True)]
    return {
        "operation_bytes": size_bytes,
        "operations": count,
        "gb_s": rates,
        "ratios": ratios,
    }


def _cut(operations: Operations, size_bytes: int, longest_bytes: int) -> Operations:
    """What the planner does with operations that are too long for a backend (all of one size here)."""
    if size_bytes <= longest_bytes:
        return operations
    offsets = np.arange(0, size_bytes, longest_bytes, dtype=np.uint64)
    lengths = np.minimum(np.uint64(longest_bytes), np.uint64(size_bytes) - offsets)
    return Operations(
        (operations.source[:, None] + offsets).ravel(),
        (operations.destination[:, None] + offsets).ravel(),
        np.tile(lengths, len(operations)),
    )


def _verify(bed: _Bed, orders: tuple[np.ndarray, np.ndarray], size_bytes: int) -> None:
    """Compare one word of each operation's page of destination with the source's; every page was spoilt before."""
    used = len(orders[0]) * size_bytes
    source = bed.source.bytes[:used].reshape(-1, size_bytes)[orders[0], ::4096]
    target = bed.target.buffer.bytes[:used].reshape(-1, size_bytes)[orders[1], ::4096]
    assert np.array_equal(source, target), f"{bed.transport.name} did not deliver the bytes"


def _through_kvbridge(bed: _Bed, operations: Operations) -> None:
    transfer = bed.transport.submit(bed.peer, operations, deadline_s=LIMIT_S)
    while not (status := transfer.poll()).state.terminal:
        time.sleep(POLL_PAUSE_S)
    assert status.state is TransferState.DONE, status


# ------------------------------------------------------------------------------------------- bare ways


def _bare_mooncake(bed: _Bed) -> dict[str, Way]:
    engine = bed.transport._engine.library
    session = bed.peer.session

    def batches(operations: Operations) -> None:
        for first in range(0, len(operations), MOONCAKE_CHUNK):
            part = operations[first : first + MOONCAKE_CHUNK]
            lists = (part.source.tolist(), part.destination.tolist(), part.length.tolist())
            assert engine.batch_transfer_sync_write(session, *lists) == 0

    def window(operations: Operations) -> None:
        waiting = deque(
            zip(operations.source.tolist(), operations.destination.tolist(), operations.length.tolist(), strict=True)
        )
        flying: list[int] = []
        while waiting or flying:
            while waiting and len(flying) < MOONCAKE_WINDOW:
                flying.append(engine.transfer_submit_write(session, *waiting.popleft()))
            answers = [engine.transfer_check_status(batch) for batch in flying]
            assert min(answers) >= 0
            before = len(flying)
            flying = [batch for batch, answer in zip(flying, answers, strict=True) if not answer]
            if len(flying) == before:
                time.sleep(POLL_PAUSE_S)

    return {"batch_transfer_sync_write": batches, "transfer_submit_write": window}


def _bare_nixl(bed: _Bed) -> dict[str, Way]:
    wrapper = bed.transport._agent
    library, agent = wrapper._library, wrapper._agent

    def rows(addresses: np.ndarray, lengths: np.ndarray) -> Any:
        return library.nixlXferDList(library.DRAM_SEG, np.stack((addresses, lengths, np.zeros_like(lengths)), axis=1))

    def one_request(operations: Operations) -> None:
        request = agent.createXferReq(
            library.NIXL_WRITE,
            rows(operations.source, operations.length),
            rows(operations.destination, operations.length),
            bed.peer.agent,
        )
        state = agent.postXferReq(request)
        while state == library.NIXL_IN_PROG:
            time.sleep(POLL_PAUSE_S)
            state = agent.getXferStatus(request)
        agent.releaseXferReq(request)

    return {"one_request": one_request}


def _bare_local(bed: _Bed) -> dict[str, Way]:
    shift = bed.target.buffer.address - bed.target.address

    def each(operations: Operations) -> None:
        for source, destination, length in zip(
            operations.source.tolist(), operations.destination.tolist(), operations.length.tolist(), strict=True
        ):
            ctypes.memmove(destination + shift, source, length)

    return {"memmove": each}


BARE: dict[str, Callable[[_Bed], dict[str, Way]]] = {
    "mooncake": _bare_mooncake,
    "nixl": _bare_nixl,
    "local": _bare_local,
}


def table(result: dict[str, Any]) -> str:
    """The result as plain text, a row for each case."""
    rows = []
    for case in result["cases"]:
        medians = {way: statistics.median(rates) for way, rates in case["gb_s"].items()}
        mine = medians.pop("kvbridge")
        bare = ", ".join(f"{way} {rate:.2f}" for way, rate in medians.items())
        rows.append(
            (case["backend"], case["operation_bytes"], case["operations"], mine, spread(case["ratios"]), BUDGET, bare)
        )
    headings = ("backend", "bytes", "operations", "GB/s", "ratio", "budget", "bare GB/s (medians)")
    return text(headings, rows)
