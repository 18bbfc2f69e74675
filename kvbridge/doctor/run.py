"""One run of the doctor: read, ask; then judge by the table of all checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.config.endpoints import is_wildcard
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor import devices, memory, network, reach, software
from kvbridge.doctor.devices import Devices
from kvbridge.doctor.findings import Finding, Level, Needs
from kvbridge.doctor.memory import Memory, Process
from kvbridge.doctor.network import Network
from kvbridge.doctor.reach import Asking, Reach
from kvbridge.doctor.software import Software
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

Config = PrefillConfig | DecodeConfig | BootstrapConfig


class Host(FrozenModel):
    """Everything that was read and asked."""

    memory: Memory = Memory()
    devices: Devices = Devices()
    network: Network = Network()
    process: Process = Process()
    software: Software = Software()
    reach: Reach = Reach()


CHECKS: dict[str, Callable[[Host, Needs], Iterator[Finding]]] = {
    "memory.locked": lambda host, needs: memory.check_locked(host.memory, needs, rdma=bool(host.network.rdma)),
    "memory.shared": lambda host, needs: memory.check_shared(host.memory, needs),
    "memory.limits": lambda host, needs: memory.check_limits(host.memory, needs),
    "devices.present": lambda host, needs: devices.check_present(host.devices, needs),
    "devices.memory": lambda host, needs: devices.check_memory(host.devices, needs),
    "devices.driver": lambda host, _: devices.check_driver(host.devices, host.software.packages),
    "devices.ipc": lambda host, _: devices.check_sharing(host.devices),
    "rdma.present": lambda host, needs: network.check_rdma(host.network, needs),
    "rdma.state": lambda host, needs: network.check_rdma_states(host.network, needs),
    "network.ports": lambda host, needs: network.check_ports(host.network, needs, host.reach.running),
    "network.addresses": lambda host, needs: network.check_addresses(host.network, needs),
    "process.open_files": lambda host, needs: memory.check_open_files(host.process, needs),
    "process.runtime_directory": lambda host, needs: memory.check_runtime_directory(host.process, needs),
    "software.mooncake": lambda host, needs: software.check_library("mooncake", host.software, needs),
    "software.nixl": lambda host, needs: software.check_library("nixl", host.software, needs),
    "software.environment": lambda host, needs: software.check_environment(
        host.software, needs, rdma=bool(host.network.rdma)
    ),
    "reach.bootstrap": lambda host, needs: reach.check_bootstrap(host.reach, needs),
    "reach.peers": lambda host, needs: reach.check_peers(host.reach, needs),
    "reach.control": lambda host, needs: reach.check_control(host.reach, needs),
}
"""Stable names, which programs may match on, in the order in which findings are shown."""


def examine(host: Host, needs: Needs) -> list[Finding]:
    """Run every check. The worst findings come first, otherwise in the order of the table."""
    if host.reach.running:  # its pools are there already
        needs = needs.model_copy(update={"shared_bytes": 0, "device_bytes": {}})
    found = [each.model_copy(update={"check": name}) for name, check in CHECKS.items() for each in check(host, needs)]
    order = list(Level)
    return sorted(found, key=lambda finding: order.index(finding.level))


@dataclass(frozen=True)
class Visit:
    """What one run looks at."""

    config: Config | None = None
    needs: Needs = field(default_factory=Needs)
    asking: Asking = field(default_factory=Asking)
    peers: Sequence[str] = ()
    """As given: `http://HOST:PORT` of a daemon, `tcp://HOST:PORT` of a control socket."""


def read_host(visit: Visit) -> Host:
    """Read and ask everything."""
    needs, config = visit.needs, visit.config
    directories = [Path(needs.directory), DEFAULT_DIRECTORY, Path(needs.settings.local.proof_directory)]
    host = Host(
        memory=memory.read_memory(directories),
        devices=devices.read_devices(needs.gpus),
        network=network.read_network(needs),
        process=memory.read_process(getattr(config, "runtime_dir", None)),
        software=software.read_software(),
    )
    with closing(visit.asking.http):
        found = visit.asking.reach(needs, _own_url(config) if config is not None else "", visit.peers)
    return host.model_copy(update={"reach": found})


def _own_url(config: Config) -> str:
    """Return where this configuration's daemon answers, if it runs: as it has written down, else as configured."""
    if isinstance(config, PrefillConfig | DecodeConfig):
        with suppress(ConfigError):  # of another user: a finding of its own
            if (written := read_endpoint(config.runtime_dir)) is not None:
                return written.http_url
    scheme = "https" if config.http.tls_certificate_file else "http"
    host = "127.0.0.1" if is_wildcard(config.http.host) else config.http.host.strip("[]")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.http.port}"
