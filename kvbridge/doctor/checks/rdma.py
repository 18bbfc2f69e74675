"""RDMA: devices, the state of their ports, and the addresses by which peers can reach them.

A RoCE port has many addresses (GIDs), and a library that takes the wrong one fails at the first transfer, not at the start:
an unset one is nobody's, a link-local one (fe80::) crosses no router, and RoCE v1 does not either.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from enum import IntEnum

from kvbridge.doctor.facts import Gid, Host, RdmaPort
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, warning
from kvbridge.doctor.needs import Needs

FULL_MEMBER = 0x8000
"""The bit of a partition key: two limited members cannot talk to each other."""
SLOW_MTU = 1500
FAST_GBIT = 25


class Rank(IntEnum):
    """How well peers can reach a GID; higher is better."""

    NOBODY = 0
    """Unset."""
    LINK = 1
    """Link-local: the same link only."""
    ROCE_V1 = 2
    """The same Ethernet segment only."""
    ROUTED = 3
    """RoCE v2 with a global address."""
    ROUTED_IPV4 = 4
    """RoCE v2 with an IPv4 address: what libraries look for first."""


def rank_of(gid: Gid) -> Rank:
    """How well peers can reach an address of an Ethernet port."""
    address = ipaddress.IPv6Address(gid.address)
    if not int(address) or not int(address) & ((1 << 64) - 1):
        return Rank.NOBODY
    if address.is_link_local:
        return Rank.LINK
    if "v2" not in gid.kind:
        return Rank.ROCE_V1
    return Rank.ROUTED if address.ipv4_mapped is None else Rank.ROUTED_IPV4


def ports_used(host: Host, needs: Needs) -> tuple[RdmaPort, ...]:
    """The ports of the devices that are named, or of all."""
    named = needs.rdma_devices
    return tuple(port for port in host.network.rdma if not named or port.device in named)


def present(host: Host, needs: Needs) -> Iterator[Finding]:
    """A transport that was told to use RDMA needs a device, and its node in /dev."""
    ports = ports_used(host, needs)
    if not ports and needs.rdma_required:
        named = f" named {', '.join(sorted(needs.rdma_devices))}" if needs.rdma_devices else ""
        yield breaks(
            f"the transports are told to use RDMA, and there is no RDMA device{named}",
            "Mooncake would take TCP without saying so, which kvbridge refuses: rank workers do not start",
            "rdma link show; install the adapter's driver, or set transports.mooncake.protocol: tcp",
        )
    elif ports and not host.network.verbs_nodes:
        add = breaks if needs.rdma_required else warning
        yield add(
            f"{len(ports)} RDMA ports are in /sys, but /dev/infiniband is not here",
            "a container sees the host's devices and cannot open them: every registration fails",
            "docker: --device=/dev/infiniband; kubernetes: resources.limits: rdma/ib: 1 (or your device plugin's name)",
        )
    elif ports:
        yield fine(f"{len(ports)} RDMA ports: {', '.join(f'{port.device}/{port.port}' for port in ports)}")
    else:
        yield not_here(
            "no RDMA device (/sys/class/infiniband)",
            "the transports move bytes over TCP, or by memory within this host; between hosts RDMA would be faster",
        )


def states(host: Host, needs: Needs) -> Iterator[Finding]:
    """A port that is not active moves nothing."""
    for port in ports_used(host, needs):
        name = f"{port.device}/{port.port}"
        if port.state == "ACTIVE":
            yield fine(f"{name}: active, {port.rate_gbit:g} Gbit/s, {port.link_layer}", subject=name)
        else:
            add = breaks if port.device in needs.rdma_devices else warning
            yield add(
                f"{name} is {port.state}",
                "a library that chooses it fails at the first transfer; some choose it although another port is active",
                f"check cable and switch, `ip link set up` its interface (InfiniBand: a subnet manager must run), or leave it "
                f"out: transports.mooncake.device_name (now {', '.join(sorted(needs.rdma_devices)) or 'all'})",
                subject=name,
            )


def addresses(host: Host, needs: Needs) -> Iterator[Finding]:
    """The GIDs of each Ethernet port, and whether the one that is forced is a good one."""
    forced = host.software.environment.get("MC_GID_INDEX", "")
    for port in ports_used(host, needs):
        name = f"{port.device}/{port.port}"
        ranked = sorted(port.gids, key=lambda gid: (-rank_of(gid), gid.index))
        if port.link_layer != "Ethernet":
            yield fine(f"{name}: InfiniBand, addressed by its subnet manager", subject=name)
            continue
        if not ranked or rank_of(ranked[0]) < Rank.ROUTED:
            yield _unreachable(name, ranked, required=needs.rdma_required)
            continue
        best = ranked[0]
        chosen = next((gid for gid in ranked if str(gid.index) == forced), None)
        if forced and (chosen is None or rank_of(chosen) < Rank.ROUTED):
            found = f"{chosen.address} ({chosen.kind})" if chosen else "unset"
            yield breaks(
                f"{name}: MC_GID_INDEX={forced} is {found}",
                "Mooncake takes that address, and peers cannot reach it",
                f"export MC_GID_INDEX={best.index} ({best.address}, {best.kind}), or unset it",
                subject=name,
            )
        else:
            shown = chosen or best
            yield fine(f"{name}: GID {shown.index} is {shown.address} ({shown.kind})", subject=name)


def _unreachable(name: str, ranked: list[Gid], *, required: bool) -> Finding:
    best = ranked[0] if ranked else None
    words = {
        Rank.NOBODY: "unset",
        Rank.LINK: "link-local (fe80), which crosses no router",
        Rank.ROCE_V1: "RoCE v1, which crosses no router",
    }
    has = "no address at all" if best is None else f"at best GID {best.index}, {best.address}: {words[rank_of(best)]}"
    add = breaks if required else warning
    return add(
        f"{name} has {has}",
        "peers get that address in the handshake; the first transfer to another subnet then ends in a timeout",
        f"give its interface{f' {best.interface}' if best and best.interface else ''} an address: ip addr add ADDRESS/PREFIX dev "
        f"{best.interface if best and best.interface else 'INTERFACE'}; RoCE v2: cma_roce_mode -d {name.partition('/')[0]} -m 2",
        subject=name,
    )


def partitions(host: Host, needs: Needs) -> Iterator[Finding]:
    """On InfiniBand, a port that is a limited member of every partition reaches full members only."""
    for port in ports_used(host, needs):
        if port.link_layer == "Ethernet" or not port.partition_keys:
            continue
        name = f"{port.device}/{port.port}"
        if any(key & FULL_MEMBER for key in port.partition_keys):
            yield fine(f"{name}: full member of a partition", subject=name)
        else:
            shown = ", ".join(f"{key:#06x}" for key in port.partition_keys)
            yield breaks(
                f"{name} is a limited member of all its partitions ({shown})",
                "two limited members cannot talk: transfers to such a peer time out",
                "in the subnet manager's partitions.conf give its GUID '=full', or a partition of full members",
                subject=name,
            )


def link_sizes(host: Host, needs: Needs) -> Iterator[Finding]:
    """Small frames cost a fast link its rate."""
    interfaces = {interface.name: interface for interface in host.network.interfaces}
    used = {gid.interface for port in ports_used(host, needs) for gid in port.gids if gid.interface}
    for name in sorted(used or interfaces):
        interface = interfaces.get(name)
        if interface is None or interface.speed_mbit < FAST_GBIT * 1000:
            continue
        if interface.mtu <= SLOW_MTU:
            yield warning(
                f"{name} has {interface.speed_mbit // 1000} Gbit/s and frames of {interface.mtu} bytes",
                "RoCE then sends 1,024 bytes a packet and TCP 1,460, and the link does not reach its rate",
                f"ip link set {name} mtu 9000 (on both ends and in the switches between)",
                subject=name,
            )
        else:
            yield fine(f"{name}: frames of {interface.mtu} bytes", subject=name)


def near(host: Host, needs: Needs) -> Iterator[Finding]:
    """A card on the other socket than the GPUs that it serves."""
    gpus = {gpu.node for gpu in host.devices.gpus if gpu.ordinal in needs.gpus and gpu.node is not None}
    cards = {port.node for port in ports_used(host, needs) if port.node is not None}
    if gpus and cards and not gpus & cards:
        yield warning(
            f"the RDMA devices are on NUMA nodes {sorted(cards)}, the GPUs in use on {sorted(gpus)}",
            "every byte crosses the link between the sockets; GPU memory may not be reachable for the card at all",
            "nvidia-smi topo -m; name near devices in transports.mooncake.device_name, or use GPUs near the cards",
        )
    elif gpus and cards:
        yield fine(f"GPUs and RDMA devices share NUMA nodes {sorted(gpus & cards)}")
