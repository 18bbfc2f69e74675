"""Everything that is tested on a GPU, unattended: `python -m tests.gpu --output out/test-gpu`.

A step is one pytest process: a file of `tests/gpu` or of the GPU part of the contract, or kernel tests under compute-sanitizer.
Steps run side by side, the longest first; tests marked `alone` run after all others. Exit code 0: all is right; 2: no GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.kernels.cuda import runtime
from tests.helpers.gpu import SMALL_VARIABLE, environment_for, reason_without_device
from tests.run import environment, run_suite

ROOT = Path(__file__).resolve().parents[2]
LEAST_S = 10.0
"""With less time than this a step is not begun."""
NO_DEVICE = 2
NO_TEST_CHOSEN = 5
"""Pytest's exit code when it was given tests and none of them was to run."""
SANITIZER_EXIT = 86
"""The exit code of compute-sanitizer when the tests pass and it has found something."""


@dataclass(frozen=True)
class Run:
    output: Path
    chosen: str = ""
    at_once: int = 1
    devices: tuple[str, ...] = ()
    """As in CUDA_VISIBLE_DEVICES."""
    begun_s: float = field(default_factory=time.monotonic)


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("out/test-gpu"), help="where the results go (JUnit XML)")
    parser.add_argument("--only", choices=PARTS, action="append", help="run these parts only")
    parser.add_argument("-k", dest="chosen", default="", help="pytest's expression for the tests to run")
    parser.add_argument(
        "--at-once",
        type=int,
        default=max(1, min(MOST_AT_ONCE, cores // CORES_OF_A_STEP)),
        help="processes side by side",
    )
    given = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a script runs in its background ignores Ctrl-C
    if reason_without_device():
        print(f"no GPU tests here: {reason_without_device()}", file=sys.stderr)
        return NO_DEVICE
    for device, fact in enumerate(map(runtime.device_facts, range(runtime.device_count()))):
        free_gb = fact.free_bytes / 1e9
        print(f"cuda:{device} {fact.name}, {fact.multiprocessors} multiprocessors, {free_gb:.0f} GB free", flush=True)
    steps = [step for step in all_steps(ROOT) if not given.only or step.part in given.only]
    print(f"{len(steps)} steps, {given.at_once} at once", flush=True)
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = named.split(",") if named else map(str, range(runtime.device_count()))
    run = Run(given.output.resolve(), given.chosen, given.at_once, tuple(devices))
    bad = run_all(steps, run)
    print(f"\n{len(bad)} of {len(steps)} failed: {', '.join(bad)}" if bad else f"\nall {len(steps)} steps are good")
    return 1 if bad else 0


def run_all(steps: Sequence[Step], run: Run) -> list[str]:
    """Run the steps side by side, then those that run alone. Returns steps that failed and parts in which nothing passed."""
    bad: list[str] = []
    looked: set[str] = set()

    def run_one(step: Step, number: int = 0) -> None:
        begun_s = time.monotonic()
        verdict = run_step(step, run, number)
        if " passed" in verdict or verdict.startswith("skipped:"):
            looked.add(step.part)
        if verdict.startswith("failed"):
            bad.append(step.name)
        print(f"{step.name:<40} {time.monotonic() - begun_s:>5.0f} s  {verdict}", flush=True)

    beside = [step for step in steps if not step.alone]
    with ThreadPoolExecutor(run.at_once) as pool:
        list(pool.map(run_one, beside, range(len(beside))))
    for step in (step for step in steps if step.alone):
        run_one(step)
    return bad + [f"{part}: no test passed" for part in sorted({step.part for step in steps} - looked)]


def run_step(step: Step, run: Run, number: int) -> str:
    """Run one step to its end or its deadline; say how it went. `number` chooses the device that it sees as the first one."""
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "compute-sanitizer"
    sanitizer = shutil.which("compute-sanitizer") or (str(toolkit) if toolkit.exists() else "")
    if step.tool and not sanitizer:
        return "skipped: compute-sanitizer is not on PATH (it comes with the CUDA toolkit)"
    left_s = TOTAL_S - (time.monotonic() - run.begun_s) - (0.0 if step.alone else ALONE_S)
    deadline_s = min(step.deadline_s, left_s)
    if deadline_s < LEAST_S:
        return "failed: not run, the steps before it took all the time"
    report = run.output / f"{step.name}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/plain.ini", "--rootdir", "."]
    command += ["-m", "gpu and alone" if step.alone else "gpu and not alone", "-q", f"--junitxml={report}"]
    chosen = " and ".join(f"({expression})" for expression in (step.chosen, run.chosen) if expression)
    command += [*(["-k", chosen] if chosen else []), *step.targets]
    if step.tool:
        # The API's errors are looked at by the code under test, which expects some of them.
        watch = [sanitizer, "--tool", step.tool, "--error-exitcode", str(SANITIZER_EXIT), "--report-api-errors", "no"]
        command = [*watch, "--target-processes", "application-only", *command]
    outcome = run_suite(step.name, command, _environment(step, run, number), deadline_s)
    if f"exit code {SANITIZER_EXIT}" in outcome.problems:
        return "failed: compute-sanitizer found errors (above)"
    if outcome.problems == [f"exit code {NO_TEST_CHOSEN}"]:
        return "no test ran"
    summary = outcome.told[-1].strip("= ") if outcome.told else ""  # "3 passed, 1 skipped in 2.00s"
    return ", ".join((f"failed: {'; '.join(outcome.problems)}", summary)) if outcome.problems else summary


def _environment(step: Step, run: Run, number: int) -> dict[str, str]:
    found = environment(run.at_once, "default") | environment_for(ROOT)
    found.setdefault("KVBRIDGE_ALLOW_MISSING_TRANSPORTS", "1")
    if len(run.devices) > 1:
        first = number % len(run.devices)  # another device comes first each time
        found["CUDA_VISIBLE_DEVICES"] = ",".join(run.devices[first:] + run.devices[:first])
    if step.tool:
        found[SMALL_VARIABLE] = "1"
    return found


TOTAL_S = 570.0
"""All steps together: a limit. They are meant to take 400 s, the tests that run alone included."""
ALONE_S = 150.0
DEADLINE_S = 300.0
"""For one step; three times what the longest takes."""
PARTS = ("tests", "contract", "memcheck", "racecheck")
SANITIZERS = ("memcheck", "racecheck")
KERNEL_TESTS = ("test_copy_stretches.py", "test_digest.py", "test_swap_in.py", "test_twin_copies.py")
CONTRACT_HALVES = ("nixl", "not nixl")
"""Expressions of pytest that divide each file of the contract: backends share nothing."""
TEST_PIECES = {"tests/gpu/test_turns.py": ("dense", "sparse")}
"""The same for other files that would take too long as one step."""
CORES_OF_A_STEP = 4
"""A step has a test's process, two daemons and their rank workers."""
MOST_AT_ONCE = 8
LONGEST_FIRST = "turns strikes late_writers transport_failures sanitizer adopted transport_local cuda"
"""Files that take more than 25 s on one H200, by how their names begin; the others follow in any order."""


@dataclass(frozen=True)
class Step:
    name: str
    part: str
    targets: tuple[str, ...]
    chosen: str = ""
    alone: bool = False
    """Whether it runs the tests marked `alone`, or those that are not."""
    deadline_s: float = DEADLINE_S

    @property
    def tool(self) -> str:
        """The tool of compute-sanitizer that watches it; empty for none."""
        return self.part if self.part in SANITIZERS else ""


def all_steps(root: Path) -> list[Step]:
    def place(step: Step) -> int:
        name = "sanitizer" if step.tool else step.name.partition("/")[2]
        begins = LONGEST_FIRST.split()
        return next((place for place, begin in enumerate(begins) if name.startswith(begin)), len(begins))

    found = []
    for part, folder in (("tests", "tests/gpu"), ("contract", "tests/contract")):
        for file in sorted(path.relative_to(root).as_posix() for path in (root / folder).glob("test_*.py")):
            for piece in CONTRACT_HALVES if part == "contract" else TEST_PIECES.get(file, ("",)):
                name = "-".join([Path(file).stem.removeprefix("test_"), *piece.split()])
                found.append(Step(f"{part}/{name}", part, (file,), piece))
    kernels = tuple(f"tests/gpu/{name}" for name in KERNEL_TESTS)
    found += [Step(tool, tool, kernels) for tool in SANITIZERS]
    return [*sorted(found, key=place), Step("tests/alone", "tests", ("tests/gpu",), alone=True, deadline_s=ALONE_S)]


if __name__ == "__main__":
    sys.exit(main())
