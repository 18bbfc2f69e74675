"""`kvbridge init`: configurations that run together, with keys and tokens if asked; `configs/` holds its complete files."""

from __future__ import annotations

import importlib.util
import secrets
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from kvbridge.cli.config import EXIT_FAILED, DaemonRole, fail
from kvbridge.cli.keys import TOKEN_BYTES
from kvbridge.config.pools import ModelConfig
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.control.keys import generate_keys, write_keys, write_secret
from kvbridge.core.addresses import is_loopback
from kvbridge.core.errors import WITH_LIBRARIES, BridgeError, ConfigError, ConflictError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import PRESETS
from kvbridge.core.ids import IndexSpace, field_docs
from kvbridge.daemon.layout import load_geometry, plan_memory

NODES = {DaemonRole.PREFILL: DaemonRole.DECODE, DaemonRole.DECODE: DaemonRole.PREFILL}
"""Each role of a node, and the role of its peers."""
LOOPBACK = "127.0.0.1"
PORTS = {DaemonRole.BOOTSTRAP: 7900, DaemonRole.PREFILL: 7901, DaemonRole.DECODE: 7902}
CONTROL_PORT = 7911
"""Port of the control socket of a prefill node that others reach; on loopback the system chooses one."""
PAGES = {IndexSpace.FULL: 1024, IndexSpace.SWA: 256, IndexSpace.REQUEST: 64}
"""Most pages of a pool; halved until all pools of a daemon fit into `POOL_BYTES`."""
POOL_BYTES = 512 << 20

TIERS = """Cached prefixes, host memory below the device and a store below that are off. Their keys are below `tier` \
(`tier.enabled`, `tier.host`, `tier.store`), and docs/concepts.md explains them.

"""
WIDTH = 120
UNBROKEN = "\u00a0"
"""A space at which no line is broken."""
UNITS = {"_s": "seconds", "_bytes": "bytes", "_us": "microseconds"}
"""Unit of a value by the end of its key."""
Section = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class InitialCluster:
    """One bootstrap, one prefill and one decode node that work together."""

    folder: str
    """Folder of the files, for their comments."""
    runtime: str
    """Beginning of the runtime directories; each ends with its role."""
    model: ModelConfig
    one_host: bool = False
    """Whether bytes move through shared memory only."""
    hosts: dict[DaemonRole, str] = field(default_factory=dict)
    """The addresses of daemons that are not on loopback."""
    keys: Path | None = None
    """Folder of keys and tokens: ROLE-0.key with its public key beside it, ROLE-allowed-keys with public keys of the other role,
    node.token (shown to nodes) and bootstrap.token (shown to bootstrap)."""

    def files(self, *, complete: bool) -> dict[str, str]:
        """Return the text of each file: with every key if `complete`, else with those that a start needs."""
        configs = {role: role.schema.model_validate(self._settings(role)) for role in DaemonRole}
        lines = {
            role: [*_comment(self._top(role, complete=complete), 0), *_section(config, 0, complete=complete)]
            for role, config in configs.items()
        }
        return {f"{role}.yaml": "\n".join(text) + "\n" for role, text in lines.items()}

    def pool_bytes(self) -> dict[DaemonRole, int]:
        """Return the bytes of each node's pools."""
        return {role: self._planned(role, self._pools(role)) for role in NODES}

    def _settings(self, role: DaemonRole) -> Section:
        host, keys, directory = self.hosts.get(role, LOOPBACK), self.keys, DaemonRole.BOOTSTRAP
        settings: Section = {"http": {"host": host, "port": PORTS[role]}}
        if keys is not None:
            settings["http"]["token_file"] = keys / ("bootstrap.token" if role is directory else "node.token")
        if role is directory:
            return settings | ({"daemons": {"token_file": keys / "node.token"}} if keys is not None else {})
        settings |= {
            "instance": f"{role}-0",
            "model": self.model.model_dump(exclude_unset=True),
            "transports": {"order": ["local"] if self.one_host else ["local", "mooncake"]},
            "bootstrap": {"url": f"http://{_in_url(self.hosts.get(directory, LOOPBACK))}:{PORTS[directory]}"},
            "pools": self._pools(role),
        }
        runtime_dir = Path(f"{self.runtime}{role}")
        if fits_sockets(runtime_dir):
            settings["runtime_dir"] = runtime_dir
        control: Section = {}
        if not is_loopback(host):
            settings["transports"]["mooncake"] = {"host": host, "ipv6": ":" in host}
            if role is DaemonRole.PREFILL:
                control["bind"] = f"tcp://{_in_url(host)}:{CONTROL_PORT}"
        if keys is not None:
            files = {"secret_key_file": keys / f"{role}-0.key", "allowed_keys_file": keys / f"{role}-allowed-keys"}
            control["curve"] = files
            settings["bootstrap"]["token_file"] = keys / "bootstrap.token"
        return settings | ({"control": control} if control else {})

    def _pools(self, role: DaemonRole) -> Section:
        geometry = load_geometry(self.model)
        spaces = {component.space for component in geometry.components}
        device = {space.value: pages for space, pages in PAGES.items() if space in spaces}
        on_host = PAGES[IndexSpace.FULL]
        sparse = [each.kind for each in geometry.components if each.kind is ComponentKind.C4_KV and each.host_capable]
        while True:
            host: Section = {"components": sparse, **({"pages": on_host} if sparse else {})}
            pools: Section = {"device": device} | ({"host": host} if role is DaemonRole.DECODE else {})
            if self._planned(role, pools) <= POOL_BYTES or min(device.values()) <= 1:
                return pools
            device, on_host = {space: pages // 2 for space, pages in device.items()}, on_host // 2

    def _planned(self, role: DaemonRole, pools: Section) -> int:
        kind = DecodeConfig if role is DaemonRole.DECODE else PrefillConfig
        config = kind.model_validate({"instance": f"{role}-0", "model": self.model, "pools": pools})
        return plan_memory(config, load_geometry(self.model)).total_bytes

    def _top(self, role: DaemonRole, *, complete: bool) -> str:
        what = "The bootstrap service" if role is DaemonRole.BOOTSTRAP else f"A {role} daemon"
        rest = (
            "every key, its unit and its default"
            if complete
            else "what a start needs; `kvbridge init --complete` writes every key with its unit and default"
        )
        return f"""{what}: {rest}.

kvbridge {role} --config {self.folder}/{role}.yaml

{"" if complete or role is DaemonRole.BOOTSTRAP else TIERS}\
Environment variables (KVBRIDGE_HTTP__PORT sets http.port) are stronger than this file, and flags (--set http.port=0) than both. \
Durations are seconds; sizes are bytes, and "64GiB" is understood."""


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write to; made when it is not there.")],
    model: Annotated[str, typer.Option(help=f"{', '.join(PRESETS)}; or a Hugging Face config.json.")] = "tiny-v4",
    one_host: Annotated[bool, typer.Option("--one-host", help="Move bytes through shared memory only.")] = False,
    secure: Annotated[bool, typer.Option("--secure", help="Make keys and tokens in DIR/keys, and use them.")] = False,
    complete: Annotated[bool, typer.Option("--complete", help="Write every key, not only those that are set.")] = False,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="ROLE=ADDRESS", help="Address of a daemon beyond loopback. Repeat for each role."
        ),
    ] = None,
) -> None:
    """Write configurations for bootstrap, a prefill and a decode node that run together as they are.

    `kvbridge up DIR` then runs all three. Nothing is overwritten.

    Exit codes: 0: written; 1: a file exists already, or cannot be written;
    2: wrong options.
    """
    folder = folder.absolute()
    try:
        cluster = InitialCluster(
            folder=str(folder),
            runtime=f"{folder}/run/",
            model=_model(model),
            one_host=one_host,
            hosts=_hosts(hosts or [], secure=secure, one_host=one_host),
            keys=folder / "keys" if secure else None,
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


def _write(files: dict[Path, str], keys: Path | None) -> None:
    """Write everything, or nothing when a file exists already. Raises ConflictError, ConfigError."""
    there = [path for path in (*files, *([keys] if keys else [])) if path.exists()]
    if there:
        raise ConflictError(f"{', '.join(map(str, there))}: exists, and nothing is overwritten; name another directory")
    try:
        next(iter(files)).parent.mkdir(parents=True, exist_ok=True)
        if keys is not None:
            keys.mkdir(mode=0o700)
            for role, peer in NODES.items():
                pair, allowed = generate_keys(), keys / f"{peer}-allowed-keys"
                write_keys(pair, keys / f"{role}-0.key")
                allowed.write_text(f"# {role} nodes that {peer} nodes speak with\n{pair.public} {role}-0\n")
                allowed.chmod(0o644)
            for name in ("node.token", "bootstrap.token"):
                write_secret(secrets.token_urlsafe(TOKEN_BYTES), keys / name)
        for path, text in files.items():
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error


def _tell(folder: Path, cluster: InitialCluster) -> None:
    sizes = ", ".join(f"{size / (1 << 20):,.0f} MiB for {role}" for role, size in cluster.pool_bytes().items())
    typer.echo(f"{folder}: bootstrap.yaml, prefill.yaml, decode.yaml{', keys' if cluster.keys else ''}")
    typer.echo(f"model {cluster.model.preset or cluster.model.hf_config}; pools in host memory: {sizes}")
    if not cluster.one_host and importlib.util.find_spec("mooncake") is None:
        typer.echo(f"these need Mooncake, which is not installed ({WITH_LIBRARIES}); or init with --one-host")
    if any(not is_loopback(host) for host in cluster.hosts.values()):
        typer.echo(f"copy {folder} to each machine, without the secret keys (*.key) of others, and start its role:")
        typer.echo(f"  kvbridge ROLE --config {folder}/ROLE.yaml")
    else:
        typer.echo(f"next: kvbridge up {folder}")


# ---------------------------------------------------------------------------------------------- commented files


def _section(config: BaseModel, depth: int, *, complete: bool) -> Iterator[str]:
    for name, info in type(config).model_fields.items():
        value = getattr(config, name)
        if not complete and name not in config.model_fields_set:
            continue
        if not depth:
            yield ""
        if isinstance(value, BaseModel):
            yield from _comment(field_docs(type(config)).get(name) or " ".join((value.__doc__ or "").split()), depth)
            yield f"{'  ' * depth}{name}:"
            yield from _section(value, depth + 1, complete=complete)
            continue
        yield from _comment(_describe(type(config), name), depth)
        if value is None:
            yield from _optional_section(info, depth)
        unset = info.default_factory_takes_validated_data and name not in config.model_fields_set
        yield f"{'  ' * depth}{'# ' if unset else ''}{name}: {_plain(value)}"


def _describe(kind: type[BaseModel], name: str) -> str:
    """Return a field's docstring with its choices, unit and default."""
    info, text = kind.model_fields[name], field_docs(kind).get(name, "")
    choices = [choice.value for choice in _choices(info.annotation)]
    if not all(choice in text for choice in choices):
        text = f"{text} One of {', '.join(choices)}.".strip()
    facts = [unit for ending, unit in UNITS.items() if name.endswith(ending)]
    if info.is_required():
        facts.append("required")
    elif not info.default_factory_takes_validated_data:
        facts.append(f"default{UNBROKEN}{_plain(info.get_default(call_default_factory=True))}")
    return f"{text} ({', '.join(facts)})" if facts else text


def _optional_section(field: FieldInfo, depth: int) -> Iterator[str]:
    """Yield the keys of a section that is null, as comments."""
    for kind in get_args(field.annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _comment("These keys in place of null:", depth)
            for name in kind.model_fields:
                yield from _comment(f"{name}: {_describe(kind, name)}", depth, indent="    ")


def _choices(annotation: Any) -> tuple[StrEnum, ...]:  # noqa: ANN401 - any type that a field may have
    """Return the values of the enumeration that an annotation is, may be, or is a sequence of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            return tuple(kind)
    return ()


def _comment(text: str, depth: int, indent: str = "") -> Iterator[str]:
    margin = "  " * depth + "#"
    for paragraph in text.split("\n"):
        lines = textwrap.wrap(paragraph, WIDTH - len(margin) - 1 - len(indent), break_on_hyphens=False) or [""]
        yield from (f"{margin} {indent}{line.replace(UNBROKEN, ' ')}".rstrip() for line in lines)


def _plain(value: Any) -> str:  # noqa: ANN401 - whatever a field holds
    value = to_jsonable_python(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value == "":
        return '""'
    dumped = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")
