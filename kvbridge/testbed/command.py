"""What the commands of the testbed have in common: their complaints, exit codes and signals.

Owns: how a run is entered and refused. Must not know: what a command does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import typer
from rich.console import Console

from kvbridge.cli.config import EXIT_CONFIG
from kvbridge.core.errors import InvalidInputError
from kvbridge.testbed.options import CommandOptions
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.run import ClusterRun
from kvbridge.testbed.signals import terminated_like_interrupted

RunT = TypeVar("RunT", bound=ClusterRun)
OptionsT = TypeVar("OptionsT", bound=CommandOptions)


class Complaints:
    """Messages of a command on standard error."""

    def __init__(self, command: str) -> None:
        self._command = command

    def say(self, text: str) -> None:
        """Print a message."""
        typer.echo(f"kvbridge {self._command}: {text}", err=True)

    def refuse(self, text: str) -> NoReturn:
        """End with the exit code for wrong options."""
        self.say(text)
        raise typer.Exit(EXIT_CONFIG)

    @contextmanager
    def prepared(self, make: Callable[[OptionsT, ShownProgress], RunT], options: OptionsT) -> Iterator[RunT]:
        """Enter the run that is made of the options, with its progress shown; refuse options that it cannot be made of."""
        kept = options.keep_logs
        if kept is not None and kept.exists() and not (kept.is_dir() and not any(kept.iterdir())):
            self.refuse(f"--keep-logs {kept}: there is something already; name an empty or a new directory")
        with terminated_like_interrupted(), ShownProgress(Console(stderr=True)) as progress:
            try:
                run = make(options, progress)
            except InvalidInputError as error:
                self.refuse(str(error))
            with run:
                yield run
