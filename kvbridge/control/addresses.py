"""Endpoints as people write them, and what to tell when one cannot be bound.

Owns: parsing, the loopback rule, the text of a failed bind. Must not know: keys, messages.
"""

from __future__ import annotations

import errno
import ipaddress
import re
from pathlib import Path
from typing import NamedTuple

from kvbridge.core.errors import BridgeError, ConfigError, ConflictError

ENGINE_SOCKET = "engine.sock"
WORKER_SOCKET = "worker.sock"
"""Names of a daemon's sockets in its runtime directory: for its engines, and for its rank workers."""

MAX_IPC_PATH_BYTES = 107
"""What `sockaddr_un` holds on Linux, without its closing zero."""


class TcpAddress(NamedTuple):
    """Host (name, IPv4, IPv6 without brackets, or "*") and port."""

    host: str
    port: int


def parse_tcp(endpoint: str) -> TcpAddress | None:
    """Return the parts of tcp://host:port, or None for an ipc endpoint. Raises ConfigError on anything else."""
    if endpoint.startswith("ipc://"):
        check_ipc_path(endpoint.removeprefix("ipc://"))
        return None
    found = re.fullmatch(r"tcp://(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:/\[\]]+)):(\d{1,5})", endpoint)
    if not found or int(found[3]) > 65_535:
        raise ConfigError(f"endpoint {endpoint!r} is not of the form tcp://host:port or ipc://path")
    return TcpAddress(found[1] or found[2], int(found[3]))


def check_ipc_path(path: str) -> None:
    """Raise ConfigError when a Unix socket cannot have this path."""
    size = len(path.encode())
    if not path.startswith("/"):
        raise ConfigError(f"ipc path {path!r} must be absolute")
    if size > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"ipc path {path!r} has {size} bytes, a socket's path at most {MAX_IPC_PATH_BYTES}; "
            "set a shorter runtime directory"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def bind_error(endpoint: str, number: int, text: str) -> BridgeError:
    """Return the error for a bind that failed with `errno` `number`."""
    if number == errno.EADDRINUSE:
        address = parse_tcp(endpoint)
        holder = _port_holder(address.port) if address else ""
        return ConflictError(
            f"control address {endpoint} is taken{holder}; stop what holds it, or configure another port (0 picks one)"
        )
    if number in {errno.EADDRNOTAVAIL, errno.ENODEV}:
        return ConfigError(f"control address {endpoint}: this machine has no such address or interface")
    if number == errno.EACCES:
        return ConfigError(f"control address {endpoint}: not permitted to bind it; use a port above 1023")
    return ConfigError(f"control address {endpoint} cannot be bound: {text}")


def _port_holder(port: int) -> str:
    """Return " by process 123 (name)" when the process that listens on `port` can be seen, else ""."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        fields = [line.split() for line in lines]
        inodes |= {
            f"socket:[{row[9]}]" for row in fields if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port
        }
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        try:
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
        except OSError:
            continue  # Ended meanwhile, or not ours to look into.
    return ""
