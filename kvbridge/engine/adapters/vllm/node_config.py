"""The configuration of the node beside a vLLM engine, by vLLM and by its user's `kv_connector_extra_config`; and its directory."""

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
from typing import Any, NamedTuple, TextIO

import yaml

from kvbridge.config.loading import merge_config
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.config.transports import TransportName
from kvbridge.control.runtime_directory import ENGINE_SOCKET, prepare_runtime_directory, require_unserved
from kvbridge.core.addresses import is_loopback
from kvbridge.core.errors import ConfigError, ConflictError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.adapters.vllm.instance import refuse
from kvbridge.engine.adapters.vllm.tensors import InstanceCache

EXTRA = "kv_connector_extra_config"
RUNTIME_DIR = "runtime_dir"
DECIDED = ("model", "parallelism", "pools")
"""Sections that follow from the tensors that vLLM has registered, and from how it is split."""
GEOMETRY_FILE, CONFIG_FILE, OWNER_FILE = "geometry.json", "node.yaml", "owner.lock"
_SHORT_TMP = Path("/tmp")  # noqa: S108 - a directory of mode 0700 is made in it, and looked at before it is used
HEARTBEAT_S = 1.0
"""Requests of a prefill server that was killed end by their policy within three seconds."""
_INSTANCE_CHARACTERS = 100


@dataclass(frozen=True)
class NodePlan:
    """One node of a vLLM instance."""

    role: Role
    engine_id: str
    """vLLM's name of the instance."""
    cache: InstanceCache
    tp_size: int
    devices: Mapping[Rank, str]
    """The ranks of this node, and where each has its tensors: `cpu`, or `cuda:N`."""
    extra: Mapping[str, Any]
    """`kv_connector_extra_config`: keys of a daemon's configuration. What is for one role only is in a section of its name."""


def settings_of(role: Role, extra: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return what the user has said for a role, from weak to strong, by where it was said. Raises ConfigError."""
    common = {key: value for key, value in extra.items() if key not in set(Role)}
    own = extra.get(role, {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"{EXTRA}.{role}: expected a section with keys that are for {role} only")
    found = {EXTRA: common, f"{EXTRA}.{role}": own}
    for origin, values in found.items():
        for key in DECIDED:
            if key in values:
                raise ConfigError(f"{origin}.{key}: is decided by vLLM's own settings; take it out")
    return found


def operated_directory(role: Role, extra: Mapping[str, Any]) -> Path | None:
    """Return the directory of the node that an operator runs, None where none was named. Raises ConfigError."""
    said = {key: value for values in settings_of(role, extra).values() for key, value in values.items()}
    if RUNTIME_DIR not in said:
        return None
    if others := sorted(said.keys() - {RUNTIME_DIR}):
        raise ConfigError(
            f"{EXTRA}: {RUNTIME_DIR} names a {role} node that you run, so {', '.join(others)} would have no effect: put that into "
            f"the configuration of that node, or take {RUNTIME_DIR} out"
        )
    return Path(said[RUNTIME_DIR])


def runtime_directory(role: Role, engine_id: str, extra: Mapping[str, Any]) -> Path:
    """Return where the sockets of a node are: the same for all processes of a vLLM instance, and short enough for sockets."""
    if (operated := operated_directory(role, extra)) is not None:
        return operated
    name = f"vllm-{role}-{hashlib.blake2b(engine_id.encode(), digest_size=6).hexdigest()}"
    homes = [Path(home) / f"kvbridge-{name}" for home in (os.environ.get("XDG_RUNTIME_DIR"),) if home]
    homes += [home / f"kvbridge-{os.getuid()}-{name}" for home in (Path(tempfile.gettempdir()), _SHORT_TMP)]
    return next(home for home in homes if fits_sockets(home))


def instance_name(engine_id: str) -> str:
    """Return an engine id as the name of an instance: as it is where that may be, or else with what it lacks."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", engine_id).lstrip("._-") or "vllm"
    if name == engine_id and len(name) <= _INSTANCE_CHARACTERS:
        return name
    digest = hashlib.blake2b(engine_id.encode(), digest_size=6).hexdigest()
    return f"{name[: _INSTANCE_CHARACTERS - len(digest) - 1]}-{digest}"


def node_config(plan: NodePlan) -> tuple[PrefillConfig | DecodeConfig, dict[str, Any]]:
    """Return the configuration of a node that is to be started, and the values for its file.

    Raises ConfigError for what the user has said, by its key; UnsupportedError for a node that anybody could reach.
    """
    runtime_dir = runtime_directory(plan.role, plan.engine_id, plan.extra)
    defaults: dict[str, Any] = {
        "instance": instance_name(plan.engine_id),
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
        "pools": {"memory": "adopted"} | ({"host": {"components": []}} if plan.role is Role.DECODE else {}),
        RUNTIME_DIR: str(runtime_dir),
    }
    sources = [("vLLM", defaults), *settings_of(plan.role, plan.extra).items(), ("vLLM", decided)]
    merged: tuple[PrefillConfig | DecodeConfig, dict[str, Any]] = (
        merge_config(PrefillConfig, sources) if plan.role is Role.PREFILL else merge_config(DecodeConfig, sources)
    )
    config, values = merged
    if _is_open(config) and config.control.curve.secret_key_file is None and not config.insecure:
        refuse(
            "it can be reached from other hosts and has no keys, so that anybody there could read and write KV caches: give it "
            "keys (kv_connector_extra_config: control.curve), keep it on this host, or set insecure to true"
        )
    return config, values


def _is_open(config: PrefillConfig | DecodeConfig) -> bool:
    """Whether peers of other hosts are to reach it."""
    hosts = [config.control.host] if isinstance(config, PrefillConfig) else []
    if TransportName.MOONCAKE in config.transports.order:
        hosts.append(config.transports.mooncake.host)
    return not all(map(is_loopback, hosts))


def own_directory(runtime_dir: Path) -> TextIO:
    """Make the directory of a node, and mark it as in use until what is returned is closed, or this process ends, however it does.

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
    """Remove the directory of a node. For whoever has the owner's lock: until then nobody else takes the directory.

    The directory goes out of the way first: the files of its next owner are never in what is removed. Raises OSError.
    """
    gone = runtime_dir.with_name(f"{runtime_dir.name}.{secrets.token_hex(4)}")
    runtime_dir.rename(gone)
    shutil.rmtree(gone)


def remove_orphans(home: Path) -> None:
    """Remove directories of nodes in `home` whose vLLM has ended without a chance to: it is killed as soon as it is told to end."""
    for owner in home.glob(f"kvbridge-*vllm-*/{OWNER_FILE}"):
        with suppress(OSError), owner.open("r+") as held:
            _lock(held, owner)
            remove_directory(owner.parent)


class WrittenNode(NamedTuple):
    """What a node starts from."""

    config: PrefillConfig | DecodeConfig
    file: Path
    """The file with that configuration."""
    owned: TextIO
    """The directory is this process's until this is closed."""


def write_node(plan: NodePlan) -> WrittenNode:
    """Write the files that a node starts from into its directory, which is made and owned.

    Raises as `node_config` does, ConfigError when the directory cannot be had, and ConflictError when another process has it, or a
    node is there that runs.
    """
    config, values = node_config(plan)
    owned = own_directory(config.runtime_dir)  # first: else whoever removes what has no owner removes the files
    try:
        require_unserved(config.runtime_dir / ENGINE_SOCKET)
        return WrittenNode(config, _write_files(plan, config, values), owned)
    except BaseException:
        owned.close()
        raise


def _write_files(plan: NodePlan, config: PrefillConfig | DecodeConfig, values: dict[str, Any]) -> Path:
    file = config.runtime_dir / CONFIG_FILE
    contents = {
        config.runtime_dir / GEOMETRY_FILE: plan.cache.geometry.model_dump_json(indent=2),
        file: yaml.safe_dump(values, sort_keys=False, allow_unicode=True),
    }
    for path, text in contents.items():
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")
    return file
