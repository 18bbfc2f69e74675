"""The local transport from GPU memory into a shared host pool, from one and from several GPUs at once.

The target's memory is in this process; each GPU has a writer, a process of its own. What is moved is the C4
part of requests, 21 layers, pages scattered on both sides; beside it one plain copy of as many bytes by the copy engine.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from kvbridge.config.transports import TransportSettings
from kvbridge.core.wire.shared_memory import FileOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from kvbridge.transport.base import Transport
from kvbridge.transport.registry import create_transport
from tests.bench.gpu.memory import PAGE_BYTES
from tests.bench.gpu.timing import Record
from tests.bench.gpu.transport_writer import weighted

LAYERS = 21
LAYER_PAGES = 1024
LENGTH_BYTES = LAYERS * LAYER_PAGES * PAGE_BYTES
START_S = 60.0
TURNS = 9
LEAD_S = 0.005
"""From giving a command to its start, so that all writers have it by then."""


class WriterProcess:
    """One writer. A context manager: leaving kills it."""

    def __init__(self, device: int) -> None:
        self.device = device
        command = [sys.executable, "-m", "tests.bench.gpu.transport_writer", str(device), str(LENGTH_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)

    def tell(self, do: str, **arguments: Any) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the next answer; the part's deadline limits it. Raises RuntimeError when it is an error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the writer on cuda:{self.device} has ended")
        found = json.loads(line)
        if "error" in found:
            raise RuntimeError(f"writer on cuda:{self.device}: {found['error']}")
        return dict(found)


def run(record: Record, *, quick: bool) -> None:
    """Measure everything that this machine's GPUs allow."""
    count = runtime.device_count()
    groups = [n for n in (1, 2, 4) if n <= count]
    with ExitStack() as stack:
        writers = [stack.enter_context(WriterProcess(device)) for device in range(max(groups))]
        for writer in writers:
            writer.answer()
        bench = _Bench(record, turns=3 if quick else TURNS)
        with host_target() as (endpoint, mapping):
            for writer in writers:
                connect_to(writer, "host", endpoint, mapping.address)
            for group in groups:
                bench.to_host(writers[:group], mapping)
            for writer in writers:
                disconnect_from(writer, "host")


@contextmanager
def host_target() -> Iterator[tuple[str, SharedMapping]]:
    """A shared host pool behind a transport of this process; yields its endpoint and the mapping."""
    name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
    threads = min(16, os.cpu_count() or 1)
    with SharedMapping.create(Path(DEFAULT_DIRECTORY), name, LENGTH_BYTES, threads=threads) as mapping:
        memory = Extent(
            address=mapping.address, length_bytes=LENGTH_BYTES, origin=FileOrigin(path=str(mapping.path)), label="pool"
        )
        with _target(memory) as endpoint:
            yield endpoint, mapping


@contextmanager
def _target(memory: Extent) -> Iterator[str]:
    transport: Transport = create_transport("local", TransportSettings())
    try:
        transport.register([memory])
        yield base64.b64encode(transport.endpoint().data).decode()
    finally:
        transport.close()


def connect_to(writer: WriterProcess, target: str, endpoint: str, address: int) -> None:
    writer.tell("connect", target=target, endpoint=endpoint, address=address)
    writer.answer()


def disconnect_from(writer: WriterProcess, target: str) -> None:
    writer.tell("disconnect", target=target)
    writer.answer()


class _Bench:
    """The cases."""

    def __init__(self, record: Record, *, turns: int) -> None:
        self._record = record
        self._turns = turns

    def to_host(self, writers: Sequence[WriterProcess], mapping: SharedMapping) -> None:
        """C4 of requests into the pool; the same in the page-first layout, where a page of all layers is one operation."""
        words = torch.frombuffer(mapping.buffer, dtype=torch.int64)
        for tokens in (32_768, 131_072):
            order = order_of(tokens)
            wrong = self._wrong(writers, "host", order, words)
            self._case(writers, "host", order, tokens=tokens, layout="layer_first", wrong=wrong)
        order = order_of(131_072) | {"layers": 1, "operation_bytes": LAYERS * PAGE_BYTES}
        wrong = self._wrong(writers, "host", order, words)
        self._case(writers, "host", order, tokens=131_072, layout="page_first", wrong=wrong)
        del words  # it pins the mapping

    def _wrong(self, writers: Sequence[WriterProcess], target: str, order: dict[str, int], words: torch.Tensor) -> str:
        """Transfer once into zeroed memory and compare checksums of every operation."""
        words.zero_()
        self._turn(writers, "transfer", target=target, order=order)
        wrong = total = 0
        for number, writer in enumerate(writers):
            writer.tell("sums", order=stripe_of(order, number, len(writers)))
            answer = writer.answer()
            each = order["operation_bytes"]
            pages = words[: len(words) // (each // 8) * (each // 8)].reshape(-1, each // 8)
            found = weighted(pages, torch.tensor(answer["offsets"]) // each)
            wrong += int((found != torch.tensor(answer["sums"])).sum())
            total += len(found)
        return f"{wrong} of {total} operations have wrong bytes" if wrong else ""

    def _case(
        self,
        writers: Sequence[WriterProcess],
        target: str,
        order: dict[str, int],
        *,
        tokens: int,
        layout: str,
        wrong: str,
    ) -> None:
        total = order["layers"] * order["pages"] * order["operation_bytes"]
        rates: dict[str, list[float]] = {"transfer": [], "copy": []}
        for _ in range(self._turns + 1):
            rates["transfer"].append(self._turn(writers, "transfer", target=target, order=order))
            rates["copy"].append(self._turn(writers, "copy", bytes=total // len(writers)))
        moved, plain = (statistics.median(rates[way][1:]) for way in ("transfer", "copy"))
        self._record(
            to="host",
            gpus=len(writers),
            tokens=tokens,
            layout=layout,
            bytes=total,
            operation_bytes=order["operation_bytes"],
            gb_s=moved,
            copy_gb_s=plain,
            wrong=wrong,
        )

    def _turn(self, writers: Sequence[WriterProcess], do: str, **arguments: Any) -> float:
        """Have all writers do something at once; return GB/s from the first beginning to the last end."""
        at_s = time.monotonic() + LEAD_S
        for number, writer in enumerate(writers):
            mine = dict(arguments)
            if "order" in mine:
                mine["order"] = stripe_of(mine["order"], number, len(writers))
            writer.tell(do, at_s=at_s, **mine)
        answers = [writer.answer() for writer in writers]
        took_s = max(answer["ended_s"] for answer in answers) - min(answer["begun_s"] for answer in answers)
        return sum(answer["bytes"] for answer in answers) / took_s / 1e9


def order_of(tokens: int) -> dict[str, int]:
    pages = tokens // 256
    return {"layers": LAYERS, "layer_pages": LAYER_PAGES, "pages": pages, "operation_bytes": PAGE_BYTES}


def stripe_of(order: dict[str, int], number: int, of: int) -> dict[str, int]:
    return order | {"stripe": number, "stripes": of}
