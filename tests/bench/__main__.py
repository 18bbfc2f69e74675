"""Measure what needs no GPU (`python -m tests.bench`), or what is named: each benchmark in a process of its own."""

import argparse
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.bench.output import environment, measure, write

HERE = ("plan", "prefix", "transport", "operations", "overhead", "hand_over", "paths", "directory", "store", "load")
GPU = ("gpu.copy_pages", "gpu.transport", "gpu.swap_in")
GROUPS = {"all": HERE, "gpu": GPU}
OTHERS = ("peers.compare", "vllm.compare", "sglang.compare")
"""These want another environment (see the Makefile)."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.splitlines()[0])
    chosen = (*GROUPS, *HERE, *GPU, *OTHERS)
    parser.add_argument("names", nargs="*", choices=chosen, default=["all"], metavar="NAME", help=", ".join(chosen))
    parser.add_argument("--output", type=Path, default=Path("out/bench"), help="where the JSON goes")
    parser.add_argument("--quick", action="store_true", help="few repetitions and cases: does everything work?")
    given = parser.parse_args()
    results: dict[str, Any] = {"environment": environment(), "quick": given.quick}
    failed = False
    for name in [each for named in given.names for each in GROUPS.get(named, (named,))]:
        begun_s = time.monotonic()
        print(f"=== {name}", flush=True)
        try:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own_process:
                results[name], table = own_process.submit(measure, name, quick=given.quick).result()
            print(table)
        except Exception as error:  # noqa: BLE001 - the others are still worth running; the failure is the exit code
            print(f"{name} FAILED: {type(error).__name__}: {error}")
            failed = True
        print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
    write(given.output, "-".join(given.names), results)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
