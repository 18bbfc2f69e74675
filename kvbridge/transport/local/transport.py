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
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from kvbridge.config.transports import LocalSettings
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.kernels.copies import copy_operations
from kvbridge.kernels.cuda import has_accelerator, runtime
from kvbridge.pool.memory.extent import Extent
from kvbridge.transport.backend import Backend, read_endpoint
from kvbridge.transport.base import Endpoint, Peer, Transfer, TransferState
from kvbridge.transport.calls import Call
from kvbridge.transport.local.gpu import CopyStream, DeviceCopier, Route, Way
from kvbridge.transport.local.host import Proof, writers_before
from kvbridge.transport.local.memory import HOST, LocalEndpoint, OwnMemory
from kvbridge.transport.local.peer import PeerMemory, populate
from kvbridge.transport.pump import Pump, PumpedTransfer
from kvbridge.transport.windowed import DONE, Check, Submitter, Window, WindowedTransfer, WindowLimits

NAME = "local"
SLICE_OPERATIONS = 4096
"""Of the processor; bounds a slice of very short operations to about a millisecond as well."""


class LocalTransport(Backend[PeerMemory]):
    """Copies made by one thread of this process, which starts with the first of them, and by its device."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: LocalSettings, *, epoch: int = 0, clock: Clock = monotonic) -> None:
        """`epoch`: that of the endpoints which this transport gives out."""
        super().__init__(clock)
        self._settings = settings
        self._epoch = epoch
        self._own = OwnMemory()
        self._proof: Proof | None = None
        self._pump = Pump(NAME)
        self._devices = DeviceCopier(
            self._make_stream,
            slice_bytes=settings.device_slice_bytes,
            quiet_timeout_s=settings.quiet_timeout_s,
            clock=clock,
        )
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
        """The first call with shared memory registered writes the proof beside it."""
        self._require_open()
        directory = self._own.proof_directory(self._settings.proof_directory)
        if self._proof is None and directory is not None:
            self._proof = Proof(directory)
        content = self._own.describe(self._proof.claim if self._proof else None, self._epoch)
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def begin_connect(self, endpoint: Endpoint) -> Call[PeerMemory]:
        """On a thread, since the peer names the files, and a file system may not answer."""
        self._require_open()
        content, timeout_s = read_endpoint(endpoint, NAME, LocalEndpoint), self._settings.connect_timeout_s
        return Call(
            partial(self._opened, content),
            name="open the memory of a local peer",
            timeout_s=timeout_s + (0.0 if self._own.device is None else self._settings.registration_wait_s),
            late=f"the files of a local peer could not be opened in {timeout_s:g} s (transports.local.connect_timeout_s); "
            "look for a file system of this host that does not answer",
            clock=self._clock,
        )

    def _opened(self, content: LocalEndpoint) -> PeerMemory:
        """Open a peer's memory, and do now what would hold up the first transfer: registrations, streams, kernels.

        Refused as well when some of the memory is not shared, or out of reach.
        """
        own = self._own.device
        memory = PeerMemory(content, device=own)
        if own is not None:
            memory.register(own, timeout_s=self._settings.registration_wait_s)
        return memory

    def take(self, known: PeerMemory) -> Peer:
        peer = super().take(known)
        own = self._own.device
        devices = known.reachable.places - {HOST} if own is None else {own}
        links = (True,) if own is None else (True, False)
        try:
            self._devices.prepare(
                Route(way, device, over_host_link=link) for device in devices for way in Way for link in links
            )
        except BridgeError as error:
            self.disconnect(peer)
            raise TransportError(f"this process's device cannot copy: {error}") from error
        for file in known.fresh:
            if file.resident and own is None:
                populate(file)
        return peer

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        """Copy by the processor between two host ends, else by the device: all operations of a submission in one way."""
        memory = self._checked(peer, operations)
        here = Operations(operations.source, memory.reachable.here(operations.destination), operations.length)
        sources = self._own.reachable.places_of(operations.source)
        places = sources | memory.reachable.places_of(operations.destination)
        transfer: Transfer
        if places <= {HOST}:
            transfer = self._copy(here, memory, deadline_s)
        else:
            device = max(places) if self._own.device is None else self._own.device
            mean_bytes = operations.total_bytes / max(1, len(operations))
            way = Way.KERNEL if mean_bytes < self._settings.copy_kernel_below_bytes else Way.ENGINES
            accesses = self._own.accesses(device) if HOST in sources else []
            if HOST in memory.reachable.places:
                accesses += memory.accesses(device)
            transfer = self._devices.begin(
                Route(way, device, over_host_link=HOST in places),
                here,
                peer=memory.label,
                deadline_s=deadline_s,
                accesses=accesses,
                keep_alive=memory,
            )
        self._transfers[transfer] = peer
        transfer.poll()  # starts the first slices
        return transfer

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

    def close(self) -> None:
        """Wait for the slices that are being copied. Harmless when closed already."""
        timeout_s = self._settings.close_timeout_s
        with ExitStack() as stack:  # in reverse: whatever fails, nothing new is copied
            stack.callback(self._forget)
            stack.callback(self._close_devices, timeout_s=timeout_s)
            stack.callback(self._close_pump, timeout_s=timeout_s)

    def revoked(self, before_epoch: int) -> bool:
        """Writers hold mappings of their own, so they have to let go of them or to end."""
        if writers_before(self._own.lock_files(), before_epoch):
            self._alone_since_s.pop(before_epoch, None)
            return False
        if not has_accelerator():
            return True
        alone_since_s = self._alone_since_s.setdefault(before_epoch, self._clock())
        return self._clock() - alone_since_s >= self._settings.settle_s

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


class _Copies(Submitter[None]):
    """The processor copies one slice a call, which is done when the call returns."""

    def __init__(self, operations: Operations, keep_alive: object) -> None:
        self._operations = operations
        self._keep_alive = keep_alive

    def start(self, first: int, stop: int) -> None:
        part = self._operations[first:stop]
        copy_operations(part.source, part.destination, part.length)

    def check(self, _: None) -> Check:
        return DONE


def copy_transfer(
    operations: Operations,
    *,
    peer: str,
    deadline_s: float,
    slice_bytes: int,
    keep_alive: object = None,
    clock: Clock = monotonic,
) -> PumpedTransfer:
    """Return a transfer between addresses of this process; `keep_alive` keeps them mapped, and is dropped at the end."""
    # Of its own, since a small transfer never waits for a large one; nothing is ever in flight.
    window = Window(WindowLimits(SLICE_OPERATIONS, slice_bytes, 1.0, SLICE_OPERATIONS, slice_bytes))
    copies = _Copies(operations, keep_alive)
    return PumpedTransfer(
        partial(WindowedTransfer, operations, copies, window, peer=peer, deadline_s=deadline_s, clock=clock)
    )
