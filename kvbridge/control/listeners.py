"""Who listens on this machine's TCP ports, as /proc shows it, and what to tell when a port cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError, UnavailableError

PROC = Path("/proc")
_LISTENS = "0A"


class TcpListener(NamedTuple):
    """A listening socket; `pid` 0 and no command when its process is not ours to look into."""

    host: str
    port: int
    pid: int
    command: str


def tcp_listeners(proc: Path = PROC) -> list[TcpListener]:
    """Return every listening TCP socket of this network namespace."""
    found = [
        (host, port, inode) for table in ("tcp", "tcp6") for host, port, inode in _read_table(proc / "net" / table)
    ]
    holders = _holders(proc, {inode for _, _, inode in found})
    return [TcpListener(host, port, *holders.get(inode, (0, ""))) for host, port, inode in found]


def bind_error(endpoint: str, number: int, text: str) -> BridgeError:
    """Return the error for a bind that failed with `errno` `number`."""
    if number == errno.EADDRINUSE:
        address = parse_tcp(endpoint)
        found = next((each for each in tcp_listeners() if address and each.port == address.port and each.pid), None)
        holder = f" by process {found.pid} ({found.command})" if found else ""
        return ConflictError(
            f"control address {endpoint} is taken{holder}; stop what holds it, or configure another port (0 picks one)"
        )
    if number in {errno.EADDRNOTAVAIL, errno.ENODEV}:
        return UnavailableError(f"control address {endpoint}: this machine has no such address or interface")
    if number == errno.EACCES:
        return ConfigError(f"control address {endpoint}: not permitted to bind it; use a port above 1023")
    return UnavailableError(f"control address {endpoint} cannot be bound: {text}")


def _read_table(path: Path) -> Iterator[tuple[str, int, str]]:
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:
        return
    for fields in map(str.split, lines):
        if fields[3] == _LISTENS:
            address, _, port = fields[1].rpartition(":")
            yield _readable(address), int(port, 16), f"socket:[{fields[9]}]"


def _readable(address: str) -> str:
    """The kernel prints 32-bit words in the machine's own order."""
    words = [int(address[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return str(getattr(found, "ipv4_mapped", None) or found)


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # Closed meanwhile, as the one by which our own directory was listed.


def _holders(proc: Path, inodes: set[str]) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for process in proc.glob("[0-9]*") if inodes else ():
        try:
            held = {_target(link) for link in (process / "fd").iterdir()} & inodes
            if held:
                words = (process / "cmdline").read_text(errors="replace").replace("\0", " ").split()
                command = " ".join(words)[:100] or (process / "comm").read_text().strip()
                found |= dict.fromkeys(held, (int(process.name), command))
        except OSError:
            continue  # Ended meanwhile, or not ours to look into.
    return found
