"""The runner of all suites: what is wrong with one is told, and keeps none of the others from running."""

import sys
from pathlib import Path

import psutil

from tests import run
from tests.helpers.cluster import eventually
from tests.run import Suite, environment, run_suite


def python(script: str, limit_s: float = 60.0) -> list[str]:
    return run_suite("it", [sys.executable, "-c", script], environment(1, "unit"), limit_s).problems


def test_all_suites_run_and_the_summary_says_which_failed(monkeypatch, capfd, tmp_path):
    durations = "import json, os; json.dump({took}, open(os.environ['DURATIONS_OF_TESTS'], 'w')); "
    scripts = {
        "one": durations.format(took={"tests/x.py": 3.0, "tests/w.py": 0.25})
        + "print('FAILED tests/x.py::test_y'); print('1 failed, 2 passed in 3.21s'); raise SystemExit(1)",
        "two": durations.format(took={"tests/y.py": 61.0}) + "print('== 4 passed, 1 skipped in 61.00s (0:01:01) ==')",
    }
    monkeypatch.setattr(run, "SUITES", tuple(Suite(name, (script,), ()) for name, script in scripts.items()))
    monkeypatch.setattr(run, "pytest_command", lambda seed, workers, targets: [sys.executable, "-c", *targets])
    monkeypatch.setattr(run, "DURATIONS", tmp_path / "out" / "durations.json")
    monkeypatch.setattr(sys, "argv", ["run", "--seed", "7", "--workers", "1"])
    assert run.main() == 1
    told = capfd.readouterr().out.partition("again: make test")[2].splitlines()
    assert told == [
        " SEED=7 =====",
        "--- one: exit code 1",
        "FAILED tests/x.py::test_y",
        "1 failed, 2 passed in 3.21s",
        "--- two: passed",
        "== 4 passed, 1 skipped in 61.00s (0:01:01) ==",
        "   61.0 s  tests/y.py",
        "    3.0 s  tests/x.py",
        "    0.2 s  tests/w.py",
    ]
    assert run.read_durations() == {"tests/w.py": 0.25, "tests/x.py": 3.0, "tests/y.py": 61.0}
    monkeypatch.setattr(run, "SUITES", (Suite("two", (scripts["two"],), ()),))
    assert run.main() == 0


def test_a_process_that_is_left_is_told_and_ended(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        f"start_new_session=True, stdout=open({str(tmp_path / 'out')!r}, 'w')).pid)"
    )
    (problem,) = python(script)
    assert problem.startswith("left process ")
    assert "time.sleep(60)" in problem
    pid = int(problem.split()[2])
    eventually("it is dead", lambda: _dead(pid))


def _dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
