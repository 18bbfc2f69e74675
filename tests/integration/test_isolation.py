"""Leftovers of a test in its process are found, and named so that one can look for them."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.helpers import isolation
from tests.helpers.isolation import read_helpers, still_there


def test_threads_and_children_that_stay_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "GRACE_S", 0.5)
    before, end = read_helpers(), threading.Event()
    thread = threading.Thread(target=end.wait, name="stays")
    thread.start()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        told = still_there(before, read_helpers)
    finally:
        end.set()
        thread.join()
        child.communicate(b"\n")
    assert sorted(line.split()[0] for line in told) == ["child", "thread"]
    assert any(line.endswith(": stays") for line in told)
    assert any(str(child.pid) in line for line in told)
    assert still_there(before, read_helpers) == []


FILE = """
import os, threading
def test_that_leaves(): os.environ["LEFT"] = "1"
def test_that_does_not(monkeypatch): monkeypatch.setenv("OTHER", "1")
def test_that_fails(): assert False
"""


def test_pytest_names_the_test(tmp_path: Path) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(FILE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.helpers.isolation",
        f"--rootdir={tmp_path}",
        str(file),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 1, found.stdout
    assert "ERROR at teardown of test_that_leaves" in found.stdout
    assert "environment variable LEFT: '1', was 'not there'" in found.stdout
    assert "1 failed, 2 passed, 1 error" in found.stdout
