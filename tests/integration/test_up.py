"""From nothing to a request, as a newcomer goes: init, up, what it says to try, Ctrl-C."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from tests.helpers.local_servers import held_ports
from tests.helpers.matrices import kept

SAID_S, END_S = 90.0, 60.0
KVBRIDGE = (sys.executable, "-m", "kvbridge")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class TriedCluster:
    """A newcomer's cluster: a directory that `kvbridge init` wrote, `kvbridge up` on it, and what that printed."""

    def __init__(self, folder: Path, ports: Sequence[int]) -> None:
        self.folder = folder
        self._where = {"cwd": folder.parent, "text": True}
        self.ports = dict(zip(("bootstrap", "prefill", "decode"), ports, strict=True))

    def init(self, *arguments: str) -> None:
        told = self.run("init", str(self.folder), "--one-host", *arguments)
        assert told.returncode == 0, told.stderr
        moved = dict(zip(("7900", "7901", "7902"), map(str, self.ports.values()), strict=True))
        for file in self.folder.glob("*.yaml"):
            file.write_text(re.sub("790[012]", lambda found: moved[found[0]], file.read_text()))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([*KVBRIDGE, *arguments], SAID_S + END_S)

    def _run(self, command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, **self._where, capture_output=True, timeout=limit_s, check=False)

    @contextmanager
    def up(self) -> Iterator[subprocess.Popen[str]]:
        # Ctrl-C reaches it, though tests may run in the background, where it is ignored.
        command = ["env", "--default-signal=INT", *KVBRIDGE, "up", str(self.folder)]
        with (
            (self.folder / "said").open("w") as output,
            subprocess.Popen(command, **self._where, stdout=output, stderr=subprocess.STDOUT) as process,
        ):
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                process.wait(END_S)

    def url(self, role: str) -> str:
        return f"http://127.0.0.1:{self.ports[role]}"

    def said(self, text: str) -> str:
        found = self.folder / "said"
        try:
            eventually(text, lambda: text in found.read_text(), timeout_s=SAID_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; said:\n{found.read_text()}") from None
        return found.read_text()

    def move_a_request(self) -> None:
        """Do in a shell what `up` says to try, and check what decode's engine has read."""
        steps = re.search(r"^  room=.*wait$", self.said("Ctrl-C drains"), re.MULTILINE | re.DOTALL)
        assert steps
        done = self._run(["bash", "-ec", steps[0]], SAID_S)
        assert done.stdout.startswith("swa_kv layer 5 (128, 104) {5}"), (done.stdout, done.stderr)


@pytest.fixture
def tried() -> Iterator[TriedCluster]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder, held_ports(3) as ports:
        yield TriedCluster(Path(folder) / "c", ports)


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
