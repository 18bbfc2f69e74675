"""What an operation of one page costs above Mooncake and NIXL: processor time, and rates against the bare libraries.

Run as `python -m tests.bench --only operations`; `run` gives the same as JSON-able data.

10,000 operations of one page of DeepSeek-V4's C4 cache (37,440 B), scattered on both sides, are submitted and polled until the
transfer is done, with a short sleep whenever nothing has moved. Counted is the processor time of the whole process, threads
included, so the calls into the libraries that do nothing count, too; what those take alone, made from a bare loop over the same
arrays, stands beside it.

Then the same operations over Mooncake's TCP and over NIXL on shared memory, with the real libraries (`bench_transport`).
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from crc32c import crc32c

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings, NixlSettings
from kvbridge.core.plan.operations import Operations
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import Endpoint, Peer, TransferState, Transport
from kvbridge.transport.mooncake import transport as mooncake
from kvbridge.transport.nixl import agent as nixl_agent
from kvbridge.transport.nixl import transport as nixl
from kvbridge.transport.nixl.peers import NixlEndpoint, NixlExtent
from tests.bench import bench_transport
from tests.bench.output import spread
from tests.bench.output import table as text
from tests.helpers.connecting import connect

OPERATIONS = 10_000
OPERATION_BYTES = 37_440
BUDGET_US = 0.25
POLL_PAUSE_S = 0.0001
BASE = 1 << 40
"""Where the memory would be; nobody reads it."""

Bare = Callable[[Operations], None]


@dataclass(frozen=True)
class Way:
    """A transport over a library that does nothing, and the same calls without kvbridge."""

    transport: Transport
    peer: Peer
    bare: Bare


def run(*, turns: int = 50, transfer_turns: int = 15) -> dict[str, Any]:
    """Measure both; "load" is how many processes wanted the machine's cores, before and after."""
    load = [os.getloadavg()[0]]
    processor = processor_time(turns)
    transfers = bench_transport.run(
        backends=("mooncake", "nixl-shm"), sizes_bytes=(OPERATION_BYTES,), turns=transfer_turns
    )
    return {
        "load": [*load, os.getloadavg()[0]],
        "processor": processor,
        "transfers": transfers,
    }


def processor_time(turns: int) -> dict[str, Any]:
    """Return {"turns", "operations", "operation_bytes", "cases": [{way, us: [...], bare_us: [...], budget_us}, ...]}."""
    rng = np.random.default_rng(0)
    source, destination = (
        rng.permutation(OPERATIONS).astype(np.uint64) * np.uint64(OPERATION_BYTES) + np.uint64(BASE) for _ in range(2)
    )
    operations = Operations(source, destination, np.full(OPERATIONS, OPERATION_BYTES, dtype=np.uint64))
    cases = []
    for name, open_way in WAYS.items():
        with open_way() as way:
            taken: dict[str, list[float]] = {"us": [], "bare_us": []}
            for turn in range(turns + 1):
                found = {
                    "us": _processor_us(lambda: _move(way, operations)),
                    "bare_us": _processor_us(lambda: way.bare(operations)),
                }
                for each, us in found.items():
                    if turn:  # the first one starts threads
                        taken[each].append(us)
        cases.append({"way": name, **taken, "budget_us": BUDGET_US})
    return {
        "turns": turns,
        "operations": OPERATIONS,
        "operation_bytes": OPERATION_BYTES,
        "cases": cases,
    }


def _processor_us(work: Callable[[], None]) -> float:
    """Of an operation."""
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1e6 / OPERATIONS


def _move(way: Way, operations: Operations) -> None:
    transfer = way.transport.submit(way.peer, operations, deadline_s=60.0)
    before = None
    while not (status := transfer.poll()).state.terminal:
        progress = getattr(transfer, "progress", None)  # what another thread pushes shows none
        if progress == before:
            time.sleep(POLL_PAUSE_S)
        before = progress
    assert status.state is TransferState.DONE, status


# ------------------------------------------------------------------------------------------- mooncake


class InstantMooncake:
    """Everything is done as soon as it is asked for."""

    def initialize(self, *_: object) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 15_000

    def send_probe(self, _: str) -> int:
        return 0

    def batch_register_memory(self, _addresses: list[int], _lengths: list[int]) -> int:
        return 0

    def transfer_submit_write(self, _session: str, _source: int, _destination: int, _length: int) -> int:
        return 1

    def transfer_check_status(self, _: int) -> int:
        return 1

    def batch_transfer_async_write(self, _session: str, _from: list[int], _to: list[int], _lengths: list[int]) -> int:
        return 1

    def get_batch_transfer_status(self, _: list[int]) -> int:
        return 0


@contextmanager
def _mooncake(protocol: MooncakeProtocol) -> Iterator[Way]:
    library = InstantMooncake()
    with mock.patch.object(mooncake, "create_library", return_value=library):
        transport = mooncake.MooncakeTransport(MooncakeSettings(protocol=protocol))
    transport.register([_memory()])
    peer = connect(transport, transport.endpoint())

    def singles(operations: Operations) -> None:
        lists = (operations.source.tolist(), operations.destination.tolist(), operations.length.tolist())
        ids = list(map(library.transfer_submit_write, repeat("peer"), *lists))
        assert min(map(library.transfer_check_status, ids)) == 1

    def batch(operations: Operations) -> None:
        lists = (operations.source.tolist(), operations.destination.tolist(), operations.length.tolist())
        assert library.get_batch_transfer_status([library.batch_transfer_async_write("peer", *lists)]) == 0

    yield Way(transport, peer, singles if protocol is MooncakeProtocol.TCP else batch)
    transport.close()


# ------------------------------------------------------------------------------------------- nixl


class InstantAgent:
    """Every request is done as soon as it is posted."""

    def createBackend(self, *_: object) -> int:
        return 1

    def getBackendParams(self, _: int) -> tuple[dict[str, str], list[str]]:
        return {}, ["DRAM_SEG"]

    def registerMem(self, *_: object) -> None: ...

    def getLocalMD(self) -> bytes:
        return b"metadata"

    def loadRemoteMD(self, _: bytes) -> str:
        return "peer"

    def createXferReq(self, *_: object) -> int:
        return 1

    def postXferReq(self, _: int) -> None: ...

    def getXferStatus(self, _: int) -> int:
        return 1

    def releaseXferReq(self, _: int) -> None: ...

    def invalidateRemoteMD(self, _: str) -> None: ...


class _NeverRaisedError(Exception):
    pass


def _instant_nixl() -> Any:
    return SimpleNamespace(
        DRAM_SEG=SimpleNamespace(name="DRAM_SEG"),
        VRAM_SEG=SimpleNamespace(name="VRAM_SEG"),
        NIXL_WRITE=1,
        NIXL_READ=2,
        NIXL_IN_PROG=0,
        NIXL_SUCCESS=1,
        NIXL_THREAD_SYNC_STRICT=1,
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda *_: InstantAgent(),
        nixlRegDList=lambda _, rows: rows,
        nixlXferDList=lambda _, rows: rows,
        nixlRemoteDisconnectError=_NeverRaisedError,
        nixlNotFoundError=_NeverRaisedError,
    )


class _NoCheck:
    """In the place of the process that reads what peers say of themselves."""

    def __init__(self, *_: object) -> None:
        pass

    def check(self, *_: object, **__: object) -> tuple[()]:
        return ()

    def close(self) -> None:
        """Nothing was opened."""


@contextmanager
def _nixl() -> Iterator[Way]:
    library = _instant_nixl()
    with (
        mock.patch.object(nixl_agent, "load_library", return_value=library),
        mock.patch.object(nixl, "PeerCheck", _NoCheck),
    ):
        transport = nixl.NixlTransport(NixlSettings())
        transport.register([_memory()])
        extent = NixlExtent(address=BASE, length_bytes=OPERATIONS * OPERATION_BYTES)
        content = NixlEndpoint(
            agent="peer", metadata=b"metadata", release="", checksum=crc32c(b"metadata"), extents=(extent,)
        )
        peer = connect(transport, Endpoint(transport=nixl.NAME, data=content.model_dump_json().encode()))
        agent = InstantAgent()

        def one_request(operations: Operations) -> None:
            nothing = np.zeros_like(operations.length)
            rows = [
                library.nixlXferDList(library.DRAM_SEG, np.stack((addresses, operations.length, nothing), axis=1))
                for addresses in (operations.source, operations.destination)
            ]
            request = agent.createXferReq(library.NIXL_WRITE, *rows, "peer")
            agent.postXferReq(request)
            assert agent.getXferStatus(request) == library.NIXL_SUCCESS

        yield Way(transport, peer, one_request)
        transport.close()


def _memory() -> Extent:
    return Extent(address=BASE, length_bytes=OPERATIONS * OPERATION_BYTES)


WAYS = {
    "mooncake over rdma, batches": lambda: _mooncake(MooncakeProtocol.RDMA),
    "mooncake over tcp, each by itself": lambda: _mooncake(MooncakeProtocol.TCP),
    "nixl, requests of many": _nixl,
}


def table(result: dict[str, Any]) -> str:
    """The result as plain text, a row for each way."""
    rows = [
        (case["way"], spread(case["us"]), statistics.median(case["bare_us"]), case["budget_us"])
        for case in result["processor"]["cases"]
    ]
    before, after = result["load"]
    title = f"load {before:.1f} before, {after:.1f} after"
    processor = text(("us of processor time an operation", "median (range)", "bare loop", "budget"), rows, title)
    return f"{processor}\n{bench_transport.table(result['transfers'])}"
