"""The interface of stores, which keep objects of bytes by name, and the messages between a node and its store process.

A message is its length as an unsigned 32-bit little-endian integer, then so many bytes from its codec. Messages go over the store
process's standard input and output, which only the node and the process hold: the pipes end with either process.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, FrameError, FrameFault, MessageCodec
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.tier.keys import KEY_BYTES

BATCH_LIMIT = 256
"""The most objects of one request."""
LENGTH = struct.Struct("<I")
_MOST_SPACES = 8


class Verb(StrEnum):
    """A request to a store. Its outcomes are also TIMED_OUT and UNREACHABLE."""

    PUT = "put"
    """Store whole pages that nobody writes: STORED or FULL."""
    GET = "get"
    """Fill pages: HIT, every byte compared, or ABSENT or one of BAD, and the page is then undefined."""
    HAS = "has"
    """Ask which objects are PRESENT or ABSENT."""
    DROP = "drop"
    """Remove objects: DROPPED."""
    CLEAR = "clear"
    """Remove all objects of a form, whoever has put them there: one outcome for all."""


class Outcome(StrEnum):
    """The outcome of a request for one object."""

    STORED = "stored"
    """The object is in the store, whole; perhaps it was before."""
    HIT = "hit"
    """The object was read, compared, and is right."""
    PRESENT = "present"
    """There is something under the object's name; only reading tells what."""
    DROPPED = "dropped"
    """The object is not in the store (any more)."""
    ABSENT = "absent"
    SHORT = "short"
    """The object has another length than it must have."""
    OTHER_KEY = "other_key"
    """The object is that of another page, or of other layers or lanes."""
    WRONG_DIGEST = "wrong_digest"
    """The object's bytes, or its trailer, are not those that were stored."""
    OTHER_VERSION = "other_version"
    """Another release has written the object, in a form that this one does not read."""
    FULL = "full"
    """The store has no room for the object now."""
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    """The store cannot be used now."""


BAD = frozenset({Outcome.SHORT, Outcome.OTHER_KEY, Outcome.WRONG_DIGEST, Outcome.OTHER_VERSION})
"""The object is not what it must be; it has been dropped, if the store could do so. Compute the page, and store it."""
BROKEN = frozenset({Outcome.TIMED_OUT, Outcome.UNREACHABLE})
"""The store is at fault, not the object. Go on without the object, and ask again later. The breaker counts these."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcomes of a request, in the order of its objects."""

    outcomes: tuple[Outcome, ...]
    settled: bool = True
    """True if nothing reads or writes the request's memory any more. If false, only the end of this process is a proof of that."""
    detail: str = ""
    """The reason when the store was at fault, for the log."""
    cleared: int = 0
    """Number of objects that a CLEAR has removed."""

    @classmethod
    def of_all(cls, outcome: Outcome, count: int, *, settled: bool = True, detail: str = "") -> Answer:
        """Return an answer with the same outcome for every object."""
        return cls((outcome,) * count, settled, detail)

    @property
    def failed(self) -> bool:
        """True if the store was at fault with any object."""
        return not self.settled or not BROKEN.isdisjoint(self.outcomes)


Stretches = npt.NDArray[np.uint64]
"""Addresses in this process and lengths in bytes, of shape (stretches, 2): what system calls take as an array of iovec."""


class StoredObject(NamedTuple):
    """An object's name, and the memory that its bytes lie in or go to, in order."""

    name: str
    stretches: Stretches

    @property
    def length_bytes(self) -> int:
        """Bytes of all stretches."""
        return int(self.stretches[:, 1].sum())


class Capabilities(FrozenModel):
    """The properties of a store."""

    kind: str
    batch: Positive
    """Objects that the store moves together. It takes more, and moves one batch after the other."""


class ObjectStore(Protocol):
    """Keeps objects. Calls come from several threads, and never raise for the state of the store or of an object.

    Names in one request are distinct. The memory of a request stays valid as long as this process, and the store may use it until
    an answer that is settled. A call returns soon after `until_s` (`time.monotonic`) if it can; a caller who needs a firm deadline
    uses the store through a process of its own (`client`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """The properties of this store."""

    def write(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Keep objects whole, or not at all: STORED, or why not. An object of the same name may stay as it is."""

    def read(self, objects: Sequence[StoredObject], until_s: float) -> Answer:
        """Fill the stretches: HIT, which nobody has compared yet, or why not; the contents are then undefined."""

    def present(self, names: Sequence[str], until_s: float) -> Answer:
        """Answer PRESENT or ABSENT."""

    def remove(self, names: Sequence[str], until_s: float) -> Answer:
        """Answer DROPPED, also for objects that were never there."""

    def clear(self, prefix: str, until_s: float) -> Answer:
        """Remove all objects whose names begin so: one outcome for all, DROPPED or why some may still be there."""

    def use_memory(self, regions: Sequence[tuple[int, int]]) -> None:
        """Take the memory (address, length) that the stretches of all later requests lie in. Raises RegistrationError."""

    def close(self) -> None:
        """Close the store. Harmless when closed."""


# ------------------------------------------------------------------------------------------- messages

Reason = Annotated[str, Field(max_length=REASON_CHARS)]


class StoreSetup(FrozenModel):
    """Node to process, first message: the store, and the memory of the node that is kept in it."""

    type: Literal["store_setup"] = "store_setup"
    settings: Annotated[str, Field(max_length=10_000)]
    """A section of `tier.store`, as JSON."""
    forms: Annotated[tuple[tuple[SharedRegion, ...], ...], Field(min_length=1, max_length=256)]
    """For each kind of object, the regions that its pages lie in."""
    model: Annotated[str, Field(max_length=1_000)] = ""
    """See ObjectForm."""
    calls: Annotated[int, Field(ge=1, le=64)]
    """The most requests under way at once."""


class StoreReady(FrozenModel):
    """Process to node: the store is open, the memory is mapped and registered."""

    type: Literal["store_ready"] = "store_ready"
    capabilities: Capabilities


class StoreFailed(FrozenModel):
    """Process to node: this process cannot serve, and ends; the text gives cause and cure."""

    type: Literal["store_failed"] = "store_failed"
    message: Reason


class StoreOrder(FrozenModel):
    """Node to process: a request."""

    type: Literal["store_order"] = "store_order"
    number: Positive
    verb: Verb
    form: NonNegative
    keys: Annotated[bytes, Field(max_length=BATCH_LIMIT * KEY_BYTES)]
    """Page keys, 16 bytes each; none for CLEAR."""
    pages: Annotated[bytes, Field(max_length=BATCH_LIMIT * _MOST_SPACES * 4)] = b""
    """For PUT and GET: for each key a page id of each space of the form, int32, little-endian."""
    until_s: float
    """The process does not begin after this, by the clock that all processes of the host share (CLOCK_MONOTONIC)."""


class StoreReport(FrozenModel):
    """Process to node: the end of an order. Unless `settled`, its pages may be touched as long as this process lives."""

    type: Literal["store_report"] = "store_report"
    number: Positive
    outcomes: Annotated[tuple[Outcome, ...], Field(max_length=BATCH_LIMIT)]
    settled: bool
    detail: Reason = ""
    cleared: NonNegative = 0


NodeToStore = Annotated[StoreSetup | StoreOrder, Field(discriminator="type")]
StoreToNode = Annotated[StoreReady | StoreFailed | StoreReport, Field(discriminator="type")]

NODE_TO_STORE: MessageCodec[NodeToStore] = MessageCodec(NodeToStore, "node-to-store")
STORE_TO_NODE: MessageCodec[StoreToNode] = MessageCodec(StoreToNode, "store-to-node")


def framed(body: bytes) -> bytes:
    """Return a message with its length in front."""
    return LENGTH.pack(len(body)) + body


def length_of(head: bytes) -> int:
    """Return how many bytes follow. Raises FrameError for more than a message may have."""
    length = int(LENGTH.unpack(head)[0])
    if length > MAX_FRAME_BYTES:
        raise FrameError(FrameFault.OVERSIZED, f"message of {length} bytes, at most {MAX_FRAME_BYTES} are taken")
    return length
