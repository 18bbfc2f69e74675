"""Processor time of 10,000 operations of a page above Mooncake and NIXL, whose libraries do nothing here, beside those alone."""

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
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Endpoint, Peer, Transport
from kvbridge.transport.mooncake import transport as mooncake
from kvbridge.transport.nixl import agent as nixl_agent, transport as nixl
from kvbridge.transport.nixl.agent import NixlEndpoint, NixlExtent
from tests.bench.bench_transport import as_lists, nixl_request, through_kvbridge
from tests.bench.output import spread, table as text
from tests.helpers.shared_buffer import connect

OPERATIONS = 10_000
OPERATION_BYTES = 37_440
BUDGET_US = 0.25
BASE = 1 << 40
"""Where the memory would be; nobody reads it."""
MEMORY = Extent(address=BASE, length_bytes=OPERATIONS * OPERATION_BYTES)


@dataclass(frozen=True)
class Way:
    transport: Transport
    peer: Peer
    bare: Callable[[Operations], None]


def run(*, quick: bool) -> dict[str, Any]:
    turns = 3 if quick else 50
    rng = np.random.default_rng(0)
    source, destination = (
        rng.permutation(OPERATIONS).astype(np.uint64) * np.uint64(OPERATION_BYTES) + np.uint64(BASE) for _ in range(2)
    )
    operations = Operations(source, destination, np.full(OPERATIONS, OPERATION_BYTES, dtype=np.uint64))
    cases = []
    for name, opened in WAYS.items():
        with opened as way:
            taken: dict[str, list[float]] = {"us": [], "bare_us": []}
            for _ in range(turns + 1):
                taken["us"].append(_processor_us(lambda: through_kvbridge(way.transport, way.peer, operations)))
                taken["bare_us"].append(_processor_us(lambda: way.bare(operations)))
        # The first turn starts threads.
        cases.append({"way": name} | {each: us[1:] for each, us in taken.items()} | {"budget_us": BUDGET_US})
    return {"turns": turns, "operations": OPERATIONS, "operation_bytes": OPERATION_BYTES, "cases": cases}


def _processor_us(work: Callable[[], None]) -> float:
    begun_s = time.process_time()
    work()
    return (time.process_time() - begun_s) * 1e6 / OPERATIONS


@contextmanager
def _mooncake(protocol: MooncakeProtocol) -> Iterator[Way]:
    """Everything is done as soon as it is asked for."""
    library = SimpleNamespace(
        initialize=lambda *_: 0,
        get_rpc_port=lambda: 15_000,
        send_probe=lambda _: 0,
        batch_register_memory=lambda *_: 0,
        transfer_submit_write=lambda *_: 1,
        transfer_check_status=lambda _: 1,
        batch_transfer_async_write=lambda *_: 1,
        get_batch_transfer_status=lambda _: 0,
    )
    with mock.patch.object(mooncake, "create_library", return_value=library):
        transport = mooncake.MooncakeTransport(MooncakeSettings(protocol=protocol))
    transport.register([MEMORY])

    def singles(operations: Operations) -> None:
        ids = list(map(library.transfer_submit_write, repeat("peer"), *as_lists(operations)))
        assert min(map(library.transfer_check_status, ids)) == 1

    def batch(operations: Operations) -> None:
        assert (
            library.get_batch_transfer_status([library.batch_transfer_async_write("peer", *as_lists(operations))]) == 0
        )

    bare = singles if protocol is MooncakeProtocol.TCP else batch
    yield Way(transport, connect(transport, transport.endpoint()), bare)
    transport.close()


@contextmanager
def _nixl() -> Iterator[Way]:
    """Every request is done as soon as it is posted; nothing is read of what a peer says of itself."""
    agent = SimpleNamespace(
        createBackend=lambda *_: 1,
        getBackendParams=lambda _: ({}, ["DRAM_SEG"]),
        registerMem=lambda *_: None,
        getLocalMD=lambda: b"metadata",
        loadRemoteMD=lambda _: "peer",
        createXferReq=lambda *_: 1,
        postXferReq=lambda _: None,
        getXferStatus=lambda _: 1,
        releaseXferReq=lambda _: None,
        invalidateRemoteMD=lambda _: None,
    )
    never_raised = type("NeverRaisedError", (Exception,), {})
    library = SimpleNamespace(
        __name__="nixl",
        DRAM_SEG=SimpleNamespace(name="DRAM_SEG"),
        VRAM_SEG=SimpleNamespace(name="VRAM_SEG"),
        NIXL_WRITE=1,
        NIXL_READ=2,
        NIXL_IN_PROG=0,
        NIXL_SUCCESS=1,
        NIXL_THREAD_SYNC_STRICT=1,
        nixlAgentConfig=SimpleNamespace,
        nixlAgent=lambda *_: agent,
        nixlRegDList=lambda _, rows: rows,
        nixlXferDList=lambda _, rows: rows,
        nixlRemoteDisconnectError=never_raised,
        nixlNotFoundError=never_raised,
    )
    no_check = SimpleNamespace(check=lambda *_, **__: (), close=lambda: None)
    with (
        mock.patch.object(nixl_agent, "load_library", return_value=library),
        mock.patch.object(nixl, "PeerCheck", return_value=no_check),
    ):
        transport = nixl.NixlTransport(NixlSettings())
        transport.register([MEMORY])
        extent = NixlExtent(address=BASE, length_bytes=MEMORY.length_bytes)
        content = NixlEndpoint(agent="peer", metadata=b"m", release="", checksum=crc32c(b"m"), extents=(extent,))
        peer = connect(transport, Endpoint(transport=nixl.NAME, data=content.model_dump_json().encode()))

        def one_request(operations: Operations) -> None:
            request = nixl_request(library, agent, "peer", operations)
            agent.postXferReq(request)
            assert agent.getXferStatus(request) == library.NIXL_SUCCESS

        yield Way(transport, peer, one_request)
        transport.close()


WAYS = {
    "mooncake over rdma, batches": _mooncake(MooncakeProtocol.RDMA),
    "mooncake over tcp, each by itself": _mooncake(MooncakeProtocol.TCP),
    "nixl, requests of many": _nixl(),
}


def table(found: dict[str, Any]) -> str:
    rows = [
        (case["way"], spread(case["us"]), statistics.median(case["bare_us"]), case["budget_us"])
        for case in found["cases"]
    ]
    return text(("us of processor time an operation", "median (range)", "bare loop", "budget"), rows)
