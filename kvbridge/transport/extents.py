"""Which memory is registered, and whether a range lies within it.

Checked here because no library can be trusted with it: Mooncake accepts unregistered local memory on TCP and loses a
connection for each remote address that it rejects; NIXL checks on the initiating side only. A range that straddles two
extents is refused even if they touch, since they are two registrations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.plan.operations import AddressArray
from kvbridge.pool.memory.extent import Extent

AddressRange = tuple[int, int]
"""(address, bytes) of one registration."""


class Extents:
    """A set of extents that do not overlap; never changed.

    `whose` names their owner in errors ("this process", "peer 10.0.0.7:15001").
    """

    def __init__(self, whose: str, extents: Iterable[AddressRange] = ()) -> None:
        """Raises InvalidInputError when two overlap."""
        self._whose = whose
        self.ranges = tuple(sorted(extents))
        """All of them, by ascending address."""
        for (left, left_bytes), (right, right_bytes) in itertools.pairwise(self.ranges):
            if left + left_bytes > right:
                raise InvalidInputError(
                    f"memory of {whose}: {_range(right, right_bytes)} overlaps {_range(left, left_bytes)}, "
                    "which is registered already or in the same call; register each byte once"
                )
        self._starts = np.array([start for start, _ in self.ranges], dtype=np.uint64)
        self._stops = np.array([start + length for start, length in self.ranges], dtype=np.uint64)

    def __len__(self) -> int:
        return len(self.ranges)

    def __repr__(self) -> str:
        return f"<Extents of {self._whose}: {len(self)} of {sum(length for _, length in self.ranges)} bytes>"

    def joined(self, memory: Sequence[Extent]) -> Extents:
        """Return these and some more. Raises InvalidInputError when one overlaps another."""
        return Extents(self._whose, [*self.ranges, *((part.address, part.length_bytes) for part in memory)])

    def require(self, addresses: AddressArray, lengths: AddressArray) -> None:
        """Raise InvalidInputError, naming the first offender, unless each range is not empty and within one extent."""
        if self._within_one(addresses, lengths):
            return
        outside = self._outside(addresses, lengths)
        if not outside.any():
            return
        first = int(outside.argmax())
        raise InvalidInputError(
            f"{int(outside.sum())} of {len(addresses)} operations leave the registered memory of {self._whose}; "
            f"the first is operation {first}, {_range(int(addresses[first]), int(lengths[first]))}. "
            "Nothing was submitted"
        )

    def _within_one(self, addresses: AddressArray, lengths: AddressArray) -> bool:
        """Whether all ranges together lie in one extent, which is the usual case and quicker to see."""
        if not len(self) or not len(addresses) or not lengths.all():
            return False
        lowest, highest = int(addresses.min()), int(addresses.max())
        extent = int(np.searchsorted(self._starts, np.uint64(lowest), side="right")) - 1
        if extent < 0 or highest >= int(self._stops[extent]):
            return False
        room = self._stops[extent] - addresses
        return bool((lengths <= room).all())

    def _outside(self, addresses: AddressArray, lengths: AddressArray) -> npt.NDArray[np.bool_]:
        if not len(self):
            return np.ones(len(addresses), dtype=np.bool_)
        position = np.searchsorted(self._starts, addresses, side="right")
        extent = np.maximum(position, 1) - 1
        room = self._stops[extent] - addresses  # meaningless (wrapped) where the address is outside; masked below
        inside: npt.NDArray[np.bool_] = (
            (position > 0) & (addresses < self._stops[extent]) & (lengths > 0) & (lengths <= room)
        )
        return ~inside


def _range(address: int, length: int) -> str:
    return f"{length} bytes at {address:#x}"
