"""Loading mooncake-transfer-engine so that it does what it was asked to, or refusing."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Protocol, cast

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings
from kvbridge.core.errors import TransportError
from kvbridge.transport.backend import set_environment

LIBRARY_ERRORS = (RuntimeError, ValueError, IndexError, OverflowError, MemoryError)
"""What C++ exceptions become in Python."""
METADATA = "P2PHANDSHAKE"
"""Peers tell each other what they have; there is no metadata server."""


class Library(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used. Answers are return codes.

    What it raises is a C++ exception (`LIBRARY_ERRORS`): of its JSON parser, for one, over what a peer says of itself.
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
        """A batch id, or -1 or 0. The first one to a peer fetches what the peer has, and waits for that like `send_probe`."""

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


_process_environment: dict[str, str] = {}
"""What the library was loaded with."""


def create_library(settings: MooncakeSettings) -> Library:
    """Import the library with the right environment and start one engine. Raises TransportError, ConfigError."""
    _set_environment(settings)
    try:
        from mooncake.engine import TransferEngine  # noqa: PLC0415  only after its environment has been set
    except ImportError as error:
        raise TransportError(
            f"the mooncake library cannot be loaded ({error}); install kvbridge[cpu] on a host without CUDA, "
            "kvbridge[cuda] on one with it, and the system package libibverbs1"
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

    `topology` is its own JSON: for each memory location, two lists of adapter names (near ones and others).
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
    """Why device memory is refused, with the cure; empty where it is taken.

    All builds install the package `mooncake`; they differ by the name of their distribution. Over TCP the CUDA builds take
    device memory (its place is found from the address, so nothing has to be said of it), and copy it through pageable host
    memory in pieces of 64 KiB. But they report a write as done when the receiver's last copy to the device has been begun,
    not when it has arrived, which is less than `TransferState.DONE` promises.
    """
    if not any(_is_installed(name) for name in CUDA_DISTRIBUTIONS):
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


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _set_environment(settings: MooncakeSettings) -> None:
    """Hand the library its settings the first time; later ones must agree, since it does not look again."""
    wanted = {
        "MC_TRANSFER_TIMEOUT": str(settings.transfer_timeout_s),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(settings.progress_timeout_s),
        "MC_HANDSHAKE_CONNECT_TIMEOUT": str(settings.connect_timeout_s),
        "MC_LOG_LEVEL": settings.log_level,
    }
    if settings.ipv6:
        wanted["MC_USE_IPV6"] = "1"
    set_environment(_process_environment, wanted, library="mooncake", settings="timeouts, log_level and ipv6")
