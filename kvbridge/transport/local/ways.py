"""The way that each operation of a submission goes, decided by where its ends are and how long it is.

Between two host ends the processor copies. Everything else a device copies: its copy engines where operations are
long, a kernel where they are short and many (37,440-byte pages to the host on one H200: engines 20 GB/s, kernel 49;
786 KB rows: engines 51). The engines refuse a copy that crosses from one registration into the next, even where both
are ours and adjoin, so such an operation goes to the kernel, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from kvbridge.core.plan.operations import AddressArray, Operations
from kvbridge.transport.base import Transfer, TransferState, TransferStatus
from kvbridge.transport.local.memory import HOST


class Way(Enum):
    """Who copies."""

    PROCESSOR = "processor"
    ENGINES = "copy engines"
    KERNEL = "copy kernel"


@dataclass(frozen=True, slots=True)
class Route:
    """What operations have in common that go together. Routes of one device run beside each other."""

    way: Way
    device: int = HOST
    """The device that copies."""
    over_host_link: bool = False
    """Whether one end is host memory: such copies must not hold up those between devices."""


@dataclass(frozen=True, slots=True)
class HostEnds:
    """For each operation, where the registration of its host end begins; 0 where it has none."""

    source: AddressArray
    destination: AddressArray
    chunk_bytes: int
    """Registrations are made in pieces of this size."""


def only_route(
    source_device: int, destination_device: int, longest_bytes: int, *, kernel_below_bytes: int
) -> Route | None:
    """The kernel's route, where operations that have their ends alike all take it; else None: each is to be looked at."""
    if longest_bytes >= kernel_below_bytes or source_device == destination_device == HOST:
        return None
    device = source_device if source_device != HOST else destination_device
    return Route(Way.KERNEL, device, over_host_link=HOST in {source_device, destination_device})


def split(
    operations: Operations,
    source_devices: npt.NDArray[np.int32],
    destination_devices: npt.NDArray[np.int32],
    ends: HostEnds,
    *,
    kernel_below_bytes: int,
) -> dict[Route, npt.NDArray[np.intp]]:
    """Return the indices of the operations that take each route; every operation takes one."""
    if not len(operations):
        return {}
    device = np.where(source_devices != HOST, source_devices, destination_devices)
    host_link = (source_devices == HOST) | (destination_devices == HOST)
    kernel = operations.length < np.uint64(kernel_below_bytes)
    for addresses, bases in ((operations.source, ends.source), (operations.destination, ends.destination)):
        long = np.flatnonzero(~kernel & (bases > 0))
        kernel[long] = _crosses(addresses[long] - bases[long], operations.length[long], ends.chunk_bytes)
    keys = (device + 1) * 4 + host_link * 2 + kernel
    keys[device == HOST] = 0
    present = np.flatnonzero(np.bincount(keys)).tolist()
    return {_route(key): np.flatnonzero(keys == key) for key in present}


def _crosses(offsets: AddressArray, lengths: AddressArray, chunk_bytes: int) -> npt.NDArray[np.bool_]:
    """Whether a stretch that begins so far into a registration ends in another chunk of it."""
    crossing: npt.NDArray[np.bool_] = offsets % np.uint64(chunk_bytes) + lengths > np.uint64(chunk_bytes)
    return crossing


def _route(key: int) -> Route:
    device, rest = divmod(key, 4)
    if device == 0:
        return Route(Way.PROCESSOR)
    return Route(Way.KERNEL if rest & 1 else Way.ENGINES, device - 1, over_host_link=bool(rest & 2))


class JointTransfer(Transfer):
    """Done when every part is. The first part that fails aborts the others, and gives the cause."""

    def __init__(self, parts: Sequence[Transfer]) -> None:
        self._parts = tuple(parts)
        self._error = ""
        self._status = TransferStatus(TransferState.ACTIVE)

    def __repr__(self) -> str:
        return f"<JointTransfer: {self._status.state.value}, {self._parts!r}>"

    def poll(self) -> TransferStatus:
        """See `Transfer.poll`. Not quiet as soon as one part is not, once all have ended."""
        if self._status.state.terminal:
            return self._status
        statuses = [part.poll() for part in self._parts]
        failed = [status for status in statuses if status.state.terminal and status.state is not TransferState.DONE]
        if failed and not self._error:
            self._error = failed[0].error
            self.abort(f"another part of the transfer failed: {self._error}")
            statuses = [part.poll() for part in self._parts]
        if all(status.state.terminal for status in statuses):
            self._status = self._joined(statuses)
        return self._status

    def abort(self, reason: str) -> None:
        for part in self._parts:
            part.abort(reason)

    def _joined(self, statuses: Sequence[TransferStatus]) -> TransferStatus:
        states = {status.state for status in statuses}
        in_transit = any(status.in_transit for status in statuses)
        for state in (TransferState.FAILED_NOT_QUIET, TransferState.FAILED_QUIET):
            if state in states:
                return TransferStatus(state, self._error, in_transit)
        return TransferStatus(TransferState.DONE)
