"""`kvbridge prefill`, `kvbridge decode`, `kvbridge bootstrap`: parse, load the configuration, run, exit code."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated, TypeVar

import structlog
import typer

from kvbridge.cli.config import EXIT_CONFIG
from kvbridge.config.endpoints import LogFormat, TelemetryConfig
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.lifecycle import Daemon, run_daemon
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.telemetry.logs import configure_logs

EXIT_FAILED = 1
"""Exit code of a daemon that could not start or go on."""

log = structlog.get_logger(__name__)

ConfigT = TypeVar("ConfigT", bound=FrozenModel)
FileOption = Annotated[
    Path | None, typer.Option("--config", envvar="KVBRIDGE_CONFIG", help="YAML file; see configs/ for a complete one.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key, as http.port=0. May be repeated."),
]
InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow endpoints that the network can reach without keys and without a token."),
]


def prefill(config: FileOption = None, overrides: SetOption = None, insecure: InsecureOption = False) -> None:
    """Run a prefill daemon: rooms whose pages an engine computes, and which are sent to a decode node."""
    loaded = _load(PrefillConfig, config, overrides, insecure=insecure)
    _logs("prefill", loaded.telemetry, instance=loaded.instance, node=loaded.node)
    _run(lambda: prefill_daemon(loaded))


def decode(config: FileOption = None, overrides: SetOption = None, insecure: InsecureOption = False) -> None:
    """Run a decode daemon: rooms whose pages are written by prefill nodes and claimed by an engine."""
    loaded = _load(DecodeConfig, config, overrides, insecure=insecure)
    _logs("decode", loaded.telemetry, instance=loaded.instance, node=loaded.node)
    _run(lambda: decode_daemon(loaded))


def bootstrap(
    config: FileOption = None,
    overrides: SetOption = None,
    insecure: InsecureOption = False,
    endpoint_dir: Annotated[
        Path | None, typer.Option("--endpoint-dir", help="Write daemon.json with the bound address there.")
    ] = None,
) -> None:
    """Run bootstrap: the directory of instances, and the pairing of requests."""
    loaded = _load(BootstrapConfig, config, overrides, insecure=insecure)
    _logs("bootstrap", loaded.telemetry)
    _run(lambda: BootstrapDaemon(loaded, endpoint_dir=endpoint_dir))


def _load(kind: type[ConfigT], file: Path | None, overrides: list[str] | None, *, insecure: bool) -> ConfigT:
    try:
        return load_config(kind, file=file, overrides=overrides or (), flags={"insecure": True if insecure else None})
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_CONFIG) from error


def _logs(role: str, telemetry: TelemetryConfig, *, instance: str = "", node: str = "") -> None:
    form = telemetry.log_format
    if form is LogFormat.AUTO:
        form = LogFormat.CONSOLE if sys.stderr.isatty() else LogFormat.JSON
    configure_logs(
        role=role,
        instance=instance,
        node=node,
        level=telemetry.log_level.value,
        form="console" if form is LogFormat.CONSOLE else "json",
    )


def _run(build: type[Daemon] | object) -> None:
    """Run a daemon to its end. What it refuses to do is one line and an exit code, not a traceback."""

    async def live() -> None:
        await run_daemon(build())  # type: ignore[operator]

    try:
        asyncio.run(live())
    except (ConfigError, ConflictError) as error:  # a conflict at start is an address or a directory that is taken
        typer.echo(str(error), err=True)
        raise typer.Exit(EXIT_CONFIG) from error
    except BridgeError as error:
        log.error("daemon_failed", code=error.code, reason=str(error))
        raise typer.Exit(EXIT_FAILED) from error
