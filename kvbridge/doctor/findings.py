"""The needs of a configuration, and the findings of a check."""

from __future__ import annotations

from enum import StrEnum
from functools import partial

from pydantic import ByteSize, Field

from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.config.transports import MooncakeProtocol, TransportName, TransportSettings
from kvbridge.core.addresses import is_loopback, parse_tcp
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.layout import load_geometry, plan_memory
from kvbridge.daemon.links import LINK_DESCRIPTORS
from kvbridge.daemon.memory import memory_directory
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

RDMA_TRANSPORTS = ("rc", "ud", "dc", "ib")
"""Beginnings of the names of UCX transports that need an RDMA device."""


class Port(FrozenModel):
    """An address that a daemon listens on."""

    key: str
    host: str
    port: int
    connections: int
    """Configured limit."""


class Needs(FrozenModel):
    """Needs of a daemon's configuration. By default, those of no configuration: only libraries."""

    role: str = ""
    instance: str = ""
    node: str = ""
    directory: str = str(DEFAULT_DIRECTORY)
    """Directory of shared memory."""
    shared_bytes: int = 0
    """Size of the pools in shared memory, which a network card has to lock."""
    device_bytes: dict[int, int] = Field(default_factory=dict)
    """Size of the pools that rank workers make, by GPU ordinal."""
    gpus: tuple[int, ...] = ()
    transports: tuple[str, ...] = tuple(TransportName)
    settings: TransportSettings = TransportSettings()
    ports: tuple[Port, ...] = ()
    idle_connections: int = 0
    """Outgoing connections, times the descriptors of each."""
    public: bool = False
    """Whether the daemon listens beyond loopback, so that peers on other hosts are expected."""
    bootstraps: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the node, or the role."""
        return f"{self.instance}/{self.node}" if self.instance else self.role

    @property
    def rdma_required(self) -> bool:
        """Whether a transport is configured for RDMA only."""
        tls = self.settings.nixl.ucx_tls
        return (
            TransportName.MOONCAKE in self.transports and self.settings.mooncake.protocol is MooncakeProtocol.RDMA
        ) or (TransportName.NIXL in self.transports and _names_rdma(tls) and "tcp" not in tls)

    @property
    def rdma_wanted(self) -> bool:
        """Whether a transport would use RDMA where there is a device."""
        tls = self.settings.nixl.ucx_tls
        return self.rdma_required or (TransportName.NIXL in self.transports and (not tls or _names_rdma(tls)))

    @property
    def rdma_devices(self) -> frozenset[str]:
        """The configured RDMA devices; empty: all."""
        named = f"{self.settings.mooncake.device_name},{self.settings.nixl.ucx_net_devices}".split(",")
        return frozenset(each.strip().partition(":")[0] for each in named if each.strip())


def _names_rdma(ucx_tls: str) -> bool:
    return not ucx_tls.startswith("^") and any(each.startswith(RDMA_TRANSPORTS) for each in ucx_tls.split(","))


def needs_of(config: PrefillConfig | DecodeConfig | BootstrapConfig) -> Needs:
    """Return the needs of a configuration. Raises ConfigError or InvalidInputError where no daemon would start with it."""
    http = config.http
    ports = [Port(key="http.port", host=http.host, port=http.port, connections=http.max_connections)]
    public = not is_loopback(http.host)
    if isinstance(config, BootstrapConfig):
        return Needs(role="bootstrap", transports=(), ports=tuple(ports), public=public)
    layout = plan_memory(config, load_geometry(config.model))
    made: dict[int, int] = {}
    for rank in layout.orders:
        placement = layout.device[rank]
        made[placement.device] = made.get(placement.device, 0) + placement.total_bytes
    if isinstance(config, PrefillConfig):
        public = public or not is_loopback(config.control.host)
        if (address := parse_tcp(config.control.bind)) is not None:
            most = config.control.max_connections
            ports.append(Port(key="control.bind", host=address.host, port=address.port, connections=most))
    used = {placed.cuda_ordinal for placed in config.parallelism.placements()}
    outgoing = config.control.max_connections * LINK_DESCRIPTORS if isinstance(config, DecodeConfig) else 0
    return Needs(
        role="prefill" if isinstance(config, PrefillConfig) else "decode",
        instance=config.instance,
        node=config.node,
        directory=str(memory_directory(config)),
        shared_bytes=layout.node_bytes,
        device_bytes=made,
        gpus=tuple(sorted(ordinal for ordinal in used if ordinal is not None)),
        transports=tuple(config.transports.order),
        settings=config.transports,
        ports=tuple(ports),
        idle_connections=outgoing,
        public=public,
        bootstraps=tuple(url for url in (config.bootstrap.url, *config.bootstrap.other_urls) if url),
    )


class Level(StrEnum):
    """Severity of a finding, the worst first."""

    BREAKS = "breaks"
    """A daemon will not start, or requests will fail."""
    WARNING = "warning"
    """It works, but slower than it could, or not after a further event."""
    NOT_HERE = "not here"
    """This host has no such thing, and nothing needs it."""
    FINE = "fine"


class Finding(FrozenModel):
    """Result of a check for one thing. Field names are those of the JSON output, and stable."""

    check: str = ""
    """`family.name`; filled in from the table of checks."""
    level: Level
    subject: str = ""
    """The thing, where a check looks at several: a device, a port, a peer."""
    what: str
    why: str = ""
    """Why it matters; for a thing that is not here, why nothing needs it."""
    cure: str = ""
    """The cure: a command wherever there is one."""


def finding(level: Level, what: str, why: str = "", cure: str = "", *, subject: str = "") -> Finding:
    """Return a finding of a level."""
    return Finding(level=level, what=what, why=why, cure=cure, subject=subject)


fine = partial(finding, Level.FINE)
not_here = partial(finding, Level.NOT_HERE)
warning = partial(finding, Level.WARNING)
breaks = partial(finding, Level.BREAKS)


def size(value_bytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves a digit before the point."""
    return ByteSize(value_bytes).human_readable(separator=" ")


def rate(bytes_per_s: float) -> str:
    """Return a rate in decimal units, as networks have them."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.1f} MB/s"
