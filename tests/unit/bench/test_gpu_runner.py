"""The runner of the GPU tests: what it makes of pytest's exit codes and reports."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.__main__ import SANITIZER_EXIT, Outcome, Step, judge, read_report, run_limited, run_step, summary

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
        (0, {"passed": 3}, "passed"),
        (1, {"passed": 3, "failed": 2}, "failed: 2 tests"),
        (0, {"skipped": 3}, "failed: no test ran"),
        (5, {}, "failed: no test ran"),
        (-11, {}, "failed: exit code -11"),
        (None, {"passed": 3}, "failed: not done after 7 s"),
        (SANITIZER_EXIT, {"passed": 3}, "failed: compute-sanitizer found errors (above)"),
    ],
)
def test_verdicts(code: int | None, counts: dict[str, int], verdict: str) -> None:
    assert judge(code, Counter(counts), 7.0) == verdict


def test_a_hanging_step_ends_at_its_deadline_with_its_children(tmp_path: Path) -> None:
    child = tmp_path / "child"
    script = (
        "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60']);"
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    assert run_limited([sys.executable, "-c", script], 1.0, dict(os.environ)) is None
    pid = int(child.read_text())
    until_s = time.monotonic() + 5
    while _lives(pid):
        assert time.monotonic() < until_s, "the child outlived its step"


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False


def test_a_step_runs_where_pytest_has_no_plugins(tmp_path: Path) -> None:
    outcome = run_step(Step("none", ("tests/unit/bench/test_gpu_runner.py",), 60.0), tmp_path, "", 60.0)
    assert outcome.verdict == "failed: no test ran"  # none of these is marked `gpu`
    assert not outcome.good


def test_a_missing_sanitizer_is_a_skip_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.__main__.find_sanitizer", lambda: "")
    outcome = run_step(Step("memcheck", (), 60.0, "memcheck"), tmp_path, "", 60.0)
    assert outcome.good
    assert outcome.verdict.startswith("skipped: compute-sanitizer is not on PATH")
    text = summary([outcome, Outcome("tests", "failed: 1 tests", False, 3.0, Counter(failed=1), Counter(why=2))])
    assert "skipped 2: why" in text
    assert "failed: 1 tests" in text
