"""A peer's device memory, opened here by CUDA IPC, and ours as peers are told of it.

Owns: the form in which an endpoint names device memory, opening it, the check that it is reachable. Must not know:
transfers, files.

While a peer has memory open its owner must not free it: what happens then is not defined, though the driver keeps the
memory until the last process lets go of it. So an owner frees device memory only when `Transport.revoked` has said that
nobody can write to it, or leaves that to its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

import structlog
from pydantic import Field

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.allocations import allocation_of, device_by_uuid
from kvbridge.pool.memory.device_memory import OpenedAllocation
from kvbridge.transport.base import SharedAllocation
from kvbridge.transport.local.memory import Stretch

log = structlog.get_logger(__name__)


class NamedAllocation(FrozenModel):
    """A device allocation, as a peer opens it."""

    handle: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
    device_uuid: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

    @classmethod
    def of(cls, shared: SharedAllocation) -> NamedAllocation:
        """The allocation without the place in it."""
        return cls(handle=shared.handle.hex(), device_uuid=shared.device_uuid)


class AllocatedExtent(FrozenModel):
    """`length_bytes` at `offset_bytes` of the `allocation`-th of a list, at `address` in its owner's process."""

    address: Positive
    length_bytes: Positive
    allocation: NonNegative
    offset_bytes: NonNegative


class OpenedAllocations:
    """The device memory of one peer, usable by a device of this process until `close`."""

    def __init__(
        self,
        who: str,
        allocations: Sequence[NamedAllocation],
        extents: Sequence[AllocatedExtent],
        *,
        device: int | None,
    ) -> None:
        """`device`: the one that will write there; None for the one that holds each allocation.

        Raises TransportError, with the reason, when one cannot be reached from here or is shorter than it is said to be.
        """
        self._stack = ExitStack()
        try:
            self._opened = [self._open(named, device) for named in allocations]
            self.stretches = tuple(self._stretch(extent) for extent in extents)
        except BridgeError as error:
            self.close()
            raise TransportError(f"the device memory of {who} cannot be written from here: {error}") from error

    def _open(self, named: NamedAllocation, device: int | None) -> tuple[OpenedAllocation, int]:
        """Open an allocation; returns it with the bytes that it has from its address on."""
        reason = runtime.reason_without_device()
        if reason:
            raise TransportError(f"this process has no device ({reason})")
        _require_reach(device, named.device_uuid)
        opened = OpenedAllocation(bytes.fromhex(named.handle), device_uuid=named.device_uuid, device=device)
        self._stack.callback(opened.close)
        found = allocation_of(opened.device, opened.address)
        return opened, found.address + found.length_bytes - opened.address

    def _stretch(self, extent: AllocatedExtent) -> Stretch:
        known = extent.allocation < len(self._opened)
        if not known or extent.offset_bytes + extent.length_bytes > self._opened[extent.allocation][1]:
            raise TransportError(f"it names {extent.length_bytes} bytes that the allocation does not have")
        opened, _ = self._opened[extent.allocation]
        return Stretch(extent.address, extent.length_bytes, opened.address + extent.offset_bytes, device=opened.device)

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
    if device is None or runtime.device_facts(device).uuid == uuid:
        return
    try:
        holder = device_by_uuid(uuid)
    except BridgeError:
        return
    runtime.reach(device, holder)
