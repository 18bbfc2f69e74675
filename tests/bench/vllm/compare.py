"""vLLM with kvbridge beside vLLM with NixlConnector, on the same work in one run: `make bench-vllm`. `VLLM` names vLLM's Python.

Two prefill and two decode servers run beside each other on the same cores, one pair for each connector, both over UCX's TCP on
loopback; connectors take turns within each repetition. NixlConnector is eased (`tests/vllm/eased`): its progress thread spins as it
comes, and on a machine with two cores a comparison would measure that. What a load takes is measured alike for both, around vLLM's
hooks (`timed/timed_connectors.py`).
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.bench.vllm import measures
from tests.bench.vllm.figures import text
from tests.bench.vllm.pairs import Shape, started
from tests.vllm.servers import ROOT, Setup

FAT = Shape("fat", cache_gib=4, chunk_tokens=512)
TINY = Shape("tiny", cache_gib=1, chunk_tokens=512)
TURNS = 5
VLLM = Path(os.environ.get("VLLM", ROOT / "out/vllm/venv/bin/python"))
WORK = ROOT / "out/vllm"
"""For models and logs."""
table = text


def run(*, quick: bool) -> dict[str, Any]:
    """Measure each part."""
    WORK.mkdir(parents=True, exist_ok=True)
    setup, turns = Setup(VLLM.absolute(), WORK), 1 if quick else TURNS
    found: dict[str, Any] = {"turns": turns}
    for shape, parts in (
        (FAT, (measures.transfers, measures.overlapped)),
        (TINY, (measures.idle, measures.short)),
    ):
        with started(setup, shape) as pairs:
            for part in parts:
                begun_s = time.monotonic()
                found[part.__name__] = part(pairs, turns)
                print(f"{part.__name__}: {time.monotonic() - begun_s:.0f} s", flush=True)
    return found
