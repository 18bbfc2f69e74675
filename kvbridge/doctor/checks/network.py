"""Ports, addresses, and the ways between this host and its peers."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.core.addresses import is_loopback
from kvbridge.doctor.facts import Host, Listener
from kvbridge.doctor.findings import Finding, breaks, fine, not_here
from kvbridge.doctor.needs import Needs, Port

WILDCARDS = {"0.0.0.0", "::", "*"}  # noqa: S104 - recognised here, not bound


def ports(host: Host, needs: Needs) -> Iterator[Finding]:
    """Each port that is to be listened on is free, or held by the daemon itself."""
    for port in needs.ports:
        name = f"{port.host}:{port.port}"
        if not port.port:
            yield fine(f"{port.key}: a free port is taken at the start", subject=port.key)
            continue
        holder = next((each for each in host.network.listeners if _collides(port, each)), None)
        if holder is None:
            yield fine(f"{port.key}: {name} is free", subject=port.key)
        elif host.reach.running:
            yield fine(f"{port.key}: {name} is held by this daemon itself, {host.reach.running}", subject=port.key)
        else:
            yield breaks(
                f"{port.key}: {name} is taken{_whose(holder)}",
                "two processes cannot listen on one address: the daemon will not start",
                f"kill {holder.pid} if it is not needed, or set another {port.key}"
                if holder.pid
                else f"sudo ss -ltnp 'sport = :{port.port}' shows whose it is; or set another {port.key}",
                subject=port.key,
            )
    if not needs.ports:
        yield not_here("no port was looked at", "no configuration was given (--config, --role)")


def _whose(holder: Listener) -> str:
    return f" by process {holder.pid} ({holder.command})" if holder.pid else " by a process of another user"


def _collides(port: Port, listener: Listener) -> bool:
    if port.port != listener.port:
        return False
    ours, theirs = _plain(port.host), _plain(listener.host)
    return ours == theirs or bool(WILDCARDS & {ours, theirs})


def _plain(host: str) -> str:
    return "127.0.0.1" if host == "localhost" else host.strip("[]")


def addresses(host: Host, needs: Needs) -> Iterator[Finding]:
    """What is bound and what peers are told are addresses of this host."""
    own = ", ".join(address for interface in host.network.interfaces for address in interface.addresses)
    told = needs.settings.mooncake.host
    mooncake = "mooncake" in needs.transports and needs.role
    for port in needs.ports:
        if port.host in host.network.foreign:
            yield breaks(
                f"{port.key.replace('.port', '.host')}: no interface of this host has the address {port.host}",
                "binding it fails: the daemon will not start",
                f"ip -br addr shows this host's addresses ({own or 'none but loopback'})",
                subject=port.key,
            )
    if mooncake and told in host.network.foreign:
        yield breaks(
            f"transports.mooncake.host is {told}, which no interface of this host has",
            "peers are told to connect there: every transfer to or from this node fails",
            f"set transports.mooncake.host to one of this host's: {own or 'ip -br addr'}",
            subject="transports.mooncake.host",
        )
    elif mooncake and is_loopback(told) and needs.public:
        yield breaks(
            f"transports.mooncake.host is {told}, while the daemon listens to other hosts",
            "peers on other hosts are told to connect to themselves: every room that crosses hosts fails",
            f"set transports.mooncake.host to an address that peers reach ({own or 'ip -br addr'})",
            subject="transports.mooncake.host",
        )
    elif not host.network.foreign:
        yield fine("what is bound and what peers are told are addresses of this host")


def routes(host: Host, needs: Needs) -> Iterator[Finding]:
    """From each card, each peer answers: a library may take any of them."""
    del needs
    dead = [route for route in host.network.routes if route.problem]
    for route in dead:
        yield breaks(
            f"{route.peer} does not answer from {route.source} ({route.interface}): {route.problem}",
            "a transfer may leave by any card that is in use, and ends in a timeout where there is no way",
            f"ip route get {route.peer.rpartition(':')[0]} from {route.source}; add the route, or name only cards that have one "
            "(transports.mooncake.device_name)",
            subject=f"{route.source} to {route.peer}",
        )
    if host.network.routes and not dead:
        sources = sorted({route.source for route in host.network.routes})
        yield fine(f"peers answer from {', '.join(sources)}")
    elif not host.network.routes:
        yield not_here("no way by a certain card was tried", "no RDMA card, or no peer on another host is known")
