"""`kvbridge init`: configurations that run together, with keys and tokens when they are asked for.

Owns: the command, what is written where, exit codes. Must not know: what the configurations set (`initial.py`).
"""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from kvbridge.cli.config import EXIT_FAILED, DaemonRole, fail
from kvbridge.cli.initial import InitialCluster, KeyFiles
from kvbridge.cli.keys import TOKEN_BYTES
from kvbridge.config.pools import ModelConfig
from kvbridge.control.keys import generate_keys, write_keys, write_secret
from kvbridge.core.addresses import is_loopback
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError
from kvbridge.core.geometry.presets import PRESETS

NODES = {DaemonRole.PREFILL: DaemonRole.DECODE, DaemonRole.DECODE: DaemonRole.PREFILL}
"""Each role of a node, and the one that it speaks with."""


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; made when it is not there.")],
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODEL", help=f"{', '.join(PRESETS)}; or a Hugging Face config.json."),
    ] = "tiny-v4",
    one_host: Annotated[
        bool,
        typer.Option("--one-host", help="Move bytes through shared memory only: no transfer library is needed."),
    ] = False,
    secure: Annotated[bool, typer.Option("--secure", help="Draw keys and tokens into DIR/keys, and use them.")] = False,
    complete: Annotated[bool, typer.Option("--complete", help="Write every key, not only those that are set.")] = False,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="ROLE=ADDRESS", help="Where a daemon will be, if not on loopback. Repeat for each role."
        ),
    ] = None,
) -> None:
    """Write configurations for bootstrap, a prefill and a decode node that run together as they are.

    `kvbridge up DIR` then runs all three. Nothing is overwritten.

    Exit codes: 0: written; 1: something is there already, or cannot be
    written; 2: wrong options.
    """
    folder = folder.absolute()
    try:
        cluster = InitialCluster(
            folder=str(folder),
            runtime=f"{folder}/run/",
            model=_model(model),
            one_host=one_host,
            hosts=_hosts(hosts or [], secure=secure, one_host=one_host),
            keys=KeyFiles(folder=folder / "keys") if secure else None,
        )
        files = {folder / name: text for name, text in cluster.files(complete=complete).items()}
    except BridgeError as error:
        fail(error)
    except ValidationError as error:
        fail(ConfigError("\n".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())))
    try:
        _write(files, cluster.keys)
    except BridgeError as error:
        fail(error, EXIT_FAILED)
    _tell(folder, cluster)


def _model(name: str) -> ModelConfig:
    path = Path(name)
    if name not in PRESETS and not path.is_file():
        raise ConfigError(f"--model: '{name}' is no file, and no model among {', '.join(PRESETS)}")
    try:
        return ModelConfig(preset=name) if name in PRESETS else ModelConfig(hf_config=path.absolute())
    except ValidationError as error:
        raise ConfigError(f"--model: {error.errors()[0]['msg']}") from error


def _hosts(given: list[str], *, secure: bool, one_host: bool) -> dict[DaemonRole, str]:
    hosts = {}
    for each in given:
        role, equals, address = each.partition("=")
        if role not in list(DaemonRole) or not equals or not address or "/" in address:
            raise ConfigError(f"--host: expected ROLE=ADDRESS with a role of {', '.join(DaemonRole)}, got '{each}'")
        hosts[DaemonRole(role)] = address.strip("[]")
    reachable = [f"{role} on {address}" for role, address in hosts.items() if not is_loopback(address)]
    if reachable and not secure:
        raise ConfigError(f"--host: others could reach {' and '.join(reachable)}; add --secure")
    if one_host and len({hosts.get(role) for role in NODES}) > 1:
        raise ConfigError("--one-host: prefill and decode have different addresses; leave one of the two options out")
    return hosts


def _write(files: dict[Path, str], keys: KeyFiles | None) -> None:
    """Write everything, or nothing when something is there already. Raises ConflictError, ConfigError."""
    there = [path for path in (*files, *([keys.folder] if keys else [])) if path.exists()]
    if there:
        raise ConflictError(f"{', '.join(map(str, there))}: exists, and nothing is overwritten; name another directory")
    try:
        next(iter(files)).parent.mkdir(parents=True, exist_ok=True)
        if keys is not None:
            _draw(keys)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error


def _draw(keys: KeyFiles) -> None:
    keys.folder.mkdir(mode=0o700)
    for role, peer in NODES.items():
        pair = generate_keys()
        write_keys(pair, keys.secret(role))
        keys.allowed(peer).write_text(f"# {role} nodes that {peer} nodes speak with\n{pair.public} {role}-0\n")
        keys.allowed(peer).chmod(0o644)
    for path in (keys.node_token, keys.bootstrap_token):
        write_secret(secrets.token_urlsafe(TOKEN_BYTES), path)


def _tell(folder: Path, cluster: InitialCluster) -> None:
    sizes = ", ".join(f"{size / (1 << 20):,.0f} MiB for {role}" for role, size in cluster.pool_bytes().items())
    typer.echo(f"{folder}: bootstrap.yaml, prefill.yaml, decode.yaml{', keys' if cluster.keys else ''}")
    typer.echo(f"model {cluster.model.preset or cluster.model.hf_config}; pools in host memory: {sizes}")
    if not cluster.one_host and importlib.util.find_spec("mooncake") is None:
        typer.echo("Mooncake is not installed, which these need: pip install 'kvbridge[cpu]'; or init with --one-host")
    if any(not is_loopback(host) for host in cluster.hosts.values()):
        typer.echo(f"copy {folder} to each machine, less the secret keys (*.key) of others, and start there, by role:")
        typer.echo(f"  kvbridge ROLE --config {folder}/ROLE.yaml")
    else:
        typer.echo(f"next: kvbridge up {folder}")
