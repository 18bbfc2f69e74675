"""Memory of one owner, looked up by the owner's addresses: whether a range is registered, and where it lies.

Checked here because no library can be trusted with it: Mooncake accepts unregistered local memory on TCP and loses a
connection for each remote address that it rejects; NIXL checks on the initiating side only. A range that straddles two
extents is refused even if they touch, since they are two registrations.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.plan.operations import AddressArray


class Stretch(NamedTuple):
    """One registration: `length_bytes` at `address` in its owner's process."""

    address: int
    length_bytes: int
    place: int = 0
    """A number by which the backend knows the kind of memory, or the device."""
    shift: int = 0
    """The same memory is at `address + shift` in this process."""


class Extents:
    """Stretches that do not overlap; never changed. `whose` names their owner in errors ("this process", "peer 10.0.0.7:15001")."""

    def __init__(self, whose: str, stretches: Iterable[Stretch | tuple[int, int]] = ()) -> None:
        """Raises InvalidInputError when two overlap."""
        self._whose = whose
        self.stretches = tuple(sorted(Stretch(*each) for each in stretches))
        """All of them, by ascending address."""
        for left, right in itertools.pairwise(self.stretches):
            if left.address + left.length_bytes > right.address:
                raise InvalidInputError(
                    f"memory of {whose}: {_range(*right[:2])} overlaps {_range(*left[:2])}, "
                    "which is registered already or in the same call; register each byte once"
                )
        self._starts = np.array([each.address for each in self.stretches], dtype=np.uint64)
        self._stops = np.array([each.address + each.length_bytes for each in self.stretches], dtype=np.uint64)
        self._places = np.array([each.place for each in self.stretches], dtype=np.int64)
        # A negative shift wraps, and the sum wraps back.
        self._shifts = np.array([each.shift for each in self.stretches], dtype=np.int64).astype(np.uint64)
        self.places = frozenset(self._places.tolist())
        """Every place with some of the memory."""

    def __len__(self) -> int:
        return len(self.stretches)

    def __repr__(self) -> str:
        return f"<Extents of {self._whose}: {len(self)} of {sum(each.length_bytes for each in self.stretches)} bytes>"

    def here(self, addresses: AddressArray) -> AddressArray:
        """Return the addresses in this process of bytes that have been checked."""
        if not len(addresses):
            return addresses
        alike = (self._shifts == self._shifts[0]).all()
        return addresses + (self._shifts[0] if alike else self._shifts[self._find(addresses)])

    def place(self, addresses: AddressArray) -> npt.NDArray[np.int64]:
        """Return the place of each address; all of them have been checked."""
        return self._places[self._find(addresses)]

    def places_of(self, addresses: AddressArray) -> frozenset[int]:
        """Return all places of some addresses that have been checked."""
        if len(self.places) < 2 or not len(addresses):
            return self.places
        return frozenset(np.unique(self.place(addresses)).tolist())

    def require(self, addresses: AddressArray, lengths: AddressArray) -> None:
        """Raise InvalidInputError, naming the first offender, unless each range is not empty and within one stretch."""
        if not len(addresses) or self._within_one(addresses, lengths):
            return
        inside = np.zeros(len(addresses), dtype=np.bool_)
        if len(self):
            found = self._find(addresses)
            stops = self._stops[found]  # the last stretch's stop for an address before the first one; masked below
            inside = (found >= 0) & (addresses < stops) & (lengths > 0) & (lengths <= stops - addresses)
        if not inside.all():
            first = int(inside.argmin())
            raise InvalidInputError(
                f"{int((~inside).sum())} of {len(addresses)} operations leave the registered memory of {self._whose}; "
                f"the first is operation {first}, {_range(int(addresses[first]), int(lengths[first]))}. "
                "Nothing was submitted"
            )

    def _find(self, addresses: AddressArray) -> npt.NDArray[np.intp]:
        return np.searchsorted(self._starts, addresses, side="right") - 1

    def _within_one(self, addresses: AddressArray, lengths: AddressArray) -> bool:
        """Return whether all ranges together lie in one stretch, which is the usual case and quicker to see."""
        if not len(self) or not lengths.all():
            return False
        found = int(np.searchsorted(self._starts, addresses.min(), side="right")) - 1
        if found < 0 or addresses.max() >= self._stops[found]:
            return False
        return bool((lengths <= self._stops[found] - addresses).all())


def _range(address: int, length: int) -> str:
    return f"{length} bytes at {address:#x}"
