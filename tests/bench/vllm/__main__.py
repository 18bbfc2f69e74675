"""vLLM with kvbridge beside vLLM with NixlConnector, on the same work in one run: `make bench-vllm`.

Owns: which parts there are, and what becomes of the figures. Must not know: how a part is measured, how servers are started.

Two prefill and two decode servers run beside each other on the same cores, one pair for each connector, both over UCX's TCP on
loopback; connectors take turns within each repetition. NixlConnector is eased (`tests/vllm/eased`): its progress thread spins as it
comes, and on a machine with two cores a comparison would measure that. What a load takes is measured alike for both, around vLLM's
hooks (`timed/timed_connectors.py`): from the allocation of decode's blocks to the report that they are filled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.bench.__main__ import environment
from tests.bench.vllm import measures
from tests.bench.vllm.figures import section
from tests.bench.vllm.pairs import Pairs, Shape
from tests.vllm.servers import ROOT, Setup

FAT = Shape("fat", cache_gib=4, chunk_tokens=512)
TINY = Shape("tiny", cache_gib=1, chunk_tokens=512, decode_blocks=17, policy="fail")
"""Decode has room for one long prompt, so that another one waits."""
OF_FAT = ("transfers", "overlapped", "neighbours")
OF_TINY = ("idle", "short", "hooks", "endings")


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
    results = {"environment": environment(), "vllm": found}
    print(section(results))
    given.output.mkdir(parents=True, exist_ok=True)
    path = given.output / f"vllm-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"written to {path}")
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
        _read(pairs, found)
    return found


def _measure(found: dict[str, Any], name: str, pairs: Pairs, turns: int) -> None:
    begun_s = time.monotonic()
    found[name] = getattr(measures, name)(pairs, turns)
    print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)


def _read(pairs: Pairs, found: dict[str, Any]) -> None:
    if "hooks" in found:
        found["hooks"] = measures.read_hooks(pairs, found["hooks"])
    if "short" in found:
        measures.read_short(pairs, found["short"])
    if "endings" in found:
        measures.read_endings(pairs, found["endings"])


if __name__ == "__main__":
    sys.exit(main())
