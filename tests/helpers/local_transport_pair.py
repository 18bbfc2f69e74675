"""C4 pages on their way within one host: a transport of this process, a peer process with a pool, and scattered pages."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvbridge.config.transports import LocalSettings, TransportSettings
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.transport.base import Peer, TransferState, Transport
from tests.contract.harness import Backend, Buffer, PeerProcess
from tests.helpers.shared_buffer import DeviceBuffer, connect

PAGE_BYTES = 37_440
LAYERS = 21
POLL_PAUSE_S = 0.0001
"""As the rank worker does between two rounds in which nothing moved."""
LIMIT_S = 60.0


@dataclass
class LocalTransportPair:
    """`page_ids` of the source go to `target_ids` of the destination, in every layer; both pools have the same form."""

    transport: Transport
    peer: Peer
    source: DeviceBuffer
    process: PeerProcess
    """Owns the destination."""
    page_bytes: int
    layers: int
    page_ids: np.ndarray
    target_ids: np.ndarray
    page_first: bool
    """Whether the layers of a page lie together in both pools, and go as one operation."""

    @property
    def target(self) -> Buffer:
        """The destination, seen from here."""
        return self.process.buffer

    @property
    def total_bytes(self) -> int:
        """That one `move` moves."""
        return len(self.page_ids) * self.layers * self.page_bytes

    def operations(self) -> Operations:
        """What a planner would have made."""
        if self.page_first:
            row = self.layers * self.page_bytes
            sides = [ids.astype(np.uint64) * np.uint64(row) for ids in (self.page_ids, self.target_ids)]
            lengths = np.full(len(self.page_ids), row, dtype=np.uint64)
        else:
            layer_bytes = np.uint64(len(self.page_ids) * self.page_bytes)
            starts = np.arange(self.layers, dtype=np.uint64)[:, None] * layer_bytes
            page = np.uint64(self.page_bytes)
            sides = [(starts + ids.astype(np.uint64) * page).ravel() for ids in (self.page_ids, self.target_ids)]
            lengths = np.full(self.layers * len(self.page_ids), page, dtype=np.uint64)
        return Operations(
            sides[0] + np.uint64(self.source.address), sides[1] + np.uint64(self.process.address), lengths
        )

    def move(self) -> float:
        """Move everything once; returns the seconds from `submit` to DONE."""
        operations = self.operations()
        begun_s = time.perf_counter()
        transfer = self.transport.submit(self.peer, operations, deadline_s=LIMIT_S)
        while not (status := transfer.poll()).state.terminal:
            time.sleep(POLL_PAUSE_S)
        took_s = time.perf_counter() - begun_s
        assert status.state is TransferState.DONE, status
        return took_s

    def check(self) -> None:
        shape = (
            (len(self.page_ids), self.layers * self.page_bytes)
            if self.page_first
            else (self.layers, len(self.page_ids), self.page_bytes)
        )
        source, target = self.source.read().reshape(shape), self.target.read().reshape(shape)
        axis = 0 if self.page_first else 1
        expected = np.take(source, self.page_ids, axis=axis)
        assert np.array_equal(np.take(target, self.target_ids, axis=axis), expected), "bytes differ"


@contextlib.contextmanager
def local_transport_pair(
    directory: Path,
    destination: MemoryKind,
    *,
    pages: int,
    page_first: bool = False,
    settings: LocalSettings | None = None,
    layers: int = LAYERS,
    page_bytes: int = PAGE_BYTES,
) -> Iterator[LocalTransportPair]:
    """A bed from device 0 to a process's host pool in `directory`, or to its device memory (on the last device).

    The host pool is registered with CUDA here before anything is moved.
    """
    given = settings or LocalSettings()
    kinds = {"source": MemoryKind.VRAM, "destination": destination}
    patient = given.model_copy(update={"registration_wait_s": LIMIT_S})
    backend = Backend("local", "local", TransportSettings(local=patient), "", **kinds)
    total_bytes = pages * layers * page_bytes
    rng = np.random.default_rng(pages)
    with PeerProcess(backend, directory / "pool", total_bytes) as process:
        transport = backend.create()
        source = DeviceBuffer(0, total_bytes)
        try:
            source.write(rng.integers(0, 256, total_bytes, dtype=np.uint8))
            process.buffer.fill(1)  # every page exists before anything is measured
            transport.register([source.memory()])
            peer = connect(transport, process.endpoint)
            yield LocalTransportPair(
                transport,
                peer,
                source,
                process,
                page_bytes,
                layers,
                rng.permutation(pages),
                rng.permutation(pages),
                page_first,
            )
        finally:
            transport.close()
            source.close()
