"""The sockets of a daemon's runtime directory by name, and what to tell when an endpoint cannot be bound."""

from __future__ import annotations

import errno
from pathlib import Path

from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError

ENGINE_SOCKET = "engine.sock"
WORKER_SOCKET = "worker.sock"
"""For its engines, and for its rank workers."""


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
