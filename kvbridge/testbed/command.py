"""What the commands of the testbed have in common: their options as one object, their complaints and exit codes.

Owns: how a dataclass becomes a command's options. Must not know: what a command does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_origin, get_type_hints

import typer

from kvbridge.cli.config import EXIT_CONFIG

OptionsT = TypeVar("OptionsT")


class Transport(StrEnum):
    """What the two daemons of a cluster may use."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"
    LOCAL = "local"


def with_options(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Make a command of a function that takes a dataclass: each field that is annotated with an option is one."""
    hints = {
        name: hint
        for name, hint in get_type_hints(options, include_extras=True).items()
        if get_origin(hint) is Annotated
    }
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(options)  # type: ignore[arg-type]
        if field.name in hints
    ]

    def decorate(action: Callable[[OptionsT], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - what typer has parsed
            action(options(**given))

        command.__doc__ = action.__doc__
        command.__annotations__ = hints
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


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

    def check_keep_logs(self, directory: Path | None) -> None:
        """Refuse a directory that logs would be mixed into."""
        if directory is not None and directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            self.refuse(f"--keep-logs {directory}: there is something already; name an empty or a new directory")
