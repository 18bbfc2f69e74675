"""`kvbridge doctor`: problems of this host and its peers, found in time. `kvbridge clean`: leftovers of dead processes."""

from __future__ import annotations

import json
import pwd
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from kvbridge import __version__
from kvbridge.cli.config import (
    EXIT_FAILED,
    DaemonRole,
    FileOption,
    JsonOption,
    SetOption,
    aligned,
    fail,
    load_or_exit,
    with_options,
)
from kvbridge.config.loading import fitting_roles, read_document, read_token
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import BridgeError, ConfigError
from kvbridge.daemon.links import curve_keys
from kvbridge.doctor.findings import Finding, Level, Needs, needs_of, size
from kvbridge.doctor.reach import Asking
from kvbridge.doctor.run import Config, examine, read_host
from kvbridge.pool.memory.leftovers import Leftover, Verdict, sweep
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

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
    role: Annotated[DaemonRole | None, typer.Option("--role", help="The daemon that the configuration is for.")] = None
    overrides: SetOption = None
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Reach this one, too: http://HOST:PORT of a daemon, tcp://HOST:PORT of a control socket. May be repeated."
        ),
    ] = None
    peer_key: Annotated[str, typer.Option("--peer-key", metavar="KEY", help="Public key of control sockets.")] = ""
    as_json: JsonOption = False


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Look for problems of this host and its peers before they break a daemon.

    Run it as the daemon's user and where the daemon runs (its container, its unit):
    it sees the limits of its own process.

    With a configuration it also checks what that configuration needs: memory, devices,
    ports, bootstrap and the peers that bootstrap knows. Daemons that are running are
    not disturbed: their HTTP endpoint is asked, and their control socket is entered
    and left. `kvbridge keys check` checks keys, `kvbridge bench-peer` moves bytes.

    Exit codes: 0: nothing will break (there may be warnings); 1: something will;
    2: wrong usage or configuration.
    """
    config, needs, peers = _configured(options), Needs(), tuple(options.peer or ())
    if wrong := [peer for peer in peers if "://" not in peer]:
        fail(ConfigError(f"--peer {wrong[0]}: expected http://HOST:PORT or tcp://HOST:PORT"))
    try:
        needs = needs if config is None else needs_of(config)
    except BridgeError as error:
        fail(error)
    host = read_host(needs, Asking() if config is None else _asking(config, options.peer_key), peers, config)
    findings = examine(host, needs)
    typer.echo(_json(needs, findings) if options.as_json else _text(needs, host.reach.running, findings))
    if any(finding.level is Level.BREAKS for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _role_of(file: Path) -> DaemonRole:
    """Return the only role for which a file is a configuration, or end the command."""
    try:
        roles = fitting_roles(read_document(file)[0], {role: role.schema for role in DaemonRole})
    except ConfigError as error:
        fail(error)
    if len(roles) != 1:
        fail(ConfigError(f"kvbridge doctor: {file} does not tell for which daemon it is: say --role"))
    return DaemonRole(roles[0])


def _configured(options: DoctorOptions) -> Config | None:
    """Load the configuration that the options name, or end the command. None: they name none."""
    role = options.role or (_role_of(options.config) if options.config else None)
    if role is None:
        return None
    if options.config is None:
        fail(ConfigError(f"kvbridge doctor: --role {role} belongs to a file: name it with --config"))
    config = load_or_exit(role.schema, options.config, options.overrides)
    assert isinstance(config, PrefillConfig | DecodeConfig | BootstrapConfig)
    return config


def _asking(config: Config, peer_key: str) -> Asking:
    """Read the secrets of a configuration. `kvbridge keys check` says why one cannot be read."""
    try:
        own = read_token(config.http, key="http.token_file")
        if isinstance(config, BootstrapConfig):
            return Asking(bootstrap_token=own, daemon_token=own)
        return Asking(
            bootstrap_token=read_token(config.bootstrap, key="bootstrap.token_file"),
            daemon_token=own,
            keys=curve_keys(config.control.curve),
            peer_key=peer_key,
        )
    except BridgeError:
        return Asking()


def _json(needs: Needs, findings: list[Finding]) -> str:
    counts = {level.value: sum(finding.level is level for finding in findings) for level in Level}
    head = {"version": __version__, "host": socket.gethostname(), "role": needs.role, "name": needs.name}
    shown = [each.model_dump(mode="json") for each in findings]
    return json.dumps(head | {"counts": counts, "findings": shown}, indent=1)


def _text(needs: Needs, running: str, findings: list[Finding]) -> str:
    what = f"{needs.role} {needs.name}".strip() if needs.role else "this host alone (no --config, --role)"
    state = f"; running: {running}" if running else ""
    lines = [f"kvbridge {__version__} doctor on {socket.gethostname()}: {what}{state}"]
    for level, group in groupby(findings, key=lambda finding: finding.level):
        found = [f"  {finding.check}: {_words(finding)}" for finding in group]
        lines += [f"\n{HEADINGS[level]} ({len(found)})", *found]
    bad, warned = (sum(each.level is level for each in findings) for level in (Level.BREAKS, Level.WARNING))
    warnings = f"; {warned} warnings" if warned else ""
    return "\n".join([*lines, f"\n{f'{bad} will break' if bad else 'Nothing will break'}{warnings}."])


def _words(finding: Finding) -> str:
    if not finding.cure:
        return f"{finding.what}: {finding.why}" if finding.why else finding.what
    return f"{finding.what}\n    why: {finding.why}\n    cure: {finding.cure}"


def clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    directories: Annotated[
        list[Path] | None,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where to look: pools.host.directory, transports.local.proof_directory. May be repeated.",
            show_default=str(DEFAULT_DIRECTORY),
        ),
    ] = None,
) -> None:
    """Remove the files of killed daemons and rank workers from shared memory.

    Removes this user's files of kvbridge that no living process has locked,
    whatever node they came from. Daemons do the same whenever they start.
    Pools that wait for the next daemon of their node (pools.keep_s) stay until
    their time is over.

    Exit codes: 0: no file without an owner is left; 1: a file could not be
    removed, or looked at.
    """
    if absent := [str(each) for each in directories or () if not each.is_dir()]:
        typer.echo(f"kvbridge clean: {', '.join(absent)}: no such directory", err=True)
        raise typer.Exit(EXIT_FAILED)
    try:
        found = sweep(directories or [DEFAULT_DIRECTORY], dry_run=dry_run)
    except OSError as error:
        typer.echo(f"kvbridge clean: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    if found:
        typer.echo(aligned(_rows(found, dry_run=dry_run)))
    removed = [each for each in found if each.verdict is Verdict.REMOVED]
    done = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(removed)} of {len(found)} files {done}, {size(sum(each.size_bytes for each in removed))}")
    if any(each.verdict is Verdict.FAILED for each in found):
        raise typer.Exit(EXIT_FAILED)


def _rows(found: list[Leftover], *, dry_run: bool) -> Iterator[tuple[str, ...]]:
    yield "file", "what", "user", "process", "size", "verdict", "why"
    for each in found:
        verdict = "would remove" if dry_run and each.verdict is Verdict.REMOVED else each.verdict.value
        holder = "" if each.holder is None else str(each.holder)
        yield str(each.path), each.kind, _user(each.user_id), holder, size(each.size_bytes), verdict, each.why


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)
