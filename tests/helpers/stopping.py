"""Stopping a process so that nothing of it runs any more when the call returns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

LIMIT_S = 30.0


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until every thread has stopped: each does when it notices, which for a busy one is a moment later."""
    os.kill(pid, signal.SIGSTOP)
    ends_s = time.monotonic() + LIMIT_S
    while {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} - {"T"}:
        assert time.monotonic() < ends_s, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended
        return "T"
