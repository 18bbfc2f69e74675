"""A process that writes from one GPU through the local transport, and obeys.

`python -m tests.bench.gpu.transport_writer DEVICE BYTES`. It has BYTES of random device memory and a transport that has
registered it. One JSON object a line in, one out. Commands: `connect` and `disconnect`, `transfer` (operations
of one size, scattered on both sides; a stripe of them), `copy` (one plain copy of as many bytes, for comparison), `sums` (of the
pages that a transfer sends). Moments are CLOCK_MONOTONIC, which all processes of a host share, so that several writers can begin
together (`at_s`). A transfer is looked after as a rank worker does.
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
from tests.bench.gpu.memory import device_memory, fill_random, host_memory, tensor_at
from tests.helpers.connecting import connect

LIMIT_S = 60.0


def scattered(order: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets of a transfer's operations at the source and at the destination, uint64.

    `order`: layers, layer_pages (of each layer's region), pages, operation_bytes, stripe, stripes. The same pages in each layer,
    random on both sides; a stripe is every `stripes`-th page.
    """
    rng = np.random.default_rng(order["pages"])
    pages = [
        rng.permutation(order["layer_pages"])[: order["pages"]][order["stripe"] :: order["stripes"]] for _ in range(2)
    ]
    layers = np.arange(order["layers"], dtype=np.uint64)[:, None] * np.uint64(order["layer_pages"])
    step = np.uint64(order["operation_bytes"])
    source, target = ((layers + side.astype(np.uint64)[None]).ravel() * step for side in pages)
    return source, target


class Writer:
    """The transport and what it writes from."""

    def __init__(self, device: int, address: int, length_bytes: int, stack: ExitStack) -> None:
        self.device, self.address, self.length_bytes = device, address, length_bytes
        self._stack = stack
        self._transport = LocalTransport(TransportSettings().local)
        stack.callback(self._transport.close)
        self._transport.register(
            [Extent(address=address, length_bytes=length_bytes, kind=MemoryKind.VRAM, device=device, label="source")]
        )
        self._target: tuple[Peer, int] | None = None
        self._plain: int | None = None
        self._stream = runtime.Stream.create(device)
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
        """Move the operations once; answer when it began and ended."""
        assert self._target is not None
        peer, address = self._target
        source, target = scattered(command["order"])
        lengths = np.full(len(source), command["order"]["operation_bytes"], dtype=np.uint64)
        operations = Operations(source + np.uint64(self.address), target + np.uint64(address), lengths)
        begun_s = _wait_until(command["at_s"])
        self._finish(self._transport.submit(peer, operations, deadline_s=LIMIT_S))
        return {"begun_s": begun_s, "ended_s": time.monotonic(), "bytes": int(operations.length.sum())}

    def _finish(self, transfer: Transfer) -> None:
        self._pauses.moved()
        while not (status := transfer.poll()).state.terminal:
            time.sleep(self._pauses.next_s())
        if status.state is not TransferState.DONE:
            raise RuntimeError(f"the transfer ended as {status}")

    def copy(self, command: dict[str, Any]) -> dict[str, Any]:
        """Copy as many bytes in one piece by a copy engine to registered host memory."""
        length_bytes = command["bytes"]
        if self._plain is None:
            self._plain = self._stack.enter_context(host_memory(self.length_bytes, self.device)).address
        begun_s = _wait_until(command["at_s"])
        runtime.copy(self._plain, self.address, length_bytes, device=self.device, stream=self._stream.handle)
        self._stream.synchronize()
        return {"begun_s": begun_s, "ended_s": time.monotonic(), "bytes": length_bytes}

    def sums(self, command: dict[str, Any]) -> dict[str, Any]:
        """A checksum of each operation's bytes at the source, with its offset at the destination."""
        order = command["order"]
        source, target = scattered(order)
        everything = self.length_bytes // order["operation_bytes"]
        words = tensor_at(self.address, everything * order["operation_bytes"] // 8, torch.int64, self.device)
        pages = words.reshape(everything, -1)
        sums = weighted(pages, torch.from_numpy((source // np.uint64(order["operation_bytes"])).astype(np.int64)))
        return {"sums": sums.tolist(), "offsets": target.tolist()}


def weighted(pages: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return a checksum of each chosen page, int64: its words times odd numbers, so that order counts, modulo 2**64."""
    weights = 2 * torch.arange(pages.shape[1], device=pages.device) + 1
    parts = [(pages[part.to(pages.device)] * weights).sum(dim=1) for part in chosen.split(1024)]
    return torch.cat(parts).cpu()


def _wait_until(at_s: float) -> float:
    while (now_s := time.monotonic()) < at_s:
        pass
    return now_s


def main() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    device, length_bytes = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.set_device(device)
    with device_memory(length_bytes, device) as address, ExitStack() as stack:
        fill_random(address, length_bytes, device, seed=device)
        writer = Writer(device, address, length_bytes, stack)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            try:
                answer = getattr(writer, command["do"])(command)
            except Exception as error:  # noqa: BLE001 - the parent reports it and goes on with other cases
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
