"""The transport within one host: copies from this process's memory into memory that peers share.

Writing needs nothing of the peer: a frozen or dying one is written to like any other, since its memory stays mapped here. A copy is
there or not, never on its way, so every failure is quiet, but for a device that does not finish what it was given.

A peer is refused as a whole when some of its memory is private or out of reach (another IPC namespace, no path
between the devices), because a pair of ranks that could exchange half its pages is of no use. Two things to know: a
peer that shrinks a mapped file ends this process with the next copy into it (SIGBUS), and so does, for device copies,
a peer that frees device memory before its writers are gone (`local.peer`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvbridge.config.transports import LocalSettings
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import AddressArray, Operations
from kvbridge.kernels.cuda import has_accelerator, runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.backend import Backend, read_endpoint
from kvbridge.transport.background import Call, take_turn
from kvbridge.transport.base import Endpoint, Peer, Steps, Transfer, TransferState
from kvbridge.transport.local.copier import Populating, copy_transfer
from kvbridge.transport.local.device_copier import CopyLimits, DeviceCopier, DeviceJob
from kvbridge.transport.local.host import Proof, writers_before
from kvbridge.transport.local.memory import HOST, DeviceAccess, IndexArray, ReachableExtents
from kvbridge.transport.local.own import LocalEndpoint, OwnMemory
from kvbridge.transport.local.peer import LocalPeer, PeerMemory
from kvbridge.transport.local.streams import CopyStream
from kvbridge.transport.local.ways import HostEnds, JointTransfer, Route, Way, only_route, split
from kvbridge.transport.pump import Pump, PumpedTransfer

NAME = "local"


class LocalTransport(Backend[PeerMemory]):
    """Copies made by one thread of this process, which starts with the first connection, and by its device."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: LocalSettings, *, epoch: int = 0, clock: Clock = monotonic) -> None:
        """`epoch`: that of the endpoints which this transport gives out."""
        super().__init__(clock)
        self._settings = settings
        self._epoch = epoch
        self._own = OwnMemory()
        self._proof: Proof | None = None
        self._pump = Pump(NAME)
        limits = CopyLimits(settings.device_slice_bytes, settings.quiet_timeout_s)
        self._devices = DeviceCopier(self._make_stream, limits)
        self._alone_since_s: dict[int, float] = {}
        """By epoch: since when no writer of an earlier one was seen."""

    def __repr__(self) -> str:
        return (
            f"<LocalTransport {os.getpid()}: {self._memory!r}, {len(self._peers)} peers, {self._pump!r}, "
            f"{self._devices!r}>"
        )

    @property
    def max_operation_bytes(self) -> int:
        """Longer ones would hold up everybody else: a slice is the least that is copied at a time."""
        return self._settings.slice_bytes

    def _require_open(self) -> None:
        self._pump.require_open()

    def _out_of_reach(self, part: Extent) -> str:
        reason = runtime.reason_without_device() if part.kind is MemoryKind.VRAM else ""
        return reason and f"it is device memory, and this process cannot use a GPU: {reason}"

    def _register(self, memory: Sequence[Extent]) -> None:
        """Memory without a shared file or allocation can be a source only."""
        self._own.add(memory)

    def endpoint(self) -> Endpoint:
        """See `Transport.endpoint`. The first call with shared memory registered writes the proof beside it."""
        self._require_open()
        directory = self._own.proof_directory(self._settings.proof_directory)
        if self._proof is None and directory is not None:
            self._proof = Proof(directory)
        content = self._own.describe(self._proof.claim if self._proof else None, self._epoch)
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def _connect(self, endpoint: Endpoint) -> Steps[LocalPeer]:
        """Refused as well when some of the peer's memory is not shared, or out of reach."""
        self._require_open()
        content = read_endpoint(endpoint, NAME, LocalEndpoint)
        memory = yield from self._open(content)
        yield from self._prepare_devices(memory)
        self._require_open()
        peer = LocalPeer(memory.label)
        self._peers[peer] = memory
        for file in memory.files.fresh:
            if file.resident and self._own.device is None:
                self._pump.add_chore(Populating(file.address, file.length_bytes, memory))
        return peer

    def _open(self, content: LocalEndpoint) -> Steps[PeerMemory]:
        """On a thread of its own, since the peer names the files, and a file system may not answer."""
        timeout_s = self._settings.connect_timeout_s
        name, until_s = "open the memory of a local peer", self._clock() + timeout_s
        yield from take_turn(name, until_s=until_s, clock=self._clock)
        opening = Call(partial(PeerMemory, content, device=self._own.device), name=name)
        late = (
            f"the files of a local peer could not be opened in {timeout_s:g} s (transports.local.connect_timeout_s); "
            "look for a file system of this host that does not answer"
        )
        return (yield from opening.result(until_s=until_s, clock=self._clock, late=late))

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """See `Transport.submit`; a destination outside of the peer's announced memory is refused the same way."""
        memory = self._checked(peer, operations)
        parts: list[Transfer] = []
        try:
            parts.extend(self._parts(operations, memory, deadline_s))
        except BaseException:
            for part in parts:  # nothing of them has been started
                part.abort("another part of the submission could not be made")
                part.poll()
            raise
        for part in parts:
            self._transfers[part] = peer
        transfer = parts[0] if len(parts) == 1 else JointTransfer(parts)
        transfer.poll()  # starts the first slices
        return transfer

    def close(self) -> None:
        """See `Transport.close`; waits for the slices that are being copied. Harmless when closed already."""
        timeout_s = self._settings.close_timeout_s
        with ExitStack() as stack:  # in reverse: whatever fails, nothing new is copied
            stack.callback(self._forget)
            stack.callback(self._close_devices, timeout_s=timeout_s)
            stack.callback(self._close_pump, timeout_s=timeout_s)

    def revoked(self, before_epoch: int) -> bool:
        """See `Transport.revoked`. Writers hold mappings of their own, so they have to let go of them or to end."""
        if writers_before(self._own.lock_files(), before_epoch):
            self._alone_since_s.pop(before_epoch, None)
            return False
        if not has_accelerator():
            return True
        alone_since_s = self._alone_since_s.setdefault(before_epoch, self._clock())
        return self._clock() - alone_since_s >= self._settings.settle_s

    # ------------------------------------------------------------------------------------------- inside

    def _parts(self, operations: Operations, memory: PeerMemory, deadline_s: float) -> Iterator[Transfer]:
        """Make a transfer for each way that some of the operations go."""
        only = self._by_one_way(operations, memory, deadline_s)
        if only is None:
            yield from self._by_ways(operations, memory, deadline_s)
        else:
            yield only

    def _by_one_way(self, operations: Operations, memory: PeerMemory, deadline_s: float) -> Transfer | None:
        """The usual case, in which no operation is looked at by itself; None where it is another one."""
        source = self._own.reachable.only(operations.source)
        target = memory.reachable.only(operations.destination)
        if source is None or target is None:
            return None
        longest_bytes = int(operations.length.max())
        below_bytes = self._settings.copy_kernel_below_bytes
        route = only_route(source.device, target.device, longest_bytes, kernel_below_bytes=below_bytes)
        if route is None:
            return None
        found = (extent.access(route.device) for extent in (source, target) if extent.access is not None)
        here = Operations(operations.source, target.all_here(operations.destination), operations.length)
        return self._by_device(route, here, memory, deadline_s, tuple(found))

    def _by_ways(self, operations: Operations, memory: PeerMemory, deadline_s: float) -> Iterator[Transfer]:
        found = memory.reachable.find(operations.destination)
        here = Operations(operations.source, memory.reachable.here(operations.destination, found), operations.length)
        if self._own.device is None and not memory.reachable.devices:
            yield self._copy(here, memory, deadline_s)
            return
        found_source = self._own.reachable.find(here.source)
        source_devices = self._own.reachable.device(found_source)
        target_devices = memory.reachable.device(found)
        by_device = (source_devices != HOST) | (target_devices != HOST)
        device = max(self._own.reachable.devices | memory.reachable.devices)
        accesses: list[DeviceAccess] = []
        ends = HostEnds(
            _bases(self._own.reachable, found_source, by_device & (source_devices == HOST), device, accesses),
            _bases(memory.reachable, found, by_device & (target_devices == HOST), device, accesses),
            runtime.REGISTER_CHUNK_BYTES,
        )
        routes = split(
            here, source_devices, target_devices, ends, kernel_below_bytes=self._settings.copy_kernel_below_bytes
        )
        for route, chosen in routes.items():
            if route.way is not Way.PROCESSOR:
                needed = accesses if route.over_host_link else ()
                yield self._by_device(route, _chosen(here, chosen), memory, deadline_s, needed)
        processor = routes.get(Route(Way.PROCESSOR))
        if processor is not None or not routes:
            chosen = processor if processor is not None else np.empty(0, dtype=np.intp)
            yield self._copy(_chosen(here, chosen), memory, deadline_s)

    def _by_device(
        self, route: Route, here: Operations, memory: PeerMemory, deadline_s: float, accesses: Sequence[DeviceAccess]
    ) -> Transfer:
        job = DeviceJob(here, memory.label, deadline_s, accesses, keep_alive=memory)
        return self._devices.begin(route, job, clock=self._clock)

    def _copy(self, here: Operations, memory: PeerMemory, deadline_s: float) -> PumpedTransfer:
        transfer = copy_transfer(
            here,
            peer=memory.label,
            deadline_s=deadline_s,
            slice_bytes=self._settings.slice_bytes,
            keep_alive=memory,
            clock=self._clock,
        )
        self._pump.add(transfer)
        return transfer

    def _prepare_devices(self, memory: PeerMemory) -> Steps[None]:
        """What would hold up the first transfer otherwise: registrations, streams, kernels."""
        own = self._own.device
        devices = memory.reachable.devices if own is None else {own}
        if own is not None:
            until_s = self._clock() + self._settings.registration_wait_s
            yield from memory.register(own, until_s=until_s, clock=self._clock)
        links = (True,) if own is None else (True, False)
        try:
            self._devices.prepare(
                Route(way, device, over_host_link=link)
                for device in devices
                for way in (Way.ENGINES, Way.KERNEL)
                for link in links
            )
        except BridgeError as error:
            raise TransportError(f"this process's device cannot copy: {error}") from error

    def _make_stream(self, route: Route) -> CopyStream:
        return CopyStream(route, kernel_blocks=self._settings.copy_kernel_blocks)

    def _close_pump(self, *, timeout_s: float) -> None:
        for transfer in self._pump.close(timeout_s=timeout_s):
            transfer.end(TransferState.FAILED_QUIET, "the transport was closed", in_transit=False)

    def _close_devices(self, *, timeout_s: float) -> None:
        self._devices.close(timeout_s=timeout_s)
        self._own.close()  # not while a device may still read it

    def _forget(self) -> None:
        self._peers.clear()
        if self._proof is not None:
            self._proof.close()
            self._proof = None


def _chosen(operations: Operations, indices: npt.NDArray[np.intp]) -> Operations:
    if len(indices) == len(operations):
        return operations
    return Operations(operations.source[indices], operations.destination[indices], operations.length[indices])


def _bases(
    reachable: ReachableExtents,
    found: IndexArray,
    on_host: npt.NDArray[np.bool_],
    device: int,
    accesses: list[DeviceAccess],
) -> AddressArray:
    """Where the registration of each host end begins, else 0; adds to `accesses` what has to be ready first."""
    table = np.zeros(len(reachable), dtype=np.uint64)
    for index in np.flatnonzero(np.bincount(found[on_host])).tolist():
        make = reachable[index].access
        assert make is not None, "host memory can be made usable by devices"
        access = make(device)
        table[index] = access.address
        if access not in accesses:
            accesses.append(access)
    bases: AddressArray = np.where(on_host, table[found], np.uint64(0))
    return bases
