"""What a long command shows while it runs, on standard error: bars on a terminal, else lines.

Owns: both forms. Must not know: what is being run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ShownProgress(Protocol):
    """How far a command is."""

    def stage(self, text: str) -> None:
        """Say that something begins, or has been reached."""

    def detail(self, text: str) -> None:
        """Say what only a log needs; bars show it anyway."""

    def bars(self, totals: Mapping[str, int]) -> None:
        """Show a bar for each name."""

    def advance(self, name: str, amount: int) -> None:
        """Move a bar forward."""


class Lines:
    """Plain lines with the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    def stage(self, text: str) -> None:
        """Print a line."""
        self._console.print(f"{time.monotonic() - self._started_s:6.1f} s  {text}", soft_wrap=True, markup=False)

    def detail(self, text: str) -> None:
        """Print a line."""
        self.stage(text)

    def bars(self, totals: Mapping[str, int]) -> None:
        """Nothing to show."""

    def advance(self, name: str, amount: int) -> None:
        """Nothing to show."""


class Bars:
    """Bars that vanish when all is done, and the stages above them."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}

    def stage(self, text: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(text, markup=False, highlight=False)

    def detail(self, text: str) -> None:
        """Nothing: the bars show it."""

    def bars(self, totals: Mapping[str, int]) -> None:
        """Add a bar for each name."""
        self._tasks |= {name: self._progress.add_task(name, total=total) for name, total in totals.items()}

    def advance(self, name: str, amount: int) -> None:
        """Move a bar forward."""
        self._progress.advance(self._tasks[name], amount)


@contextmanager
def shown_progress(console: Console) -> Iterator[ShownProgress]:
    """Show progress on `console` in the form that suits it."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        TextColumn("{task.description}", justify="right"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bars(progress)
