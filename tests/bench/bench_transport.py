"""Bytes a second through a transport, in turns with its bare library moving the same scattered operations in the same run.

A turn's ratio is kvbridge's rate over that of the bare way with the best median; reported is the median over the turns.
"""

import ctypes
import multiprocessing
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
from tests.bench.output import spread, table as text
from tests.contract.harness import Backend, PeerProcess
from tests.helpers.shared_buffer import SharedBuffer, connect

MIB = 1 << 20
BUDGET = 0.95
"""As a share of the bare library's rate."""
SIZES_BYTES = (37_440, MIB)
TOTAL_BYTES = 256 * MIB
POLL_PAUSE_S = 0.0001
"""As the rank worker does between two rounds in which nothing moved."""
LIMIT_S = 60.0
MOONCAKE_CHUNK = 1024
MOONCAKE_WINDOW = 32

SETTINGS = TransportSettings(
    mooncake=MooncakeSettings(), nixl=NixlSettings(ucx_tls="tcp", ucx_net_devices="lo"), local=LocalSettings()
)
LIBRARIES = {"mooncake": "mooncake.engine", "nixl": "nixl_cu12", "local": ""}

Way = Callable[[Operations], None]


@dataclass(frozen=True)
class _Bed:
    transport: Transport
    peer: Peer
    source: SharedBuffer
    target: PeerProcess


def run(*, quick: bool) -> dict[str, Any]:
    """Measure each backend in a process of its own, since libraries are set up once a process."""
    turns, total_bytes = (2, 16 * MIB) if quick else (7, TOTAL_BYTES)
    cases = []
    for name in LIBRARIES:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
            cases += own_process.submit(_run_backend, name, total_bytes, turns).result()
    return {"turns": turns, "cases": cases}


def _run_backend(name: str, total_bytes: int, turns: int) -> list[dict[str, Any]]:
    backend = Backend(name, name, SETTINGS, LIBRARIES[name])
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as path:
        source = SharedBuffer(Path(path) / "source", total_bytes)
        source.bytes[:] = np.random.default_rng(0).integers(0, 256, total_bytes, dtype=np.uint8)
        with PeerProcess(backend, Path(path) / "target", total_bytes) as target:
            target.buffer.bytes[:] = 1  # every page exists before anything is measured
            transport = backend.create()
            try:
                transport.register([source.memory()])
                bed = _Bed(transport, connect(transport, target.endpoint), source, target)
                return [{"backend": name} | _run_case(bed, size, total_bytes // size, turns) for size in SIZES_BYTES]
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
    ways: dict[str, Way] = {"kvbridge": lambda given: through_kvbridge(bed.transport, bed.peer, given)}
    ways |= BARE[bed.transport.name](bed)
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
    return {"operation_bytes": size_bytes, "operations": count, "gb_s": rates, "ratios": ratios}


def _verify(bed: _Bed, orders: tuple[np.ndarray, np.ndarray], size_bytes: int) -> None:
    """Compare one word of each operation's page of destination with the source's; every page was spoilt before."""
    used = len(orders[0]) * size_bytes
    source = bed.source.bytes[:used].reshape(-1, size_bytes)[orders[0], ::4096]
    target = bed.target.buffer.bytes[:used].reshape(-1, size_bytes)[orders[1], ::4096]
    assert np.array_equal(source, target), f"{bed.transport.name} did not deliver the bytes"


def through_kvbridge(transport: Transport, peer: Peer, operations: Operations) -> None:
    """Move operations as a rank worker does; it sleeps for a moment whenever nothing has moved."""
    transfer: Any = transport.submit(peer, operations, deadline_s=LIMIT_S)
    before = None
    while not (status := transfer.poll()).state.terminal:
        progress = None if transfer.pumped else (transfer._next, transfer._held.operations)
        if progress == before:
            time.sleep(POLL_PAUSE_S)
        before = progress
    assert status.state is TransferState.DONE, status


def as_lists(operations: Operations) -> tuple[list[int], list[int], list[int]]:
    return operations.source.tolist(), operations.destination.tolist(), operations.length.tolist()


def nixl_request(library: Any, agent: Any, peer: str, operations: Operations) -> Any:
    nothing = np.zeros_like(operations.length)
    rows = [
        library.nixlXferDList(library.DRAM_SEG, np.stack((addresses, operations.length, nothing), axis=1))
        for addresses in (operations.source, operations.destination)
    ]
    return agent.createXferReq(library.NIXL_WRITE, *rows, peer)


def _bare_mooncake(bed: _Bed) -> dict[str, Way]:
    engine = bed.transport._engine.library
    session = bed.transport._peers[bed.peer].session

    def batches(operations: Operations) -> None:
        for first in range(0, len(operations), MOONCAKE_CHUNK):
            part = as_lists(operations[first : first + MOONCAKE_CHUNK])
            assert engine.batch_transfer_sync_write(session, *part) == 0

    def window(operations: Operations) -> None:
        waiting = deque(zip(*as_lists(operations), strict=True))
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
    library, agent = bed.transport._agent._library, bed.transport._agent._agent

    def one_request(operations: Operations) -> None:
        request = nixl_request(library, agent, bed.transport._peers[bed.peer].agent, operations)
        state = agent.postXferReq(request)
        while state == library.NIXL_IN_PROG:
            time.sleep(POLL_PAUSE_S)
            state = agent.getXferStatus(request)
        agent.releaseXferReq(request)

    return {"one_request": one_request}


def _bare_local(bed: _Bed) -> dict[str, Way]:
    shift = bed.target.buffer.address - bed.target.address

    def each(operations: Operations) -> None:
        for source, destination, length in zip(*as_lists(operations), strict=True):
            ctypes.memmove(destination + shift, source, length)

    return {"memmove": each}


BARE = {"mooncake": _bare_mooncake, "nixl": _bare_nixl, "local": _bare_local}


def table(found: dict[str, Any]) -> str:
    rows = []
    for case in found["cases"]:
        medians = {way: statistics.median(rates) for way, rates in case["gb_s"].items()}
        mine = medians.pop("kvbridge")
        bare = ", ".join(f"{way} {rate:.2f}" for way, rate in medians.items())
        rows.append((case["backend"], case["operation_bytes"], mine, spread(case["ratios"]), BUDGET, bare))
    return text(("backend", "bytes", "GB/s", "ratio", "budget", "bare GB/s (medians)"), rows)
