"""The settings of the transports, a section for each backend. Backends read this, never the other way round.

Every backend that writes in a window has three limits: how much may be in flight to one peer, by operations and by bytes, and how
long a failed transfer may take to become quiet before the transport has to be torn down.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvbridge.core.ids import FrozenModel

MIB = 1 << 20

Seconds = Annotated[float, Field(gt=0, le=3600)]
Host = Annotated[str, Field(min_length=1, max_length=253)]


class TransportName(StrEnum):
    """Every backend there is; what `transports.order` may list."""

    LOCAL = "local"
    MOONCAKE = "mooncake"
    NIXL = "nixl"


TCP_OPERATION_COST_BYTES = 96 * 1024
"""What Mooncake's TCP moves in the time that another operation takes, on one host: 33 us at 3.2 GB/s."""


class MooncakeProtocol(StrEnum):
    """What Mooncake moves bytes with."""

    TCP = "tcp"
    RDMA = "rdma"


class MooncakeSettings(FrozenModel):
    """mooncake-transfer-engine.

    Fields marked "whole process" are read once by the library: all transports of a process share them.
    """

    host: Host = "127.0.0.1"
    """Address of this machine that peers connect to, without a port. The library listens on every interface all the same."""
    protocol: MooncakeProtocol = MooncakeProtocol.TCP
    device_name: Annotated[str, Field(max_length=500)] = ""
    """RDMA devices to use, comma-separated ("mlx5_0,mlx5_1"); empty lets the library choose. Not used with tcp."""
    connect_timeout_s: Annotated[int, Field(ge=1, le=600)] = 5
    """Longest wait for a peer's answer when connecting. Whole process."""
    metadata_timeout_s: Seconds = 1.0
    """Longest wait, when connecting to a peer that has answered, for the library to fetch what the peer has. No other transfer of
    the rank is started meanwhile."""
    transfer_timeout_s: Annotated[int, Field(ge=5, le=3600)] = 30
    """The library's own limit for one operation; 5 is its floor. Whole process."""
    progress_timeout_s: Annotated[int, Field(ge=1, le=3600)] = 5
    """TCP: an operation that has not moved a byte for so long has failed. Whole process."""
    window_operations: Annotated[int, Field(ge=1, le=1024)] = 16
    """Operations in flight to one peer, over all transfers; over RDMA batches of them. More bring nothing on TCP and take longer
    to become quiet; the library's queue breaks at about 2,050."""
    window_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 64 * MIB
    """Bytes in flight to one peer, over all transfers."""
    batch_operations: Annotated[int, Field(ge=1, le=65536)] = 256
    """RDMA: operations given to the library by one call. A transfer that fails with some of a batch under way is not quiet. With 1
    each is given by itself and every failed transfer becomes quiet, at several times the processor time for an operation."""
    batch_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 8 * MIB
    """RDMA: bytes given to the library by one call. 50 GB/s take 0.16 ms for as many, and 1 MB fills such a link over 20 us; some
    batches are in flight, since they are looked after every 0.1 ms."""
    max_operation_bytes: Annotated[int, Field(ge=4096, le=1 << 30)] = 16 * MIB
    """Longest single operation; the planner cuts longer ones."""
    operation_cost_bytes: Annotated[int, Field(ge=0, le=1 << 30)] | None = None
    """With a request's last rows, up to so many bytes of its own pages that hold nothing go along where that saves an operation.
    None: 96 KiB over TCP, where an operation takes some 30 us whatever it moves, and 0 over RDMA. With both sides `page_first`
    windows and states then are one operation, of twice their bytes: set 0 where the network, not the processor, is slow."""
    quiet_timeout_s: Seconds = 45.0
    """After a failure, how long to wait for the operations in flight before the transport counts as not quiet and has to be torn
    down, with what it moves to other peers. A frozen TCP peer needs about window_operations / 2 * progress_timeout_s."""
    ipv6: bool = False
    """Set when `host` is an IPv6 address; without it the library initialises and then fails each transfer. Whole process."""
    log_level: Annotated[str, Field(pattern="^(TRACE|INFO|WARNING|ERROR)$")] = "ERROR"
    """The library's own log, which goes to stderr. Whole process."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_operation_bytes > self.window_bytes or self.batch_bytes > self.window_bytes:
            raise ValueError(
                f"max_operation_bytes ({self.max_operation_bytes}) and batch_bytes ({self.batch_bytes}) must fit into "
                f"window_bytes ({self.window_bytes})"
            )
        if ":" in self.host and not self.ipv6:
            raise ValueError(
                f"host '{self.host}' looks like an IPv6 address or carries a port; give no port, and set ipv6 for IPv6"
            )
        return self

    @property
    def dead_bytes(self) -> int:
        """What `operation_cost_bytes` amounts to."""
        if self.operation_cost_bytes is not None:
            return self.operation_cost_bytes
        return TCP_OPERATION_COST_BYTES if self.protocol is MooncakeProtocol.TCP else 0


class NixlSettings(FrozenModel):
    """NIXL over UCX. Fields marked "whole process" are read once by the library: all its transports share them."""

    ucx_tls: Annotated[str, Field(max_length=500)] = ""
    """UCX transports ("tcp", "rc,cuda_copy"); empty lets UCX choose, which is shared memory access (CMA) between two processes
    of one host and needs ptrace rights there. `cuda_copy` and `cuda_ipc` are added on a host with a GPU. UCX_TLS. Whole process."""
    ucx_net_devices: Annotated[str, Field(max_length=500)] = ""
    """Network devices to use, comma-separated ("mlx5_0:1,mlx5_1:1", "eth0", "lo"); empty means all.
    UCX_NET_DEVICES. Whole process."""
    ucx_modules: Annotated[str, Field(max_length=500)] = "auto"
    """UCX modules to load. `auto` leaves InfiniBand out where the host has none, since its libraries can crash the
    interpreter at its exit; empty sets nothing. UCX_MODULES. Whole process."""
    log_level: Annotated[str, Field(pattern="^(fatal|error|warn|info|debug)$")] = "error"
    """UCX's own log, which goes to stderr. Whole process."""
    progress_delay_us: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Longest sleep of the library's progress thread; it is woken by traffic. At 0, the library's default, it keeps a core busy."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for a peer's answer when connecting."""
    check_timeout_s: Seconds = 15.0
    """Longest life of the process that reads a peer's description before we do, and longest wait for its turn."""
    batch_operations: Annotated[int, Field(ge=1, le=65536)] = 1024
    """Operations posted by one call, which takes about 4 us for each."""
    batch_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 16 * MIB
    """Bytes posted by one call, which takes up to 0.3 ms a MiB on TCP."""
    window_operations: Annotated[int, Field(ge=1, le=1 << 20)] = 8192
    """Operations in flight to one peer, over all transfers."""
    window_bytes: Annotated[int, Field(ge=65536, le=1 << 40)] = 64 * MIB
    """Bytes in flight to one peer, over all transfers; an aborted transfer waits for as many."""
    max_operation_bytes: Annotated[int, Field(ge=4096, le=1 << 30)] = 4 * MIB
    """Longest single operation; the planner cuts longer ones."""
    quiet_timeout_s: Seconds = 5.0
    """After a failure, how long to wait for the operations in flight before the transport counts as not quiet. The
    library itself waits for a frozen peer for ever."""
    close_timeout_s: Seconds = 10.0
    """Longest wait for the library to return from a call when the transport is closed."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_operation_bytes > self.window_bytes or self.batch_bytes > self.window_bytes:
            raise ValueError(
                f"max_operation_bytes ({self.max_operation_bytes}) and batch_bytes ({self.batch_bytes}) must fit into "
                f"window_bytes ({self.window_bytes})"
            )
        if self.connect_timeout_s >= self.check_timeout_s:
            raise ValueError(
                f"connect_timeout_s ({self.connect_timeout_s:g} s) must be shorter than check_timeout_s "
                f"({self.check_timeout_s:g} s): the check waits for the peer's answer, too"
            )
        return self


class LocalSettings(FrozenModel):
    """Copies within one host: between mappings by the processor, from and to device memory by the device."""

    slice_bytes: Annotated[int, Field(ge=65536, le=1 << 30)] = 16 * MIB
    """The processor copies so much between two looks at aborts, deadlines and other transfers (1 to 4 ms); also the longest
    single operation, so the planner cuts longer ones."""
    device_slice_bytes: Annotated[int, Field(ge=65536, le=1 << 30)] = 128 * MIB
    """Given to a device at a time (2.4 ms over a PCIe 5 link), four times at most; an abort waits for what was given."""
    copy_kernel_below_bytes: Annotated[int, Field(ge=0, le=1 << 40)] = 256 * 1024
    """A device copies a transfer by a kernel where operations are shorter on average, else by its copy engines. The engines take
    about 2 us for each operation, the kernel takes a share of the device from whatever else it computes."""
    copy_kernel_blocks: Annotated[int, Field(ge=1, le=1024)] = 16
    """Blocks of the copy kernel, of 1,024 threads or fewer. 8 fill a PCIe 5 link; between devices more are faster."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for the files and allocations that a peer names to be opened."""
    registration_wait_s: Seconds = 1.0
    """Longest wait, when connecting, for the peer's host memory to be registered with CUDA (0.05 to 0.4 s a GiB). What is not
    done by then goes on in the background, and transfers from devices wait for it until their deadline."""
    quiet_timeout_s: Seconds = 5.0
    """After a failure, how long to wait for what a device was given before the transport counts as not quiet."""
    settle_s: Annotated[float, Field(ge=0, le=60)] = 0.5
    """On a host with a GPU: how long writers must have been gone before their endpoint counts as revoked, since a device may
    finish some milliseconds of copies for a process that was killed."""
    proof_directory: Annotated[str, Field(pattern="^/", max_length=4096)] = "/dev/shm"  # noqa: S108 - shared memory, not scratch
    """Where the files lie by which peers see that they share this host, when no registered memory is a file there. The same
    place for all processes of the host; containers share it."""
    close_timeout_s: Seconds = 10.0
    """Longest wait for the slices under way when the transport is closed."""


class TransportSettings(FrozenModel):
    """How bytes are moved, and in which order of preference."""

    order: tuple[TransportName, ...] = (TransportName.LOCAL, TransportName.MOONCAKE)
    """Backends to offer to peers, the preferred one first; a pair of ranks uses the first that both have and that connects. The
    others that both have are connected as well, and a room goes on over the next one when the one that it uses is lost."""
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
