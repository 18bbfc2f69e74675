"""Settings of the transports, a section for each backend. Backends read this module; it never reads them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.core.ids import FrozenModel

MIB = 1 << 20

Seconds = Annotated[float, Field(gt=0, le=3600)]
Host = Annotated[str, Field(min_length=1, max_length=253)]
Names = Annotated[str, Field(max_length=500)]
WindowBytes = Annotated[int, Field(ge=65536, le=1 << 40)]
OperationBytes = Annotated[int, Field(ge=4096, le=1 << 30)]


class TransportName(StrEnum):
    """The backends, as `transports.order` names them."""

    LOCAL = "local"
    MOONCAKE = "mooncake"
    NIXL = "nixl"


TCP_OPERATION_COST_BYTES = 96 * 1024
"""Bytes that Mooncake's TCP moves in the time of one more operation, on one host: 33 us at 3.2 GB/s."""


class MooncakeProtocol(StrEnum):
    """Network that Mooncake moves bytes over."""

    TCP = "tcp"
    RDMA = "rdma"


def _require_window(operation_bytes: int, batch_bytes: int, window_bytes: int) -> None:
    if max(operation_bytes, batch_bytes) > window_bytes:
        raise ValueError(
            f"max_operation_bytes ({operation_bytes}) and batch_bytes ({batch_bytes}) must fit into window_bytes ({window_bytes})"
        )


class MooncakeSettings(FrozenModel):
    """mooncake-transfer-engine. The library reads fields marked "whole process" once, for all transports of a process."""

    host: Host = "127.0.0.1"
    """Address of this machine that peers connect to, without a port, or the network interface (`net1`) whose IPv4 address that is.
    The library listens on every interface all the same."""
    protocol: MooncakeProtocol = MooncakeProtocol.TCP
    device_name: Names = ""
    """RDMA devices to use, comma-separated ("mlx5_0,mlx5_1"); empty lets the library choose. Not used with tcp."""
    connect_timeout_s: Annotated[int, Field(ge=1, le=600)] = 5
    """Longest wait for a peer's answer when connecting. Whole process."""
    metadata_timeout_s: Seconds = 1.0
    """Longest wait for the library to fetch the description of a peer that answers. The rank starts no other transfer meanwhile."""
    transfer_timeout_s: Annotated[int, Field(ge=5, le=3600)] = 30
    """The library's own limit for one operation; 5 is its floor. Whole process."""
    progress_timeout_s: Annotated[int, Field(ge=1, le=3600)] = 5
    """TCP: an operation that has not moved a byte for so long has failed. Whole process."""
    window_operations: Annotated[int, Field(ge=1, le=1024)] = 16
    """Operations in flight to one peer, over all transfers; over RDMA batches of them. More bring nothing on TCP and take longer
    to become quiet; the library's queue breaks at about 2,050."""
    window_bytes: WindowBytes = 64 * MIB
    """Bytes in flight to one peer, over all transfers."""
    batch_operations: Annotated[int, Field(ge=1, le=65536)] = 256
    """RDMA: operations given to the library by one call. A transfer that fails with part of a batch under way is not quiet.
    With 1, every failed transfer becomes quiet, at several times the processor time for an operation."""
    batch_bytes: WindowBytes = 8 * MIB
    """RDMA: bytes given to the library by one call. A link of 50 GB/s takes 0.16 ms for 8 MiB. Batches in flight are polled every
    0.1 ms, and 1 MB keeps such a link busy for 20 us, so several batches are in flight."""
    max_operation_bytes: OperationBytes = 16 * MIB
    """Longest single operation; the planner cuts longer ones."""
    operation_cost_bytes: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    """Up to so many dead bytes of a request's own pages are sent with its last rows where that saves an operation. None: 96 KiB
    over TCP, where an operation takes some 30 us whatever it moves, and 0 over RDMA. With `page_first` on both sides windows
    and states are then one operation, of twice their bytes: set 0 where the network, not the processor, is slow."""
    quiet_timeout_s: Seconds = 45.0
    """Longest wait, after a failure, for the operations in flight. Then the transport is torn down, with its transfers to other
    peers. A frozen TCP peer needs about window_operations / 2 * progress_timeout_s."""
    ipv6: bool = False
    """Set when `host` is an IPv6 address; without it the library initialises and then fails each transfer. Whole process."""
    log_level: Annotated[str, Field(pattern="^(TRACE|INFO|WARNING|ERROR)$")] = "ERROR"
    """The library's own log, which goes to stderr. Whole process."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_window(self.max_operation_bytes, self.batch_bytes, self.window_bytes)
        if ":" in self.host and not self.ipv6:
            raise ValueError(f"host '{self.host}' is an IPv6 address or has a port: give no port, set ipv6 for IPv6")
        return self

    @property
    def dead_bytes(self) -> int:
        """The value of `operation_cost_bytes` with its default filled in."""
        if self.operation_cost_bytes is not None:
            return self.operation_cost_bytes
        return TCP_OPERATION_COST_BYTES if self.protocol is MooncakeProtocol.TCP else 0


class NixlSettings(FrozenModel):
    """NIXL over UCX. The library reads fields marked "whole process" once, for all transports of a process."""

    ucx_tls: Names = ""
    """UCX transports ("tcp", "rc,cuda_copy"); empty lets UCX choose, which is shared memory access (CMA) between two processes
    of one host and needs ptrace rights there. `cuda_copy` and `cuda_ipc` are added on a host with a GPU. UCX_TLS. Whole
    process."""
    ucx_net_devices: Names = ""
    """Network devices to use, comma-separated ("mlx5_0:1,mlx5_1:1", "eth0", "lo"); empty: all. UCX_NET_DEVICES. Whole process."""
    ucx_modules: Names = "auto"
    """UCX modules to load. `auto` leaves InfiniBand out where the host has none, since its libraries can crash the interpreter at
    its exit; empty sets nothing. UCX_MODULES. Whole process."""
    log_level: Annotated[str, Field(pattern="^(fatal|error|warn|info|debug)$")] = "error"
    """UCX's own log, which goes to stderr. Whole process."""
    progress_delay_us: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Longest sleep of the library's progress thread, which traffic wakes. At 0, the library's default, it keeps a core busy."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for a peer's answer when connecting."""
    check_timeout_s: Seconds = 15.0
    """Longest life of the process that reads a peer's description before we do, and longest wait for its turn."""
    batch_operations: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Operations posted by one call, which takes about 4 us for each."""
    batch_bytes: WindowBytes = 16 * MIB
    """Bytes posted by one call, which takes up to 0.3 ms a MiB on TCP."""
    window_operations: Annotated[int, Field(ge=1, le=1 << 20)] = 8192
    """Operations in flight to one peer, over all transfers."""
    window_bytes: WindowBytes = 64 * MIB
    """Bytes in flight to one peer, over all transfers; an aborted transfer waits for them."""
    max_operation_bytes: OperationBytes = 4 * MIB
    """Longest single operation; the planner cuts longer ones."""
    quiet_timeout_s: Seconds = 5.0
    """Longest wait, after a failure, for operations in flight, before the transport is torn down. The library waits for ever."""
    close_timeout_s: Seconds = 10.0
    """Longest wait for the library to return from a call when the transport is closed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_window(self.max_operation_bytes, self.batch_bytes, self.window_bytes)
        if self.connect_timeout_s >= self.check_timeout_s:
            raise ValueError(
                f"connect_timeout_s ({self.connect_timeout_s:g} s) must be shorter than check_timeout_s "
                f"({self.check_timeout_s:g} s): the check waits for the peer's answer, too"
            )
        return self


class LocalSettings(FrozenModel):
    """Copies within one host: between mappings by the processor, from and to device memory by the device."""

    slice_bytes: Annotated[int, Field(ge=65536, le=1 << 30)] = 16 * MIB
    """Bytes that the processor copies between checks for aborts and deadlines (1 to 4 ms). The planner cuts longer operations."""
    device_slice_bytes: Annotated[int, Field(ge=65536, le=1 << 30)] = 128 * MIB
    """Bytes given to a device at a time (2.4 ms over a PCIe 5 link), four times at most; an abort waits for them."""
    copy_kernel_below_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 256 * 1024
    """A device copies a transfer by a kernel where operations are shorter on average, else by its copy engines. The engines take
    about 2 us for each operation; the kernel takes a share of the device from other computation."""
    copy_kernel_blocks: Annotated[int, Field(ge=1, le=1024)] = 16
    """Blocks of the copy kernel, of 1,024 threads or fewer. 8 fill a PCIe 5 link; between devices more are faster."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for a peer's files and allocations to be opened."""
    registration_wait_s: Seconds = 1.0
    """Longest wait, when connecting, for the peer's host memory to be registered with CUDA (0.05 to 0.4 s a GiB). The rest is
    registered in the background, and transfers from devices wait for it until their deadline."""
    quiet_timeout_s: Seconds = 5.0
    """Longest wait, after a failure, for a device's copies under way before the transport counts as not quiet."""
    settle_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """On a host with a GPU: how long writers must have been gone before their endpoint counts as revoked. A device may finish
    some milliseconds of copies for a process that was killed."""
    proof_directory: Annotated[str, Field(pattern="^/", max_length=4096)] = "/dev/shm"  # noqa: S108 - shared memory, not scratch
    """Directory of the files by which peers see that they share this host, when no registered memory is a file. The same for all
    processes of the host; containers share it."""
    close_timeout_s: Seconds = 10.0
    """Longest wait for the slices under way when the transport is closed."""


class TransportSettings(FrozenModel):
    """How bytes are moved, and in which order of preference."""

    order: tuple[TransportName, ...] = (TransportName.LOCAL, TransportName.MOONCAKE)
    """Backends to offer to peers, the preferred one first. A pair of ranks uses the first one that both have and that connects;
    the others are connected as well, and a room goes on over the next one when its own is lost."""
    mooncake: MooncakeSettings = MooncakeSettings()
    nixl: NixlSettings = NixlSettings()
    local: LocalSettings = LocalSettings()

    @property
    def close_s(self) -> float:
        """Longest time that the transports in `order` take to close, side by side. `local` waits for a thread, then for a GPU."""
        limits_s = {
            TransportName.LOCAL: 2 * self.local.close_timeout_s,
            TransportName.MOONCAKE: float(self.mooncake.connect_timeout_s),
            TransportName.NIXL: self.nixl.close_timeout_s,
        }
        return max(limits_s[name] for name in self.order)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.order or len(set(self.order)) != len(self.order):
            raise ValueError(f"order must name at least one transport and none twice, got {list(self.order)}")
        return self
