"""The configuration of the node beside an engine, from the engine and from its user's settings; and the node's directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import yaml

from kvbridge.config.loading import merge_config
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.config.transports import TransportName
from kvbridge.control.runtime_directory import ENGINE_SOCKET, prepare_runtime_directory, require_unserved
from kvbridge.core.addresses import is_loopback
from kvbridge.core.errors import ConfigError, ConflictError, UnsupportedError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Product
from kvbridge.engine.kit.tensors import InstanceCache

RUNTIME_DIR = "runtime_dir"
DECIDED = ("model", "parallelism", "pools")
"""Sections that follow from the engine's tensors, and from how it is split."""
GEOMETRY_FILE, CONFIG_FILE, OWNER_FILE = "geometry.json", "node.yaml", "owner.lock"
_SHORT_TMP = Path("/tmp")  # noqa: S108 - a directory of mode 0700 is made in it, and looked at before it is used
HEARTBEAT_S = 1.0
"""Requests of a prefill server that was killed end by their policy within three seconds."""
_INSTANCE_CHARACTERS = 100


@dataclass(frozen=True)
class NodePlace:
    """The node of one role of one engine instance: where it is, and the user's settings for it."""

    product: Product
    role: Role
    engine_id: str
    """The engine's name of the instance."""
    extra: Mapping[str, Any]
    """Keys of a daemon's configuration. A section named by a role is for this role only."""

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Return the user's settings for this role, from weak to strong, by their origin. Raises ConfigError."""
        common = {key: value for key, value in self.extra.items() if key not in set(Role)}
        own, name = self.extra.get(self.role, {}), self.product.settings
        if not isinstance(own, Mapping):
            raise ConfigError(f"{name}.{self.role}: expected a section with keys that are for {self.role} only")
        found = {name: common, f"{name}.{self.role}": own}
        for origin, values in found.items():
            for key in DECIDED:
                if key in values:
                    raise ConfigError(f"{origin}.{key}: is decided by {self.product.name}'s own settings; take it out")
        return found

    @property
    def operated(self) -> Path | None:
        """Directory of the node that an operator runs, None when the user named none. Raises ConfigError."""
        said = {key: value for values in self.settings().values() for key, value in values.items()}
        if RUNTIME_DIR not in said:
            return None
        if others := sorted(said.keys() - {RUNTIME_DIR}):
            raise ConfigError(
                f"{self.product.settings}: {RUNTIME_DIR} names a {self.role} node that you run, so {', '.join(others)} would have "
                f"no effect: put that into the configuration of that node, or take {RUNTIME_DIR} out"
            )
        return Path(said[RUNTIME_DIR])

    @property
    def runtime_dir(self) -> Path:
        """Directory of the node's sockets: the same in all processes of an instance, and short enough for sockets."""
        if (operated := self.operated) is not None:
            return operated
        name = f"{self.product.slug}-{self.role}-{_digest(self.engine_id)}"
        homes = [Path(home) / f"kvbridge-{name}" for home in (os.environ.get("XDG_RUNTIME_DIR"),) if home]
        homes += [home / f"kvbridge-{os.getuid()}-{name}" for home in (Path(tempfile.gettempdir()), _SHORT_TMP)]
        return next(home for home in homes if fits_sockets(home))

    @property
    def instance(self) -> str:
        """The engine's id as the name of an instance, with what it lacks for one."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.engine_id).lstrip("._-") or self.product.slug
        if name == self.engine_id and len(name) <= _INSTANCE_CHARACTERS:
            return name
        digest = _digest(self.engine_id)
        return f"{name[: _INSTANCE_CHARACTERS - len(digest) - 1]}-{digest}"


def _digest(engine_id: str) -> str:
    return hashlib.blake2b(engine_id.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class NodePlan:
    """One node to be started."""

    place: NodePlace
    cache: InstanceCache
    tp_size: int
    devices: Mapping[Rank, str]
    """The ranks of this node, and the device of each one's tensors: `cpu`, or `cuda:N`."""


def refuse(reason: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(f"kvbridge cannot transfer this KV cache: {reason}")


def node_config(plan: NodePlan) -> tuple[PrefillConfig | DecodeConfig, dict[str, Any]]:
    """Return the configuration of a node that is to be started, and the values for its file.

    Raises ConfigError for the user's settings, by their key; UnsupportedError for a node that anybody could reach.
    """
    place = plan.place
    runtime_dir = place.runtime_dir
    defaults: dict[str, Any] = {
        "instance": place.instance,
        "http": {"port": 0},
        "telemetry": {"log_format": "console"},
        "timeouts": {"control_heartbeat_s": HEARTBEAT_S},
    }
    decided: dict[str, Any] = {
        "model": {"geometry": str(runtime_dir / GEOMETRY_FILE)},
        "parallelism": {
            "pp_size": len(plan.cache.stage_boundaries) + 1,
            "tp_size": plan.tp_size,
            "stage_boundaries": list(plan.cache.stage_boundaries),
            "ranks": [{"pp": rank.pp, "tp": rank.tp, "device": device} for rank, device in plan.devices.items()],
        },
        "pools": {"memory": "adopted"} | ({"host": {"components": []}} if place.role is Role.DECODE else {}),
        RUNTIME_DIR: str(runtime_dir),
    }
    engine = place.product.name
    sources = [(engine, defaults), *place.settings().items(), (engine, decided)]
    merged: tuple[PrefillConfig | DecodeConfig, dict[str, Any]] = (
        merge_config(PrefillConfig, sources) if place.role is Role.PREFILL else merge_config(DecodeConfig, sources)
    )
    config, values = merged
    if _is_open(config) and config.control.curve.secret_key_file is None and not config.insecure:
        refuse(
            "it can be reached from other hosts and has no keys, so that anybody there could read and write KV caches: give it "
            f"keys ({place.product.settings}: control.curve), keep it on this host, or set insecure to true"
        )
    return config, values


def _is_open(config: PrefillConfig | DecodeConfig) -> bool:
    """Whether peers of other hosts are to reach it."""
    hosts = [config.control.host] if isinstance(config, PrefillConfig) else []
    if TransportName.MOONCAKE in config.transports.order:
        hosts.append(config.transports.mooncake.host)
    return not all(map(is_loopback, hosts))


# ---------------------------------------------------------------------------------------------- the directory


class WrittenNode(NamedTuple):
    """The files that a node starts from."""

    config: PrefillConfig | DecodeConfig
    file: Path
    """The file with that configuration."""
    owned: TextIO
    """The directory is this process's until this is closed."""


def write_node(plan: NodePlan) -> WrittenNode:
    """Write the files that a node starts from into its directory, which this makes and owns.

    Raises as `node_config` does, ConfigError when the directory cannot be had, ConflictError when another process has it, or a
    running node is there.
    """
    config, values = node_config(plan)
    owned = own_directory(config.runtime_dir)  # first: `remove_orphans` of another process removes what has no owner
    try:
        require_unserved(config.runtime_dir / ENGINE_SOCKET)
        file = config.runtime_dir / CONFIG_FILE
        contents = {
            config.runtime_dir / GEOMETRY_FILE: plan.cache.geometry.model_dump_json(indent=2),
            file: yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
        }
        for path, text in contents.items():
            path.touch(0o600)
            path.write_text(text, encoding="utf-8")
        return WrittenNode(config, file, owned)
    except BaseException:
        owned.close()
        raise


def own_directory(runtime_dir: Path) -> TextIO:
    """Make the directory of a node. It is in use until the result is closed, or this process ends, however it does.

    Raises ConfigError when the directory cannot be had, ConflictError while another process has it or removes it.
    """
    path = prepare_runtime_directory(runtime_dir) / OWNER_FILE
    with ExitStack() as stack:
        try:
            held = stack.enter_context(path.open("w"))
            _lock(held, path)
        except OSError as error:
            raise ConflictError(f"another process has the directory {runtime_dir}, or removes it") from error
        stack.pop_all()
    return held


def _lock(held: TextIO, path: Path) -> None:
    """Take the lock of an owner's file. Raises OSError while another process has it, or when the file is not at its path now."""
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(held.fileno()), path.stat()):
        raise FileNotFoundError(path)


def remove_directory(runtime_dir: Path) -> None:
    """Remove the directory of a node, of which this process has the owner's lock: nobody else takes it until then.

    The directory is renamed first, so that it never contains files of its next owner. Raises OSError.
    """
    gone = runtime_dir.with_name(f"{runtime_dir.name}.{secrets.token_hex(4)}")
    runtime_dir.rename(gone)
    shutil.rmtree(gone)


def remove_orphans(home: Path, product: Product) -> None:
    """Remove directories of nodes in `home` whose engine was killed before it could remove them."""
    for owner in home.glob(f"kvbridge-*{product.slug}-*/{OWNER_FILE}"):
        with suppress(OSError), owner.open("r+") as held:
            _lock(held, owner)
            remove_directory(owner.parent)
