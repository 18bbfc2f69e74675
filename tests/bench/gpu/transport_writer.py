"""A process that writes from a GPU through the local transport, and obeys.

`python -m tests.bench.gpu.transport_writer BYTES`. It has BYTES of random device memory and a transport that has registered it. One
JSON object a line in, one out. Commands: `connect` and `disconnect`, `transfer` (whole pages, scattered on both sides), `copy` (one
plain copy of as many bytes, for comparison), `sums` (of the pages that a transfer sends). A transfer is looked after as a rank
worker does.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from kvbridge.config.transports import TransportSettings
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import Endpoint, Peer, Transfer, TransferState
from kvbridge.transport.local.transport import LocalTransport
from kvbridge.worker.pause import Pauses
from tests.bench.gpu.memory import PAGE_BYTES, device_memory, fill_random, host_memory, tensor_at
from tests.helpers.connecting import connect

LIMIT_S = 60.0


def scattered(order: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of a transfer's pages at the source and at the destination, uint64.

    `order`: layers, layer_pages (of each layer's region), pages. The same pages in each layer, random on both sides.
    """
    rng = np.random.default_rng(order["pages"])
    layers = np.arange(order["layers"], dtype=np.uint64)[:, None] * np.uint64(order["layer_pages"])
    sides = [rng.permutation(order["layer_pages"])[: order["pages"]].astype(np.uint64) for _ in range(2)]
    source, target = ((layers + side[None]).ravel() * np.uint64(PAGE_BYTES) for side in sides)
    return source, target


class Writer:
    """The transport and what it writes from."""

    def __init__(self, address: int, length_bytes: int, stack: ExitStack) -> None:
        self.address, self.length_bytes = address, length_bytes
        self._stack = stack
        self._transport = LocalTransport(TransportSettings().local)
        stack.callback(self._transport.close)
        self._transport.register(
            [Extent(address=address, length_bytes=length_bytes, kind=MemoryKind.VRAM, device=0, label="source")]
        )
        self._target: tuple[Peer, int] | None = None
        self._plain: int | None = None
        self._stream = runtime.Stream.create(0)
        self._pauses = Pauses(time.monotonic, with_gpu=True)
        self._pauses.sleep_precisely()

    def connect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Connect to the target."""
        endpoint = Endpoint(transport="local", data=base64.b64decode(command["endpoint"]))
        self._target = connect(self._transport, endpoint), command["address"]
        return {}

    def disconnect(self, _: dict[str, Any]) -> dict[str, Any]:
        """Let go of the target's memory, before its owner frees it."""
        assert self._target is not None
        self._transport.disconnect(self._target[0])
        return {}

    def transfer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Move the pages once; answer how long it took."""
        assert self._target is not None
        peer, address = self._target
        source, target = scattered(command["order"])
        lengths = np.full(len(source), PAGE_BYTES, dtype=np.uint64)
        operations = Operations(source + np.uint64(self.address), target + np.uint64(address), lengths)
        begun_s = time.monotonic()
        self._finish(self._transport.submit(peer, operations, deadline_s=LIMIT_S))
        return {"took_s": time.monotonic() - begun_s, "bytes": operations.total_bytes}

    def _finish(self, transfer: Transfer) -> None:
        self._pauses.moved()
        while not (status := transfer.poll()).state.terminal:
            time.sleep(self._pauses.next_s())
        if status.state is not TransferState.DONE:
            raise RuntimeError(f"the transfer ended as {status}")

    def copy(self, command: dict[str, Any]) -> dict[str, Any]:
        """Copy as many bytes in one piece by a copy engine to registered host memory."""
        if self._plain is None:
            self._plain = self._stack.enter_context(host_memory(self.length_bytes)).address
        begun_s = time.monotonic()
        runtime.copy(self._plain, self.address, command["bytes"], device=0, stream=self._stream.handle)
        self._stream.synchronize()
        return {"took_s": time.monotonic() - begun_s, "bytes": command["bytes"]}

    def sums(self, command: dict[str, Any]) -> dict[str, Any]:
        """A checksum of each page at the source, with its offset at the destination."""
        source, target = scattered(command["order"])
        pages = tensor_at(self.address, self.length_bytes // 8, torch.int64, 0).reshape(-1, PAGE_BYTES // 8)
        sums = weighted(pages, torch.from_numpy((source // np.uint64(PAGE_BYTES)).astype(np.int64)))
        return {"sums": sums.tolist(), "offsets": target.tolist()}


def weighted(pages: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return a checksum of each chosen page, int64: its words times odd numbers, so that order counts, modulo 2**64."""
    weights = 2 * torch.arange(pages.shape[1], device=pages.device) + 1
    parts = [(pages[part.to(pages.device)] * weights).sum(dim=1) for part in chosen.split(1024)]
    return torch.cat(parts).cpu()


def main() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    length_bytes = int(sys.argv[1])
    with device_memory(length_bytes) as address, ExitStack() as stack:
        fill_random(address, length_bytes, 0)
        writer = Writer(address, length_bytes, stack)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(writer, command["do"])(command)
            except Exception as error:  # noqa: BLE001 - the parent reports it
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
