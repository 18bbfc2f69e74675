"""The interface of stores: objects of bytes by name, and answers instead of exceptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvbridge.core.ids import FrozenModel, Positive

BATCH_LIMIT = 256
"""Objects of one request at most."""


class Verb(StrEnum):
    """A request to a store."""

    PUT = "put"
    GET = "get"
    HAS = "has"
    DROP = "drop"
    CLEAR = "clear"
    """All objects of a form."""


class Outcome(StrEnum):
    """The outcome of a request for one object."""

    STORED = "stored"
    """It is there, whole; perhaps it was there before."""
    HIT = "hit"
    """Read, compared, and right."""
    PRESENT = "present"
    """There is something under its name; only reading it tells what."""
    DROPPED = "dropped"
    """It is not there (any more)."""
    ABSENT = "absent"
    SHORT = "short"
    """An object of another length than it must have."""
    OTHER_KEY = "other_key"
    """The object of another page, or of other layers or lanes."""
    WRONG_DIGEST = "wrong_digest"
    """Its bytes, or its trailer, are not those that were stored."""
    OTHER_VERSION = "other_version"
    """Another release has written it, in a form that this one does not read."""
    FULL = "full"
    """The store has no room for it, now."""
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    """The store cannot be used, now."""


BAD = frozenset({Outcome.SHORT, Outcome.OTHER_KEY, Outcome.WRONG_DIGEST, Outcome.OTHER_VERSION})
"""The object is not what it must be: it has been dropped, as far as the store could. Compute the page, and store it."""
BROKEN = frozenset({Outcome.TIMED_OUT, Outcome.UNREACHABLE})
"""The store is at fault, not the object: go on without, and ask again later. The breaker counts these."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcomes of a request, in the order of its objects."""

    outcomes: tuple[Outcome, ...]
    settled: bool = True
    """True if nothing reads or writes the request's memory any more. If not, only the end of this process ends that."""
    detail: str = ""
    """Why, for the log, when the store was at fault."""
    cleared: int = 0
    """Objects that a `clear` has removed."""

    @classmethod
    def of_all(cls, outcome: Outcome, count: int, *, settled: bool = True, detail: str = "") -> Answer:
        """The same for every object."""
        return cls((outcome,) * count, settled, detail)

    @property
    def failed(self) -> bool:
        """True if the store was at fault with any of them."""
        return not self.settled or not BROKEN.isdisjoint(self.outcomes)


Stretches = npt.NDArray[np.uint64]
"""Addresses in this process and lengths in bytes, of shape (stretches, 2): what system calls take as an array of iovec."""


class StoredObject(NamedTuple):
    """An object by its name, and the memory that its bytes lie in or go to, in their order."""

    name: str
    stretches: Stretches

    @property
    def length_bytes(self) -> int:
        """Bytes of all stretches."""
        return int(self.stretches[:, 1].sum())


class Capabilities(FrozenModel):
    """The properties of a store for its users."""

    kind: str
    batch: Positive
    """Objects that it moves together. It takes more, and moves them one batch after the other."""


class ObjectStore(Protocol):
    """Keeps objects. Calls come from several threads, and never raise for what the store, or an object in it, is or is not.

    Names in one request are distinct. Memory is this process's, valid as long as the process, and the caller's until an answer
    that is settled. A call returns soon after `until_s` (`time.monotonic`) where it can; who cannot bear that it cannot, uses the
    store through a process of its own (`client`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """Properties of this store."""

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Keep objects whole, or not at all: `stored`, or why not. One of the same name may stay as it is."""

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Fill the stretches: `hit`, which nobody has compared yet, or why not; what they hold is then undefined."""

    def present(self, names: Sequence[str], until_s: float) -> Answer:
        """`present` or `absent`."""

    def remove(self, names: Sequence[str], until_s: float) -> Answer:
        """`dropped`, also what was never there."""

    def clear(self, prefix: str, until_s: float) -> Answer:
        """Remove all objects whose names begin so: one outcome for all, `dropped` or why some may still be there."""

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Memory (address, length) that the stretches of all later requests lie in. Raises RegistrationError."""

    def close(self) -> None:
        """Let go of the store. Harmless when closed."""
