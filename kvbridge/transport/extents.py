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

IndexArray = npt.NDArray[np.intp]


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

    def find(self, addresses: AddressArray) -> IndexArray:
        """Return which of `ranges` each address lies in; all of them have been checked."""
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def require(self, addresses: AddressArray, lengths: AddressArray) -> None:
        """Raise InvalidInputError, naming the first offender, unless each range is not empty and within one extent."""
        if not len(addresses) or self._within_one(addresses, lengths):
            return
        inside = np.zeros(len(addresses), dtype=np.bool_)
        if len(self):
            found = self.find(addresses)
            stops = self._stops[found]  # of the last extent where there is none; masked below
            inside = (found >= 0) & (addresses < stops) & (lengths > 0) & (lengths <= stops - addresses)
        if not inside.all():
            first = int(inside.argmin())
            raise InvalidInputError(
                f"{int((~inside).sum())} of {len(addresses)} operations leave the registered memory of {self._whose}; "
                f"the first is operation {first}, {_range(int(addresses[first]), int(lengths[first]))}. "
                "Nothing was submitted"
            )

    def _within_one(self, addresses: AddressArray, lengths: AddressArray) -> bool:
        """Return whether all ranges together lie in one extent, which is the usual case and quicker to see."""
        if not len(self) or not lengths.all():
            return False
        extent = int(np.searchsorted(self._starts, addresses.min(), side="right")) - 1
        if extent < 0 or addresses.max() >= self._stops[extent]:
            return False
        return bool((lengths <= self._stops[extent] - addresses).all())


def _range(address: int, length: int) -> str:
    return f"{length} bytes at {address:#x}"
