"""`kvbridge doctor`: what will break on this host and between it and its peers, found before it does."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated

import typer

from kvbridge import __version__
from kvbridge.cli.config import (
    EXIT_CONFIG,
    EXIT_FAILED,
    DaemonRole,
    FileOption,
    SetOption,
    fail,
    load_or_exit,
    with_options,
)
from kvbridge.config.loading import read_token
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.services import BootstrapConfig
from kvbridge.core.errors import BridgeError, ConfigError
from kvbridge.daemon.peer_setup import curve_keys
from kvbridge.doctor.findings import Finding, Level, Needs, needs_of
from kvbridge.doctor.reach import Asking
from kvbridge.doctor.run import Config, Visit, examine, read_host

HEADINGS = {
    Level.BREAKS: "WILL BREAK",
    Level.WARNING: "WARNINGS",
    Level.NOT_HERE: "NOT HERE, and nothing needs it",
    Level.FINE: "FINE",
}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """The options of `kvbridge doctor`."""

    config: FileOption = None
    role: Annotated[DaemonRole | None, typer.Option("--role", help="Whose configuration it is.")] = None
    overrides: SetOption = None
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="PEER",
            help="Reach this one, too: http://HOST:PORT of a daemon, tcp://HOST:PORT of a prefill node's control socket. "
            "May be repeated.",
        ),
    ] = None
    peer_key: Annotated[str, typer.Option("--peer-key", metavar="KEY", help="Public key of control sockets.")] = ""
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON, and nothing else.")] = False


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Look for what will break on this host and between it and its peers, before it does.

    Run it as the daemon's user and where the daemon runs (its container, its unit):
    limits are those of the process that looks.

    With a configuration it also looks at what that one needs: memory, devices, ports,
    bootstrap and the peers that bootstrap knows. Daemons that are running are not
    disturbed: their HTTP endpoint is asked, and their control socket is entered and
    left. `kvbridge keys check` looks at keys, `kvbridge bench-peer` moves bytes.

    Exit codes: 0: nothing will break (there may be warnings); 1: something will;
    2: wrong usage or configuration.
    """
    visit = _visit(options)
    host = read_host(visit)
    findings = examine(host, visit.needs)
    if options.as_json:
        typer.echo(_json(visit.needs, findings))
    else:
        _print(visit.needs, host.reach.running, findings)
    if any(finding.level is Level.BREAKS for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _visit(options: DoctorOptions) -> Visit:
    """Load what the options name, or end the command."""
    peers = tuple(options.peer or ())
    for peer in peers:
        if "://" not in peer:
            fail(ConfigError(f"--peer {peer}: expected http://HOST:PORT or tcp://HOST:PORT"))
    if (options.config is None) != (options.role is None):
        typer.echo("kvbridge doctor: --config and --role belong together: give both, or neither", err=True)
        raise typer.Exit(EXIT_CONFIG)
    if options.role is None:
        return Visit(peers=peers)
    config = load_or_exit(options.role.schema, options.config, options.overrides)
    assert isinstance(config, PrefillConfig | DecodeConfig | BootstrapConfig)
    try:
        needs = needs_of(config)
    except BridgeError as error:
        fail(error)
    return Visit(
        config=config,
        needs=needs,
        asking=_asking(config, options.peer_key),
        peers=peers,
    )


def _asking(config: Config, peer_key: str) -> Asking:
    """Read what can be read; `kvbridge keys check` says why the rest cannot."""
    try:
        own = read_token(config.http, key="http.token_file")
        if isinstance(config, BootstrapConfig):
            return Asking(bootstrap_token=own, daemon_token=own)
        link = config.bootstrap
        return Asking(
            bootstrap_token=read_token(link, key="bootstrap.token_file"),
            daemon_token=own,
            keys=curve_keys(config.control.curve),
            peer_key=peer_key,
        )
    except BridgeError:
        return Asking()


def _json(needs: Needs, findings: list[Finding]) -> str:
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    head = {"version": __version__, "host": socket.gethostname(), "role": needs.role, "name": needs.name}
    return json.dumps(
        head | {"counts": counts, "findings": [each.model_dump(mode="json") for each in findings]}, indent=1
    )


def _print(needs: Needs, running: str, findings: list[Finding]) -> None:
    what = f"{needs.role} {needs.name}".strip() if needs.role else "this host alone (no --config, --role)"
    typer.echo(
        f"kvbridge {__version__} doctor on {socket.gethostname()}: {what}{f'; running: {running}' * bool(running)}"
    )
    for level, group in groupby(findings, key=lambda finding: finding.level):
        found = list(group)
        typer.echo(f"\n{HEADINGS[level]} ({len(found)})")
        for finding in found:
            typer.echo(f"  {finding.check}: {_words(finding)}")
    bad, warned = (sum(each.level is level for each in findings) for level in (Level.BREAKS, Level.WARNING))
    verdict = f"{bad} will break, {warned} warnings." if bad else f"Nothing will break; {warned} warnings."
    typer.echo(f"\n{verdict if bad or warned else 'Nothing will break.'}")


def _words(finding: Finding) -> str:
    if not finding.cure:
        return f"{finding.what}: {finding.why}" if finding.why else finding.what
    return f"{finding.what}\n    why: {finding.why}\n    cure: {finding.cure}"
