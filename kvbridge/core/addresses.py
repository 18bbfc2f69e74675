"""Endpoints as people write them, and the addresses of nodes."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, NamedTuple
from urllib.parse import SplitResult, urlsplit

from pydantic import Field

from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel

MAX_SOCKET_PATH_BYTES = 107
"""The capacity of `sockaddr_un` on Linux, without its closing zero."""

_LABEL = "[A-Za-z0-9_-]{1,63}"
_PORT = "(6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})"
SERVER_URL = rf"https?://({_LABEL}(\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]+\])(:{_PORT})?"
"""A pattern of servers: a scheme, a host in ASCII, a port."""
HTTP_URL = rf"{SERVER_URL}(/[!-~]*)?"
"""The same with a path."""


class PeerAddress(FrozenModel):
    """The address of the control socket of one prefill node."""

    endpoint: Annotated[str, Field(pattern=r"^(tcp|ipc)://", max_length=500)]
    public_key: Annotated[str, Field(max_length=40)] = ""
    """CURVE public key in Z85 (40 characters), or empty when the cluster runs without keys."""


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
    if size > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"ipc path {path!r} has {size} bytes, a socket's path at most {MAX_SOCKET_PATH_BYTES}; "
            "set a shorter runtime directory"
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a bound `host`. A name other than localhost counts as reachable."""
    bare = host.strip("[]")
    if bare == "localhost":
        return True
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def redis_hosts(url: SplitResult) -> list[tuple[str, int | None]]:
    """Return the hosts of a URL of Redis, with their ports: several sentinels, or one server. Raises ValueError for a port."""
    parts = [urlsplit(f"//{host}") for host in url.netloc.rpartition("@")[2].split(",")]
    return [(part.hostname or "localhost", part.port) for part in parts]
