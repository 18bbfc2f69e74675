"""`kvbridge config`: what a daemon would run with.

Owns: the sub-commands and their exit codes. Must not know: the schema.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from kvbridge.config.loading import load_config, render_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError

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
FileOption = Annotated[Path | None, typer.Option("--config", envvar="KVBRIDGE_CONFIG", help="YAML file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key, as http.port=0. May be repeated."),
]


@app.callback()
def group() -> None:
    """Look at a daemon's configuration."""


@app.command()
def show(role: RoleOption, config: FileOption = None, overrides: SetOption = None) -> None:
    """Print the merged configuration as YAML, secrets blanked, and exit with 2 when it is wrong."""
    try:
        loaded = load_config(role.schema, file=config, overrides=overrides or ())
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_CONFIG) from error
    typer.echo(render_config(loaded), nl=False)
