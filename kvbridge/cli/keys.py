"""`kvbridge keys`: make keys and tokens, and check those of a configuration. No command prints a secret or overwrites a file."""

from __future__ import annotations

import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from kvbridge.cli.config import EXIT_CONFIG, ROLES, FileOption, RoleOption, SetOption, fail, load_or_exit
from kvbridge.config.endpoints import CurveConfig, HttpConfig, TokenConfig
from kvbridge.config.loading import read_grants
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig, RouterConfig
from kvbridge.control.keys import (
    generate_keys,
    load_keys,
    public_key_beside,
    read_allowed,
    readable_by_design,
    write_keys,
    write_secret,
)
from kvbridge.core.errors import BridgeError
from kvbridge.core.prefixes import Namespaces

TOKEN_BYTES = 32
SHORTEST_TOKEN = 16
"""Characters; a shorter token can be guessed by trying."""
_OTHERS = 0o077

app = typer.Typer(name="keys", help="Make and check keys and tokens.", no_args_is_help=True)


@app.command()
def generate(
    file: Annotated[Path, typer.Argument(help="File for the secret key; the public one goes beside it as .pub.")],
    instance: Annotated[
        str, typer.Option("--instance", help="The instance that the key is for; part of the printed entry.")
    ] = "",
) -> None:
    """Make a CURVE key pair, and print where to use it. Never overwrites a file."""
    keys = generate_keys()
    try:
        public_file = write_keys(keys, file)
    except BridgeError as error:
        fail(error)
    entry = f"{keys.public} {instance}".strip()
    typer.echo(f"""secret key: {file.absolute()} (mode 0600; it stays on this machine)
public key: {keys.public} (also in {public_file.absolute()})

In this node's configuration:

control:
  curve:
    secret_key_file: {file.absolute()}

A decode node connects to prefill nodes. For a decode node's key, one line in the file that each prefill node names as
control.curve.allowed_keys_file (running daemons notice it):

{entry}

A prefill node's public key needs no list: bootstrap hands it out with each request.""")


@app.command()
def token(file: Annotated[Path, typer.Argument(help="File for the token.")]) -> None:
    """Make a bearer token for the HTTP APIs. Never overwrites a file, and does not print the token."""
    try:
        write_secret(secrets.token_urlsafe(TOKEN_BYTES), file)
    except BridgeError as error:
        fail(error)
    typer.echo(f"""token: {file.absolute()} (mode 0600)

The daemons that ask for it: http.token_file. Bootstrap, when it is the token of its daemons: daemons.token_file.
Daemons, when it is the token of their bootstrap: bootstrap.token_file.""")


@app.command()
def check(role: RoleOption, config: FileOption = None, overrides: SetOption = None) -> None:
    """Check the keys and tokens that a daemon would use; exit with 2 when something is wrong with them."""
    findings = list(_findings(load_or_exit(ROLES[role], config, overrides)))
    for good, text in findings:
        typer.echo(f"{'ok     ' if good else 'PROBLEM'} {text}")
    if not all(good for good, _ in findings):
        raise typer.Exit(EXIT_CONFIG)


def _findings(loaded: BaseModel) -> Iterator[tuple[bool, str]]:
    """Yield whether a key or token is good, and a line about it."""
    assert isinstance(loaded, PrefillConfig | DecodeConfig | BootstrapConfig | RouterConfig)
    if isinstance(loaded, PrefillConfig | DecodeConfig):
        yield from _curve(loaded.control.curve, prefill=isinstance(loaded, PrefillConfig))
    yield from _http(loaded.http)
    if isinstance(loaded, BootstrapConfig):
        yield from _token("daemons", loaded.daemons)
        if loaded.directory.redis_password_file is not None:
            yield from _private("directory.redis_password_file", loaded.directory.redis_password_file)
    else:
        yield from _token("bootstrap", loaded.bootstrap)


def _curve(curve: CurveConfig, *, prefill: bool) -> Iterator[tuple[bool, str]]:
    path = curve.secret_key_file
    if path is None:
        yield (True, "control.curve: no keys; the control socket is not encrypted, on loopback only")
        return
    try:
        allowed = read_allowed(curve.allowed_public_keys, curve.allowed_keys_file)
        keys = load_keys(path, public=curve.public_key or "", allowed=allowed)
    except BridgeError as error:
        yield (False, f"control.curve: {error}")
        return
    yield (True, f"control.curve.secret_key_file: {path}, public key {keys.public}")
    beside = public_key_beside(path)
    if beside not in {"", keys.public}:
        yield (False, f"control.curve: {path.with_suffix('.pub')} holds another pair's public key: {beside[:40]}")
    if not prefill:
        return
    yield (True, f"may connect: {keys.public} (this node's own pair), as any instance")
    for key, instances in sorted(allowed.items()):
        yield (True, f"may connect: {key} as {', '.join(sorted(instances)) or 'any instance'}")


def _http(http: HttpConfig) -> Iterator[tuple[bool, str]]:
    if not http.has_token:
        yield (True, "http: no token; the endpoint is open to everybody who reaches it, on loopback only")
    yield from _token("http", http)
    if http.tls_key_file is not None:
        yield from _private("http.tls_key_file", http.tls_key_file)
    elif http.has_token:
        yield (True, "http: no TLS; the token travels in the clear, so the network must be trusted")


def _token(section: str, given: TokenConfig) -> Iterator[tuple[bool, str]]:
    file = given.token_file
    try:
        found = read_grants(given, key=f"{section}.token_file")
    except BridgeError as error:
        yield (False, str(error))
        return
    if not found:
        return
    if file is None:
        yield (True, f"{section}.token: given in the configuration itself; a file of mode 0600 keeps it better")
    else:
        yield from _private(f"{section}.token_file", file)
    shortest = min(len(grant.token) for grant in found)
    if shortest < SHORTEST_TOKEN:
        text = f"{section}: a token of {shortest} characters can be guessed; `kvbridge keys token` makes one"
        yield (False, text)
    for number, grant in enumerate(found, 1):
        if section == "http" and grant.namespaces != Namespaces():
            yield (True, f"http: token {number} of {len(found)} may name {grant.namespaces}")
    if len(found) > 1:
        yield (True, f"{section}: {len(found)} tokens are valid; remove the old ones once nobody shows them")


def _private(key: str, file: Path) -> Iterator[tuple[bool, str]]:
    try:
        facts = file.stat()
        mode = stat.S_IMODE(facts.st_mode & ~readable_by_design(facts))
    except OSError as error:
        yield (False, f"{key}: cannot read {file}: {error.strerror}")
        return
    if mode & _OTHERS:
        yield (False, f"{key}: {file} has mode {mode:04o}, others can read it; run: chmod 600 {file}")
    else:
        yield (True, f"{key}: {file}")
