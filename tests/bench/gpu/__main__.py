"""Runs every benchmark that needs a GPU: `python -m tests.bench.gpu --output out/bench-gpu`. Prints tables, writes JSON.

Each part is a process of its own under a deadline of its own: one that fails or hangs stops no other, and what it had measured
until then is kept. Every figure stands beside its ceiling, measured in the same run. A case is flat facts; its `wrong` is empty or
says which bytes were.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvbridge.kernels.cuda import runtime
from tests.bench.gpu import budgets
from tests.bench.output import environment, table, write
from tests.helpers.gpu import environment_for

ROOT = Path(__file__).resolve().parents[3]
PARTS_S = {"copy_pages": 60, "transport": 100, "swap_in": 300}
"""Names, with deadlines. Each is a module `part_NAME` with `run(record, quick)`."""
NO_DEVICE = 2
GRACE_S = 20.0
"""From the deadline's SIGTERM to SIGKILL: time to remove shared memory."""


def main() -> int:
    """Run the chosen parts; the exit code is 0 when all of them ran to their end and every byte was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/bench-gpu"), help="where the JSON goes")
    parser.add_argument("--only", choices=PARTS_S, action="append", help="run these parts only")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions: does everything work?")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        _run_here(given.part[0], Path(given.part[1]), quick=given.quick)
        return 0
    reason = runtime.reason_without_device()
    if reason:
        print(f"no GPU benchmarks here: {reason}", file=sys.stderr)
        return NO_DEVICE
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "environment": environment() | {"devices": _devices()},
        "quick": given.quick,
        "parts": {},
    }
    for name in given.only or PARTS_S:
        print(f"\n=== {name}", flush=True)
        part = results["parts"][name] = run_part(name, output / f"{name}.jsonl", quick=given.quick)
        shown = [case.keys() - {"wrong"} for case in part["cases"][:1]]
        headings = [key for key in part["cases"][0] if key in shown[0]] if shown else []
        print(table(headings, ([case.get(key) for key in headings] for case in part["cases"])))
        print("\n".join(f"WRONG BYTES: {case}" for case in part["cases"] if case["wrong"]) + part["failed"], flush=True)
    found = budgets.budgets({name: part["cases"] for name, part in results["parts"].items()})
    rows = [(each.what, each.measured, each.limit, each.unit, "met" if each.met else "MISSED") for each in found]
    print(table(("budget", "measured", "limit", "", ""), rows))
    write(output, "bench-gpu", results)
    parts = results["parts"].values()
    return int(any(part["failed"] or any(case["wrong"] for case in part["cases"]) for part in parts))


def run_part(name: str, file: Path, *, quick: bool) -> dict[str, Any]:
    """Run a part as a process; return {"cases", "failed"}: its measurements, and why it failed if it did."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.bench.gpu", "--part", name, str(file), *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, cwd=ROOT, env=environment_for(ROOT), start_new_session=True)
    failed = _wait(process, PARTS_S[name])
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    cases = []
    for line in lines:
        with contextlib.suppress(ValueError):  # the last line, if the deadline has cut it off
            cases.append(json.loads(line))
    return {"cases": cases, "failed": failed and f"{name} FAILED: {failed}"}


def _wait(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Wait for a part, and end everything that it started; return why it failed, or an empty text."""
    try:
        code = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return f"not done after {deadline_s:.0f} s"
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"exit code {code} (its last words are above)" if code else ""


def _run_here(name: str, file: Path, *, quick: bool) -> None:
    """Run a part in this process; its measurements go to the file as they are made."""

    def end(*_: object) -> None:
        """At the deadline: leave through the context managers, so that shared memory goes with us."""
        raise SystemExit(128 + signal.SIGTERM)

    def record(**facts: Any) -> None:
        with file.open("a") as opened:
            opened.write(json.dumps(facts) + "\n")

    signal.signal(signal.SIGTERM, end)
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")
    importlib.import_module(f"tests.bench.gpu.part_{name}").run(record, quick=quick)


def _devices() -> list[str]:
    """Look in a process of its own: this one holds no context on the devices."""
    code = "import sys, json; from kvbridge.kernels.cuda import runtime as r; "
    code += "print(json.dumps([r.device_facts(each).name for each in range(r.device_count())]))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
