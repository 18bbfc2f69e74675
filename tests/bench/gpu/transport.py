"""The local transport of C4 pages from GPU memory into a shared host pool, beside one plain copy of as many bytes."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbridge.core.ids import MemoryKind
from kvbridge.kernels.cuda import runtime
from tests.bench.gpu import timing
from tests.gpu.test_transport_local import local_transport_pair

LAYER_PAGES = 1024
TURNS = 9


def run(*, quick: bool) -> dict[str, Any]:
    return {"cases": [_case(pages, 3 if quick else TURNS) for pages in (128, 512)]}


def _case(pages: int, turns: int) -> dict[str, Any]:
    """Transfer C4 of a request between pools of `LAYER_PAGES`, compare every page, and measure GB/s."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-bench-") as folder,
        local_transport_pair(Path(folder), MemoryKind.DRAM, pages=LAYER_PAGES, moved=pages) as pair,
        timing.host_memory(pair.total_bytes) as plain,
        runtime.Stream.create(0) as stream,
    ):

        def copy() -> float:
            begun_s = time.monotonic()
            runtime.copy(plain.address, pair.source.address, pair.total_bytes, device=0, stream=stream.handle)
            stream.synchronize()
            return time.monotonic() - begun_s

        both_s = [(pair.move(), copy()) for _ in range(turns + 1)][1:]
        pair.check()
        moved, copied = (pair.total_bytes / statistics.median(taken_s) / 1e9 for taken_s in zip(*both_s, strict=True))
        return {"tokens": 256 * pages, "bytes": pair.total_bytes, "gb_s": moved, "copy_gb_s": copied}


def table(found: dict[str, Any]) -> str:
    return timing.with_budgets(found["cases"], timing.of_transport(found["cases"]))
