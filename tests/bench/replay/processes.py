"""Daemons and engine processes of one run: how they start, what engines report, how all of them end.

Orders and reports are pickled dataclasses on a pipe, and torch is imported by the engine processes alone.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvbridge.cli.local_cluster import ClusterSpec, check_workers, plan_cluster, used_pages, wait_all_ready
from kvbridge.cli.signals import interrupts_ignored
from kvbridge.core.children import how_it_ended
from kvbridge.core.errors import BridgeError, DeadlineError, PeerError
from kvbridge.core.wire.engine_messages import RoomEvent

START_S = 180.0
SILENCE_S = 600.0
"""A run ends when no engine reports anything for so long."""
QUIET_S = 15.0
"""After so long without a report a line says that engines are at work."""
FREE_S = 10.0
"""After the last release, every page is available within this time."""
LOOK_S = 0.1
STOP_S, FORCE_S = 8.0, 1.0
"""How long daemons may take to end, and how soon they are forced to after a run that was cut short."""
ENGINE_STOP_S = 3.0
SCRATCH = "tmp"
"""Where libraries of engine processes put what they forget to remove."""

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Attached:
    """The engine has attached to its daemon."""


@dataclass(frozen=True)
class RoomEnded:
    """A room ended before its time."""

    room: int
    reason: str

    @classmethod
    def told(cls, event: RoomEvent, side: str) -> RoomEnded:
        """Return what the daemon of a side says about the end of a room."""
        return cls(event.room, f"{event.kind} on {side}: {event.reason}")


@dataclass(frozen=True)
class Failed:
    """The engine process cannot go on, and ends."""

    message: str


class Channel:
    """The pipe as an engine process sees it."""

    def __init__(self, pipe: Connection) -> None:
        self.ended = False
        """Whether no more orders will come."""
        self._pipe = pipe

    def report(self, event: object) -> None:
        """Report an event."""
        self._pipe.send(event)

    def next_order(self, timeout_s: float | None = None) -> Any | None:
        """Return the next order; None when none comes within `timeout_s`, or no more will come."""
        try:
            if not self.ended and self._pipe.poll(timeout_s):
                return self._pipe.recv()
        except (EOFError, OSError):
            self.ended = True
        return None


class EngineProcess:
    """An engine process as the command sees it."""

    def __init__(self, part: str, name: str, target: str, job: object, folder: Path) -> None:
        """Start `target`, "module:function", as function(job, channel). `name` is for messages."""
        self.part = part
        self.name = name
        self.log_path = folder / f"{part}-engine.log"
        self.pipe, theirs = _SPAWN.Pipe()
        entry = (target, job, theirs, self.log_path, folder / SCRATCH)
        self.process = _SPAWN.Process(target=_enter, name=name, args=entry, daemon=True)
        with interrupts_ignored():  # which the process inherits
            self.process.start()
        theirs.close()

    def order(self, order: object) -> None:
        """Hand over an order. Raises PeerError when the process has ended."""
        try:
            self.pipe.send(order)
        except OSError as error:
            raise self.end() from error

    def receive(self) -> Any:
        """Return the next report. Raises PeerError when the process has ended or says that it failed."""
        try:
            event = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self.end() from error
        if isinstance(event, Failed):
            raise PeerError(f"{self.name} failed: {event.message}")
        return event

    def end(self) -> PeerError:
        """Return the error that says how the process ended."""
        self.process.join(ENGINE_STOP_S)
        log = "\n".join(self.log_path.read_text(errors="replace").splitlines()[-8:]) if self.log_path.exists() else ""
        found = f"its log ends:\n{log}" if log else "its log is empty"
        return PeerError(f"{self.name} ended ({how_it_ended(self.process.exitcode or 0)}); {found}")


def _enter(target: str, job: object, pipe: Connection, log_path: Path, scratch: Path) -> None:
    """Run an engine process to its end."""
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.setsid()  # Ctrl-C and a terminal's end are the command's to hear
    os.environ["TMPDIR"] = str(scratch)
    module, _, function = target.partition(":")
    channel = Channel(pipe)
    try:
        getattr(importlib.import_module(module), function)(job, channel)
    except (ImportError, BridgeError) as error:
        with contextlib.suppress(OSError):
            channel.report(Failed(str(error)))
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(1)  # the command is over


class ClusterRun(ABC):
    """Daemons and engines of one run. Use as a context; leaving it ends every process and removes the folder."""

    def __init__(
        self,
        name: str,
        spec: Callable[[Path], ClusterSpec],
        *,
        keep_logs: Path | None,
        say: Callable[[str], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """`spec` is of the folder; `say` shows a line to the user."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"kvbridge-{name}-"))
        (self.folder / SCRATCH).mkdir()
        self.cluster = plan_cluster(self.folder, spec(self.folder))
        """Not started; it ends with the run."""
        self.say = say
        self.engines: dict[str, EngineProcess] = {}
        self.attached: set[str] = set()
        self.completed = False
        """Whether everything was done; what is left may be ended by force otherwise."""
        self.seconds: dict[str, float] = {}
        """How long each part took."""
        self.silence_s = silence_s
        self.waited_s = 0.0
        """For how long a report has been waited for since the last one; whoever expects none may set it back."""
        self._keep_logs = keep_logs

    @abstractmethod
    def handle(self, engine: EngineProcess, event: object) -> None:
        """Take in what an engine process reports, other than that it has attached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process, keep the logs if that was asked, remove the folder. Ctrl-C has to wait for it (seconds)."""
        with ExitStack() as last:
            last.enter_context(interrupts_ignored())
            last.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self._keep_logs is not None:
                ignored = shutil.ignore_patterns("run", SCRATCH)
                last.callback(shutil.copytree, self.folder, self._keep_logs, dirs_exist_ok=True, ignore=ignored)
            force_s = None if self.completed else FORCE_S
            last.callback(self.cluster.stop, timeout_s=STOP_S, force_after_s=force_s)
            self._stop_engines()

    def _stop_engines(self) -> None:
        for engine in self.engines.values():
            engine.pipe.close()
        deadline_s = time.monotonic() + (ENGINE_STOP_S if self.completed else 0.0)
        for engine in self.engines.values():
            engine.process.join(max(0.0, deadline_s - time.monotonic()))
            engine.process.kill()
            engine.process.join()
            engine.process.close()

    @contextmanager
    def causes_named(self) -> Iterator[None]:
        """Inside, an error gives way to the end of a daemon, which is then the cause of what was noticed first."""
        try:
            yield
        except BridgeError:
            self.cluster.check_running()
            raise

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long it takes what is done inside, however it ends."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = round(time.monotonic() - begun_s, 2)

    def start_engine(self, part: str, name: str, target: str, job: object) -> None:
        """Start an engine process."""
        self.engines[part] = EngineProcess(part, name, target, job, self.folder)

    def wait_ready(self) -> None:
        """Wait until requests can be paired. Raises PeerError when a daemon or a rank worker cannot, DeadlineError."""
        nodes = [self.cluster.prefill, self.cluster.decode]
        wait_all_ready(self.cluster.all(), timeout_s=START_S, check=lambda: check_workers(nodes))

    def wait_attached(self) -> None:
        """Wait until the engines of both nodes have attached."""
        while not {"prefill", "decode"} <= self.attached:
            self.next_report()
        self.say("daemons are ready, engines have attached")

    def next_report(self, wait_s: float = math.inf) -> None:
        """Take in what engines report next, or return after `wait_s`.

        Raises PeerError when a process has ended or an engine failed, DeadlineError when all engines are silent for too long.
        """
        until_s = time.monotonic() + wait_s
        by_pipe = {engine.pipe: engine for engine in self.engines.values()}
        while not (found := self._wait(list(by_pipe), until_s)):
            self.cluster.check_running()
            if self.waited_s > self.silence_s:
                raise DeadlineError(f"no engine reported anything for {self.silence_s:g} s")
            if time.monotonic() >= until_s:
                return
        self.waited_s = 0.0
        for pipe in found:
            engine = by_pipe[pipe]  # type: ignore[index]  # these are connections only
            event = engine.receive()
            if isinstance(event, Attached):
                self.attached.add(engine.part)
            else:
                self.handle(engine, event)

    def _wait(self, pipes: list[Connection], until_s: float) -> Sequence[object]:
        """Return the pipes that have something, after a moment at most, and count the time in vain."""
        begun_s = time.monotonic()
        found = wait(pipes, max(0.0, min(LOOK_S, until_s - begun_s)))
        before_s, self.waited_s = self.waited_s, self.waited_s + time.monotonic() - begun_s
        if not found and before_s // QUIET_S < self.waited_s // QUIET_S:
            self.say(f"no report for {self.waited_s:.0f} s; engines are at work")
        return found

    def wait_free(self) -> int:
        """Return how many pages are not available some time after the last release."""
        deadline_s = time.monotonic() + FREE_S
        while True:
            left = sum(sum(used_pages(daemon).values()) for daemon in (self.cluster.prefill, self.cluster.decode))
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(LOOK_S)
