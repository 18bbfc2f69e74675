"""Runs every benchmark that needs no GPU: `python -m tests.bench --output out/bench`. Prints tables, writes JSON.

Every rate stands beside the thing it is compared with, measured in the same run; figures of two runs are not compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console

from tests.bench import (
    bench_digest,
    bench_directory,
    bench_fleet,
    bench_layouts,
    bench_load,
    bench_operations,
    bench_overhead,
    bench_paths,
    bench_plan,
    bench_prefix,
    bench_scrape,
    bench_shared_rooms,
    bench_store,
    bench_telemetry,
    bench_traces,
    bench_transport,
    bench_twin_copies,
    bench_used_pools,
    bench_warm_restart,
    bench_watching,
)
from tests.helpers.progress import ShownProgress

BENCHMARKS: dict[str, Any] = {
    "plan": bench_plan,
    "prefix": bench_prefix,
    "transport": bench_transport,
    "operations": bench_operations,
    "layouts": bench_layouts,
    "twin_copies": bench_twin_copies,
    "used_pools": bench_used_pools,
    "shared_rooms": bench_shared_rooms,
    "warm_restart": bench_warm_restart,
    "overhead": bench_overhead,
    "paths": bench_paths,
    "directory": bench_directory,
    "fleet": bench_fleet,
    "store": bench_store,
    "digest": bench_digest,
    "telemetry": bench_telemetry,
    "scrape": bench_scrape,
    "watching": bench_watching,
    "traces": bench_traces,
    "load": bench_load,
}
LIBRARIES = ("numpy", "torch", "pyzmq", "mooncake-transfer-engine-non-cuda", "nixl-cu12")


def main() -> int:
    """Run the chosen benchmarks; the exit code says whether all of them ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the JSON goes")
    parser.add_argument("--only", choices=sorted(BENCHMARKS), action="append", help="run these only")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    given.output.mkdir(parents=True, exist_ok=True)
    console = Console()
    results: dict[str, Any] = {"environment": environment()}
    failed = []
    for name in given.only or BENCHMARKS:
        begun_s = time.monotonic()
        console.rule(name)
        try:
            with ShownProgress(Console(stderr=True)) as progress:
                progress.stage(name)
                results[name] = BENCHMARKS[name].run()
            print(BENCHMARKS[name].table(results[name]))
        except Exception as error:  # noqa: BLE001 - the others are still worth running; the failure is the exit code
            console.print(f"[red]{name} failed:[/red] {type(error).__name__}: {error}")
            failed.append(name)
        console.print(f"{name}: {time.monotonic() - begun_s:.0f} s")
    path = given.output / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    console.print(f"written to {path}")
    return 1 if failed else 0


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    facts = {name: metadata.version(name) for name in LIBRARIES if _installed(name)}
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    return {"python": platform.python_version(), "machine": platform.machine(), "cpu": cpu, "libraries": facts}


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
