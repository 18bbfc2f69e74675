"""The sockets of a daemon's runtime directory by name, and what to tell when an endpoint cannot be bound."""

from __future__ import annotations

import errno

from kvbridge.control.listeners import tcp_listeners
from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError, UnavailableError

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
        return UnavailableError(f"control address {endpoint}: this machine has no such address or interface")
    if number == errno.EACCES:
        return ConfigError(f"control address {endpoint}: not permitted to bind it; use a port above 1023")
    return UnavailableError(f"control address {endpoint} cannot be bound: {text}")


def _port_holder(port: int) -> str:
    """Return " by process 123 (command)" when the process that listens on `port` can be seen, else ""."""
    found = next((each for each in tcp_listeners() if each.port == port and each.pid), None)
    return f" by process {found.pid} ({found.command})" if found else ""
