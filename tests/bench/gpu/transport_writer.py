"""A process that writes from one GPU through the local transport, and obeys.

`python -m tests.bench.gpu.transport_writer DEVICE BYTES`. Owns: BYTES of random device memory and a transport that has
registered it. One JSON object a line in, one out. Commands: `connect` and `disconnect` (a target's name), `transfer` (operations
of one size, scattered on both sides; a stripe of them), `copy` (one plain copy of as many bytes, for comparison), `sums` (of the
pages that a transfer sends). Moments are CLOCK_MONOTONIC, which all processes of a host share, so that several writers can begin
together (`at_s`). A transfer is looked after as a rank worker does; `phases` is a transfer that is told of part by part.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvbridge.config.transports import TransportSettings
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.base import Endpoint, Peer, Transfer, TransferState
from kvbridge.transport.local.streams import CopyStream
from kvbridge.transport.local.transport import LocalTransport
from kvbridge.worker.pause import Pauses
from tests.bench.gpu.memory import device_memory, fill_random, host_memory, tensor_at
from tests.helpers.connecting import connect

if TYPE_CHECKING:
    from tests.bench.gpu.copy_timeline import CopyTimeline

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
        self._peers: dict[str, tuple[Peer, int]] = {}
        self._plain: dict[str, int] = {}
        self._stream = runtime.Stream.create(device)
        self._timeline: CopyTimeline | None = None
        self._slice_bytes = TransportSettings().local.device_slice_bytes
        self._blocks: dict[CopyStream, int] = {}
        self._pauses = Pauses(time.monotonic, with_gpu=True)
        self._pauses.sleep_precisely()

    def connect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Connect to a target under a name."""
        endpoint = Endpoint(transport="local", data=base64.b64decode(command["endpoint"]))
        begun_s = time.monotonic()
        self._peers[command["target"]] = (connect(self._transport, endpoint), command["address"])
        return {"took_s": time.monotonic() - begun_s}

    def disconnect(self, command: dict[str, Any]) -> dict[str, Any]:
        """Let go of a target's memory, before its owner frees it."""
        peer, _ = self._peers.pop(command["target"])
        self._transport.disconnect(peer)
        return {}

    def transfer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Move the operations once; answer when it began and ended."""
        peer, operations = self._operations(command)
        begun_s = _wait_until(command["at_s"])
        self._finish(self._transport.submit(peer, operations, deadline_s=LIMIT_S))
        return {"begun_s": begun_s, "ended_s": time.monotonic(), "bytes": int(operations.length.sum())}

    def phases(self, command: dict[str, Any]) -> dict[str, Any]:
        """The same; answers with seconds from its beginning as well: when it was submitted, when the device began and ended.

        `pause_s`: between two looks; 0 for none, negative for what a rank worker rests. `slice_mib`: given to the device at a time,
        0 for what the settings say; `times_blocks`: so many times as many blocks of the kernel.
        """
        from tests.bench.gpu.copy_timeline import CopyTimeline  # CUDA's own bindings: the other commands do without

        if self._timeline is None:
            self._timeline = CopyTimeline(self.device)
        self._tune(int(command["slice_mib"]), int(command["times_blocks"]))
        peer, operations = self._operations(command)
        _wait_until(command["at_s"])
        begun_s = self._timeline.begin()
        transfer = self._transport.submit(peer, operations, deadline_s=LIMIT_S)
        submitted_s = time.monotonic()
        self._finish(transfer, command["pause_s"])
        ended_s = time.monotonic()
        seen = self._timeline.read()
        return {
            "begun_s": begun_s,
            "ended_s": ended_s,
            "bytes": int(operations.length.sum()),
            "submitted_s": submitted_s - begun_s,
            "device_began_s": seen.began_s,
            "device_ended_s": seen.ended_s,
            "device_busy_s": seen.busy_s,
            "slices": seen.slices,
        }

    def _tune(self, slice_mib: int, times_blocks: int) -> None:
        devices = self._transport._devices
        for window in devices._windows.values():
            window.limits = replace(window.limits, batch_bytes=slice_mib << 20 or self._slice_bytes)
        for stream in devices._streams.values():
            if stream._kernel is not None:
                usual = self._blocks.setdefault(stream, stream._kernel._blocks)
                stream._kernel._blocks = times_blocks * usual

    def _operations(self, command: dict[str, Any]) -> tuple[Peer, Operations]:
        peer, address = self._peers[command["target"]]
        source, target = scattered(command["order"])
        lengths = np.full(len(source), command["order"]["operation_bytes"], dtype=np.uint64)
        return peer, Operations(source + np.uint64(self.address), target + np.uint64(address), lengths)

    def _finish(self, transfer: Transfer, pause_s: float = -1.0) -> None:
        self._pauses.moved()
        while not (status := transfer.poll()).state.terminal:
            if pause_s:
                time.sleep(pause_s if pause_s > 0 else self._pauses.next_s())
        if status.state is not TransferState.DONE:
            raise RuntimeError(f"the transfer ended as {status}")

    def copy(self, command: dict[str, Any]) -> dict[str, Any]:
        """Copy as many bytes in one piece by a copy engine: to registered host memory, or to a device."""
        length_bytes = command["bytes"]
        target = self._target_of_copies(command["to"])
        begun_s = _wait_until(command["at_s"])
        runtime.copy(target, self.address, length_bytes, device=self.device, stream=self._stream.handle)
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

    def _target_of_copies(self, to: str) -> int:
        if to not in self._plain:
            memory = (
                host_memory(self.length_bytes, self.device)
                if to == "host"
                else device_memory(self.length_bytes, int(to.removeprefix("cuda:")))
            )
            entered = self._stack.enter_context(memory)
            self._plain[to] = entered if isinstance(entered, int) else entered.address
            if to.startswith("cuda:"):
                runtime.reach(self.device, int(to.removeprefix("cuda:")))
        return self._plain[to]


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
