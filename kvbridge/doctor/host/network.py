"""Interfaces, RDMA devices and listening sockets as /sys and /proc show them; ways to peers, tried."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kvbridge.control.listeners import tcp_listeners
from kvbridge.core.addresses import is_loopback
from kvbridge.doctor.checks.rdma import ports_used
from kvbridge.doctor.facts import Gid, Host, Interface, Listener, Network, RdmaPort, Route
from kvbridge.doctor.host.memory import ROOT, read_number, read_text
from kvbridge.doctor.needs import Needs

REACH_S = 3.0
_SIOCGIFADDR = 0x8915
_MOST_ROUTES = 64


def read_network(needs: Needs, root: Path = ROOT) -> Network:
    """Look at everything but ways to peers (`read_routes`)."""
    told = [needs.settings.mooncake.host] if "mooncake" in needs.transports and needs.role else []
    return Network(
        rdma=tuple(read_rdma(root)),
        verbs_nodes=(root / "dev/infiniband").is_dir(),
        interfaces=tuple(read_interfaces(root)),
        listeners=tuple(Listener(**each._asdict()) for each in tcp_listeners(root / "proc")),
        foreign=tuple(host for host in dict.fromkeys([*told, *(port.host for port in needs.ports)]) if _foreign(host)),
    )


def read_rdma(root: Path = ROOT) -> Iterator[RdmaPort]:
    """Every port of every RDMA device."""
    for device in sorted((root / "sys/class/infiniband").glob("*")):
        node = read_number(device / "device/numa_node")
        for port in sorted((device / "ports").glob("[0-9]*"), key=lambda path: int(path.name)):
            state = read_text(port / "state")
            speed = re.match(r"[\d.]+", read_text(port / "rate"))
            yield RdmaPort(
                device=device.name,
                port=int(port.name),
                state=state.partition(":")[2].strip() or state,
                link_layer=read_text(port / "link_layer") or "InfiniBand",
                rate_gbit=float(speed.group()) if speed else 0,
                node=node if node is not None and node >= 0 else None,
                gids=tuple(_gids(port)),
                partition_keys=tuple(_partition_keys(port)),
            )


def _gids(port: Path) -> Iterator[Gid]:
    for path in sorted((port / "gids").glob("[0-9]*"), key=lambda found: int(found.name)):
        address = read_text(path)
        if address and int(ipaddress.IPv6Address(address)):
            kind = read_text(port / "gid_attrs/types" / path.name)
            interface = read_text(port / "gid_attrs/ndevs" / path.name)
            yield Gid(index=int(path.name), address=_shown(address), kind=kind, interface=interface)


def _shown(address: str) -> str:
    """An address as people write it: with the dots of an IPv4 address inside."""
    found = ipaddress.IPv6Address(address)
    return str(found) if found.ipv4_mapped is None else f"::ffff:{found.ipv4_mapped}"


def _partition_keys(port: Path) -> Iterator[int]:
    for path in (port / "pkeys").glob("[0-9]*"):
        key = int(read_text(path) or "0", 16)
        if key:
            yield key


def read_interfaces(root: Path = ROOT) -> Iterator[Interface]:
    """Every interface but loopback."""
    v6 = _addresses_v6(root)
    for path in sorted((root / "sys/class/net").glob("*")):
        if path.name == "lo" or not (path / "mtu").exists():
            continue
        node = read_number(path / "device/numa_node")
        v4 = [address] if (address := _address_v4(path.name)) else []
        yield Interface(
            name=path.name,
            up=read_text(path / "operstate") in {"up", "unknown"},
            speed_mbit=max(0, read_number(path / "speed") or 0),
            mtu=read_number(path / "mtu") or 0,
            addresses=tuple(v4 + v6.get(path.name, [])),
            node=node if node is not None and node >= 0 else None,
        )


def _address_v4(name: str) -> str:
    """The interface's first IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _addresses_v6(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in read_text(root / "proc/net/if_inet6").splitlines():
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


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


def read_routes(host: Host, needs: Needs, endpoints: Iterable[str]) -> Iterator[Route]:
    """Try to reach each peer from the address of each RDMA card. `endpoints`: URLs."""
    cards = {gid.interface for port in ports_used(host, needs) for gid in port.gids if gid.interface}
    sources = [
        (address, interface.name)
        for interface in host.network.interfaces
        if interface.name in cards
        for address in interface.addresses[:1]
    ]
    targets = [(parts.hostname, parts.port) for parts in map(urlsplit, dict.fromkeys(endpoints))]
    pairs = [(source, target) for source in sources for target in targets if target[0] and not is_loopback(target[0])]
    for (address, name), (peer, port) in pairs[:_MOST_ROUTES]:
        yield Route(
            source=address, interface=name, peer=f"{peer}:{port}", problem=_no_way(address, str(peer), port or 80)
        )


def _no_way(source: str, peer: str, port: int) -> str:
    try:
        socket.create_connection((peer, port), timeout=REACH_S, source_address=(source, 0)).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def wire_towards(host: str, root: Path = ROOT) -> tuple[str, float]:
    """Return the name and the bytes a second of the card by which a host is reached; 0 where the card does not say."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the way
            source = str(probe.getsockname()[0])
    except OSError:
        return "", 0.0
    card = next((each for each in read_interfaces(root) if source in each.addresses), None)
    if card is None:
        return "", 0.0
    return card.name, card.speed_mbit * 1e6 / 8
