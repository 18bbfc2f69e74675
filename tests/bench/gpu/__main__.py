"""Runs every benchmark that needs a GPU: `python -m tests.bench.gpu --output out/bench-gpu`. Prints tables, writes JSON.

Each part is a process of its own under a deadline of its own: one that fails or hangs stops no other, and what it had measured
until then is kept. Every figure stands beside its ceiling, measured in the same run. Parts for several GPUs run where there are
several. `python -m tests.bench.gpu.report FILE` draws the picture and prints the tables again, on any machine.

The JSON is {"environment", "quick", "parts": {name: {"cases", "skipped", "failed", "took_s"}}}: a case is flat facts, and its
`wrong` is empty or says which bytes were; `skipped` are reasons; `failed` is empty when the part ran to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvbridge.kernels.cuda import runtime
from tests.bench.gpu import comparison, recorder, tables
from tests.bench.gpu.parts import PARTS, TOTAL_S, Part
from tests.helpers.gpu import environment_for

ROOT = Path(__file__).resolve().parents[3]
NO_DEVICE = 2
GRACE_S = 20.0
"""From the deadline's SIGTERM to SIGKILL: time to end daemons and to remove shared memory."""


def main() -> int:
    """Run the chosen parts; the exit code is 0 when all of them ran to their end and every byte was right."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/bench-gpu"), help="where the JSON goes")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run these parts only")
    parser.add_argument("--quick", action="store_true", help="fewer cases and repetitions: does everything work?")
    given = parser.parse_args()
    reason = runtime.reason_without_device()
    if reason:
        print(f"no GPU benchmarks here: {reason}", file=sys.stderr)
        return NO_DEVICE
    output = given.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    name = f"bench-gpu-{time.strftime('%Y%m%d-%H%M%S')}{'-quick' if given.quick else ''}"
    results: dict[str, Any] = {"environment": _environment(), "quick": given.quick, "parts": {}}
    ends_at_s = time.monotonic() + TOTAL_S
    for part in PARTS.values():
        if given.only and part.name not in given.only:
            continue
        result = run_part(part, output / f"{name}.{part.name}.jsonl", given.quick, ends_at_s - time.monotonic())
        results["parts"][part.name] = result
        print(tables.part_text(part.name, result), flush=True)
        (output / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    failed = [part for part, result in results["parts"].items() if result["failed"]]
    wrong = comparison.wrong_cases(results)
    print("".join(f"\nWRONG BYTES in {line}" for line in wrong))
    verdict = f"failed: {', '.join(failed)}" if failed else "every part ran to its end"
    print(f"\nwritten to {output / name}.json; {verdict}")
    return 1 if failed or wrong else 0


def run_part(part: Part, file: Path, quick: bool, left_s: float) -> dict[str, Any]:
    """Run a part as a process; return its measurements, what it skipped, and why it failed if it did."""
    deadline_s = min(part.deadline_s, left_s)
    if deadline_s < 5:
        return {"cases": [], "skipped": [], "failed": "not run: the parts before it took all the time", "took_s": 0.0}
    print(f"\n=== {part.name}: {part.about} ===", flush=True)
    command = [sys.executable, "-m", "tests.bench.gpu.part", part.name, str(file), *(["--quick"] if quick else [])]
    begun_s = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, env=environment_for(ROOT), start_new_session=True)
    failed = _wait(process, deadline_s)
    cases, skipped = recorder.read(file)
    file.unlink(missing_ok=True)
    return {"cases": cases, "skipped": skipped, "failed": failed, "took_s": round(time.monotonic() - begun_s, 1)}


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


def _environment() -> dict[str, Any]:
    """Look in a process of its own: this one holds no context on the devices."""
    code = "import json; from tests.bench.gpu.environment import environment; print(json.dumps(environment()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        return {"unknown": done.stderr[-500:]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


if __name__ == "__main__":
    sys.exit(main())
