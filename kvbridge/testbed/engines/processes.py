"""The engine processes of a command, seen from outside.

Owns: their pipes, and the one queue of what they report. Must not know: what an event means, daemons.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from kvbridge.core.children import module_command
from kvbridge.core.errors import DeadlineError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.children import ChildProcess
from kvbridge.testbed.engines.messages import Failed

LOOK_S = 0.1
"""How often processes are looked at while nothing is reported."""
SCRATCH = "tmp"
"""Beside the job: where libraries put what they forget to remove."""
LAST_WORDS_S = 2.0
"""A process that has ended has had its last line read within this time."""

Reported: TypeAlias = "tuple[EngineProcess, FrozenModel]"


class EngineProcess(ChildProcess):
    """One engine process of a command's package. What it reports appears in `reports`, which all of them share."""

    def __init__(
        self,
        package: str,
        part: str,
        name: str,
        folder: Path,
        *,
        events: TypeAdapter[Any],
        reports: queue.SimpleQueue[Reported],
    ) -> None:
        """`events` validates what it reports; `name` is for messages."""
        super().__init__(name, folder / f"{part}-engine.log", ends_with_us=True)
        self.part = part
        self._package = package
        self._events = events
        self._reports = reports
        self._reader = threading.Thread(target=self._read, name=f"reports of {name}", daemon=True)

    def start(self, job_file: Path) -> None:
        """Start it; it reads the job at once."""
        scratch = job_file.parent / SCRATCH
        scratch.mkdir(exist_ok=True)
        command = module_command("kvbridge.testbed.engines", self._package, self.part, str(job_file))
        self.launch(command, piped=True, environment={"TMPDIR": str(scratch)})
        self._reader.start()

    def order(self, order: FrozenModel) -> None:
        """Hand it an order. Raises PeerError when it has ended."""
        try:
            self._write(order.model_dump_json().encode() + b"\n")
        except OSError as error:
            self.wait_last_words()
            raise PeerError(f"{self.name} takes no orders any more ({error}); its log ends:\n{self.log(15)}") from error

    def dismiss(self) -> None:
        """Say that there will be no more orders: it ends by itself."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def wait_last_words(self) -> None:
        """Wait until everything that an ended process had reported is in the queue."""
        self._reader.join(LAST_WORDS_S)

    def _write(self, line: bytes) -> None:
        if self.process is None or self.process.stdin is None:
            raise OSError("it was not started")
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def _read(self) -> None:
        if self.process is None or self.process.stdout is None:
            return
        for line in self.process.stdout:
            try:
                event = self._events.validate_json(line)
            except ValidationError as error:
                event = Failed(
                    message=f"it reported something that is no event ({error.errors()[0]['msg']}): {line[:200]!r}"
                )
            self._reports.put((self, event))


class Reports:
    """What the engine processes report, one at a time, for as long as all of them are alive."""

    def __init__(self, *, silence_s: float) -> None:
        """`silence_s`: the longest time that is waited for a report in vain."""
        self.queue: queue.SimpleQueue[Reported] = queue.SimpleQueue()
        self.silence_s = silence_s
        self.waited_s = 0.0
        """For how long since the last report; whoever expects none may set it back."""

    def next(
        self, engines: Iterable[EngineProcess], *, check: Callable[[], None], wait_s: float = math.inf
    ) -> Reported | None:
        """Return the next report of any of the processes, None when there is none within `wait_s`; call `check` meanwhile.

        Raises what `check` raises, PeerError when a process has ended or says that it failed, DeadlineError when all
        are silent for too long.
        """
        engines = tuple(engines)
        until_s = time.monotonic() + wait_s
        while (reported := self._take(engines, min(LOOK_S, until_s - time.monotonic()))) is None:
            for engine in engines:
                engine.check_running()
            check()
            if self.waited_s > self.silence_s:
                logs = "\n".join(f"{engine.name}: {engine.log(5) or 'nothing in its log'}" for engine in engines)
                raise DeadlineError(f"no engine said anything for {self.silence_s:g} s (--patience); {logs}")
            if time.monotonic() >= until_s:
                return None
        engine, event = reported
        if isinstance(event, Failed):
            raise PeerError(f"{engine.name} failed: {event.message}")
        return reported

    def _take(self, engines: Iterable[EngineProcess], timeout_s: float) -> Reported | None:
        begun_s = time.monotonic()
        try:
            reported = self.queue.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            for engine in engines:
                if not engine.running:
                    engine.wait_last_words()
            if self.queue.empty():
                self.waited_s += time.monotonic() - begun_s
                return None
            reported = self.queue.get()
        self.waited_s = 0.0
        return reported
