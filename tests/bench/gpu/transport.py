"""The local transport of C4 pages from GPU memory into a shared host pool, beside one plain copy of as many bytes."""

import os
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvbridge.config.transports import TransportSettings
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.wire.messages import FileOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Extent
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from kvbridge.transport import create_transport
from kvbridge.transport.base import Endpoint, Transfer, TransferState
from kvbridge.transport.local.transport import LocalTransport
from kvbridge.worker.rank import Pauses
from tests.bench.gpu import timing
from tests.helpers.gpu_children import Child, child
from tests.helpers.shared_buffer import connect

LAYERS = 21
LAYER_PAGES = 1024
LENGTH_BYTES = LAYERS * LAYER_PAGES * timing.PAGE_BYTES
TURNS = 9
LIMIT_S = 60.0


@dataclass(frozen=True)
class Told:
    endpoint: Endpoint
    address: int


def run(*, quick: bool) -> dict[str, Any]:
    with host_target() as (told, mapping), child(write, told) as writer:
        words = torch.frombuffer(mapping.buffer, dtype=torch.int64)
        cases = [_case(writer, words, pages, 3 if quick else TURNS) for pages in (128, 512)]
        del words  # it pins the mapping
    return {"cases": cases}


@contextmanager
def host_target() -> Iterator[tuple[Told, SharedMapping]]:
    name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
    with SharedMapping.create(Path(DEFAULT_DIRECTORY), name, LENGTH_BYTES) as mapping:
        origin = FileOrigin(path=str(mapping.path))
        transport = create_transport("local", TransportSettings())
        try:
            transport.register([Extent(address=mapping.address, length_bytes=LENGTH_BYTES, origin=origin, label="p")])
            yield Told(transport.endpoint(), mapping.address), mapping
        finally:
            transport.close()


def _asked(writer: Child, what: str, pages: int) -> Any:
    writer.pipe.send((what, pages))
    return writer.hear()


def _case(writer: Child, words: torch.Tensor, pages: int, turns: int) -> dict[str, Any]:
    """Transfer C4 of a request into zeroed memory, compare checksums of every page, and measure GB/s."""
    words.zero_()
    _asked(writer, "transfer", pages)
    sums = _asked(writer, "sums", pages)
    found = weighted(words[: LENGTH_BYTES // 8].reshape(-1, timing.PAGE_BYTES // 8), scattered(pages)[1])
    wrong = int((found != torch.from_numpy(sums)).sum())
    assert not wrong, f"{wrong} of {len(found)} pages have wrong bytes"
    total = len(found) * timing.PAGE_BYTES
    both_s = [(_asked(writer, "transfer", pages), _asked(writer, "copy", pages)) for _ in range(turns + 1)][1:]
    moved, plain = (total / statistics.median(taken_s) / 1e9 for taken_s in zip(*both_s, strict=True))
    return {"tokens": 256 * pages, "bytes": total, "gb_s": moved, "copy_gb_s": plain}


def scattered(pages: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the pages of a transfer at the source and at the destination, int64: in each layer the same, random on both sides."""
    rng = np.random.default_rng(pages)
    layers = np.arange(LAYERS)[:, None] * LAYER_PAGES
    source, target = ((layers + rng.permutation(LAYER_PAGES)[:pages]).ravel() for _ in range(2))
    return source, target


def weighted(pages: torch.Tensor, chosen: np.ndarray) -> torch.Tensor:
    """Return a checksum of each chosen page, int64: its words times odd numbers, so that order counts, modulo 2**64."""
    weights = 2 * torch.arange(pages.shape[1], device=pages.device) + 1
    parts = torch.from_numpy(chosen).split(1024)
    return torch.cat([(pages[part.to(pages.device)] * weights).sum(dim=1) for part in parts]).cpu()


def write(pipe: Connection, told: Told) -> None:
    """Obey until the pipe ends: "transfer" pages or "copy" as many bytes (answers seconds), or tell the "sums" of the pages."""
    with timing.device_memory(LENGTH_BYTES) as address, timing.host_memory(LENGTH_BYTES) as plain, ExitStack() as stack:
        timing.fill_random(address, LENGTH_BYTES, 0)
        transport = LocalTransport(TransportSettings().local)
        stack.callback(transport.close)
        vram = Extent(address=address, length_bytes=LENGTH_BYTES, kind=MemoryKind.VRAM, device=0, label="source")
        transport.register([vram])
        peer = connect(transport, told.endpoint)
        stack.callback(transport.disconnect, peer)  # before its owner frees the memory
        pauses = Pauses(time.monotonic, with_gpu=True)
        pauses.sleep_precisely()
        stream = stack.enter_context(runtime.Stream.create(0))
        while order := _order(pipe):
            what, pages = order
            source, target = scattered(pages)
            begun_s = time.monotonic()
            if what == "transfer":
                sides = (
                    (ids * timing.PAGE_BYTES + base).astype(np.uint64)
                    for ids, base in ((source, address), (target, told.address))
                )
                operations = Operations(*sides, np.full(len(source), timing.PAGE_BYTES, dtype=np.uint64))
                begun_s = time.monotonic()
                _finish(transport.submit(peer, operations, deadline_s=LIMIT_S), pauses)
            elif what == "copy":
                runtime.copy(plain.address, address, len(source) * timing.PAGE_BYTES, device=0, stream=stream.handle)
                stream.synchronize()
            else:
                words = timing.tensor_at(address, LENGTH_BYTES // 8, torch.int64, 0).reshape(-1, timing.PAGE_BYTES // 8)
                pipe.send(weighted(words, source).numpy())
                continue
            pipe.send(time.monotonic() - begun_s)


def _order(pipe: Connection) -> tuple[str, int] | None:
    try:
        what, pages = pipe.recv()
    except EOFError:
        return None
    return what, pages


def _finish(transfer: Transfer, pauses: Pauses) -> None:
    pauses.moved()
    while not (status := transfer.poll()).state.terminal:
        time.sleep(pauses.next_s())
    if status.state is not TransferState.DONE:
        raise RuntimeError(f"the transfer ended as {status}")


def table(found: dict[str, Any]) -> str:
    return timing.with_budgets(found["cases"], timing.of_transport(found["cases"]))
