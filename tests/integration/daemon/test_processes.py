"""Child processes: they end when told and with their parent, they are started again, and no failure of one goes unseen."""

import asyncio
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbridge import processes
from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.errors import DeadlineError, PeerError
from kvbridge.core.ids import Rank
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.node.worker_process import worker_process
from kvbridge.processes import EXIT_ORPHANED, ChildEnd, ChildProcess, SupervisedChild, stop_all, wait_for
from kvbridge.telemetry.logs import Seldom

LIMIT_S = 60.0
READY = "print('ready', flush=True)"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(60)"
SECOND_TIME = (
    "import signal, sys, time; seen = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5) if seen else seen.append(1))\n"
    f"{READY}\n"
    "while True: time.sleep(0.05)"
)


@pytest.fixture
def child(tmp_path):
    made: list[ChildProcess] = []

    def start(code: str, **more) -> ChildProcess:
        child = ChildProcess(f"child {len(made)}", tmp_path / f"{len(made)}.log", **more)
        made.append(child)
        child.launch([sys.executable, "-c", code])
        wait_for("ready", lambda: "ready" in child.log(), timeout_s=20)
        return child

    yield start
    for each in made:
        each.kill()


@pytest.mark.parametrize(
    ("code", "limits", "ended"),
    [
        (STUBBORN, {"timeout_s": 0.2}, -signal.SIGKILL),
        (SECOND_TIME, {"timeout_s": 20, "hurry_after_s": 2.0}, 5),  # two signals at once would be one
    ],
    ids=["a stubborn one is killed", "hurry sends the signal again"],
)
def test_processes_end_together(child, code, limits, ended):
    asked = child(code)
    stop_all([asked], **limits)
    assert asked.process.returncode == ended


def test_stop_is_a_term_signal_and_waiting_notices_an_end_before_its_deadline(child):
    sleeper = f"import time; {READY}; time.sleep(60)"
    assert child(sleeper).stop() == -signal.SIGTERM
    running = child(sleeper)
    with pytest.raises(DeadlineError, match=r"a miracle: not within 0\.05 s"):
        wait_for("a miracle", lambda: None, timeout_s=0.05, watched=[running])
    running.kill()
    with pytest.raises(PeerError, match="killed by SIGKILL"):
        wait_for("a miracle", lambda: None, timeout_s=20, watched=[running])


CHILD = (
    "import signal, sys, time; from kvbridge.processes import end_with_parent\n"
    "end_with_parent(int(sys.argv[1]), signal.SIGTERM, watch_input=True); print('bound', flush=True); time.sleep(600)"
)
PARENT = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())])\n"
    "print(child.pid, flush=True); time.sleep(600)"
)


def test_the_end_of_its_input_ends_it() -> None:
    command = [sys.executable, "-c", CHILD, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write("whatever is said")
            child.stdin.flush()
            assert child.stdout.readline() == "bound\n"
            child.stdin.close()
            assert child.wait(LIMIT_S) == -signal.SIGTERM
        finally:
            child.kill()


def test_the_end_of_its_parent_ends_it_while_somebody_still_holds_the_pipe() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, text=True) as parent:
        os.close(reading)
        try:
            assert parent.stdout is not None
            child = int(parent.stdout.readline())
            process = os.pidfd_open(child)
            assert parent.stdout.readline() == "bound\n"  # the child writes to the same pipe
            parent.kill()
            ended, _, _ = select.select([process], [], [], LIMIT_S)
            os.close(process)
            assert ended
        finally:
            parent.kill()
            os.close(writing)  # ends the child whatever happened


def test_one_whose_parent_is_gone_already_does_not_begin() -> None:
    command = [sys.executable, "-c", CHILD, str(os.getppid())]
    child = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False)
    assert child.returncode == EXIT_ORPHANED


def supervise(tmp_path: Path, on_end: Callable[[ChildEnd], None]) -> SupervisedChild:
    socket = str(tmp_path / "nobody-listens.sock")
    options = {"socket": socket, "setup-timeout-s": "5.0", "role": "prefill", "instance": "i", "node": "n"}
    return worker_process(Rank(pp=0, tp=0), options, Seldom(lambda _event: None), on_end)


async def test_a_start_that_fails_is_reported_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    reports: asyncio.Queue[str] = asyncio.Queue()
    subject = supervise(tmp_path, lambda end: reports.put_nowait(end.reason))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        subject.start()
        async with asyncio.timeout(LIMIT_S):
            assert "the process could not be started: [Errno 24] Too many open files" in await reports.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    async with asyncio.timeout(LIMIT_S):
        while (told := await reports.get()).startswith("the process could not be started"):
            pass
    assert told.startswith("exit code"), "a process was started, and found nobody to serve"
    await subject.stop(1.0, "the test is over")


async def test_a_defect_in_the_care_for_workers_is_raised(tmp_path, monkeypatch):
    def defect(end: ChildEnd) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "executable", os.devnull)  # cannot be started
    subject = supervise(tmp_path, defect)
    subject.start()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(subject.failed(), LIMIT_S)
    await subject.stop(1.0, "the test is over")


async def test_a_worker_runs_no_module_of_the_working_directory(tmp_path, monkeypatch):
    """A user who can write to the daemon's working directory must not run code as the daemon's user."""
    planted, trace = tmp_path / "structlog.py", tmp_path / "was-run"
    planted.write_text(f"open({str(trace)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    ends: asyncio.Queue[str] = asyncio.Queue()
    subject = supervise(tmp_path, lambda end: ends.put_nowait(end.reason))
    subject.start()
    async with asyncio.timeout(LIMIT_S):
        assert await ends.get() == "exit code 3", "it came as far as its socket, at which nobody listens"
    await subject.stop(1.0, "the test is over")
    assert not trace.exists()


async def test_a_worker_that_a_real_time_signal_ends_is_started_again(tmp_path, monkeypatch):
    """Real-time signals have no name."""
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    script = tmp_path / "worker.sh"
    script.write_text(f"#!/bin/sh\nkill -{signal.SIGRTMIN + 5} $$\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    ends: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    subject = supervise(tmp_path, lambda end: ends.put_nowait((end.reason, end.cause)))
    subject.start()
    async with asyncio.timeout(LIMIT_S):
        for _ in range(2):
            assert await ends.get() == (f"killed by signal {signal.SIGRTMIN + 5}", "signal")
    await subject.stop(1.0, "the test is over")


async def test_who_has_killed_a_worker_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PAUSE_S", 0.01)
    script = tmp_path / "worker.sh"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    ends: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    subject = supervise(tmp_path, lambda end: ends.put_nowait((end.reason, end.cause)))
    subject.start()
    async with asyncio.timeout(LIMIT_S):
        for killer in ("the node", "somebody else"):
            while not subject.pid:  # noqa: ASYNC110 - it is started again after a pause
                await asyncio.sleep(0.01)
            if killer == "the node":
                assert subject.kill("it was silent")
                assert await ends.get() == ("killed by SIGKILL (it was silent)", "killed")
                continue
            os.kill(subject.pid, signal.SIGKILL)
            while not processes.is_ending(subject.pid):
                time.sleep(0.001)  # noqa: ASYNC251 - the loop does not hear of the end, as when a connection is heard of first
            assert not subject.kill("its connection ended")
            reason, cause = await ends.get()
            assert (reason.startswith("killed by SIGKILL, not by its node"), cause) == (True, "signal")
    await subject.stop(1.0, "the test is over")


@pytest.mark.parametrize("part", ["its sweeper", "the following of its secrets"])
async def test_a_bootstrap_of_which_a_part_ends_does_not_end_as_if_it_had_been_told_to(monkeypatch, part):
    """Without the following of secrets, changed tokens and certificates would never be in force."""
    daemon = BootstrapDaemon(BootstrapConfig.model_validate({"http": {"port": 0}}))

    async def defect() -> None:
        raise ZeroDivisionError

    if part == "the following of its secrets":
        monkeypatch.setattr(daemon, "_follow_all", defect)
    await daemon.start()
    if part == "its sweeper":
        monkeypatch.setattr(daemon.directory, "expire", defect)
    try:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(daemon.failed(), LIMIT_S)
    finally:
        await daemon.close()
