"""All checks, by their stable names, and how they are run.

Owns: the table. Must not know: what any of them looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvbridge.doctor.checks import devices, memory, network, process, rdma, reach, software
from kvbridge.doctor.facts import Host
from kvbridge.doctor.findings import Finding, Level
from kvbridge.doctor.needs import Needs


class Check(NamedTuple):
    """One check: a name that programs may match on, and a pure function."""

    name: str
    run: Callable[[Host, Needs], Iterator[Finding]]


CHECKS = (
    Check("memory.locked", memory.locked),
    Check("memory.shared", memory.shared),
    Check("memory.limits", memory.limits),
    Check("memory.huge_pages", memory.huge_pages),
    Check("memory.numa", memory.numa),
    Check("memory.leftovers", memory.left),
    Check("devices.present", devices.present),
    Check("devices.memory", devices.memory),
    Check("devices.driver", devices.driver),
    Check("devices.peer_access", devices.peer_access),
    Check("devices.ipc", devices.sharing),
    Check("rdma.present", rdma.present),
    Check("rdma.state", rdma.states),
    Check("rdma.gids", rdma.addresses),
    Check("rdma.partitions", rdma.partitions),
    Check("rdma.mtu", rdma.link_sizes),
    Check("rdma.numa", rdma.near),
    Check("network.ports", network.ports),
    Check("network.addresses", network.addresses),
    Check("network.routes", network.routes),
    Check("process.open_files", process.open_files),
    Check("process.ptrace", process.tracing),
    Check("process.runtime_directory", process.runtime_directory),
    Check("process.keys", process.keys),
    Check("software.python", software.python),
    Check("software.mooncake", software.mooncake),
    Check("software.nixl", software.nixl),
    Check("software.environment", software.environment),
    Check("reach.bootstrap", reach.bootstrap),
    Check("reach.clock", reach.clock),
    Check("reach.peers", reach.peers),
    Check("reach.control", reach.control),
    Check("reach.transfers", reach.transfers),
)
"""In the order in which they are shown."""


def examine(host: Host, needs: Needs) -> list[Finding]:
    """Run every check. The worst findings come first, otherwise in the order of the table."""
    found = [finding.model_copy(update={"check": check.name}) for check in CHECKS for finding in check.run(host, needs)]
    order = list(Level)
    return sorted(found, key=lambda finding: order.index(finding.level))
