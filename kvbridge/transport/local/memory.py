"""Where memory is, as the local transport needs it: on the host or on a device, and at what address in this process.

Owns: `ReachableExtent`, and looking up many addresses at once. Must not know: how memory got here, who copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import AddressArray
from kvbridge.transport.local.access import DeviceAccess
from kvbridge.transport.local.host import SharedExtent

HOST = -1
"""In arrays of devices: no device, but the host."""

IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ReachableExtent:
    """`length_bytes` that its owner knows by `address`, and this process by `here`."""

    address: int
    length_bytes: int
    here: int
    device: int = HOST
    """The device of this process by which it is reached, for device memory."""
    access: Callable[[int], DeviceAccess] | None = None
    """Makes host memory usable by a device; None for device memory."""

    def all_here(self, addresses: AddressArray) -> AddressArray:
        """Addresses in this process of bytes that all lie in it."""
        return addresses + np.uint64((self.here - self.address) % (1 << 64))  # wraps back where it lies below


def reach(who: str, extents: Iterable[SharedExtent], opened: Sequence[ReachableExtent]) -> tuple[ReachableExtent, ...]:
    """Find what a peer shares in its opened files or allocations. Raises TransportError for bytes that are not there."""
    found = []
    for extent in extents:
        origin = opened[extent.origin] if extent.origin < len(opened) else None
        if origin is None or extent.offset_bytes + extent.length_bytes > origin.length_bytes:
            raise TransportError(f"{who} names {extent.length_bytes} bytes that its file or allocation does not have")
        here = origin.here + extent.offset_bytes
        found.append(replace(origin, address=extent.address, length_bytes=extent.length_bytes, here=here))
    return tuple(found)


class ReachableExtents:
    """Extents that do not overlap, looked up by their owner's addresses, each of which lies in one."""

    def __init__(self, extents: Iterable[ReachableExtent]) -> None:
        self._all = sorted(extents, key=lambda extent: extent.address)
        self._starts = np.array([extent.address for extent in self._all], dtype=np.uint64)
        here = np.array([extent.here for extent in self._all], dtype=np.uint64)
        self._shift = here - self._starts  # wraps where memory lies below its owner's address; the sum wraps back
        self._devices = np.array([extent.device for extent in self._all], dtype=np.int32)

    def __getitem__(self, index: int) -> ReachableExtent:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def devices(self) -> set[int]:
        """Devices with memory among the extents."""
        return {extent.device for extent in self._all} - {HOST}

    def only(self, addresses: AddressArray) -> ReachableExtent | None:
        """The extent that all of these lie in, if it is one."""
        if not len(addresses):
            return None
        first, last = self.find(np.array([addresses.min(), addresses.max()])).tolist()
        return self._all[first] if first == last else None

    def find(self, addresses: AddressArray) -> IndexArray:
        """The extent of each address."""
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def here(self, addresses: AddressArray, found: IndexArray) -> AddressArray:
        """Addresses in this process; `found` as `find` gave it for them."""
        if not len(addresses):
            return addresses
        return addresses + self._shift[found]

    def device(self, found: IndexArray) -> npt.NDArray[np.int32]:
        """The device of each, or HOST."""
        return self._devices[found] if len(found) else np.empty(0, dtype=np.int32)
