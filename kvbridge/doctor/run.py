"""One run of the doctor: read the host, ask others, and check everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.config.endpoints import is_wildcard
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor import machine, network, reach, software
from kvbridge.doctor.findings import Finding, Level, Needs
from kvbridge.doctor.machine import Machine
from kvbridge.doctor.network import Network
from kvbridge.doctor.reach import Asking, Reach
from kvbridge.doctor.software import Software
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY

Config = PrefillConfig | DecodeConfig | BootstrapConfig


class Host(FrozenModel):
    """All facts of one run."""

    machine: Machine = Machine()
    network: Network = Network()
    software: Software = Software()
    reach: Reach = Reach()


CHECKS: dict[str, Callable[[Host, Needs], Iterator[Finding]]] = {
    "memory.locked": lambda host, needs: machine.check_locked(host.machine, needs, rdma=bool(host.network.rdma)),
    "memory.shared": lambda host, needs: machine.check_shared(host.machine, needs),
    "memory.limits": lambda host, needs: machine.check_limits(host.machine, needs),
    "devices.present": lambda host, needs: machine.check_gpus(host.machine, needs),
    "devices.memory": lambda host, needs: machine.check_gpu_memory(host.machine, needs),
    "devices.driver": lambda host, _: machine.check_driver(host.machine, host.software.packages),
    "devices.ipc": lambda host, _: machine.check_sharing(host.machine),
    "rdma.present": lambda host, needs: network.check_rdma(host.network, needs),
    "rdma.state": lambda host, needs: network.check_rdma_states(host.network, needs),
    "network.ports": lambda host, needs: network.check_ports(host.network, needs, host.reach.running),
    "network.addresses": lambda host, needs: network.check_addresses(host.network, needs),
    "process.open_files": lambda host, needs: machine.check_open_files(host.machine, needs),
    "process.runtime_directory": lambda host, needs: machine.check_runtime_directory(host.machine, needs),
    "software.mooncake": lambda host, needs: software.check_library("mooncake", host.software, needs),
    "software.nixl": lambda host, needs: software.check_library("nixl", host.software, needs),
    "software.environment": lambda host, needs: software.check_environment(
        host.software, needs, rdma=bool(host.network.rdma)
    ),
    "running.node": lambda host, needs: reach.check_node(host.reach.node, needs),
    "reach.bootstrap": lambda host, needs: reach.check_bootstrap(host.reach, needs),
    "reach.peers": lambda host, needs: reach.check_peers(host.reach, needs),
    "reach.control": lambda host, needs: reach.check_control(host.reach, needs),
}
"""All checks by their stable names, in the order in which findings are shown."""


def examine(host: Host, needs: Needs) -> list[Finding]:
    """Run every check. The worst findings come first, and otherwise the order is that of the table."""
    if host.reach.running:  # its pools are there already
        needs = needs.model_copy(update={"shared_bytes": 0, "device_bytes": {}})
    found = [each.model_copy(update={"check": name}) for name, check in CHECKS.items() for each in check(host, needs)]
    order = list(Level)
    return sorted(found, key=lambda finding: order.index(finding.level))


def read_host(needs: Needs, asking: Asking, peers: Sequence[str] = (), config: Config | None = None) -> Host:
    """Read the host and ask others.

    `peers`: further ones, as `http://HOST:PORT` of a daemon or `tcp://HOST:PORT` of a control socket.
    """
    directories = [Path(needs.directory), DEFAULT_DIRECTORY, Path(needs.settings.local.proof_directory)]
    host = Host(
        machine=machine.read_machine(directories, getattr(config, "runtime_dir", None), needs.gpus),
        network=network.read_network(needs),
        software=software.read_software(),
    )
    with closing(asking.http):
        found = asking.reach(needs, _own_url(config) if config is not None else "", peers)
    return host.model_copy(update={"reach": found})


def _own_url(config: Config) -> str:
    """Return the URL of this configuration's daemon: from its endpoint file, else as configured."""
    if isinstance(config, PrefillConfig | DecodeConfig):
        with suppress(ConfigError):  # another user's file: a finding of its own
            if (written := read_endpoint(config.runtime_dir)) is not None:
                return written.http_url
    scheme = "https" if config.http.tls_certificate_file else "http"
    host = "127.0.0.1" if is_wildcard(config.http.host) else config.http.host.strip("[]")
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{config.http.port}"
