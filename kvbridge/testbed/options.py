"""What a user may choose for every command of the testbed.

Owns: these options. Must not know: what a command does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Transport(StrEnum):
    """What the two daemons of a cluster may use."""

    MOONCAKE = "mooncake"
    NIXL = "nixl"
    LOCAL = "local"


def count_of(what: str, *, least: int = 1, most: int | None = None, default: str | bool = True) -> Any:  # noqa: ANN401 - as typer
    """Return the option that is a number of something."""
    return typer.Option(min=least, max=most, metavar="N", help=what, show_default=default)


@dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """The options that every command of the testbed has; each field is annotated with its own."""

    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on standard output.")
    ] = False
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Copy configurations, logs and results of all processes there.")
    ] = None
    patience_s: Annotated[
        float,
        typer.Option("--patience", min=1, metavar="SECONDS", help="Give up when no engine says anything for so long."),
    ] = 120.0
