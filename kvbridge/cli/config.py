"""`kvbridge config`, and how every command reads its options and a configuration, and ends with an error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import StrEnum
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from kvbridge.config.loading import MISSING_KEY, load_config, render_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig, RouterConfig
from kvbridge.core.errors import BridgeError, ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)
OptionsT = TypeVar("OptionsT")

EXIT_FAILED = 1
EXIT_CONFIG = 2
"""Exit code of a wrong configuration: to start again does not help."""
EXIT_UNAVAILABLE = 3
"""Exit code of a daemon whose address, file or directory is missing, held or unfit on this host: to start again later may help."""

app = typer.Typer(name="config", help="Look at a daemon's configuration.", no_args_is_help=True)


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]


class DaemonRole(StrEnum):
    """Daemons of a cluster that moves KV caches."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOOTSTRAP = "bootstrap"

    @property
    def schema(self) -> type[BaseModel]:
        """The schema of that daemon's configuration."""
        return ROLES[self]


class ConfigRole(StrEnum):
    """Daemons with a configuration."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOOTSTRAP = "bootstrap"
    ROUTER = "router"


ROLES: dict[str, type[BaseModel]] = {
    ConfigRole.PREFILL: PrefillConfig,
    ConfigRole.DECODE: DecodeConfig,
    ConfigRole.BOOTSTRAP: BootstrapConfig,
    ConfigRole.ROUTER: RouterConfig,
}

RoleOption = Annotated[ConfigRole, typer.Option("--role", help="The daemon that the configuration is for.")]
FileOption = Annotated[
    Path | None, typer.Option("--config", envvar="KVBRIDGE_CONFIG", help="YAML file; `kvbridge init` writes one.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key, as http.port=0. May be repeated."),
]

InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow endpoints that the network can reach without keys and token."),
]


def fail(error: BridgeError, code: int = EXIT_CONFIG) -> NoReturn:
    """End the command: print the error to standard error, without a traceback, and exit."""
    typer.echo(str(error), err=True)
    raise typer.Exit(code) from error


def load_or_exit(
    kind: type[ConfigT],
    file: Path | None,
    overrides: list[str] | None,
    *,
    insecure: bool = False,
    flags: Mapping[str, Any] | None = None,
) -> ConfigT:
    """Load a configuration, or print its mistakes and end the command.

    `flags` are the command's own options, by dotted key; None: not given.
    """
    try:
        flags = {**(flags or {}), "insecure": True if insecure else None}
        return load_config(kind, file=file, overrides=overrides or (), flags=flags, roles=ROLES)
    except ConfigError as error:
        hint = "\n  no file was named: --config FILE; `kvbridge init DIR` writes files that can be run"
        fail(ConfigError(f"{error}{hint}") if file is None and not overrides and MISSING_KEY in str(error) else error)


def aligned(rows: Iterable[Sequence[str]], right: Sequence[int] | None = None) -> str:
    """Return rows of cells as aligned columns. `right`: columns that are set to the right; None: all but the first."""
    cells = [list(row) for row in rows]
    to_the_right = range(1, len(cells[0])) if right is None else right
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        [
            cell.rjust(width) if at in to_the_right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in cells
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)


def with_options(options: type[OptionsT]) -> Callable[[Callable[[OptionsT], None]], Callable[..., None]]:
    """Make a command of a function that takes its options as one dataclass."""
    hints = get_type_hints(options, include_extras=True)
    parameters = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(action: Callable[[OptionsT], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:  # noqa: ANN401 - as typer parsed them
            action(options(**given))

        command.__doc__ = action.__doc__
        command.__annotations__ = hints
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


@app.command()
def show(role: RoleOption, config: FileOption = None, overrides: SetOption = None) -> None:
    """Print the merged configuration as YAML, secrets blanked, and exit with 2 when it is wrong."""
    typer.echo(render_config(load_or_exit(ROLES[role], config, overrides)), nl=False)


@app.command()
def schema(role: RoleOption) -> None:
    """Print the JSON schema of a configuration, for editors and for programs that write configurations.

    An editor with a YAML language server checks and completes a file whose first line is
    `# yaml-language-server: $schema=FILE`, with the output of this command in FILE.
    """
    described = {"$schema": GenerateJsonSchema.schema_dialect, **ROLES[role].model_json_schema()}
    typer.echo(json.dumps(described, indent=2))
