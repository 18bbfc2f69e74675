"""Objects of a store: requests and outcomes, the form of an object with its trailer, messages to the store process.

An object is one page with all components and layers: its parts, each the page of one layer of one component, side by side in the
order of components' names and layers, and then a trailer. The parts thus lie in files as they lie in memory, aligned to the
operating system's pages: with 64 bytes before them, copies took a fifth longer. The trailer, all numbers little-endian:

| bytes | what |
|---|---|
| 8 | `kvbpage` and the version |
| 16 | form: BLAKE2b over the parts' components, layers, lanes and lengths, and the model as the node states it |
| 16 | key, made of page keys and a namespace (`tier.keys`): model, revision, fingerprint, adapter, all tokens up to a page's end |
| 8 | bytes of all parts |
| 4 | their CRC-32C, as of one stretch |
| 12 | BLAKE2b of these 52 bytes |

Two objects have the same name only if their bytes must be the same, whichever node has computed them. A reader can tell whether an
object belongs to its name. Digests find accidents, not malice: a writer of the store can give a wrong page a right trailer.

A message is its length as an unsigned 32-bit little-endian integer, then so many bytes from its codec. Messages go over the store
process's standard input and output, which only the node and the process hold: the pipes end with either process.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence
from enum import StrEnum
from itertools import groupby
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive
from kvbridge.core.plan.operations import AddressArray, PageArray
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, FrameError, FrameFault, MessageCodec
from kvbridge.core.wire.messages import REASON_CHARS, SharedRegion
from kvbridge.tier.keys import KEY_BYTES, Keys, Link

BATCH_LIMIT = 256
"""The most objects of one request."""
LENGTH = struct.Struct("<I")
_MOST_SPACES = 8
VERSION = 2
MAGIC = b"kvbpage"
FORM_DOMAIN = b"kvbridge store forms v%d\n" % VERSION
"""Names of two versions differ, so releases do not drop each other's objects."""

PageIds = npt.NDArray[np.int32]
NO_PAGES: PageIds = np.empty(0, dtype=np.int32)

_HEAD = struct.Struct("<7sB16s16sQI")
_CHECK_BYTES = 12
TRAILER_BYTES = _HEAD.size + _CHECK_BYTES
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")


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
    """The store has bytes under the object's name; only a GET tells whether they are right."""
    DROPPED = "dropped"
    """The object is not in the store (any more)."""
    ABSENT = "absent"
    SHORT = "short"
    """The object has another length than it must have."""
    OTHER_KEY = "other_key"
    """The object is that of another page, or of other layers or lanes."""
    WRONG_DIGEST = "wrong_digest"
    """The object's bytes, or its trailer, have changed since they were stored."""
    OTHER_VERSION = "other_version"
    """Another release has written the object, in a form that this one does not read."""
    FULL = "full"
    """The store has no room for the object now."""
    TIMED_OUT = "timed_out"
    UNREACHABLE = "unreachable"
    """The store cannot be used now."""


BAD = frozenset({Outcome.SHORT, Outcome.OTHER_KEY, Outcome.WRONG_DIGEST, Outcome.OTHER_VERSION})
"""The object is wrong, and has been dropped if the store could do so. Compute the page, and store it."""
BROKEN = frozenset({Outcome.TIMED_OUT, Outcome.UNREACHABLE})
"""The store is at fault, not the object. Go on without the object, and ask again later. The breaker counts these."""


Reason = Annotated[str, AfterValidator(lambda text: text[:REASON_CHARS])]


class Answer(FrozenModel):
    """The outcomes of a request, in the order of its objects."""

    outcomes: Annotated[tuple[Outcome, ...], Field(max_length=BATCH_LIMIT)]
    settled: bool = True
    """True if nothing reads or writes the request's memory any more. If false, only the end of this process is a proof of that."""
    detail: Reason = ""
    """The reason when the store was at fault, for the log."""
    cleared: NonNegative = 0
    """Number of objects that a CLEAR has removed."""

    @classmethod
    def of_all(cls, outcome: Outcome, count: int, *, settled: bool = True, detail: str = "") -> Self:
        """Return an answer with the same outcome for every object."""
        return cls(outcomes=(outcome,) * count, settled=settled, detail=detail)

    @property
    def failed(self) -> bool:
        """True if the store was at fault with any object."""
        return not self.settled or not BROKEN.isdisjoint(self.outcomes)


Stretches = npt.NDArray[np.uint64]
"""Addresses in this process and lengths in bytes, of shape (stretches, 2): an array of iovec for system calls."""


class StoredObject(NamedTuple):
    """An object's name, and the memory that its bytes lie in or go to, in order."""

    name: str
    stretches: Stretches

    @property
    def length_bytes(self) -> int:
        """Bytes of all stretches."""
        return int(self.stretches[:, 1].sum())


# ------------------------------------------------------------------------------------------- the form of objects


class ObjectForm:
    """The parts of one kind of object, and where they lie in memory. The name does not depend on the pools' layout."""

    def __init__(self, regions: Iterable[Region], model: str = "") -> None:
        """`regions`: one for each part. `model`: name, revision and fingerprint; objects of other models have other names.

        Raises InvalidInputError when they cannot be one object, UnsupportedError for device memory.
        """
        ordered = sorted(regions, key=lambda region: (region.component, region.layer))
        if not ordered or len({(region.component, region.layer) for region in ordered}) != len(ordered):
            raise InvalidInputError("an object has at least one part, and no component of a layer twice")
        if any(region.memory is not MemoryKind.DRAM for region in ordered):
            raise UnsupportedError("a store takes pages of host memory; copy them there first")
        words = [
            f"{region.component} {region.layer} {region.lane_start} {region.lane_stop} {region.page_bytes}\n"
            for region in ordered
        ]
        self.name = _hash(FORM_DOMAIN + "".join([*words, model]).encode(), 16)
        self.prefix = f"{self.name.hex()}-"
        """The beginning of the names of all objects of this form, and of no others."""
        heads = [not index or not _together(ordered[index - 1], region) for index, region in enumerate(ordered)]
        runs = np.flatnonzero(heads)
        self.lengths: list[int] = np.add.reduceat([region.page_bytes for region in ordered], runs).tolist()
        """Bytes of each stretch of memory that a page's parts lie in; parts side by side are one stretch."""
        ordered = [ordered[index] for index in runs]
        self.payload_bytes = sum(self.lengths)
        self.object_bytes = TRAILER_BYTES + self.payload_bytes
        self.spaces: tuple[IndexSpace, ...] = tuple(sorted({region.space for region in ordered}))
        """The spaces of a page's ids, in the order in which requests name them."""
        self._arrays = [
            (self.spaces.index(space), PageArray.of(list(alike)))
            for (space, _), alike in groupby(ordered, key=lambda region: (region.space, region.form))
        ]
        """The pages of neighbouring stretches of one form, each with the place of its space."""

    def check(self, pages: PageIds, count: int) -> None:
        """Raise InvalidInputError unless `pages` has a row for each of `count` objects, with the id of a page in each space."""
        if pages.shape != (count, len(self.spaces)):
            raise InvalidInputError(
                f"each of {count} objects needs a page id of each of {', '.join(self.spaces)}, got ids of shape {pages.shape}"
            )
        for column, array in self._arrays:
            array.require(pages[:, column])

    def addresses(self, pages: PageIds) -> AddressArray:
        """Return the addresses of the stretches of pages, whose ids have been checked: shape (objects, stretches)."""
        return np.concatenate([array.addresses(pages[:, column]) for column, array in self._arrays]).T

    def stretches(self, trailers: int, addresses: AddressArray) -> AddressArray:
        """Return the stretches of each object: its `addresses`, then its trailer. Trailers lie side by side."""
        found = np.empty((len(addresses), len(self.lengths) + 1, 2), dtype=np.uint64)
        found[:, :-1, 0] = addresses
        found[:, -1, 0] = trailers + np.arange(len(addresses)) * TRAILER_BYTES
        found[:, :, 1] = [*self.lengths, TRAILER_BYTES]
        return found

    def object_name(self, key: bytes) -> str:
        """Return the name of an object in a store. Raises InvalidInputError for bytes that are no page key."""
        if len(key) != KEY_BYTES:
            raise InvalidInputError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
        return f"{self.prefix}{key.hex()}"

    def trailer(self, key: bytes, digest: int) -> bytes:
        """Return the trailer of an object. `digest`: the CRC-32C of its parts."""
        head = _HEAD.pack(MAGIC, VERSION, self.name, key, self.payload_bytes, digest)
        return head + _hash(head, _CHECK_BYTES)

    def read_trailer(self, key: bytes, data: bytes) -> int | Outcome:
        """Return the digest that a trailer states, or the outcome for a trailer that is not of this form and key. Never raises."""
        if len(data) != TRAILER_BYTES:
            return Outcome.WRONG_DIGEST
        magic, version, name, found_key, payload_bytes, digest = _HEAD.unpack_from(data)
        if magic == MAGIC and version != VERSION:
            return Outcome.OTHER_VERSION
        if magic != MAGIC or _hash(data[:-_CHECK_BYTES], _CHECK_BYTES) != data[-_CHECK_BYTES:]:
            return Outcome.WRONG_DIGEST
        if (name, found_key, payload_bytes) != (self.name, key, self.payload_bytes):
            return Outcome.OTHER_KEY
        return int(digest)


def _together(one: Region, next_one: Region) -> bool:
    """True if the second region's bytes follow the first one's in every page."""
    same = ("space", "pages_per_extent", "page_count", "page_stride_bytes")
    ends = tuple(address + one.page_bytes for address in one.extent_addresses)
    return ends == next_one.extent_addresses and all(getattr(one, name) == getattr(next_one, name) for name in same)


def linked(keys: Keys) -> Keys:
    """Return the keys under which a store keeps the pages of a prompt: a hash of each key and the one before.

    A request can name any keys until an engine has stated those of its tokens. Keys that are no chain thus find nothing.
    """
    found = keys.to_list()
    return of_links(zip([b"", *found], found, strict=False))


def of_links(links: Iterable[Link]) -> Keys:
    """Return the keys under which a store keeps single pages."""
    return Keys(b"".join(_hash(before + key, KEY_BYTES) for before, key in links))


def part_keys(key: bytes, parts: int) -> Keys:
    """Return the keys under which a store keeps the pages of a checkpoint, mostly one. `key`: of the page before it."""
    return Keys(b"".join([key, *(_hash(key + part.to_bytes(4, "little"), KEY_BYTES) for part in range(1, parts))]))


def is_object_name(name: str) -> bool:
    """Return whether `ObjectForm.object_name` can have made this name."""
    return _NAME.fullmatch(name) is not None


def check_request(forms: Sequence[ObjectForm], form: int, keys: Keys) -> ObjectForm:
    """Return the form of a request. Raises InvalidInputError for an unknown form, and for keys that cannot be one request."""
    if not 0 <= form < len(forms):
        raise InvalidInputError(f"there is no form {form} of objects here, only {len(forms)} forms from 0 on")
    if not 1 <= len(keys) <= BATCH_LIMIT:
        raise InvalidInputError(f"a request is about 1 to {BATCH_LIMIT} objects, got {len(keys)}")
    if len(set(keys.to_list())) != len(keys):
        raise InvalidInputError("a request names a page key twice; ask for each page once")
    return forms[form]


def _hash(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size, usedforsecurity=False).digest()


# ------------------------------------------------------------------------------------------- messages


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
    kind: str


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


class StoreReport(Answer):
    """Process to node: the end of an order. Unless `settled`, its pages may be touched as long as this process lives."""

    type: Literal["store_report"] = "store_report"
    number: Positive
    settled: bool


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
