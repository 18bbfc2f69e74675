"""The runner of the GPU tests: what it runs, in which order, and what it makes of pytest's exit codes and reports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu import __main__ as runner
from tests.gpu.__main__ import (
    NOTHING,
    PASSED,
    ROOT,
    SANITIZER_EXIT,
    Outcome,
    Run,
    add_up,
    heed_interruptions,
    judge,
    read_report,
    run_all,
    run_limited,
    run_step,
    summary,
)
from tests.gpu.steps import (
    ALONE_S,
    MEASURED_S,
    PARTS,
    TEST_PIECES,
    TOTAL_S,
    Step,
    all_steps,
    devices_in_turn,
    steps_at_once,
    time_for,
)

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><skipped message="needs two GPUs"/></testcase>
<testcase name="c"><failure message="no"/></testcase><testcase name="d"><error message="no"/></testcase>
<testcase name="e"><skipped message="needs two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_a_report_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(REPORT)
    counts, reasons = read_report(file)
    assert counts == {"passed": 1, "failed": 2, "skipped": 2}
    assert reasons == {"needs two GPUs": 2}
    assert read_report(tmp_path / "none.xml") == (Counter(), Counter())


@pytest.mark.parametrize(
    ("code", "counts", "verdict"),
    [
        (0, {"passed": 3}, PASSED),
        (1, {"passed": 3, "failed": 2}, "failed: 2 tests"),
        (0, {"skipped": 3}, NOTHING),
        (5, {}, NOTHING),
        (4, {}, "failed: exit code 4"),
        (-11, {}, "failed: exit code -11"),
        (None, {"passed": 3}, "failed: not done after 7 s"),
        (SANITIZER_EXIT, {"passed": 3}, "failed: compute-sanitizer found errors (above)"),
    ],
)
def test_verdicts(code: int | None, counts: dict[str, int], verdict: str) -> None:
    assert judge(code, Counter(counts), 7.0) == verdict


def test_every_test_is_in_one_step_and_the_longest_begins_first() -> None:
    steps = all_steps(ROOT)
    side_by_side, last = steps[:-1], steps[-1]
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    whole = [target for step in side_by_side if step.part == "tests" and not step.chosen for target in step.targets]
    assert sorted([*whole, *TEST_PIECES]) == files
    for file, pieces in TEST_PIECES.items():
        assert sorted(step.chosen for step in side_by_side if step.targets == (file,)) == sorted(pieces)
    for file in (ROOT / "tests/contract").glob("test_*.py"):
        halves = [step.chosen for step in side_by_side if step.targets == (f"tests/contract/{file.name}",)]
        assert sorted(halves) == ["nixl", "not nixl"]
    assert {step.part for step in steps} == set(PARTS)
    assert [step.tool for step in steps if step.tool] == ["racecheck", "memcheck"]
    assert side_by_side[0].name == max(MEASURED_S, key=lambda name: MEASURED_S[name])
    assert last.alone
    assert not any(step.alone for step in side_by_side)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert set(MEASURED_S) <= set(names), "a file that was measured is no more"
    assert all((ROOT / target).exists() for step in steps for target in step.targets)


def test_what_runs_alone_has_its_time_whatever_the_others_took() -> None:
    step, alone = Step("a", "tests", (), deadline_s=300.0), Step("b", "tests", (), alone=True, deadline_s=ALONE_S)
    assert time_for(step, 0.0) == 300.0
    assert time_for(step, TOTAL_S - ALONE_S - 20.0) == 20.0
    assert time_for(step, TOTAL_S - ALONE_S) == 0.0
    assert time_for(alone, TOTAL_S - ALONE_S) == ALONE_S
    assert time_for(alone, TOTAL_S - 30.0) == 30.0


def test_steps_at_once_by_cores() -> None:
    assert [steps_at_once(cores) for cores in (1, 2, 16, 32, 64, 192)] == [1, 1, 4, 8, 8, 8]


def test_each_device_is_the_first_one_in_turn() -> None:
    assert [devices_in_turn(["0", "1"], number) for number in range(3)] == ["0,1", "1,0", "0,1"]
    assert devices_in_turn(["GPU-a", "GPU-b", "GPU-c"], 5) == "GPU-c,GPU-a,GPU-b"


def run_of(output: Path, *, at_once: int = 1, devices: tuple[str, ...] = ()) -> Run:
    return Run(output, at_once=at_once, devices=devices)


def test_steps_run_side_by_side_and_what_runs_alone_runs_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running: set[str] = set()
    seen: list[tuple[str, int, frozenset[str]]] = []

    async def stand_in(step: Step, run: Run, number: int) -> Outcome:
        running.add(step.name)
        for _ in range(3):
            await asyncio.sleep(0)
        seen.append((step.name, number, frozenset(running)))
        running.discard(step.name)
        return Outcome(step.name, PASSED, good=True, counts=Counter(passed=1))

    monkeypatch.setattr(runner, "run_step", stand_in)
    steps = [Step(name, part, ()) for name, part in (("a", "tests"), ("b", "contract"), ("c", "tests"))]
    steps.insert(1, Step("last", "tests", (), alone=True))
    found = asyncio.run(run_all(steps, run_of(tmp_path, at_once=2)))
    assert [(name, number) for name, number, _ in seen] == [("a", 0), ("b", 1), ("c", 2), ("last", 0)]
    assert seen[0][2] == {"a", "b"}
    assert max(len(together) for _, _, together in seen) == 2
    assert seen[-1][2] == {"last"}
    assert {part: [outcome.name for outcome in outcomes] for part, outcomes in found.items()} == {
        "tests": ["a", "c", "last"],
        "contract": ["b"],
    }
    assert capsys.readouterr().out.count(PASSED) == 4


def test_a_part_is_the_sum_of_its_steps() -> None:
    well = Outcome("a", PASSED, True, 2.0, Counter(passed=3), Counter(why=1))
    none = Outcome("b", NOTHING, True, 1.0)
    bad = Outcome("c", "failed: 1 tests", False, 4.0, Counter(passed=1, failed=1), Counter(why=2))
    assert add_up("tests", [well, none]) == Outcome("tests", PASSED, True, 3.0, Counter(passed=3), Counter(why=1))
    assert add_up("tests", [none]).verdict == "failed: no test ran"
    assert not add_up("tests", [none]).good
    total = add_up("tests", [bad, well])
    assert (total.good, total.verdict, total.took_s) == (False, "c failed: 1 tests", 6.0)
    assert (total.counts, total.reasons) == (Counter(passed=4, failed=1), Counter(why=3))
    late = Outcome("d", "not run: the steps before it took all the time", False)
    assert not add_up("tests", [well, late]).good


@pytest.fixture
def sigint_ignored() -> Iterator[None]:
    """As for whatever a script starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.outside
def test_a_hanging_step_ends_at_its_deadline_with_its_children(tmp_path: Path, sigint_ignored: None) -> None:
    heed_interruptions()
    child, log = tmp_path / "child", tmp_path / "log"
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); print('begun', flush=True); time.sleep(60)"
    )
    assert asyncio.run(run_limited([sys.executable, "-c", script], 10.0, dict(os.environ), log)) is None
    assert log.read_text().startswith("begun\nTraceback"), "it was interrupted, and could still say something"
    assert_ends(int(child.read_text()))


def test_nothing_runs_on_when_the_run_is_interrupted(tmp_path: Path) -> None:
    child = tmp_path / "child"
    os.mkfifo(child)
    script = f"import os, time; open({str(child)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    pids = []

    async def interrupted() -> None:
        run = run_limited([sys.executable, "-c", script], 60.0, dict(os.environ), tmp_path / "log")
        running = asyncio.create_task(run)
        pids.append(int(await asyncio.to_thread(child.read_text)))
        running.cancel()
        await running

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert_ends(pids[0])


def assert_ends(pid: int) -> None:
    until_s = time.monotonic() + 20
    while _lives(pid):
        assert time.monotonic() < until_s, "the child outlived its step"


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_a_step_runs_where_pytest_has_no_plugins(tmp_path: Path) -> None:
    step = Step("tests/none", "tests", ("tests/unit/bench/test_gpu_runner.py",))
    outcome = asyncio.run(run_step(step, run_of(tmp_path)))
    assert outcome.verdict == NOTHING  # none of these is marked `gpu`
    assert "deselected" in (tmp_path / "tests/none.log").read_text()
    assert (tmp_path / "tests/none.xml").exists()


def test_a_missing_sanitizer_is_a_skip_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "find_sanitizer", lambda: "")
    step = Step("memcheck", "memcheck", ())
    outcome = add_up("memcheck", [asyncio.run(run_step(step, run_of(tmp_path)))])
    assert outcome.good
    assert outcome.verdict.startswith("skipped: compute-sanitizer is not on PATH")
    text = summary([outcome, Outcome("tests", "failed: 1 tests", False, 3.0, Counter(failed=1), Counter(why=2))])
    assert "skipped 2: why" in text
    assert "failed: 1 tests" in text
