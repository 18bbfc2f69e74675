"""The local transport from GPU memory into a shared host pool: this process's, which a process with the GPU writes.

What is moved is the C4 part of requests, 21 layers, pages scattered on both sides; beside it one plain copy of as many bytes by the
copy engine.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from kvbridge.config.transports import TransportSettings
from kvbridge.core.wire.shared_memory import FileOrigin
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
TURNS = 9


class WriterProcess:
    """The writer. A context manager: leaving kills it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.bench.gpu.transport_writer", str(LENGTH_BYTES)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=20)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Give a command and wait for its answer. Raises RuntimeError when it is an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the writer has ended")
        found = dict(json.loads(line))
        if "error" in found:
            raise RuntimeError(f"the writer: {found['error']}")
        return found

    def rate(self, do: str, **arguments: Any) -> float:
        """Have it move something; return GB/s."""
        found = self.ask(do, **arguments)
        return float(found["bytes"] / found["took_s"] / 1e9)


def run(*, quick: bool) -> dict[str, Any]:
    """Measure requests of two lengths."""
    with WriterProcess() as writer, host_target() as (endpoint, mapping):
        writer.ask("connect", endpoint=endpoint, address=mapping.address)
        words = torch.frombuffer(mapping.buffer, dtype=torch.int64)
        cases = [_case(writer, words, tokens, 3 if quick else TURNS) for tokens in (32_768, 131_072)]
        del words  # it pins the mapping
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


def _case(writer: WriterProcess, words: torch.Tensor, tokens: int, turns: int) -> dict[str, Any]:
    """Transfer C4 of a request into zeroed memory, compare checksums of every page, and measure."""
    order = {"layers": LAYERS, "layer_pages": LAYER_PAGES, "pages": tokens // 256}
    words.zero_()
    writer.ask("transfer", order=order)
    sums = writer.ask("sums", order=order)
    pages = words[: LENGTH_BYTES // 8].reshape(-1, PAGE_BYTES // 8)
    found = weighted(pages, torch.tensor(sums["offsets"]) // PAGE_BYTES)
    wrong = int((found != torch.tensor(sums["sums"])).sum())
    assert not wrong, f"{wrong} of {len(found)} pages have wrong bytes"
    total = len(found) * PAGE_BYTES
    rates = [(writer.rate("transfer", order=order), writer.rate("copy", bytes=total)) for _ in range(turns + 1)]
    moved, plain = (statistics.median(each) for each in zip(*rates[1:], strict=True))
    return {"tokens": tokens, "bytes": total, "gb_s": moved, "copy_gb_s": plain}


def table(found: dict[str, Any]) -> str:
    """The figures and their budgets for a reader."""
    return with_budgets(found["cases"], of_transport(found["cases"]))
