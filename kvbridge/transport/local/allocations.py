"""A peer's device memory, opened here by CUDA IPC.

Owns: opening it, the check that it is reachable. Must not know: transfers, files.

While a peer has memory open its owner must not free it: what happens then is not defined, though the driver keeps the
memory until the last process lets go of it. So an owner frees device memory only when `Transport.revoked` has said that
nobody can write to it, or leaves that to its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.wire.shared_memory import CudaOrigin
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.allocations import allocation_of, device_by_uuid, device_uuid
from kvbridge.pool.memory.device_memory import OpenedAllocation
from kvbridge.transport.local.host import Presence, SharedExtent
from kvbridge.transport.local.memory import ReachableExtent, reach

log = structlog.get_logger(__name__)


class OpenedAllocations:
    """The device memory of one peer, usable by a device of this process until `close`."""

    def __init__(
        self,
        who: str,
        allocations: Sequence[CudaOrigin],
        extents: Sequence[SharedExtent],
        *,
        device: int | None,
        presence: Presence | None = None,
    ) -> None:
        """`device`: the one that will write there; None for the one that holds each allocation.

        `presence` is kept for as long as this is: without it the peer takes its memory for closed, and may free it.

        Raises TransportError, with the reason, when one cannot be reached from here or is shorter than it is said to be.
        """
        self._presence = presence
        self._stack = ExitStack()
        try:
            self.reachable = reach(who, extents, [self._open(origin, device) for origin in allocations])
        except BridgeError as error:
            self.close()
            raise TransportError(f"the device memory of {who} cannot be written from here: {error}") from error

    def _open(self, origin: CudaOrigin, device: int | None) -> ReachableExtent:
        """Open an allocation; what counts is what it has from its address on."""
        reason = runtime.reason_without_device()
        if reason:
            raise TransportError(f"this process has no device ({reason})")
        _require_reach(device, origin.device_uuid)
        opened = OpenedAllocation(origin.handle, device_uuid=origin.device_uuid, device=device)
        self._stack.callback(opened.close)
        found = allocation_of(opened.device, opened.address)
        return ReachableExtent(0, found.address + found.length_bytes - opened.address, opened.address, opened.device)

    def close(self) -> None:
        """Let go of the memory; no device writes there any more. Harmless when closed."""
        try:
            self._stack.close()
        except BridgeError as error:  # nobody is left who could do anything about it
            log.warning("device_memory_not_closed", reason=str(error))


def _require_reach(device: int | None, uuid: str) -> None:
    """Refuse early, and in words, what a device could only fault at.

    A device that this process does not see is left to CUDA, which can open memory of such, too.
    """
    if device is None or device_uuid(device) == uuid:
        return
    try:
        holder = device_by_uuid(uuid)
    except BridgeError:
        return
    runtime.reach(device, holder)
