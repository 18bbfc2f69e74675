"""The engine processes of a command, seen from outside.

Owns: their pipes, and the one queue of what they report. Must not know: what an event means, daemons.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

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
        command = [sys.executable, "-m", "kvbridge.testbed.engines", self._package, self.part, str(job_file)]
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
        """`silence_s`: the longest time without any report while one is waited for."""
        self.queue: queue.SimpleQueue[Reported] = queue.SimpleQueue()
        self.silence_s = silence_s

    def next(self, engines: Iterable[EngineProcess], *, check: Callable[[], None]) -> Reported:
        """Return the next report of any of the processes, and call `check` while there is none.

        Raises what `check` raises, PeerError when a process has ended or says that it failed, DeadlineError when all
        are silent for too long.
        """
        engines = tuple(engines)
        deadline_s = time.monotonic() + self.silence_s
        while (reported := self.take(engines, LOOK_S)) is None:
            check()
            if time.monotonic() > deadline_s:
                raise self.silent(engines)
        return reported

    def take(self, engines: Iterable[EngineProcess], timeout_s: float) -> Reported | None:
        """Return the next report of any of the processes, None when there is none within `timeout_s`.

        Raises PeerError when a process has ended or says that it failed.
        """
        engines = tuple(engines)
        reported = self._take(timeout_s)
        if reported is None:
            for engine in engines:
                if not engine.running:
                    engine.wait_last_words()
            reported = self._take(0.0)
        if reported is not None:
            return _not_failed(reported)
        for engine in engines:
            engine.check_running()
        return None

    def silent(self, engines: Iterable[EngineProcess]) -> DeadlineError:
        """Return the error of a process that has said nothing for `silence_s`."""
        logs = "\n".join(f"{engine.name}: {engine.log(5) or 'nothing in its log'}" for engine in engines)
        return DeadlineError(f"no engine said anything for {self.silence_s:g} s (--patience); {logs}")

    def _take(self, timeout_s: float) -> Reported | None:
        try:
            return self.queue.get(timeout=timeout_s) if timeout_s else self.queue.get_nowait()
        except queue.Empty:
            return None


def _not_failed(reported: Reported) -> Reported:
    engine, event = reported
    if isinstance(event, Failed):
        raise PeerError(f"{engine.name} failed: {event.message}")
    return reported
