"""vLLM with kvbridge beside vLLM with NixlConnector, on the same work in one run: `make bench-vllm`.

Two prefill and two decode servers run beside each other on the same cores, one pair for each connector, both over UCX's TCP on
loopback; connectors take turns within each repetition. NixlConnector is eased (`tests/vllm/eased`): its progress thread spins as it
comes, and on a machine with two cores a comparison would measure that. What a load takes is measured alike for both, around vLLM's
hooks (`timed/timed_connectors.py`): from the allocation of decode's blocks to the report that they are filled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.bench.output import environment, write
from tests.bench.vllm import measures
from tests.bench.vllm.figures import text
from tests.bench.vllm.pairs import Pairs, Shape
from tests.vllm.servers import ROOT, Setup

FAT = Shape("fat", cache_gib=4, chunk_tokens=512)
TINY = Shape("tiny", cache_gib=1, chunk_tokens=512)
OF_FAT = ("transfers", "overlapped")
OF_TINY = ("idle", "short", "hooks")


def main() -> int:
    """Print the tables, write the JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.vllm", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the JSON goes")
    parser.add_argument(
        "--vllm", type=Path, default=ROOT / "out/vllm/venv/bin/python", help="Python of vLLM's environment"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "out/vllm", help="for models and logs")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=(*OF_FAT, *OF_TINY), default=(*OF_FAT, *OF_TINY))
    given = parser.parse_args()
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    load = [os.getloadavg()[0]]
    found = run(Setup(given.vllm.absolute(), work), given.only, given.turns)
    found["load"] = [*load, os.getloadavg()[0]]
    print(text(found))
    write(given.output, "vllm", {"environment": environment(), "vllm": found})
    return 0


def run(setup: Setup, only: Collection[str], turns: int) -> dict[str, Any]:
    """Measure; JSON-able."""
    found: dict[str, Any] = {"turns": turns}
    if wanted := [name for name in OF_FAT if name in only]:
        with Pairs(setup, FAT) as pairs:
            for name in wanted:
                _measure(found, name, pairs, turns)
        if "transfers" in found:
            measures.read_transfers(pairs, found["transfers"])
    if wanted := [name for name in OF_TINY if name in only]:
        with Pairs(setup, TINY) as pairs:
            for name in wanted:
                _measure(found, name, pairs, turns)
        if "hooks" in found:
            found["hooks"] = measures.read_hooks(pairs, found["hooks"])
        if "short" in found:
            measures.read_short(pairs, found["short"])
    return found


def _measure(found: dict[str, Any], name: str, pairs: Pairs, turns: int) -> None:
    begun_s = time.monotonic()
    found[name] = getattr(measures, name)(pairs, turns)
    print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
