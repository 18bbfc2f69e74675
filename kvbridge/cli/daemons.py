"""`kvbridge prefill`, `kvbridge decode`, `kvbridge bootstrap`: parse, load the configuration, run, exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import structlog
import typer

from kvbridge.cli.config import EXIT_FAILED, FileOption, SetOption, fail, load_or_exit
from kvbridge.config.endpoints import TelemetryConfig
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError
from kvbridge.daemon.bootstrap import BootstrapDaemon
from kvbridge.daemon.decode import decode_daemon
from kvbridge.daemon.descriptors import raise_open_files
from kvbridge.daemon.lifecycle import Daemon, run_daemon
from kvbridge.daemon.prefill import prefill_daemon
from kvbridge.telemetry.logs import configure_logs

log = structlog.get_logger(__name__)

InsecureOption = Annotated[
    bool,
    typer.Option("--insecure", help="Allow endpoints that the network can reach without keys and without a token."),
]


def prefill(config: FileOption = None, overrides: SetOption = None, insecure: InsecureOption = False) -> None:
    """Run a prefill daemon: rooms whose pages an engine computes, and which are sent to a decode node."""
    loaded = load_or_exit(PrefillConfig, config, overrides, insecure=insecure)
    _logs("prefill", loaded.telemetry, instance=loaded.instance, node=loaded.node)
    _run(lambda: prefill_daemon(loaded))


def decode(config: FileOption = None, overrides: SetOption = None, insecure: InsecureOption = False) -> None:
    """Run a decode daemon: rooms whose pages are written by prefill nodes and claimed by an engine."""
    loaded = load_or_exit(DecodeConfig, config, overrides, insecure=insecure)
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
    loaded = load_or_exit(BootstrapConfig, config, overrides, insecure=insecure)
    _logs("bootstrap", loaded.telemetry)
    _run(lambda: BootstrapDaemon(loaded, endpoint_dir=endpoint_dir))


def _logs(role: str, telemetry: TelemetryConfig, *, instance: str = "", node: str = "") -> None:
    level, form = telemetry.log_level.value, telemetry.log_format.value
    configure_logs(names={"role": role, "instance": instance, "node": node}, level=level, form=form)


def _run(build: Callable[[], Daemon]) -> None:
    """Run a daemon to its end. What it refuses to do is one line and an exit code, not a traceback."""
    raise_open_files()

    async def live() -> None:
        await run_daemon(build())

    try:
        asyncio.run(live())
    except (ConfigError, ConflictError) as error:  # a conflict at start is an address or a directory that is taken
        fail(error)
    except BridgeError as error:
        log.error("daemon_failed", code=error.code, reason=str(error))
        raise typer.Exit(EXIT_FAILED) from error
