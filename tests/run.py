"""`make test` and `make test-all`: every suite in a process of its own, all at the same time, and one summary.

Files of a suite run side by side, those first that took long the last time, and otherwise in an order drawn from a seed:
`make test SEED=...` draws the same order again. The seconds of each file are in out/durations.json. The exit code is 0 only
when every suite passed and left no process behind.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 3600.0
"""For one suite: longer than any takes, so that one that hangs is told and the next ones run."""
GRACE_S = 60.0
"""From the interruption at the limit to SIGKILL."""
QUIET_S = 15.0
"""When a suite has printed nothing for so long, a line says for how long it runs."""
LAST_WORDS_S = 30.0
"""For what is still in a suite's pipe after its end."""
DURATIONS = ROOT / "out" / "durations.json"
"""Seconds of each file of tests in its last run, by its path."""
NEW_DURATIONS = "DURATIONS_OF_TESTS"
"""An environment variable with the file to which pytest writes what each file took."""
SLOWEST = 20
"""Files that the summary names."""
MARK = "RUN_OF_TESTS"
"""An environment variable that everything inherits which a suite starts: so what is left of it is found."""
TOLD = re.compile(r"^(FAILED|ERROR) |^(=+ )?\d+ (passed|failed|error|skipped|deselected)\b.* in [\d.]+s")
"""The lines of pytest that the summary repeats."""


@dataclass(frozen=True)
class Suite:
    """Tests that share their processes."""

    name: str
    short: tuple[str, ...] | None
    """Arguments of pytest for `make test`; None: it has no part there."""
    whole: tuple[str, ...]
    """Arguments of pytest for `make test-all`."""


@dataclass
class Outcome:
    """The outcome of a suite."""

    suite: str
    problems: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    """The lines of its own summary."""
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds of each file."""


SUITES = (
    Suite("main", ("-m", "not thorough"), ()),
    Suite("contract", ("tests/contract",), ("tests/contract",)),
    Suite("faults", ("tests/faults", "-m", "faults_short"), ("tests/faults",)),
    # Real engines: started once, so in one process.
    Suite("sglang", None, ("tests/sglang", "-m", "sglang_short", "-n", "0")),
    Suite("vllm", None, ("tests/vllm", "-m", "vllm_short", "-n", "0")),
)
UNIT = Suite("unit", ("tests/unit", "-m", "not thorough and not outside and not slow"), ("tests/unit",))
"""A part of the main suite, for `make unit`."""


def main() -> int:
    """Run the suites and say how they went."""
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument(
        "--all", action="store_true", help="full matrices, all faults, twenty times the random examples"
    )
    parser.add_argument(
        "--only", choices=[suite.name for suite in (*SUITES, UNIT)], action="append", help="run these suites"
    )
    parser.add_argument("--seed", type=int, help="of the order and of random numbers; drawn when not given")
    parser.add_argument("--workers", type=int, help="files that run at once; as many as there are cores, up to 8")
    given = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if given.seed is None else given.seed
    workers = given.workers or min(8, len(os.sched_getaffinity(0)))
    suites = [suite for suite in (*SUITES, UNIT) if suite.name in given.only] if given.only else SUITES
    suites = [suite for suite in suites if given.all or suite.short is not None]
    if not suites:
        parser.error(f"{', '.join(given.only)}: only --all has cases of it")
    print(f"===== {', '.join(suite.name for suite in suites)}: SEED={seed} WORKERS={workers} =====", flush=True)

    def run(suite: Suite) -> Outcome:
        # The main suite computes, the others wait for most of their time.
        own_workers = workers if suite is suites[0] else max(1, workers // 2)
        command = pytest_command(seed, own_workers, suite.whole if given.all else suite.short)
        profile = "thorough" if given.all else "unit" if suite is UNIT else "default"
        return run_suite(suite.name, command, environment(workers, profile))

    with ThreadPoolExecutor(len(suites)) as pool:
        outcomes = list(pool.map(run, suites))
    durations = {file: took_s for outcome in outcomes for file, took_s in outcome.durations.items()}
    _keep(durations)
    failed = [outcome.suite for outcome in outcomes if outcome.problems]
    print(f"\n===== {', '.join(failed) + ' failed' if failed else 'all passed'}; again: make test SEED={seed} =====")
    for outcome in outcomes:
        print(f"--- {outcome.suite}: {'; '.join(outcome.problems) or 'passed'}", *outcome.told, sep="\n")
    slowest = sorted(durations.items(), key=lambda item: -item[1])[:SLOWEST]
    print(*(f"{took_s:7.1f} s  {file}" for file, took_s in slowest), sep="\n", flush=True)
    return 1 if failed else 0


def _keep(durations: dict[str, float]) -> None:
    """Write what files took over what they took before."""
    if durations:
        DURATIONS.parent.mkdir(exist_ok=True)
        DURATIONS.write_text(json.dumps(read_durations() | durations, indent=1, sort_keys=True) + "\n")


def read_durations() -> dict[str, float]:
    """Return what each file took in its last run, as far as that is known."""
    try:
        found: dict[str, float] = json.loads(DURATIONS.read_text())
    except (OSError, ValueError):
        return {}
    return found


def pytest_command(seed: int, workers: int, targets: Sequence[str]) -> list[str]:
    """Run pytest on some targets, in the order of a seed."""
    side_by_side = ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"] if workers > 1 else []
    colour = ["--color=yes"] if sys.stdout.isatty() else []
    seeds = [f"--randomly-seed={seed}", f"--hypothesis-seed={seed}"]
    return [sys.executable, "-m", "pytest", *seeds, *side_by_side, *colour, *targets]


def environment(workers: int, profile: str) -> dict[str, str]:
    """The environment of a suite's processes. `profile`: of Hypothesis, unless the environment has one."""
    found = {**os.environ, MARK: secrets.token_hex(8)}
    # A suite starts hundreds of processes; without bytecode on disk each of them would compile the package again.
    found.pop("PYTHONDONTWRITEBYTECODE", None)
    # Tensor libraries take every core in every process otherwise.
    found.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    found.setdefault("HYPOTHESIS_PROFILE", profile)
    return found


def run_suite(name: str, command: Sequence[str], environment: dict[str, str], limit_s: float = LIMIT_S) -> Outcome:
    """Run a suite, showing what it prints."""
    outcome, printed = Outcome(name), bytearray()
    with tempfile.TemporaryDirectory() as folder:
        durations = Path(folder) / "durations.json"
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {NEW_DURATIONS: str(durations)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        show = threading.Thread(target=_copy, args=(name, process.stdout.fileno(), printed), daemon=True)
        show.start()
        try:
            code = process.wait(limit_s)
            outcome.problems += [f"exit code {code}"] if code else []
        except subprocess.TimeoutExpired:
            outcome.problems.append(f"not done after {limit_s:.0f} s")
        finally:
            _end(process)
        if durations.exists():
            outcome.durations = json.loads(durations.read_text())
    outcome.problems += [f"left process {pid} running: {command}" for pid, command in end_left(environment[MARK])]
    show.join(LAST_WORDS_S)
    if not show.is_alive():
        process.stdout.close()
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed.decode(errors="replace"))
    outcome.told = [line for line in plain.splitlines() if TOLD.match(line)]
    return outcome


def _copy(name: str, descriptor: int, printed: bytearray) -> None:
    """Show what a suite prints line by line, as others print at the same time."""
    begun_s, rest = time.monotonic(), b""
    while True:
        if not select.select([descriptor], [], [], QUIET_S)[0]:
            print(f"{name}: ({time.monotonic() - begun_s:.0f} s; nothing new for {QUIET_S:g} s)", flush=True)
            continue
        chunk = os.read(descriptor, 1 << 16)
        printed += chunk
        *lines, rest = (rest + chunk).split(b"\n")
        lines += [] if chunk else [rest]
        sys.stdout.buffer.write(b"".join(b"%s: %s\n" % (name.encode(), line) for line in lines))
        sys.stdout.buffer.flush()
        if not chunk:
            return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End pytest if it still runs: first as Ctrl-C does, so that it ends what its fixtures have started."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def end_left(mark: str) -> list[tuple[int, str]]:
    """Kill every process that a suite has left, and return them."""
    wanted, found = f"{MARK}={mark}".encode(), []
    until_s = time.monotonic() + LAST_WORDS_S
    while True:
        found = [(pid, _command(pid)) for pid in _processes() if wanted in _environment(pid)]
        if not found or time.monotonic() > until_s:
            break
        time.sleep(0.1)
    for pid, _ in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return []


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
