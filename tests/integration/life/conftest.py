"""One cluster serves a file of tests of the life of daemons; each test leaves it whole. Helpers ask one daemon."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.daemon.memory import file_prefix
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from tests.helpers.cluster import DaemonProcess, eventually, mutated
from tests.helpers.live_rooms import LiveCluster, http, live_cluster, report, status
from tests.helpers.matrices import kept

TOKENS = 1000
SHUTDOWN_ROOMS_S = 8.0
"""Long enough for a room to be looked at and to end meanwhile on a busy machine."""
SHUTDOWN_CLOSE_S = 16.0
SHUTDOWN_S = SHUTDOWN_ROOMS_S + SHUTDOWN_CLOSE_S
TIMEOUTS = {"shutdown_rooms_s": SHUTDOWN_ROOMS_S, "shutdown_close_s": SHUTDOWN_CLOSE_S, "control_heartbeat_s": 0.2}
EXPIRE_S = 40.0
"""`directory.expire_after_s`: longer than any test takes, so that a name is free for a reason of its own."""
RESTART_S = 2.5
_LATER = f"""
from kvbridge import processes

processes.FIRST_PAUSE_S = processes.LONGEST_PAUSE_S = {RESTART_S}
"""
"""A rank worker that has ended is missed for a while before the next one is there, however slowly that is looked at."""


def restarting_later(daemon: DaemonProcess) -> DaemonProcess:
    return daemon if daemon.role == "bootstrap" else mutated(daemon, daemon_code=_LATER)


ONE_SIDE = pytest.mark.parametrize("daemon", ["prefill", kept("decode", False)], indirect=True)
"""Both nodes have the same code for it."""


def other(live: LiveCluster, daemon: DaemonProcess) -> DaemonProcess:
    return live.decode if daemon is live.prefill else live.prefill


def in_flight(live: LiveCluster) -> int:
    """Return a room that is half way across; both engines are attached."""
    assert live.reader
    room = live.pair(TOKENS)
    live.write(room, TOKENS, 0, 500)
    eventually("the transfer begun", lambda: report(live.prefill, room)["state"] == "transferring")
    return room


def pid(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return daemon.process.pid


def worker_pid(daemon: DaemonProcess) -> int:
    return int(status(daemon)["ranks"][0]["pid"])


def exit_code(daemon: DaemonProcess, timeout_s: float = SHUTDOWN_S + 2) -> int:
    """Wait for the end of a daemon's process, with two seconds more for a busy machine."""
    assert daemon.process is not None
    try:
        return daemon.process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{daemon.name} runs on after {timeout_s} s:\n{daemon.log(20)}") from None


def gone(process: int) -> bool:
    """Whether a process has ended; one without a parent that waited counts."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def shared_files(daemon: DaemonProcess, folder: Path = DEFAULT_DIRECTORY) -> set[str]:
    prefix = file_prefix(str(daemon.config["instance"]), f"{daemon.role}-node-0")
    return {path.name for path in folder.iterdir() if path.name.startswith(prefix)}


def restarted(live: LiveCluster, daemon: DaemonProcess) -> None:
    live.detach()
    daemon.start()
    live.cluster.wait_ready()


def holder(live: LiveCluster, daemon: DaemonProcess) -> str:
    """Return the incarnation that the directory knows by a daemon's name; empty when there is none."""
    shown = http("GET", live.cluster.bootstrap, "/v1/instances").json()
    return next((each["nodes"][0]["incarnation"] for each in shown if each["role"] == daemon.role), "")


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    # Names that no other run on this machine has.
    mine = {"timeouts": TIMEOUTS}
    prefill, decode = (mine | {"instance": f"{role}-{os.getpid()}"} for role in ("prefill", "decode"))
    directory = {"directory": {"expire_after_s": EXPIRE_S}}
    with live_cluster(prefill=prefill, decode=decode, bootstrap=directory, change=restarting_later) as running:
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _whole_again(live: LiveCluster) -> Iterator[None]:
    """Start daemons again that a test has ended."""
    yield
    live.detach()
    for each in live.cluster.all():
        if each.process is not None and each.process.poll() is not None:
            each.start()
    live.cluster.wait_ready()


@pytest.fixture(params=["prefill", "decode"])
def daemon(live: LiveCluster, request: pytest.FixtureRequest) -> DaemonProcess:
    return getattr(live, request.param)
