"""`kvbridge config`: what a daemon would run with; and how every command reads a configuration and says that something is wrong.

Owns: the sub-commands, the options that name a configuration, exit codes. Must not know: the schema.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from kvbridge.config.loading import load_config, render_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import BridgeError, ConfigError

ConfigT = TypeVar("ConfigT", bound=BaseModel)

EXIT_FAILED = 1
"""Exit code of a command that could not do what it was told to."""
EXIT_CONFIG = 2
"""Exit code of every command that is given a wrong configuration."""

app = typer.Typer(name="config", help="Look at a daemon's configuration.", no_args_is_help=True)


class DaemonRole(StrEnum):
    """Whose configuration is meant."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOOTSTRAP = "bootstrap"

    @property
    def schema(self) -> type[BaseModel]:
        """The root of that daemon's configuration."""
        return _SCHEMAS[self]


_SCHEMAS: dict[DaemonRole, type[BaseModel]] = {
    DaemonRole.PREFILL: PrefillConfig,
    DaemonRole.DECODE: DecodeConfig,
    DaemonRole.BOOTSTRAP: BootstrapConfig,
}

RoleOption = Annotated[DaemonRole, typer.Option("--role", help="Whose configuration.")]
FileOption = Annotated[
    Path | None, typer.Option("--config", envvar="KVBRIDGE_CONFIG", help="YAML file; see configs/ for a complete one.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key, as http.port=0. May be repeated."),
]


def fail(error: BridgeError, code: int = EXIT_CONFIG) -> NoReturn:
    """End the command: an error is one line on standard error and an exit code, not a traceback."""
    typer.echo(str(error), err=True)
    raise typer.Exit(code) from error


def load_or_exit(
    kind: type[ConfigT], file: Path | None, overrides: list[str] | None, *, insecure: bool = False
) -> ConfigT:
    """Load a configuration, or say what is wrong with it and end the command."""
    try:
        return load_config(kind, file=file, overrides=overrides or (), flags={"insecure": True if insecure else None})
    except ConfigError as error:
        fail(error)


@app.callback()
def group() -> None:
    """Look at a daemon's configuration."""


@app.command()
def show(role: RoleOption, config: FileOption = None, overrides: SetOption = None) -> None:
    """Print the merged configuration as YAML, secrets blanked, and exit with 2 when it is wrong."""
    typer.echo(render_config(load_or_exit(role.schema, config, overrides)), nl=False)


@app.command()
def schema(role: RoleOption) -> None:
    """Print the JSON schema of a configuration, for editors and for whoever generates configurations.

    An editor with a YAML language server checks and completes a file whose first line is
    `# yaml-language-server: $schema=prefill.schema.json`.
    """
    described = {"$schema": GenerateJsonSchema.schema_dialect, **role.schema.model_json_schema()}
    typer.echo(json.dumps(described, indent=2))
