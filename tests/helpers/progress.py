"""What a long command shows while it runs, on standard error: lines, and on a terminal bars below them.

Owns: both forms, and that neither stands still for long without a word. Must not know: what is being run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 15.0
"""When nothing that is shown has changed for so long, a line says how far the command is."""


class ShownProgress:
    """How far a command is. Use as a context; the bars vanish with it."""

    def __init__(self, console: Console, *, quiet_s: float = QUIET_S) -> None:
        self._console = console
        self._quiet_s = quiet_s
        name, bar = TextColumn("{task.description}", justify="right"), BarColumn(bar_width=30)
        columns = (name, bar, MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._reached = "beginning"
        self._begun_s = self._changed_s = time.monotonic()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._break_silence, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._bars.start()
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self._bars.stop()

    def stage(self, text: str) -> None:
        """Say that something begins, or has been reached."""
        self._reached = text
        self._print(text)

    def detail(self, text: str) -> None:
        """Say what only a log needs; bars show it anyway."""
        if not self._console.is_terminal:
            self._print(text)

    def bars(self, totals: Mapping[str, int]) -> None:
        """Show a bar for each name."""
        self._tasks |= {name: self._bars.add_task(name, total=total) for name, total in totals.items()}

    def advance(self, name: str, amount: int) -> None:
        """Move a bar forward."""
        self._bars.advance(self._tasks[name], amount)
        if self._console.is_terminal:
            self._changed_s = time.monotonic()

    def _print(self, text: str) -> None:
        self._changed_s = time.monotonic()
        elapsed_s = self._changed_s - self._begun_s
        self._console.print(f"{elapsed_s:6.1f} s  {text}", soft_wrap=True, markup=False, highlight=False)

    def _break_silence(self) -> None:
        while not self._ended.wait(self._changed_s + self._quiet_s - time.monotonic()):
            if time.monotonic() - self._changed_s >= self._quiet_s:
                done = [f"{task.description} {task.completed:,.0f} of {task.total:,.0f}" for task in self._bars.tasks]
                self._print("; ".join([f"nothing new for {self._quiet_s:g} s, last: {self._reached}", *done]))
