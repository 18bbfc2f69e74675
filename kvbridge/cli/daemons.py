"""`kvbridge prefill`, `kvbridge decode`, `kvbridge bootstrap`, `kvbridge router`: load the configuration, run, exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import structlog
import typer

from kvbridge.cli.config import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_UNAVAILABLE,
    FileOption,
    InsecureOption,
    SetOption,
    fail,
    load_or_exit,
    with_options,
)
from kvbridge.config.endpoints import TelemetryConfig
from kvbridge.config.pools import MemoryOwner
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, DispatchOrder, PrefillConfig, RouterConfig
from kvbridge.core.errors import WITH_LIBRARIES, BridgeError, ConfigError, ConflictError, UnavailableError
from kvbridge.core.process import UNUSED_BY_DAEMONS, importing
from kvbridge.daemon.lifecycle import Daemon, run_daemon
from kvbridge.processes import end_with_parent, raise_open_files
from kvbridge.telemetry.logs import configure_logs
from kvbridge.transport import is_installed

log = structlog.get_logger(__name__)

NodeConfigT = TypeVar("NodeConfigT", PrefillConfig, DecodeConfig)


@dataclass
class NodeOptions:
    """The options of a node daemon; `--config` and `--set` have the rest."""

    config: FileOption = None
    overrides: SetOption = None
    insecure: InsecureOption = False
    parent: Annotated[int | None, typer.Option("--parent", hidden=True, help="End with this process.")] = None

    def load(self, role: str, kind: type[NodeConfigT]) -> NodeConfigT:
        """Load the configuration of the node, and have the process end with its parent."""
        if self.parent is not None:
            end_with_parent(self.parent, signal.SIGTERM, watch_input=True)
        loaded = load_or_exit(kind, self.config, self.overrides, insecure=self.insecure)
        order = loaded.transports.order
        if loaded.pools.memory is MemoryOwner.OWNED and not any(map(is_installed, order)):
            # Of adopted memory the engine's process moves the bytes.
            names = ", ".join(order)
            fail(ConfigError(f"transports.order is {names}, and none of them is installed; {WITH_LIBRARIES}"))
        _logs(role, loaded.telemetry, instance=loaded.instance, node=loaded.node)
        return loaded


@with_options(NodeOptions)
def prefill(options: NodeOptions) -> None:
    """Run a prefill daemon: it holds the pages that an engine computes, and sends them to decode nodes."""
    loaded = options.load("prefill", PrefillConfig)
    with importing(*UNUSED_BY_DAEMONS):
        from kvbridge.daemon.prefill import prefill_daemon  # noqa: PLC0415 - a process has one role
    _run(lambda: prefill_daemon(loaded))


@with_options(NodeOptions)
def decode(options: NodeOptions) -> None:
    """Run a decode daemon: it holds the pages that prefill nodes write, and an engine claims them."""
    loaded = options.load("decode", DecodeConfig)
    with importing(*UNUSED_BY_DAEMONS):
        from kvbridge.daemon.decode import decode_daemon  # noqa: PLC0415 - a process has one role
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
    with importing(*UNUSED_BY_DAEMONS):
        from kvbridge.daemon.bootstrap import BootstrapDaemon  # noqa: PLC0415 - a process has one role
    _run(lambda: BootstrapDaemon(loaded, endpoint_dir=endpoint_dir))


@dataclass
class RouterOptions:
    """The options of a router; `--config` and `--set` have the rest."""

    prefill: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A server that computes prompts. Repeat, or URL,URL.")
    ] = None
    decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="A server that generates answers. Repeat, or URL,URL.")
    ] = None
    bootstrap: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Take the servers from this directory, by their engine_url."),
    ] = None
    order: Annotated[
        DispatchOrder | None,
        typer.Option(help="paired (default): a request goes to both at once; plain: to decode with prefill's answer."),
    ] = None
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on. Default: 127.0.0.1.")] = None
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one. Default: 7903.")] = None
    limit: Annotated[int | None, typer.Option("--limit", help="Requests under way at once. Default: 1024.")] = None
    token_file: Annotated[
        str | None, typer.Option(help="File of bearer tokens, one a line: callers must show one of them.")
    ] = None
    config: FileOption = None
    overrides: SetOption = None
    insecure: InsecureOption = False

    @property
    def flags(self) -> dict[str, object]:
        """The given options, by dotted key."""
        return {
            "prefill": _urls(self.prefill),
            "decode": _urls(self.decode),
            "bootstrap.url": self.bootstrap,
            "order": self.order,
            "http.host": self.host,
            "http.port": self.port,
            "http.token_file": self.token_file,
            "limit": self.limit,
        }


@with_options(RouterOptions)
def router(options: RouterOptions) -> None:
    """Run a router: OpenAI's completions and chat in front of prefill and decode servers."""
    flags, insecure = options.flags, options.insecure
    loaded = load_or_exit(RouterConfig, options.config, options.overrides, insecure=insecure, flags=flags)
    _logs("router", loaded.telemetry)
    with importing(*UNUSED_BY_DAEMONS):
        from kvbridge.daemon.router import RouterDaemon  # noqa: PLC0415 - a process has one role
    _run(lambda: RouterDaemon(loaded))


def _urls(given: list[str] | None) -> list[str] | None:
    return [url for each in given for url in each.split(",") if url] if given else None


def _logs(role: str, telemetry: TelemetryConfig, *, instance: str = "", node: str = "") -> None:
    level, form = telemetry.log_level.value, telemetry.log_format.value
    configure_logs(names={"role": role, "instance": instance, "node": node}, level=level, form=form)


def _run(build: Callable[[], Daemon]) -> None:
    """Run a daemon to its end. An error that it raises is one line and an exit code, not a traceback."""
    raise_open_files()
    # FastAPI checks whether each model is one of pydantic.v1, and would import that module for it.
    sys.modules.setdefault("pydantic.v1", None)  # type: ignore[arg-type]  # None there is an ImportError

    async def live() -> None:
        await run_daemon(build())

    try:
        asyncio.run(live())
    except BridgeError as error:
        log.error("daemon_failed", code=error.code, reason=str(error))
        unavailable = isinstance(error, UnavailableError | ConflictError)  # an address or a directory is taken
        code = EXIT_UNAVAILABLE if unavailable else EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
        raise typer.Exit(code) from error
