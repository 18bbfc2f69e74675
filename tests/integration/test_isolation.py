"""What a test leaves in its process is found, and told so that it can be looked for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers import process_state
from tests.helpers.process_state import (
    changed_names,
    changed_settings,
    read_helpers,
    read_names,
    read_settings,
    still_there,
)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the package with state in it."""
    made = ModuleType("kvbridge.example")
    made.held = {}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_settings_that_change_are_named(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    before = read_settings()
    assert not list(changed_settings(before, read_settings()))
    monkeypatch.setenv("LEFT", "here")
    module.held["key"] = "value"
    former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        told = "\n".join(changed_settings(before, read_settings()))
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert "environment variable LEFT: 'here', was 'not there'" in told
    assert "size of kvbridge.example.held: 1, was 0" in told
    assert "handler of SIGUSR1" in told


def test_a_global_name_that_stands_for_something_else_is_named(module: ModuleType) -> None:
    before = read_names()
    module.held = None  # type: ignore[attr-defined]
    assert list(changed_names(before, read_names())) == ["kvbridge.example.held: None, was {}"]


def test_threads_and_children_that_stay_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_state, "GRACE_S", 0.5)
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
    """The plugin at work, in a pytest of its own."""
    file = tmp_path / "test_one.py"
    file.write_text(FILE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.helpers.isolation",
        "--rootdir",
        str(tmp_path),
        str(file),
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 1, found.stdout
    assert "ERROR at teardown of test_that_leaves" in found.stdout
    assert "environment variable LEFT: '1', was 'not there'" in found.stdout
    assert "1 failed, 2 passed, 1 error" in found.stdout
