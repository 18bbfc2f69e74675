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
from tests.bench.gpu.budgets import of_transport, with_budgets
from tests.bench.gpu.memory import PAGE_BYTES
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

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        self.tell(do, **arguments)
        return self.answer()

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


def run(*, quick: bool) -> dict[str, Any]:
    """Measure everything that this machine's GPUs allow."""
    groups = [n for n in (1, 2, 4) if n <= runtime.device_count()]
    with ExitStack() as stack:
        writers = [stack.enter_context(WriterProcess(device)) for device in range(max(groups))]
        for writer in writers:
            writer.answer()
        with host_target() as (endpoint, mapping):
            for writer in writers:
                writer.ask("connect", endpoint=endpoint, address=mapping.address)
            cases = [case for group in groups for case in _to_host(writers[:group], mapping, 3 if quick else TURNS)]
            for writer in writers:
                writer.ask("disconnect")
    return {"cases": cases}


@contextmanager
def host_target() -> Iterator[tuple[str, SharedMapping]]:
    """A shared host pool behind a transport of this process; yields its endpoint and the mapping."""
    name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
    threads = min(16, os.cpu_count() or 1)
    with SharedMapping.create(Path(DEFAULT_DIRECTORY), name, LENGTH_BYTES, threads=threads) as mapping:
        origin = FileOrigin(path=str(mapping.path))
        transport: Transport = create_transport("local", TransportSettings())
        try:
            transport.register(
                [Extent(address=mapping.address, length_bytes=LENGTH_BYTES, origin=origin, label="pool")]
            )
            yield base64.b64encode(transport.endpoint().data).decode(), mapping
        finally:
            transport.close()


def _to_host(writers: Sequence[WriterProcess], mapping: SharedMapping, turns: int) -> Iterator[dict[str, Any]]:
    """C4 of requests into the pool; the same in the page-first layout, where a page of all layers is one operation."""
    page_first = order_of(131_072) | {"layers": 1, "operation_bytes": LAYERS * PAGE_BYTES}
    orders = [(tokens, "layer_first", order_of(tokens)) for tokens in (32_768, 131_072)]
    words = torch.frombuffer(mapping.buffer, dtype=torch.int64)
    for tokens, layout, order in [*orders, (131_072, "page_first", page_first)]:
        words.zero_()
        _turn(writers, "transfer", order=order)
        _require_right(writers, order, words)
        total = order["layers"] * order["pages"] * order["operation_bytes"]
        rates: dict[str, list[float]] = {"transfer": [], "copy": []}
        for _ in range(turns + 1):
            rates["transfer"].append(_turn(writers, "transfer", order=order))
            rates["copy"].append(_turn(writers, "copy", bytes=total // len(writers)))
        moved, plain = (statistics.median(each[1:]) for each in rates.values())
        yield {
            "gpus": len(writers),
            "tokens": tokens,
            "layout": layout,
            "bytes": total,
            "operation_bytes": order["operation_bytes"],
            "gb_s": moved,
            "copy_gb_s": plain,
        }
    del words  # it pins the mapping


def _require_right(writers: Sequence[WriterProcess], order: dict[str, int], words: torch.Tensor) -> None:
    """Compare checksums of every operation that was transferred into zeroed memory."""
    each = order["operation_bytes"] // 8
    pages = words[: len(words) // each * each].reshape(-1, each)
    for number, writer in enumerate(writers):
        answer = writer.ask("sums", order=stripe_of(order, number, len(writers)))
        found = weighted(pages, torch.tensor(answer["offsets"]) // order["operation_bytes"])
        wrong = int((found != torch.tensor(answer["sums"])).sum())
        assert not wrong, f"{wrong} of {len(found)} operations have wrong bytes"


def _turn(writers: Sequence[WriterProcess], do: str, **arguments: Any) -> float:
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


def table(found: dict[str, Any]) -> str:
    """The figures and their budgets for a reader."""
    return with_budgets(found["cases"], of_transport(found["cases"]))
