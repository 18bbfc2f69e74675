"""ZeroMQ sockets inside an asyncio loop, with their keys and the limit of their connections; the holders of TCP ports.

The descriptor of a ZeroMQ socket signals edges: it becomes readable when *something* has changed, once, and any call on the socket
may consume the signal. Therefore a `LoopSocket` asks the socket itself after every wake and every send whether frames wait.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket as unix
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvbridge.control.keys import CurveKeys, Gate
from kvbridge.core.addresses import parse_tcp
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError, UnavailableError

SENDS_QUEUED = 10_000
"""High-water mark of every socket: frames that wait for one connection before a send is refused or dropped."""
RECEIVES_QUEUED = 64
"""Frames of one connection that wait for the loop. A peer that sends faster waits, or its frames would fill our memory."""
CLOSE_LINGER_MS = 200
FRAMES_PER_TURN = 128
TURN_S = 0.02
"""A socket lets the rest of the loop run after so many frames, or after this time."""
ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"kvbridge"
_ZAP_VERSION = b"1.0"

# As plain numbers: Python computes with ZeroMQ's own enumerations in Python, several times for each frame.
_READABLE = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_MORE_FOLLOWS = int(zmq.NOBLOCK | zmq.SNDMORE)

Parts = list[zmq.Frame]

# Events of connections.
HANDSHAKE_FAILED = int(
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
HANDSHAKE_FAILED_AUTH = int(zmq.Event.HANDSHAKE_FAILED_AUTH)
HANDSHAKE_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
ACCEPTED = int(zmq.Event.ACCEPTED)
DISCONNECTED = int(zmq.Event.DISCONNECTED)
CONNECT_FAILED = int(zmq.Event.CLOSED)
"""An attempt to connect has failed, as a rule because nobody listens there. ZeroMQ makes the next attempt."""


def read_event(head: bytes) -> tuple[int, int]:
    """Return (event, value) of a monitor's frame; the value of ACCEPTED and DISCONNECTED is the connection's descriptor."""
    event, value = struct.unpack("=HI", head)
    return event, value


class SocketContext:
    """The ZeroMQ thread that sockets of one process share. Close it after its sockets; closing is bounded."""

    def __init__(self) -> None:
        self.zmq = zmq.Context(1)
        self.zmq.set(zmq.MAX_SOCKETS, 16_384)

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new socket with the limits of kvbridge set."""
        socket = self.zmq.socket(kind)
        socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SENDS_QUEUED)
        socket.setsockopt(zmq.RCVHWM, RECEIVES_QUEUED)
        return socket

    def close(self) -> None:
        """Close the sockets that are still open and end the thread; waits at most for the sockets' linger."""
        self.zmq.destroy()


def bind(socket: zmq.Socket[bytes], endpoint: str) -> str:
    """Listen, and return the real endpoint. Raises as `bind_error` says."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise bind_error(endpoint, error.errno or 0, str(error)) from error
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))


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


class LoopSocket:
    """Calls `on_parts` in the running loop for each message that arrives on `socket`, and owns the socket.

    An exception of `on_parts` reaches the loop's exception handler and costs that one message only.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_parts: Callable[[Parts], None]) -> None:
        self._socket = socket
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._in_turn = self._scheduled = False
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._turn)
        self._look_again()

    def send(self, parts: Sequence[bytes]) -> bool:
        """Hand parts to ZeroMQ. Return False after `close`, and when no connection takes them now: they are dropped then."""
        if self._socket.closed:
            return False
        try:
            for part in parts[:-1]:
                self._socket.send(part, _MORE_FOLLOWS)
            self._socket.send(parts[-1], _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in {zmq.EAGAIN, zmq.EHOSTUNREACH}:
                return False
            raise
        finally:
            self._look_again()
        return True

    def close(self) -> None:
        """Stop listening and close the socket; harmless when closed."""
        if not self._socket.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
            self._socket.close()

    def _frames_wait(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & _READABLE)

    def _look_again(self) -> None:
        if not (self._in_turn or self._scheduled or self._socket.closed) and self._frames_wait():
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled, self._in_turn = False, True
        try:
            end_s = time.monotonic() + TURN_S
            for _ in range(FRAMES_PER_TURN):
                if self._socket.closed or not self._frames_wait():
                    return
                parts = [self._socket.recv(_NOBLOCK, copy=False)]
                while parts[-1].more:
                    parts.append(self._socket.recv(_NOBLOCK, copy=False))
                self._on_parts(parts)
                if time.monotonic() > end_s:
                    return
        finally:
            self._in_turn = False
            self._look_again()


def show_keys(socket: zmq.Socket[bytes], keys: CurveKeys, server_key: str = "") -> None:
    """Set up CURVE on a socket: as a server, or as the client of the server with that public key."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    if server_key:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    else:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)


class Authenticator:
    """Answers ZeroMQ's question about each CURVE handshake: the peer must have proved to own an allowed key.

    ZeroMQ notes this key as the "User-Id" of the peer's frames. Open the authenticator before the server socket of the same context
    is bound.
    """

    def __init__(self, context: SocketContext, gate: Gate, on_denied: Callable[[str], None]) -> None:
        self._gate = gate
        self._on_denied = on_denied
        socket = context.open(zmq.REP)
        socket.bind(ZAP_ENDPOINT)
        self._socket = LoopSocket(socket, self._answer)

    def close(self) -> None:
        """Stop answering; nobody gets in any more."""
        self._socket.close()

    def _answer(self, parts: Parts) -> None:
        fields = [part.bytes for part in parts]
        request = fields[1] if len(fields) > 1 else b""
        correct = len(fields) == 7 and fields[0] == _ZAP_VERSION and fields[5] == b"CURVE" and len(fields[6]) == 32
        public = z85.encode(fields[6]).decode() if correct else ""
        if public and self._gate.allows(public):
            self._socket.send([_ZAP_VERSION, request, b"200", b"", public.encode(), b""])
            return
        self._socket.send([_ZAP_VERSION, request, b"400", b"key not allowed", b"", b""])
        address = fields[3].decode(errors="replace") if len(fields) > 3 else "?"
        self._on_denied(
            f"{address} holds key {public or '(none)'}, which is not in the list of allowed keys; "
            "add it there if this peer belongs to the cluster"
        )


class ConnectionLimit:
    """Bounds the connections of one listening ZeroMQ socket. The socket's monitor reports them.

    ZeroMQ accepts every connection in a thread of its own. No option bounds their number, and to unbind the address would end every
    connection that was accepted there. Each connection beyond the limit is therefore shut down, and ZeroMQ closes it. ZeroMQ may
    have closed the descriptor meanwhile, and its number may be another file's. We copy the descriptor, check that the copy is a
    connection of this address, and shut the copy down. The copy takes the place of a descriptor held in reserve, since a process
    may have no free one.
    """

    def __init__(self, most: int, on_refused: Callable[[], None]) -> None:
        """`on_refused()` is called for each connection that is shut down."""
        self._most = most
        self._on_refused = on_refused
        self._open: set[int] = set()
        self._name: object = None
        self._copy = unix.socket()
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def bound(self, endpoint: str) -> None:
        """Note the endpoint at which the socket listens, with its real port."""
        address = parse_tcp(endpoint)
        self._name = address.port if address else endpoint.removeprefix("ipc://")

    def on_event(self, event: int, descriptor: int) -> None:
        """Take note of an ACCEPTED or DISCONNECTED event."""
        if event != ACCEPTED:
            self._open.discard(descriptor)
        elif len(self._open) < self._most:
            self._open.add(descriptor)
        else:
            self._cut(descriptor)
            self._on_refused()

    def close(self) -> None:
        """Close the descriptors held in reserve."""
        self._copy.close()
        os.close(self._nothing)

    def _cut(self, descriptor: int) -> None:
        place = self._copy.fileno()
        try:
            os.dup2(descriptor, place, inheritable=False)
            name = self._copy.getsockname()
            if self._name == (name[1] if isinstance(name, tuple) else name):
                self._copy.shutdown(unix.SHUT_RDWR)
        except OSError:
            return  # it has ended by itself
        finally:
            os.dup2(self._nothing, place, inheritable=False)


# ------------------------------------------------------------------------------------------- holders of TCP ports

PROC = Path("/proc")
_LISTENS = "0A"


class TcpListener(NamedTuple):
    """A listening socket. `pid` is 0 and the command empty when this process may not look into the socket's process."""

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


def _holders(proc: Path, inodes: set[str]) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for process in proc.glob("[0-9]*") if inodes else ():
        try:
            held = set[str]()
            for link in (process / "fd").iterdir():
                with suppress(OSError):  # closed meanwhile, as the one that lists our own directory
                    held |= {str(link.readlink())} & inodes
            if held:
                words = (process / "cmdline").read_text(errors="replace").replace("\0", " ").split()
                command = " ".join(words)[:100] or (process / "comm").read_text().strip()
                found |= dict.fromkeys(held, (int(process.name), command))
        except OSError:
            continue  # it has ended meanwhile, or belongs to another user
    return found
