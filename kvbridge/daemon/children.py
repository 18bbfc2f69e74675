"""A child process of this one: its log, its life, its end.

Children get a session of their own, so that Ctrl-C reaches only the parent, which ends them in its own order.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import TypeVar

from kvbridge.core.children import child_environment, how_it_ended
from kvbridge.core.errors import DeadlineError, PeerError

STOP_S = 20.0
KILL_S = 5.0
"""A killed process is gone within this time, or the machine has other troubles."""
LONGEST_LINE = 300
"""What an error shows of a line of a log."""
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl

FoundT = TypeVar("FoundT")


class ChildProcess:
    """One child process, started at most once at a time. Its standard error (and output) is appended to `log_path`."""

    def __init__(self, name: str, log_path: Path, *, ends_with_us: bool = False) -> None:
        """`name` is for messages. `ends_with_us`: SIGTERM when the thread that started it ends, however it ends."""
        self.name = name
        self.log_path = log_path
        self.process: Popen[bytes] | None = None
        self._ends_with_us = ends_with_us

    def launch(
        self, command: Sequence[str], *, piped: bool = False, environment: Mapping[str, str] | None = None
    ) -> Popen[bytes]:
        """Start the process. `piped`: its standard input and output are pipes to us, else nothing and the log.

        `environment` is added to this process's own, less the settings of kvbridge.
        """
        with self.log_path.open("ab") as log:
            self.process = Popen(
                command,
                stdin=PIPE if piped else DEVNULL,
                stdout=PIPE if piped else log,
                stderr=log,
                env=child_environment(os.environ) | dict(environment or {}),
                start_new_session=True,
                preexec_fn=_end_with_parent if self._ends_with_us else None,  # noqa: PLW1509 - it calls one C function
            )
        return self.process

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def check_running(self) -> None:
        """Raise PeerError with the tail of its log when it has ended."""
        process = self.process  # another thread may start it again meanwhile
        if process is not None and process.poll() is not None:
            tail = "\n".join(line[:LONGEST_LINE] for line in self.log(8).splitlines())
            found = f"its log ends:\n{tail}" if tail else "its log is empty"
            raise PeerError(f"{self.name} ended ({how_it_ended(process.returncode)}); {found}")

    def log(self, lines: int = 60) -> str:
        """Return the last lines of its output."""
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal; after SIGKILL, wait for the end."""
        if self.process is None:
            return
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(KILL_S)

    def stop(self) -> int:
        """Send SIGTERM, wait, kill what does not end; return the exit code (0 when it never ran)."""
        stop_all([self], timeout_s=STOP_S)
        return 0 if self.process is None else int(self.process.returncode)


def stop_all(children: Iterable[ChildProcess], *, timeout_s: float, hurry_after_s: float | None = None) -> None:
    """End processes together: SIGTERM, once more after `hurry_after_s`, and SIGKILL to those left after `timeout_s`."""
    running = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGCONT)  # a stopped one would not hear the rest
        process.terminate()
    deadline_s = time.monotonic() + timeout_s
    if hurry_after_s is not None:
        left = _wait_all(running, min(deadline_s, time.monotonic() + hurry_after_s))
        for process in left:
            process.terminate()
    for process in _wait_all(running, deadline_s):
        process.kill()
        process.wait(KILL_S)


def _wait_all(processes: list[Popen[bytes]], deadline_s: float) -> list[Popen[bytes]]:
    """Return those that have not ended by the deadline."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return [process for process in processes if process.poll() is None]


def wait_for(
    what: str, look: Callable[[], FoundT | None], *, timeout_s: float, watched: Iterable[ChildProcess] = ()
) -> FoundT:
    """Return the first true value of `look`. Raises PeerError when a watched process ends first, else DeadlineError."""
    deadline_s = time.monotonic() + timeout_s
    watched = tuple(watched)
    while True:
        for child in watched:
            child.check_running()
        found = look()
        if found:
            return found
        if time.monotonic() >= deadline_s:
            raise DeadlineError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
