"""mooncake-transfer-engine: loading it so that it does what it was asked to, and ending its calls that wait for a peer."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Protocol, TypeVar, cast

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings
from kvbridge.core.errors import WITH_LIBRARIES, TransportError
from kvbridge.transport.base import set_environment
from kvbridge.transport.threads import start_thread

LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError)
"""Python's forms of C++ exceptions."""
_SIOCGIFADDR = 0x8915
METADATA = "P2PHANDSHAKE"
"""Peers tell each other what they have; there is no metadata server."""


class Library(Protocol):
    """The methods of `mooncake.engine.TransferEngine` that are used. Answers are return codes.

    It raises C++ exceptions (`LIBRARY_ERRORS`): of its JSON parser, for one, over what a peer says of itself.
    """

    def initialize(self, host: str, metadata: str, protocol: str, device_name: str, /) -> int:
        """0 also for a protocol that is not there."""

    def get_rpc_port(self) -> int:
        """The port by which peers know this engine."""

    def get_local_topology(self) -> str:
        """JSON: memory location to two lists of adapter names."""

    def send_probe(self, session: str, /) -> int:
        """0 when the peer answered. Waits for 60 s for each part of the answer, and disturbs no other call meanwhile."""

    def batch_register_memory(self, addresses: list[int], lengths: list[int], /) -> int:
        """0 when all were registered."""

    def batch_unregister_memory(self, addresses: list[int], /) -> int:
        """0 when all were known."""

    def transfer_submit_write(self, session: str, source: int, destination: int, length: int, /) -> int:
        """A batch id, or -1 or 0. The first one to a peer fetches its description, and waits for that like `send_probe`."""

    def transfer_check_status(self, batch: int, /) -> int:
        """1 done, -1 failed (the id is freed by either), 0 pending, -2 timed out but not ended (not freed).

        Looks at the first operation only, so it says nothing of a batch.
        """

    def batch_transfer_async_write(
        self, session: str, sources: list[int], destinations: list[int], lengths: list[int], /
    ) -> int:
        """A batch id, or -1 or 0; then some operations may have been posted all the same."""

    def get_batch_transfer_status(self, batches: list[int], /) -> int:
        """0 when all have ended well, -1 after the first failure in any (the ids are freed by either). Spins until then."""


STATUS_PENDING, STATUS_DONE, STATUS_FAILED, STATUS_UNKNOWN = 0, 1, -1, -2
"""States of one operation; any other answer counts as unknown: given up by the library, and perhaps not ended."""


class Engine:
    """The only reference to the library's engine, because only the engine's destruction ends all its operations."""

    def __init__(self, library: Library) -> None:
        self._library: Library | None = library

    @property
    def library(self) -> Library:
        """Raises TransportError after `destroy`."""
        if self._library is None:
            raise TransportError("this mooncake transport has been closed; create another one")
        return self._library

    def destroy(self) -> None:
        """Drop the engine. Harmless when dropped already."""
        self._library = None

    def status(self, single: int) -> int:
        """Return the state of an operation that was given by itself. Not to be called again after done or failed."""
        try:
            answer = self.library.transfer_check_status(single)
        except LIBRARY_ERRORS:
            return STATUS_UNKNOWN
        return answer if answer in {STATUS_PENDING, STATUS_DONE, STATUS_FAILED} else STATUS_UNKNOWN


_process_environment: dict[str, str] = {}
"""The variables that the library was loaded with."""


def create_library(settings: MooncakeSettings) -> Library:
    """Import the library with its environment set, and start one engine. Raises TransportError, ConfigError."""
    wanted = {
        "MC_TRANSFER_TIMEOUT": str(settings.transfer_timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(settings.progress_timeout_s),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(settings.connect_timeout_s),
        "MC_LOG_LEVEL": settings.log_level,
    }
    if settings.ipv6:
        wanted["MC_USE_IPV6"] = "1"
    set_environment(_process_environment, wanted, library="mooncake", settings="timeouts, log_level and ipv6")
    try:
        from mooncake.engine import TransferEngine  # noqa: PLC0415  only after its environment has been set
    except ImportError as error:
        raise TransportError(
            f"the mooncake library cannot be loaded ({error}); {WITH_LIBRARIES}, and the system package libibverbs1"
        ) from error
    library = cast("Library", TransferEngine())
    answer = library.initialize(settings.host, METADATA, settings.protocol.value, settings.device_name)
    if answer != 0:
        raise TransportError(
            f"mooncake could not start on {settings.host} over {settings.protocol} (it answered {answer}); "
            "check transports.mooncake.host and device_name"
        )
    if settings.protocol is MooncakeProtocol.RDMA:
        require_adapter(library.get_local_topology(), settings.device_name)
    return library


def require_adapter(topology: str, device_name: str) -> None:
    """Raise TransportError unless the library found an RDMA adapter.

    `topology` is the library's JSON: for each memory location, two lists of adapter names (near ones and others).
    """
    try:
        found = {name for near_and_far in json.loads(topology).values() for names in near_and_far for name in names}
    except (ValueError, AttributeError, TypeError):
        found = set()
    if not found:
        among = f" among {device_name}" if device_name else ""
        raise TransportError(
            f"mooncake found no RDMA adapter{among} and would use TCP without saying so; install the adapter's driver "
            "and pass /dev/infiniband into the container, or set transports.mooncake.protocol to tcp"
        )


CUDA_DISTRIBUTIONS = ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")


def why_no_device_memory(protocol: MooncakeProtocol) -> str:
    """Return why device memory is refused, with the cure; empty where it is accepted.

    All builds install the package `mooncake`; they differ by the name of their distribution. Over TCP the CUDA builds take device
    memory (its place is found from the address, so nothing has to be said of it), and copy it through pageable host memory in
    pieces of 64 KiB. But they report a write as done when the receiver's last copy to the device has been begun, not when it has
    arrived, which is less than `TransferState.DONE` promises.
    """
    if not any(True for name in CUDA_DISTRIBUTIONS for _ in importlib.metadata.distributions(name=name)):
        return (
            "this build of mooncake does not reach device memory; install mooncake-transfer-engine (CUDA 12) or "
            "mooncake-transfer-engine-cuda13 in place of its non-CUDA build"
        )
    if protocol is MooncakeProtocol.TCP:
        return (
            "over tcp mooncake reports device memory as written before it is; set transports.mooncake.protocol to rdma, or "
            "transports.order to local (one host) or nixl"
        )
    return ""


# ------------------------------------------------------------------------------------------- calls that wait for a peer

DESCRIPTORS = Path("/proc/self/fd")
AGAIN_S = 0.02
"""Between two looks for connections of a late call: the call may open another one."""
GRACE_S = 2.0
"""Time in which a call returns once its connections are shut down; only the resolver of host names takes longer."""

T = TypeVar("T")

Address = tuple[IPv4Address | IPv6Address, int]


class PeerCall:
    """Calls of the library that wait for one peer, made one after another by one thread, and ended from outside when it must be.

    The library waits for up to 60 s for each part of a peer's answer and offers no way to give up; a peer that says nothing, or
    drips, would keep a thread for as long as it likes. But the call waits for a socket of this process. Once the peer has had its
    time, the connections that have come since the call began and lead to the peer's address and port are shut down, and the call
    returns with an error within milliseconds (measured with 0.3.13). Nothing tells the library's sockets from others of the process
    but where they lead, which no other part of kvbridge connects to.
    """

    def __init__(self, session: str) -> None:
        """`session` is the peer's host:port."""
        self._session = session
        self._known: set[str] = set()
        """Sockets that were there before the present call."""
        self._addresses: frozenset[Address] = frozenset()
        """Ends of the connections of a call; empty until the host of the peer has been resolved."""
        self._late = False
        self._unwanted = False
        self._returned = threading.Event()
        self._returned.set()

    def ask(self, function: Callable[[], T], *, timeout_s: float, name: str, late: str) -> T:
        """Return the library's answer. A call that has not ended after `timeout_s` is cut off, and raises TransportError(`late`).

        `name` names the work in messages. Raises TransportError.
        """
        self._late = False
        try:
            self._known = {inode for inode, _ in _sockets()}
        except OSError as error:
            raise TransportError(
                f"cannot {name}: {error}; raise the limit of open files of this rank worker (ulimit -n, LimitNOFILE)"
            ) from error
        self._returned.clear()
        try:
            # Not by the caller: while the library fetches one peer's description, writes to all others wait inside of it.
            start_thread(self._watch, timeout_s, name=f"watch: {name}")
            self._addresses = _addresses(self._session)
            self._late = self._unwanted
            found = None if self._late else function()
        except TransportError as error:
            raise TransportError(late if self._late else str(error)) from error
        finally:
            self._returned.set()
        if self._late or found is None:
            raise TransportError(late)
        return found

    def cancel(self, _: object = None) -> None:
        """Cut the present call off without waiting for its end."""
        self.end(0.0)

    def end(self, timeout_s: float) -> bool:
        """Cut the present call off, and later ones. Returns whether none is under way, at the latest after `timeout_s`."""
        self._unwanted = True
        self._try_to_cut_off()
        return self._returned.wait(timeout_s)

    def _watch(self, timeout_s: float) -> None:
        ends_at_s = time.monotonic() + timeout_s
        while not self._unwanted and time.monotonic() < ends_at_s:
            if self._returned.wait(min(AGAIN_S, max(0.0, ends_at_s - time.monotonic()))):
                return
        self._late = True
        while not self._returned.wait(AGAIN_S):
            self._try_to_cut_off()

    def _try_to_cut_off(self) -> None:
        with contextlib.suppress(OSError):  # no descriptor is left to look for sockets by: the watch tries again
            for inode, descriptor in _sockets():
                if inode not in self._known:
                    _shut_down(descriptor, self._addresses)


def _sockets() -> list[tuple[str, int]]:
    """Return every socket of this process: the kernel's name for it, and a descriptor."""
    found = []
    for entry in DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            target = entry.readlink().name
            if target.startswith("socket:"):
                found.append((target, int(entry.name)))
    return found


def interface_address(name: str) -> str:
    """Return the first IPv4 address of a network interface; empty without an address or interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode()[:15].ljust(256, b"\0"))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _addresses(session: str) -> frozenset[Address]:
    """Return the addresses of a session's host, with the port. May wait for a resolver. Raises TransportError."""
    host, _, port = session.rpartition(":")
    try:
        found = socket.getaddrinfo(host.removeprefix("[").removesuffix("]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(
            f"mooncake peer {session} cannot be reached: '{host}' has no address here ({error}); set another one on the peer "
            "(transports.mooncake.host)"
        ) from error
    return frozenset((_plain(str(sockaddr[0])), int(port)) for *_, sockaddr in found)


def _plain(address: str) -> IPv4Address | IPv6Address:
    """Return an address without its zone; an IPv4 one as such, also where IPv6 sockets lead to it."""
    found = ip_address(address.partition("%")[0])
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found


def _shut_down(descriptor: int, addresses: frozenset[Address]) -> None:
    """Shut down a connection to one of the addresses. The library keeps the descriptor, and sees the end of the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        if connection.family in {socket.AF_INET, socket.AF_INET6} and connection.type is socket.SOCK_STREAM:
            host, port, *_ = connection.getpeername()
            if (_plain(host), port) in addresses:
                connection.shutdown(socket.SHUT_RDWR)
