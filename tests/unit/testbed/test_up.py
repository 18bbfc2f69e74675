"""How `kvbridge up` ends daemons that do not obey, and what Ctrl-C interrupts."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from kvbridge.cli.cluster_directory import read_cluster
from kvbridge.cli.main import app
from kvbridge.testbed import up
from kvbridge.testbed.signals import Interrupts
from kvbridge.testbed.up import ForegroundCluster, ShownDaemon
from tests.helpers.cluster import eventually

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
LEFT = "kvbridge-0123456789ab-0123456789abcdef.device"
"""As pools are called."""


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def deaf(tmp_path: Path, said: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ShownDaemon]]:
    """A cluster whose daemons ignore SIGTERM, with a file in what stands for shared memory."""
    assert CliRunner().invoke(app, ["init", str(tmp_path / "c"), "--one-host"]).exit_code == 0
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / LEFT).write_bytes(bytes(4096))
    (tmp_path / "c" / "logs").mkdir()
    monkeypatch.setattr(up, "shared_directories", lambda _daemons: [tmp_path / "shm"])
    console = Console(file=said, width=200)
    daemons = [ShownDaemon(each, console, Text(each.name)) for each in read_cluster(tmp_path / "c")]
    for daemon in daemons:
        daemon.launch([sys.executable, "-c", DEAF])
        eventually("deaf", lambda daemon=daemon: "deaf" in daemon.log())
    yield daemons
    for daemon in daemons:
        daemon.kill()


def test_what_does_not_end_is_killed_and_what_it_leaves_is_removed(
    deaf: list[ShownDaemon], said: io.StringIO, tmp_path: Path
) -> None:
    with Interrupts() as interrupts:
        cluster = ForegroundCluster(deaf, Console(file=said, width=200), interrupts)
        interrupts.only_counted()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        cluster.end()
    assert [each.process.returncode for each in deaf if each.process] == [-signal.SIGKILL] * 3
    assert not any(each.ended_in_peace for each in deaf)
    assert all(f"{each.name} did not end in time and was killed" in said.getvalue() for each in deaf)
    assert "removed from shared memory: 1 files, 4.1 kB" in said.getvalue()
    assert not (tmp_path / "shm" / LEFT).exists()


def test_told_once_more_they_have_seconds_left(deaf: list[ShownDaemon], said: io.StringIO, monkeypatch) -> None:
    monkeypatch.setattr(up, "GRACE_S", 0.2)
    with Interrupts() as interrupts:
        cluster = ForegroundCluster(deaf, Console(file=said, width=200), interrupts)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        cluster.end()
    assert [each.running for each in deaf] == [False] * 3


def test_the_first_signal_is_raised_and_the_others_are_counted() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.more == 3


def test_a_step_that_is_held_is_done_first() -> None:
    done = []

    def step() -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGHUP)
            done.append("whole")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            step()
        assert done == ["whole"]
        assert interrupts.more == 0
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.more == 1


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
