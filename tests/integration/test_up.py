"""From nothing to a request, as a newcomer goes: init, up, what it says to try, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbridge.daemon.announce import read_endpoint
from tests.helpers.cluster import eventually

KVBRIDGE = [sys.executable, "-m", "kvbridge"]


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def initialised(folder: Path, *arguments: str) -> None:
    """A directory as `init` writes it, on ports that are free."""
    subprocess.run([*KVBRIDGE, "init", str(folder), "--one-host", *arguments], check=True, capture_output=True)
    moved = dict(zip(("7900", "7901", "7902"), map(str, free_ports(3)), strict=True))
    for file in folder.glob("*.yaml"):
        file.write_text(re.sub("790[012]", lambda found: moved[found[0]], file.read_text()))


@contextmanager
def up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`kvbridge up`, what it prints in the file `said`; Ctrl-C ends it at the latest when the test does."""
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(
            ["env", "--default-signal=INT", *KVBRIDGE, "up", str(folder)], stdout=said, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(60)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as socket paths have to be."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as path:
        yield Path(path) / "c"


def said(folder: Path, text: str) -> str:
    """What `up` has printed, once a text is in it."""
    eventually(text, lambda: text in (folder / "said").read_text(), timeout_s=90.0)
    return (folder / "said").read_text()


def move_a_request(folder: Path) -> None:
    """Do in a shell what `up` says."""
    steps = re.search(r"^  room=.*wait$", said(folder, "Ctrl-C drains"), re.MULTILINE | re.DOTALL)[0]
    done = subprocess.run(["bash", "-ec", steps], capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout.startswith("c4_kv layer 2 (250, 104) {2}"), (done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_from_nothing_to_a_request_with_keys(folder: Path) -> None:
    initialised(folder, "--secure")
    with up(folder) as process:
        subprocess.run([*KVBRIDGE, "wait", str(folder), "--timeout", "90"], check=True)
        move_a_request(folder)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    drained = re.findall(r"^(\w+) +\| .*\] draining ", (folder / "said").read_text(), re.MULTILINE)
    assert sorted(drained) == ["decode", "prefill"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_daemon_that_dies_is_told_and_a_second_cluster_on_the_same_ports_ends(folder: Path) -> None:
    initialised(folder)
    with up(folder) as process:
        said(folder, "Ctrl-C drains")
        second = subprocess.run([*KVBRIDGE, "up", str(folder)], capture_output=True, text=True, timeout=90, check=False)
        os.kill(read_endpoint(folder / "run" / "decode").pid, signal.SIGKILL)
        printed = said(folder, "not ready any more")
        assert process.poll() is None
    assert process.returncode == 1
    assert second.returncode == 1
    assert "bootstrap ended (exit code 2); its log ends:" in second.stdout
    assert "cannot listen there" in second.stdout
    assert "ready after" not in second.stdout
    assert "decode ended (killed by SIGKILL); its log ends:" in printed
    assert f"to have it again: kvbridge decode --config {folder}/decode.yaml" in printed
