"""Runs every benchmark that needs no GPU: `python -m tests.bench --output out/bench`. Prints tables, writes JSON.

Every rate stands beside the thing that it is compared with, measured in the same run; figures of two runs are not compared.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import time
from pathlib import Path
from typing import Any

import structlog

from tests.bench.output import environment, write

BENCHMARKS = ("plan", "prefix", "transport", "operations", "overhead", "paths", "directory", "store", "load")


def main() -> int:
    """Run the chosen benchmarks; the exit code says whether all of them ran."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the JSON goes")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="run these only")
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    results: dict[str, Any] = {"environment": environment()}
    failed = []
    for name in given.only or BENCHMARKS:
        begun_s = time.monotonic()
        print(f"=== {name}", flush=True)
        try:
            bench = importlib.import_module(f"tests.bench.bench_{name}")
            results[name] = bench.run()
            print(bench.table(results[name]))
        except Exception as error:  # noqa: BLE001 - the others are still worth running; the failure is the exit code
            print(f"{name} FAILED: {type(error).__name__}: {error}")
            failed.append(name)
        print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
    write(given.output, "bench", results)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
