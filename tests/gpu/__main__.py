"""Everything that is tested on a GPU, unattended: `python -m tests.gpu --output out/test-gpu`.

Four steps, each a process of its own under a deadline: the tests in `tests/gpu`, the GPU part of the transport contract, and
the kernel tests once more under compute-sanitizer (memcheck, racecheck) at small sizes. Ends with a table: what ran, what
failed, what was skipped and why. The exit code is 0 only if everything that could run was right; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

from kvbridge.kernels.cuda import runtime
from tests.helpers.gpu import SMALL_VARIABLE, environment_for, reason_without_device

ROOT = Path(__file__).resolve().parents[2]
TOTAL_S = 570.0
"""The steps together; what a step does not use is there for the next ones."""
GRACE_S = 15.0
"""From the interruption at a deadline to SIGKILL."""
NO_DEVICE = 2
KERNEL_TESTS = (
    "test_copy_pages.py",
    "test_copy_rows.py",
    "test_copy_stretches.py",
    "test_digest.py",
    "test_swap_in.py",
)
SANITIZER_EXIT = 86
"""What compute-sanitizer exits with when the tests pass and it has found something."""


@dataclass(frozen=True)
class Step:
    """One process."""

    name: str
    targets: tuple[str, ...]
    """What pytest is given: files or folders of the repository."""
    deadline_s: float
    tool: str = ""
    """The tool of compute-sanitizer that watches it; empty for none."""


STEPS = (
    Step("tests", ("tests/gpu",), 300.0),
    Step("contract", ("tests/contract",), 150.0),
    Step("memcheck", tuple(f"tests/gpu/{name}" for name in KERNEL_TESTS), 180.0, "memcheck"),
    Step("racecheck", tuple(f"tests/gpu/{name}" for name in KERNEL_TESTS), 180.0, "racecheck"),
)


@dataclass
class Outcome:
    """How a step went."""

    name: str
    verdict: str
    """"passed", "skipped", or what is wrong."""
    good: bool
    took_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    """Tests by "passed", "failed", "skipped"."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why tests were skipped, with how many."""


def main() -> int:
    """Run the steps and say how they went."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/test-gpu"), help="where the results go (JUnit XML)")
    parser.add_argument("--only", choices=[step.name for step in STEPS], action="append", help="run these steps only")
    parser.add_argument("-k", dest="chosen", default="", help="pytest's expression for the tests to run")
    given = parser.parse_args()
    if reason_without_device():
        print(f"no GPU tests here: {reason_without_device()}", file=sys.stderr)
        return NO_DEVICE
    print(_devices(), flush=True)
    given.output.mkdir(parents=True, exist_ok=True)
    ends_at_s = time.monotonic() + TOTAL_S
    outcomes = []
    for step in STEPS:
        if given.only and step.name not in given.only:
            continue
        left_s = ends_at_s - time.monotonic()
        print(f"\n=== {step.name} ===", flush=True)
        outcomes.append(run_step(step, given.output.resolve(), given.chosen, min(step.deadline_s, left_s)))
    print("\n" + summary(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


def run_step(step: Step, output: Path, chosen: str, deadline_s: float) -> Outcome:
    """Run one step to its end or its deadline."""
    targets = [target for target in step.targets if (ROOT / target).exists()]
    sanitizer = find_sanitizer() if step.tool else ""
    if step.tool and not sanitizer:
        return Outcome(step.name, "skipped: compute-sanitizer is not on PATH (it comes with the CUDA toolkit)", True)
    if deadline_s < 10:
        return Outcome(step.name, "not run: the steps before it took all the time", False)
    report = output / f"{step.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/plain.ini", "--rootdir", ".", "-m", "gpu", "-q"]
    command += [f"--junitxml={report}", *(["-k", chosen] if chosen else []), *targets]
    if sanitizer:
        # The API's errors are looked at by the code under test, which expects some of them.
        watch = [sanitizer, "--tool", step.tool, "--error-exitcode", str(SANITIZER_EXIT), "--report-api-errors", "no"]
        command = [*watch, "--target-processes", "application-only", *command]
    environment = environment_for(ROOT)
    environment.setdefault("KVBRIDGE_ALLOW_MISSING_TRANSPORTS", "1")
    if step.tool:
        environment[SMALL_VARIABLE] = "1"
    begun_s = time.monotonic()
    code = run_limited(command, deadline_s, environment)
    took_s = time.monotonic() - begun_s
    counts, reasons = read_report(report)
    verdict = judge(code, counts, deadline_s)
    return Outcome(step.name, verdict, verdict == "passed", took_s, counts, reasons)


def judge(code: int | None, counts: Counter[str], deadline_s: float) -> str:
    """Say "passed" or what is wrong; `code` is None when the deadline ended the step."""
    if code is None:
        return f"failed: not done after {deadline_s:.0f} s"
    if code == SANITIZER_EXIT:
        return "failed: compute-sanitizer found errors (above)"
    if code == 5 or (code == 0 and not counts["passed"]):
        return "failed: no test ran"
    if code:
        return f"failed: {counts['failed']} tests" if counts["failed"] else f"failed: exit code {code}"
    return "passed"


def run_limited(command: Sequence[str], deadline_s: float, environment: dict[str, str]) -> int | None:
    """Run a command with all that it starts; return its exit code, None when it was ended at its deadline."""
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _interrupt(process)
        with contextlib.suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C: pytest then ends what its fixtures have started, and writes its report."""
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def read_report(report: Path) -> tuple[Counter[str], Counter[str]]:
    """Return how many tests passed, failed and were skipped, and the reasons of those that were skipped."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    if not report.exists():
        return counts, reasons
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is not None:
            counts["skipped"] += 1
            reasons[skipped.get("message", "no reason")] += 1
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
        else:
            counts["passed"] += 1
    return counts, reasons


def summary(outcomes: Sequence[Outcome]) -> str:
    """Lay the outcomes out for reading."""
    lines = [f"{'step':<10} {'seconds':>7} {'passed':>6} {'failed':>6} {'skipped':>7}  verdict"]
    for outcome in outcomes:
        counts = outcome.counts
        lines.append(
            f"{outcome.name:<10} {outcome.took_s:>7.0f} {counts['passed']:>6} {counts['failed']:>6} "
            f"{counts['skipped']:>7}  {outcome.verdict}"
        )
        lines += [f"{'':<10} skipped {count}: {reason}" for reason, count in outcome.reasons.most_common()]
    return "\n".join(lines)


def find_sanitizer() -> str:
    """Where compute-sanitizer is; empty when it is nowhere."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.exists() else "")


def _devices() -> str:
    facts = [runtime.device_facts(device) for device in range(runtime.device_count())]
    return "\n".join(
        f"cuda:{device} {fact.name}, {fact.multiprocessors} multiprocessors, {fact.free_bytes / 1e9:.0f} GB free"
        for device, fact in enumerate(facts)
    )


if __name__ == "__main__":
    sys.exit(main())
