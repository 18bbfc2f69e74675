"""RDMA devices, network interfaces, ports and addresses of this host."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from kvbridge.config.endpoints import is_wildcard
from kvbridge.control.sockets import TcpListener, tcp_listeners
from kvbridge.core.addresses import is_loopback
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, Port, breaks, fine, not_here, warning
from kvbridge.doctor.machine import ROOT, read_text
from kvbridge.transport.mooncake.library import interface_address


class RdmaPort(FrozenModel):
    """One port of an RDMA device."""

    device: str
    port: int
    state: str = "ACTIVE"
    link_layer: str = "Ethernet"
    rate_gbit: float = 0


class Interface(FrozenModel):
    """A network interface."""

    name: str
    speed_mbit: int = 0
    """0: not known."""
    addresses: tuple[str, ...] = ()


class Network(FrozenModel):
    """How this host is connected."""

    rdma: tuple[RdmaPort, ...] = ()
    verbs_nodes: bool = False
    """Whether /dev/infiniband is here; a container gets it only when told so."""
    peer_memory: bool = False
    """Whether the kernel module is loaded that lets network cards read and write GPU memory."""
    interfaces: tuple[Interface, ...] = ()
    listeners: tuple[TcpListener, ...] = ()
    foreign: tuple[str, ...] = ()
    """Addresses of the configuration that this host does not have."""


def read_network(needs: Needs, root: Path = ROOT) -> Network:
    """Read the cards and sockets of this host, and find the addresses of a configuration that it does not have."""
    host = needs.settings.mooncake.host
    told = [interface_address(host) or host] if "mooncake" in needs.transports and needs.role else []
    return Network(
        rdma=tuple(read_rdma(root)),
        verbs_nodes=(root / "dev/infiniband").is_dir(),
        peer_memory=any((root / "sys/module" / name).is_dir() for name in ("nvidia_peermem", "nv_peer_mem")),
        interfaces=tuple(read_interfaces(root)),
        listeners=tuple(tcp_listeners(root / "proc")),
        foreign=tuple(host for host in dict.fromkeys([*told, *(port.host for port in needs.ports)]) if _foreign(host)),
    )


def read_rdma(root: Path = ROOT) -> Iterator[RdmaPort]:
    """Read every port of every RDMA device."""
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/[0-9]*")):
        state = read_text(port / "state")
        speed = re.match(r"[\d.]+", read_text(port / "rate"))
        yield RdmaPort(
            device=port.parent.parent.name,
            port=int(port.name),
            state=state.partition(":")[2].strip() or state,
            link_layer=read_text(port / "link_layer") or "InfiniBand",
            rate_gbit=float(speed.group()) if speed else 0,
        )


def read_interfaces(root: Path = ROOT) -> Iterator[Interface]:
    """Read every interface but loopback."""
    v6 = [line.split() for line in read_text(root / "proc/net/if_inet6").splitlines()]
    for path in sorted((root / "sys/class/net").glob("*")):
        if path.name == "lo" or not (path / "mtu").exists():
            continue
        speed = read_text(path / "speed")
        speed_mbit = int(speed) if speed.isdecimal() else 0
        found = [ipaddress.IPv6Address(int(digits, 16)) for digits, *_, name in v6 if name == path.name]
        addresses = [interface_address(path.name), *(str(address) for address in found if not address.is_link_local)]
        yield Interface(name=path.name, speed_mbit=speed_mbit, addresses=tuple(filter(None, addresses)))


def _foreign(host: str) -> bool:
    """Whether this host cannot bind an address."""
    try:
        families = socket.getaddrinfo(host.strip("[]").replace("*", ""), 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, _, _, address in families:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    return True
    return False


def check_rdma(network: Network, needs: Needs) -> Iterator[Finding]:
    """A transport that is configured for RDMA needs a device, its node in /dev and, for GPU memory, a kernel module."""
    ports = _ports_used(network, needs)
    if not ports and needs.rdma_required:
        named = f" named {', '.join(sorted(needs.rdma_devices))}" if needs.rdma_devices else ""
        yield breaks(
            f"the transports are configured for RDMA, and there is no RDMA device{named}",
            "Mooncake would take TCP without saying so, which kvbridge refuses: rank workers do not start",
            "rdma link show; install the adapter's driver, or set transports.mooncake.protocol: tcp",
        )
    elif ports and not network.verbs_nodes:
        add = breaks if needs.rdma_required else warning
        yield add(
            f"{len(ports)} RDMA ports are in /sys, but /dev/infiniband is not here",
            "a container sees the host's devices and cannot open them: every registration fails",
            "docker: --device=/dev/infiniband; kubernetes: resources.limits: rdma/ib: 1 (or your device plugin's name)",
        )
    elif ports and needs.gpus and needs.rdma_wanted and not network.peer_memory:
        yield warning(
            "ranks are placed on GPUs, and the module nvidia_peermem is not loaded",
            "unless driver and transport library share GPU memory by dma-buf, registration of the device pools fails",
            "modprobe nvidia_peermem (on the host, also for containers)",
        )
    elif ports:
        yield fine(f"{len(ports)} RDMA ports: {', '.join(f'{port.device}/{port.port}' for port in ports)}")
    else:
        yield not_here(
            "no RDMA device (/sys/class/infiniband)",
            "the transports move bytes over TCP, or through memory within this host; between hosts RDMA would be faster",
        )


def check_rdma_states(network: Network, needs: Needs) -> Iterator[Finding]:
    """A port that is not active moves nothing."""
    for port in _ports_used(network, needs):
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


def _ports_used(network: Network, needs: Needs) -> list[RdmaPort]:
    """Return the ports of the configured devices, or of all."""
    return [port for port in network.rdma if not needs.rdma_devices or port.device in needs.rdma_devices]


def check_ports(network: Network, needs: Needs, running: str) -> Iterator[Finding]:
    """Each configured port is free, or held by the daemon itself (`running`)."""
    for port in needs.ports:
        name = f"{port.host}:{port.port}"
        holder = next((each for each in network.listeners if _collides(port, each)), None)
        if not port.port:
            yield fine(f"{port.key}: a free port is taken at the start", subject=port.key)
        elif holder is None:
            yield fine(f"{port.key}: {name} is free", subject=port.key)
        elif running:
            yield fine(f"{port.key}: {name} is held by this daemon itself, {running}", subject=port.key)
        else:
            yield breaks(
                f"{port.key}: {name} is taken by "
                + (f"process {holder.pid} ({holder.command})" if holder.pid else "a process of another user"),
                "two processes cannot listen on one address: the daemon will not start",
                f"kill {holder.pid} if it is not needed, or set another {port.key}"
                if holder.pid
                else f"sudo ss -ltnp 'sport = :{port.port}' shows the process; or set another {port.key}",
                subject=port.key,
            )
    if not needs.ports:
        yield not_here("no port was looked at", "no configuration was given (--config, --role)")


def _collides(port: Port, listener: TcpListener) -> bool:
    ours, theirs = ("127.0.0.1" if host == "localhost" else host.strip("[]") for host in (port.host, listener.host))
    return port.port == listener.port and (ours == theirs or is_wildcard(ours) or is_wildcard(theirs))


def check_addresses(network: Network, needs: Needs) -> Iterator[Finding]:
    """The addresses that are bound, and those that peers are told, are addresses of this host."""
    own = ", ".join(address for interface in network.interfaces for address in interface.addresses)
    host, key = needs.settings.mooncake.host, "transports.mooncake.host"
    told = interface_address(host) or host
    mooncake = "mooncake" in needs.transports and needs.role
    for port in needs.ports:
        if port.host in network.foreign:
            yield breaks(
                f"{port.key.replace('.port', '.host')}: no interface of this host has the address {port.host}",
                "binding it fails: the daemon will not start",
                f"ip -br addr shows this host's addresses ({own or 'none but loopback'})",
                subject=port.key,
            )
    if mooncake and told in network.foreign:
        yield breaks(
            f"{key} is {told}, which no interface of this host has",
            "peers are told to connect there: every transfer to or from this node fails",
            f"set {key} to one of this host's: {own or 'ip -br addr'}",
            subject=key,
        )
    elif mooncake and is_loopback(told) and needs.public:
        yield breaks(
            f"{key} is {told}, while the daemon listens to other hosts",
            "peers on other hosts are told to connect to themselves: every room that crosses hosts fails",
            f"set {key} to an address that peers reach ({own or 'ip -br addr'})",
            subject=key,
        )
    elif not network.foreign:
        yield fine("bound addresses, and those that peers are told, are addresses of this host")
