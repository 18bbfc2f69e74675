"""The node beside an engine: a child process with an interpreter of its own, or a daemon that an operator runs.

A child gets its configuration from the engine and from the engine's user, in a directory of its own. A thread starts it, and starts
another one after a growing pause whenever it ends. The kernel ends the child with this thread (`processes.end_with_parent`), which
lives until `close`. The child logs to this process's standard error.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TextIO

import structlog
import yaml

from kvbridge.api.endpoint_file import DaemonEndpoint, read_endpoint
from kvbridge.config.loading import merge_config
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.control.unix_sockets import ENGINE_SOCKET, prepare_runtime_directory, require_unserved
from kvbridge.core.addresses import is_loopback
from kvbridge.core.errors import WITH_LIBRARIES, ConfigError, ConflictError, NotReadyError, PeerError, UnsupportedError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Product
from kvbridge.engine.kit.tensors import InstanceCache
from kvbridge.processes import RestartPause, child_environment, how_it_ended, module_command
from kvbridge.transport import is_installed

log = structlog.get_logger(__name__)

RUNTIME_DIR = "runtime_dir"
DECIDED = ("model", "parallelism", "pools")
"""Sections that follow from the engine's tensors and its split into ranks."""
GEOMETRY_FILE, CONFIG_FILE, OWNER_FILE = "geometry.json", "node.yaml", "owner.lock"
_SHORT_TMP = Path("/tmp")  # noqa: S108 - the directory in it has mode 0700, and is checked before it is used
HEARTBEAT_S = 1.0
"""Short, so that requests of a killed prefill server end by their policy within three seconds."""
_INSTANCE_CHARACTERS = 100
START_S = 60.0
"""Longest wait for a node to listen."""
LOOK_S = 0.02
"""Pause between two looks for a node that is starting."""
DRAIN_S, KILL_S = 2.0, 5.0
"""Limits of `close`: after a first signal rooms may end, after a second one endpoints close; then the node is killed."""


@dataclass(frozen=True)
class NodePlace:
    """The node of one role of one engine instance: its directory, and the user's settings for it."""

    product: Product
    role: Role
    engine_id: str
    """The engine's name for the instance."""
    extra: Mapping[str, Any]
    """Keys of a daemon's configuration. A section named `prefill` or `decode` is for that role only."""

    def settings(self) -> dict[str, Mapping[str, Any]]:
        """Return the user's settings for this role by their origin; later ones override earlier ones. Raises ConfigError."""
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
        """Directory of the node: the same in all processes of an instance, and short enough for the addresses of sockets."""
        if (operated := self.operated) is not None:
            return operated
        name = f"{self.product.slug}-{self.role}-{_digest(self.engine_id)}"
        homes = [Path(home) / f"kvbridge-{name}" for home in (os.environ.get("XDG_RUNTIME_DIR"),) if home]
        homes += [home / f"kvbridge-{os.getuid()}-{name}" for home in (Path(tempfile.gettempdir()), _SHORT_TMP)]
        return next(home for home in homes if fits_sockets(home))

    @property
    def instance(self) -> str:
        """The engine's id as a valid name of an instance. A digest keeps changed ids apart."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", self.engine_id).lstrip("._-") or self.product.slug
        if name == self.engine_id and len(name) <= _INSTANCE_CHARACTERS:
            return name
        digest = _digest(self.engine_id)
        return f"{name[: _INSTANCE_CHARACTERS - len(digest) - 1]}-{digest}"


def _digest(engine_id: str) -> str:
    return hashlib.blake2b(engine_id.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class NodePlan:
    """A node to be started."""

    place: NodePlace
    cache: InstanceCache
    tp_size: int
    devices: Mapping[Rank, str]
    """Device of each rank's tensors, for the ranks of this node: `cpu` or `cuda:N`."""


def refuse(reason: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(f"kvbridge cannot transfer this KV cache: {reason}")


def node_config(plan: NodePlan) -> tuple[PrefillConfig | DecodeConfig, dict[str, Any]]:
    """Return the configuration of a node to be started, and the values for its file.

    Raises ConfigError, which names the key, for the user's settings; UnsupportedError for a node that anybody could reach.
    """
    place = plan.place
    runtime_dir = place.runtime_dir
    order = [name.value for name in TransportSettings().order if is_installed(name)]
    defaults: dict[str, Any] = {
        "instance": place.instance,
        "http": {"port": 0},
        "telemetry": {"log_format": "console"},
        "transports": {"order": order},
        "timeouts": {"control_heartbeat_s": HEARTBEAT_S, **place.product.timeouts},
    }
    host = {"memory": "adopted", "components": sorted(kind.value for kind in plan.cache.in_host)}
    decided: dict[str, Any] = {
        "model": {"geometry": str(runtime_dir / GEOMETRY_FILE)},
        "parallelism": {
            "pp_size": len(plan.cache.stage_boundaries) + 1,
            "tp_size": plan.tp_size,
            "stage_boundaries": list(plan.cache.stage_boundaries),
            "ranks": [{"pp": rank.pp, "tp": rank.tp, "device": device} for rank, device in plan.devices.items()],
        },
        "pools": {"memory": "adopted"} | ({"host": host} if place.role is Role.DECODE else {}),
        RUNTIME_DIR: str(runtime_dir),
    }
    engine = place.product.name
    sources = [(engine, defaults), *place.settings().items(), (engine, decided)]
    kind: type[PrefillConfig | DecodeConfig] = PrefillConfig if place.role is Role.PREFILL else DecodeConfig
    config, values = merge_config(kind, sources)
    for name in config.transports.order:
        if not is_installed(name):
            raise ConfigError(
                f"{place.product.settings}: transports.order names {name}, whose library is not installed here; "
                f"{WITH_LIBRARIES}, or take {name} out"
            )
    hosts = [config.control.host] if isinstance(config, PrefillConfig) else []
    if TransportName.MOONCAKE in config.transports.order:
        hosts.append(config.transports.mooncake.host)
    is_open = not all(map(is_loopback, hosts))
    if is_open and config.control.curve.secret_key_file is None and not config.insecure:
        refuse(
            "it can be reached from other hosts and has no keys, so that anybody there could read and write KV caches: give it "
            f"keys ({place.product.settings}: control.curve), keep it on this host, or set insecure to true"
        )
    return config, values


class WrittenNode(NamedTuple):
    """The files of a node."""

    config: PrefillConfig | DecodeConfig
    file: Path
    """File with this configuration."""
    owned: TextIO
    """Owner's lock: the directory belongs to this process until the lock is closed."""


def write_node(plan: NodePlan) -> WrittenNode:
    """Write the files of a node into its directory, which this makes and owns.

    Raises the errors of `node_config` and `own_directory`, and ConflictError when a running node is there.
    """
    config, values = node_config(plan)
    if config.transports.order == (TransportName.LOCAL,) and not is_installed(TransportName.MOONCAKE):
        log.info(
            "this_host_only", node_role=plan.place.role.value, reason=f"mooncake is not installed; {WITH_LIBRARIES}"
        )
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
    """Make the directory of a node, which is in use until the result is closed or this process ends.

    Raises ConfigError when the directory cannot be made, ConflictError while another process uses or removes it.
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
    """Take the lock of an owner's file. Raises OSError when another process has it, or when the file has left its path."""
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not os.path.samestat(os.fstat(held.fileno()), path.stat()):
        raise FileNotFoundError(path)


def remove_directory(runtime_dir: Path) -> None:
    """Remove the directory of a node while this process has the owner's lock, which keeps others out. Raises OSError.

    The directory is renamed first, so that files of its next owner are never in it.
    """
    gone = runtime_dir.with_name(f"{runtime_dir.name}.{secrets.token_hex(4)}")
    runtime_dir.rename(gone)
    shutil.rmtree(gone)


def remove_orphans(home: Path, product: Product) -> None:
    """Remove the directories in `home` of nodes whose engine was killed before it could remove them."""
    for owner in home.glob(f"kvbridge-*{product.slug}-*/{OWNER_FILE}"):
        with suppress(OSError), owner.open("r+") as held:
            _lock(held, owner)
            remove_directory(owner.parent)


# ---------------------------------------------------------------------------------------------- the process


def open_node(plan: NodePlan, *, timeout_s: float = START_S) -> Node:
    """Start the node of a plan, or find the node that an operator runs, and wait until it listens.

    Raises ConfigError and UnsupportedError for its settings, ConflictError when another engine with this id has a node, PeerError
    when the node ends instead, NotReadyError when it does not listen in time.
    """
    deadline_s = time.monotonic() + timeout_s
    place, operated = plan.place, plan.place.operated
    node: Node | None = None if operated is None else OperatedNode(place, operated)
    try:
        while True:
            try:
                node = node or NodeProcess(plan)
                node.endpoint()
                break
            except NotReadyError:
                if time.monotonic() >= deadline_s:
                    raise
            except ConflictError as error:  # the node of an ended engine with the same id may be going
                if time.monotonic() >= deadline_s:
                    raise ConflictError(
                        f"a {place.role} node of engine id '{place.engine_id}' runs on this host already ({error}); give each "
                        f"{place.product.name} an engine_id of its own ({place.product.id_option}), or stop the other one"
                    ) from error
            time.sleep(LOOK_S)
    except BaseException:
        if node is not None:
            node.close()
        raise
    return node


class OperatedNode:
    """A node that an operator runs."""

    def __init__(self, place: NodePlace, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self._place = place

    def endpoint(self) -> DaemonEndpoint:
        """Return the node's addresses. Raises NotReadyError; ConfigError when a daemon of another role is there."""
        role, engine = self._place.role, self._place.product.name
        found = read_endpoint(self.runtime_dir)
        if found is None:
            raise NotReadyError(
                f"no {role} node listens in {self.runtime_dir} (runtime_dir): start one there, or take runtime_dir out and "
                f"{engine} starts its own"
            )
        if found.role != role:
            raise ConfigError(
                f"the node in {self.runtime_dir} (runtime_dir) is of role {found.role}; this {engine} needs one of role {role}"
            )
        return found

    def close(self) -> None:
        """Leave the node to its operator."""


class NodeProcess:
    """A node as a child of this process."""

    def __init__(self, plan: NodePlan) -> None:
        """Raises the errors of `write_node`."""
        config, self._config_file, self._owned = write_node(plan)
        self.runtime_dir = config.runtime_dir
        remove_orphans(config.runtime_dir.parent, plan.place.product)
        self._role, self._engine = plan.place.role, plan.place.product.name
        self._changing = threading.Lock()
        """Held while a child is started or signalled, so that none is started after `close`."""
        self._closing = threading.Event()
        self._has_listened = False
        self._process: subprocess.Popen[bytes] | None = None
        self.ends: deque[str] = deque(maxlen=16)
        """The latest unrequested ends of children, in words; the last one last."""
        self._thread = threading.Thread(target=self._keep, name=f"kvbridge-{self._role}-node", daemon=True)
        self._thread.start()

    def endpoint(self) -> DaemonEndpoint:
        """Return the child's addresses without waiting.

        Raises NotReadyError while the child cannot be reached, and PeerError when the first child ended before it listened.
        """
        found, process = read_endpoint(self.runtime_dir), self._process
        if found is not None and process is not None and found.pid == process.pid and process.returncode is None:
            self._has_listened = True
            return found
        if self.ends and not self._has_listened:
            raise PeerError(
                f"the {self._role} node of this {self._engine} could not start: {self.ends[0]}; its log, above, says why. Try it "
                f"by itself: kvbridge {self._role} --config {self._config_file}"
            )
        reason = f"has ended ({self.ends[-1]}) and is being started again" if self.ends else "is being started"
        raise NotReadyError(
            f"the {self._role} node of this {self._engine} {reason}; its log is among the lines of this process"
        )

    def _keep(self) -> None:
        """Keep a child running until `close`: the thread."""
        pause = RestartPause()
        while not self._closing.is_set():
            begun_s = time.monotonic()
            try:
                how = self._run()
            except Exception as error:  # without this thread no node would be started any more
                log.exception("node_not_followed", node_role=self._role.value)
                how = f"it could not be followed: {type(error).__name__}: {error}"
            if self._closing.is_set():
                return
            self.ends.append(how)
            pause_s = pause.after(time.monotonic() - begun_s)
            log.error("node_gone", node_role=self._role.value, reason=how, again_in_s=pause_s)
            self._closing.wait(pause_s)

    def _run(self) -> str:
        """Start a child and wait for its end. Return why it ended, or why it could not start."""
        command = module_command("kvbridge", self._role.value, "--config", str(self._config_file))
        with self._changing:
            if self._closing.is_set():
                return ""
            try:
                process = self._process = subprocess.Popen(
                    [*command, "--parent", str(os.getpid())],
                    stdin=subprocess.PIPE,  # the child ends when this pipe does
                    stdout=2,  # standard error
                    env=child_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is for the engine, which ends the child
                )
            except OSError as error:  # descriptors, processes or memory are short, perhaps for a moment only
                return f"it could not be started: {error}"
        try:
            return how_it_ended(process.wait())
        finally:
            assert process.stdin is not None
            process.stdin.close()

    def close(self) -> None:
        """End the child, whose rooms may end within DRAIN_S, and remove its directory. Harmless when the child has ended."""
        with self._changing:
            self._closing.set()
        self._signal(signal.SIGCONT)  # a stopped child would not get the others
        for number, limit_s in ((signal.SIGTERM, DRAIN_S), (signal.SIGTERM, KILL_S), (signal.SIGKILL, KILL_S)):
            self._signal(number)
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                break
        if self._has_listened and not self._owned.closed:  # otherwise a person may try its configuration by hand
            with suppress(OSError):
                remove_directory(self.runtime_dir)
        self._owned.close()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


Node = NodeProcess | OperatedNode
