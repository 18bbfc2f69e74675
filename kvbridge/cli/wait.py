"""`kvbridge wait`: for scripts that go on when daemons are ready."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kvbridge.api.client import BlockingClient
from kvbridge.api.status import Readiness
from kvbridge.cli.cluster_directory import read_cluster
from kvbridge.cli.config import EXIT_FAILED, fail
from kvbridge.core.errors import BridgeError, ConfigError

CALL_S = 5.0
LOOK_S = 0.1
QUIET_S = 15.0
"""So often it says what it waits for."""


def wait(
    targets: Annotated[
        list[str], typer.Argument(metavar="URL|DIR...", help="Daemons, as http://127.0.0.1:7900; or what `up` runs.")
    ],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Wait at most so long.")
    ] = 60.0,
) -> None:
    """Wait until daemons are ready: all that are named, or the cluster of a directory.

    A node is ready when it can admit requests, bootstrap when it has a pair.

    Exit codes: 0: all are ready; 1: not in time (standard error says why);
    2: wrong arguments.
    """
    try:
        waiting = [url for target in targets for url in _urls(target)]
    except BridgeError as error:
        fail(error)
    calls = BlockingClient(timeout_s=CALL_S, timeout_key="a limit of this command")
    deadline_s = time.monotonic() + timeout_s
    next_word_s = time.monotonic() + QUIET_S
    while True:
        unready = {url: reason for url in waiting if (reason := why_not_ready(calls, url))}
        if not unready:
            return
        if time.monotonic() >= deadline_s:
            break
        waiting = list(unready)
        if time.monotonic() >= next_word_s:
            next_word_s = time.monotonic() + QUIET_S
            typer.echo("; ".join(f"{url} is not ready yet: {reason}" for url, reason in unready.items()), err=True)
        time.sleep(LOOK_S)
    for url, reason in unready.items():
        typer.echo(f"{url} is not ready after {timeout_s:g} s: {reason}", err=True)
    raise typer.Exit(EXIT_FAILED)


def why_not_ready(calls: BlockingClient, url: str) -> str:
    """Ask a daemon whether it can serve requests; return why not, nothing when it can."""
    try:
        found = calls.ask(Readiness, "GET", f"{url}/ready")
    except BridgeError as error:
        return str(error)
    return "" if found.ready else "; ".join(found.reasons) or "it gives no reason"


def _urls(target: str) -> list[str]:
    if target.startswith(("http://", "https://")):
        return [target.rstrip("/")]
    if "://" in target:
        raise ConfigError(f"'{target}' is neither a URL that begins with http:// or https:// nor a directory")
    return [daemon.url for daemon in read_cluster(Path(target))]
