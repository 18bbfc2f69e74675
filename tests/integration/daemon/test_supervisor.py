"""A rank worker that cannot be started, and tasks of a daemon that end by a defect: neither goes unseen."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from pathlib import Path

import pytest

from kvbridge.config.schema import BootstrapConfig
from kvbridge.core.ids import Rank
from kvbridge.daemon import supervisor
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.daemon.supervisor import Supervisor
from kvbridge.telemetry.logs import Seldom

pytestmark = pytest.mark.asyncio

R0 = Rank(pp=0, tp=0)
WAIT_S = 30.0


def supervise(tmp_path: Path, on_gone) -> Supervisor:
    return Supervisor(
        [R0],
        socket=tmp_path / "nobody-listens.sock",
        options={"setup-timeout-s": "5.0", "role": "prefill", "instance": "i", "node": "n"},
        on_gone=on_gone,
        seldom=Seldom(lambda _event: None),
    )


async def test_a_start_that_fails_is_reported_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    reports: asyncio.Queue[str] = asyncio.Queue()
    subject = supervise(tmp_path, lambda _rank, reason, _cause: reports.put_nowait(reason))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        subject.start()
        async with asyncio.timeout(WAIT_S):
            assert "start failed: [Errno 24] Too many open files" in await reports.get()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    async with asyncio.timeout(WAIT_S):
        while (told := await reports.get()).startswith("start failed"):
            pass
    assert told.startswith("exit code"), "a process was started, and found nobody to serve"
    await subject.stop(1.0)


async def test_a_defect_in_the_care_for_workers_is_raised(tmp_path, monkeypatch):
    def defect(rank: Rank, reason: str, cause: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(sys, "executable", os.devnull)  # cannot be started
    subject = supervise(tmp_path, defect)
    subject.start()
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(subject.failed(), WAIT_S)
    await subject.stop(1.0)


async def test_a_bootstrap_whose_sweeper_ends_does_not_end_as_if_it_had_been_told_to(monkeypatch):
    daemon = BootstrapDaemon(BootstrapConfig.model_validate({"http": {"port": 0}}))
    await daemon.start()

    async def defect() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon.directory, "expire", defect)
    try:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(daemon.failed(), WAIT_S)
    finally:
        await daemon.close()


async def test_a_worker_runs_no_module_of_the_working_directory(tmp_path, monkeypatch):
    """Whoever can write to the directory that a daemon was started in must not run code as the daemon's user."""
    planted, trace = tmp_path / "structlog.py", tmp_path / "was-run"
    planted.write_text(f"open({str(trace)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    ends: asyncio.Queue[str] = asyncio.Queue()
    subject = supervise(tmp_path, lambda _rank, reason, _cause: ends.put_nowait(reason))
    subject.start()
    async with asyncio.timeout(WAIT_S):
        assert await ends.get() == "exit code 3", "it came as far as its socket, at which nobody listens"
    await subject.stop(1.0)
    assert not trace.exists()


async def test_a_worker_that_a_real_time_signal_ends_is_started_again(tmp_path, monkeypatch):
    """Real-time signals have no name, which is no reason to give up the rank."""
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    script = tmp_path / "worker.sh"
    script.write_text(f"#!/bin/sh\nkill -{signal.SIGRTMIN + 5} $$\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    ends: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    subject = supervise(tmp_path, lambda _rank, reason, cause: ends.put_nowait((reason, cause)))
    subject.start()
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            assert await ends.get() == (f"killed by signal {signal.SIGRTMIN + 5}", "killed")
    await subject.stop(1.0)


async def test_a_bootstrap_that_follows_its_secrets_no_more_ends(monkeypatch):
    """Tokens and certificates that are changed from then on would never be in force, and nobody would know."""
    daemon = BootstrapDaemon(BootstrapConfig.model_validate({"http": {"port": 0}}))

    async def defect() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(daemon._secrets, "run", defect)
    await daemon.start()
    try:
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(daemon.failed(), WAIT_S)
    finally:
        await daemon.close()
