"""From nothing to a request, as a newcomer goes: init, up, what it says to try, Ctrl-C."""

import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.cli import up
from kvbridge.cli.main import app
from kvbridge.cli.signals import Interrupts
from kvbridge.cli.up import ConfiguredDaemon, ForegroundCluster, read_cluster
from tests.helpers.cluster import eventually
from tests.helpers.matrices import kept
from tests.helpers.tried_cluster import END_S, TriedCluster, short_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def tried() -> Iterator[TriedCluster]:
    with short_folder() as folder:
        yield TriedCluster(folder / "c")


def test_from_nothing_to_a_request_with_keys(tried: TriedCluster) -> None:
    tried.init("--secure")
    with tried.up() as process:
        assert tried.run("wait", str(tried.folder), "--timeout", "90").returncode == 0
        tried.move_a_request()
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    drained = re.findall(r"^(\w+) +\| .*\] draining ", tried.said(""), re.MULTILINE)
    assert sorted(drained) == ["decode", "prefill"]


def test_a_daemon_that_dies_is_told_and_a_cluster_that_runs_is_not_started_again(tried: TriedCluster) -> None:
    tried.init()
    with tried.up() as process:
        tried.said("Ctrl-C drains")
        second = tried.run("up", str(tried.folder))
        os.kill(read_endpoint(tried.folder / "run" / "decode").pid, signal.SIGKILL)
        tried.said("not ready any more")
        printed = tried.said("to start it again")  # its end may be seen a moment after its silence
        assert process.poll() is None
    assert process.returncode == 1
    assert second.returncode == 1
    assert "runs already: bootstrap (pid " in second.stdout + second.stderr
    assert "ready after" not in second.stdout
    assert "decode ended (killed by SIGKILL); its log ends:" in printed
    assert f"to start it again: kvbridge decode --config {tried.folder}/decode.yaml" in printed


@pytest.mark.thorough
def test_ctrl_c_twice_does_not_wait_for_rooms(tried: TriedCluster) -> None:
    tried.init()
    with tried.up() as process:
        tried.said("Ctrl-C drains")
        answer = httpx.post(f"{tried.url('bootstrap')}/v1/requests", json={"prompt_tokens": 1000}, trust_env=False)
        assert answer.status_code == 201, answer.text
        process.send_signal(signal.SIGINT)
        told = tried.said("rooms=1")
        assert "told to end: bootstrap, prefill, decode; at most 35 s (once more: at once)" in told
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    hurried = [line.split()[0] for line in tried.said("").splitlines() if "effect='closing now'" in line]
    assert {"prefill", "decode"} <= set(hurried), "and bootstrap, if it is still there"


def daemons_of(root: psutil.Process) -> list[psutil.Process]:
    """Its children that are daemons; libraries have children of their own while they are imported (ldconfig)."""
    found = []
    for child in root.children():
        with suppress(psutil.NoSuchProcess):
            if "--config" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.parametrize("started", [kept(1, False), 2, kept(3, False)])
def test_ctrl_c_during_the_start_leaves_nothing(tried: TriedCluster, started: int) -> None:
    tried.init()
    with tried.up() as process:
        root = psutil.Process(process.pid)
        eventually(f"{started} daemons", lambda: len(daemons_of(root)) >= started, timeout_s=END_S)
        children = root.children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
    assert "told to end: bootstrap" in tried.said("")
    assert not [each for each in children if each.is_running()]
    assert not list((tried.folder / "run").glob("*/daemon.json"))


@pytest.mark.thorough
def test_a_daemon_that_hangs_is_heard_of_and_ended(tried: TriedCluster) -> None:
    tried.init()
    with tried.up() as process:
        tried.said("Ctrl-C drains")
        os.kill(read_endpoint(tried.folder / "run" / "decode").pid, signal.SIGSTOP)
        tried.said("not ready any more: ")
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
LEFT = "kvbridge-0123456789ab-0123456789abcdef.device"
"""As pools are called."""


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ConfiguredDaemon]]:
    """A cluster whose daemons ignore SIGTERM, with a file in what stands for shared memory."""
    assert CliRunner().invoke(app, ["init", str(tmp_path / "c"), "--one-host"]).exit_code == 0
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / LEFT).write_bytes(bytes(4096))
    (tmp_path / "c" / "logs").mkdir()
    monkeypatch.setattr(up, "shared_directories", lambda _daemons: [tmp_path / "shm"])
    daemons = read_cluster(tmp_path / "c")
    for daemon in daemons:
        daemon.launch([sys.executable, "-c", DEAF])
        eventually("deaf", lambda daemon=daemon: "deaf" in daemon.log())
    yield daemons
    for daemon in daemons:
        daemon.kill()


def test_what_does_not_end_is_killed_and_what_it_leaves_is_removed(deaf, said, tmp_path):
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
