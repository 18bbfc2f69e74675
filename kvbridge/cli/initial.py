"""The configurations that a new cluster begins with: what `kvbridge init` writes, and what `configs/` holds.

Owns: which keys they set, and to what. Must not know: files, how keys are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbridge.cli.config import DaemonRole
from kvbridge.config.pools import ModelConfig
from kvbridge.config.rendering import render_commented
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.core.addresses import is_loopback
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.memory import plan_memory
from kvbridge.daemon.model import load_geometry

LOOPBACK = "127.0.0.1"
PORTS = {DaemonRole.BOOTSTRAP: 7900, DaemonRole.PREFILL: 7901, DaemonRole.DECODE: 7902}
CONTROL_PORT = 7911
"""Of a prefill node that others reach; on loopback the system chooses one."""
PAGES = {IndexSpace.FULL: 1024, IndexSpace.SWA: 256, IndexSpace.REQUEST: 64}
"""The most that a pool is given, halved until all pools of a daemon fit into `POOL_BYTES`."""
POOL_BYTES = 512 << 20

TIERS = """Prefixes that stay, host memory below the device and a store below that are off; they are the keys below `tier` \
(`tier.enabled`, `tier.host`, `tier.store`), and docs/concepts.md says what each is for.

"""
Section = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class KeyFiles:
    """Where the keys and tokens of a cluster are."""

    folder: Path

    def secret(self, role: DaemonRole) -> Path:
        """A node's CURVE secret key; its public key is beside it."""
        return self.folder / f"{role}-0.key"

    def allowed(self, role: DaemonRole) -> Path:
        """The public keys of the other role's nodes, which a node of this role speaks with."""
        return self.folder / f"{role}-allowed-keys"

    @property
    def node_token(self) -> Path:
        """What bootstrap and routers show to nodes."""
        return self.folder / "node.token"

    @property
    def bootstrap_token(self) -> Path:
        """What nodes and routers show to bootstrap."""
        return self.folder / "bootstrap.token"


@dataclass(frozen=True, kw_only=True)
class InitialCluster:
    """One bootstrap, one prefill and one decode node that are to work together."""

    folder: str
    """Where the files will be, for their comments."""
    runtime: str
    """What the runtime directories begin with; each ends with its role."""
    model: ModelConfig
    one_host: bool = False
    """Bytes move through shared memory only."""
    hosts: dict[DaemonRole, str] = field(default_factory=dict)
    """Where daemons are that are not on loopback."""
    keys: KeyFiles | None = None

    def files(self, *, complete: bool) -> dict[str, str]:
        """Return the text of each file. `complete`: with every key, else with those that matter for a start."""
        configs = {role: role.schema.model_validate(self._settings(role)) for role in DaemonRole}
        return {
            f"{role}.yaml": render_commented(config, top=self._top(role, complete=complete), complete=complete)
            for role, config in configs.items()
        }

    def pool_bytes(self) -> dict[DaemonRole, int]:
        """Return how large the pools of each node are."""
        return {role: self._planned(role, self._pools(role)) for role in DaemonRole if role is not DaemonRole.BOOTSTRAP}

    def _settings(self, role: DaemonRole) -> Section:
        if role is DaemonRole.BOOTSTRAP:
            return self._bootstrap()
        host, keys = self._host(role), self.keys
        url = f"http://{_in_url(self._host(DaemonRole.BOOTSTRAP))}:{PORTS[DaemonRole.BOOTSTRAP]}"
        settings: Section = {
            "instance": f"{role}-0",
            "model": self.model.model_dump(exclude_unset=True),
            "transports": {"order": ["local"] if self.one_host else ["local", "mooncake"]},
            "http": {"host": host, "port": PORTS[role]},
            "bootstrap": {"url": url},
            "pools": self._pools(role),
        }
        runtime_dir = Path(f"{self.runtime}{role}")
        if fits_sockets(runtime_dir):
            settings["runtime_dir"] = runtime_dir
        if not is_loopback(host):
            settings["transports"]["mooncake"] = {"host": host, "ipv6": ":" in host}
        control: Section = {}
        if role is DaemonRole.PREFILL and not is_loopback(host):
            control["bind"] = f"tcp://{_in_url(host)}:{CONTROL_PORT}"
        if keys is not None:
            control["curve"] = {"secret_key_file": keys.secret(role), "allowed_keys_file": keys.allowed(role)}
            settings["http"]["token_file"] = keys.node_token
            settings["bootstrap"]["token_file"] = keys.bootstrap_token
        return settings | ({"control": control} if control else {})

    def _bootstrap(self) -> Section:
        settings: Section = {"http": {"host": self._host(DaemonRole.BOOTSTRAP), "port": PORTS[DaemonRole.BOOTSTRAP]}}
        if self.keys is not None:
            settings["http"]["token_file"] = self.keys.bootstrap_token
            settings["daemons"] = {"token_file": self.keys.node_token}
        return settings

    def _pools(self, role: DaemonRole) -> Section:
        geometry = load_geometry(self.model)
        spaces = {component.space for component in geometry.components}
        device, on_host = (
            {space.value: pages for space, pages in PAGES.items() if space in spaces},
            PAGES[IndexSpace.FULL],
        )
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

    def _host(self, role: DaemonRole) -> str:
        return self.hosts.get(role, LOOPBACK)

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
