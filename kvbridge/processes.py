"""Child processes: command and environment, start, supervision, and their end in words."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any, TypeVar

import structlog

from kvbridge.core.errors import DeadlineError, PeerError

SETTINGS_PREFIX = "KVBRIDGE_"
"""Variables with this prefix set keys of a configuration, except `PROCESS_VARIABLES`."""
PROCESS_VARIABLES = frozenset({"KVBRIDGE_KERNEL_CACHE"})
"""Variables that every process reads itself: no configuration has a key for them, and children inherit them."""

OPEN_FILES_SHARE = 4
"""Each listening endpoint gets 1/n of all descriptors. At most two listen; workers, engines and files need the rest."""
EXIT_ORPHANED = 4
"""Exit code of a child whose parent ended before the child could bind itself to the parent."""
STOP_S = 20.0
KILL_S = 5.0
"""A killed process ends within this time, unless the machine is broken."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0
STABLE_AFTER_S = 30.0
"""A process that lived this long is started again after the first pause."""
LONGEST_LINE = 300
"""Characters of a log line in an error."""
_READ_BYTES = 4096
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl

log = structlog.get_logger(__name__)
FoundT = TypeVar("FoundT")


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in an interpreter of its own.

    Without `-P`, Python would import, and so run, files of the working directory in place of installed modules.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without settings of a configuration: a child gets them on its command line, and no secret."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(SETTINGS_PREFIX) or name in PROCESS_VARIABLES
    }


_PF_EXITING = 0x4
"""A flag of the kernel in /proc/PID/stat (include/linux/sched.h)."""


class EndCause(StrEnum):
    """The kind of end of a process."""

    KILLED = "killed"
    """Its supervisor has killed it, and gives a reason."""
    SIGNAL = "signal"
    """A signal from elsewhere: the kernel for want of memory, a crash in native code, a person."""
    EXITED = "exited"
    START_FAILED = "start_failed"
    """There was no process."""


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number in words: real-time signals have no name."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def how_it_ended(code: int) -> str:
    """Return an exit code in words; a negative one is the number of a signal."""
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def is_ending(pid: int) -> bool:
    """Return whether a process has ended or has begun to: its sockets close only after it has begun."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    state, *_, flags = stat.rpartition(")")[2].split()[:7]
    return state in "ZX" or bool(int(flags) & _PF_EXITING)


# ------------------------------------------------------------------ in this process


def raise_open_files() -> None:
    """Let this process and its children open as many files as the system allows.

    The soft limit of 1024 protects programs that call select(), which cannot handle larger descriptors. Nothing here calls it:
    Python, ZeroMQ and the transport libraries wait by poll and epoll.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(configured: int, key: str, *, each: int = 1) -> int:
    """Return the limit of connections: as configured by `key`, or as many as an endpoint's share of descriptors holds.

    `each`: descriptors that one connection takes.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = configured if descriptors == resource.RLIM_INFINITY else max(1, descriptors // OPEN_FILES_SHARE // each)
    if most < configured:
        remedy = "raise the hard limit of open files (LimitNOFILE, ulimit -Hn), or configure less"
        log.warning(
            "connections_limited", key=key, configured=configured, limit=most, open_files=descriptors, do=remedy
        )
    return min(configured, most)


def end_with_parent(parent: int, number: signal.Signals, *, watch_input: bool = False) -> None:
    """Have the kernel send this process a signal when its parent process ends. Exit if `parent` has ended already.

    The signal comes when the parent's *thread* that started this process ends. `watch_input`: it comes also when the parent closes
    the pipe to the standard input.
    """
    _prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_ORPHANED)

    def wait_for_input_end() -> None:
        while os.read(0, _READ_BYTES):
            pass
        os.kill(os.getpid(), number)

    if watch_input:
        threading.Thread(target=wait_for_input_end, name="kvbridge-parent", daemon=True).start()


# ------------------------------------------------------------------ a child that is kept running


class RestartPause:
    """Pauses before a process is started again, each twice as long as the one before."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def after(self, lived_s: float) -> float:
        """Return the pause after a process that lived for `lived_s`."""
        pause_s = FIRST_PAUSE_S if lived_s > STABLE_AFTER_S else self._next_s
        self._next_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a supervised process, or its failed start."""

    how: str
    cause: EndCause
    pid: int = 0
    why: str = ""
    """Why it was killed or gave up, if known."""

    @property
    def reason(self) -> str:
        """The end in words, with its reason."""
        return f"{self.how} ({self.why})" if self.why else self.how


class SupervisedChild:
    """One child process, started again after each end and a growing pause. Used in one running loop."""

    def __init__(self, name: str, live: Callable[[], Awaitable[None]], on_end: Callable[[ChildEnd], None]) -> None:
        """`live()` starts the process by `launch`, and returns when the process has ended or is about to end.

        After each end, before the next start, `on_end` gets the end. `failed` raises a defect in either function.
        """
        self.process: asyncio.subprocess.Process | None = None
        self.why = ""
        """Why the present process ends, if known."""
        self._name = name
        self._live = live
        self._on_end = on_end
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Id of the present process; 0: none."""
        return 0 if self.process is None else self.process.pid

    def start(self) -> None:
        """Keep a process running from now on."""
        self._task = asyncio.create_task(self._keep(), name=f"supervise {self._name}")

    async def failed(self) -> None:
        """Raise the defect that has ended the supervision."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def launch(self, module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:  # noqa: ANN401 - asyncio's
        """Run a module without settings, in a session of its own, so that Ctrl-C reaches the parent alone."""
        self.process = await asyncio.create_subprocess_exec(
            *module_command(module, *arguments), start_new_session=True, env=child_environment(os.environ), **options
        )
        return self.process

    def kill(self, why: str = "") -> bool:
        """Kill the process; it is started again. Return whether a process was there and was not ending yet."""
        if (
            self.process is None
            or self.process.returncode is not None
            or (not self.why and is_ending(self.process.pid))
        ):
            return False
        is_first, self.why = not self.why, self.why or why
        # `process.kill` would fetch the exit code itself, and take it from the task that waits for it.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        return is_first

    async def stop(self, timeout_s: float, why: str) -> bool:
        """Start no more processes; end the present one, by a kill after `timeout_s`. Return whether it was killed."""
        self._stopping = True
        if self._task is None:
            return False
        if self.process is None:
            self._task.cancel()
        await asyncio.wait([self._task], timeout=timeout_s)
        if killed := self.kill(why):
            await asyncio.wait([self._task], timeout=timeout_s)
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return killed

    async def _keep(self) -> None:
        pause = RestartPause()
        while not self._stopping:
            begun_s = time.monotonic()
            end = await self._run()
            self._on_end(end)
            if not self._stopping:
                await asyncio.sleep(pause.after(time.monotonic() - begun_s))

    async def _run(self) -> ChildEnd:
        self.why = ""
        try:
            await self._live()
            assert self.process is not None, "`live` launches a process"
            code = await self.process.wait()
            cause, how = EndCause.EXITED, how_it_ended(code)
            if code < 0:
                cause = EndCause.KILLED if self.why and code == -signal.SIGKILL else EndCause.SIGNAL
            if cause is EndCause.SIGNAL and code == -signal.SIGKILL:
                how += ", not by its node: by a person, or by the kernel for want of memory"
            return ChildEnd(how, cause, self.process.pid, self.why)
        except OSError as error:  # descriptors, processes or memory are short, perhaps only now
            if self.process is not None:
                raise
            return ChildEnd(f"the process could not be started: {error}", EndCause.START_FAILED)
        finally:
            self.process = None


# ------------------------------------------------------------------ children of commands and tests


class ChildProcess:
    """A child process of a command or a test. Its standard error, and output, is appended to `log_path`."""

    def __init__(self, name: str, log_path: Path, *, ends_with_us: bool = False) -> None:
        """`name` is for messages. `ends_with_us`: the child gets SIGTERM when the thread that starts it ends."""
        self.name = name
        self.log_path = log_path
        self.process: Popen[bytes] | None = None
        self._ends_with_us = ends_with_us

    def launch(
        self, command: Sequence[str], *, piped: bool = False, environment: Mapping[str, str] | None = None
    ) -> Popen[bytes]:
        """Start the process, in a session of its own.

        `piped`: its standard input and output are pipes, else /dev/null and the log. `environment` adds to this process's
        environment without the settings of kvbridge.
        """
        with self.log_path.open("ab") as log:
            self.process = Popen(
                command,
                stdin=PIPE if piped else DEVNULL,
                stdout=PIPE if piped else log,
                stderr=log,
                env=child_environment(os.environ) | dict(environment or {}),
                start_new_session=True,
                preexec_fn=_term_with_parent if self._ends_with_us else None,  # noqa: PLW1509 - it calls one C function
            )
        return self.process

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def check_running(self) -> None:
        """Raise PeerError with the end of its log if it has ended."""
        process = self.process  # another thread may start a new one meanwhile
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
        """Send SIGTERM, wait, kill if necessary. Return the exit code; 0 when it never ran."""
        stop_all([self], timeout_s=STOP_S)
        return 0 if self.process is None else int(self.process.returncode)


def _term_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def stop_all(children: Iterable[ChildProcess], *, timeout_s: float, hurry_after_s: float | None = None) -> None:
    """End processes together: SIGTERM, again after `hurry_after_s`, and SIGKILL to those left after `timeout_s`."""
    running = [child.process for child in children if child.process is not None and child.process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGCONT)  # a stopped process would not get the next signal
        process.terminate()
    deadline_s = time.monotonic() + timeout_s
    if hurry_after_s is not None:
        for process in _wait_all(running, min(deadline_s, time.monotonic() + hurry_after_s)):
            process.terminate()
    for process in _wait_all(running, deadline_s):
        process.kill()
        process.wait(KILL_S)


def _wait_all(processes: list[Popen[bytes]], deadline_s: float) -> list[Popen[bytes]]:
    """Return the processes that have not ended by the deadline."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return [process for process in processes if process.poll() is None]


def wait_for(
    what: str, look: Callable[[], FoundT | None], *, timeout_s: float, watched: Iterable[ChildProcess] = ()
) -> FoundT:
    """Return the first true value of `look`. Raises PeerError when a watched process ends before, else DeadlineError."""
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
