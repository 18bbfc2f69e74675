"""The form of an object in a store: one page, all components and layers; where its parts lie, and the trailer that proves it.

An object is its parts, each the page of one layer of one component, without anything between them, in the order of components'
names and layers, and then a trailer. The parts thus lie in files as they lie in memory, aligned to the operating system's pages:
with 64 bytes before them, copies took a fifth longer. The trailer, all numbers little-endian:

| bytes | what |
|---|---|
| 8 | `kvbpage` and the version |
| 16 | form: BLAKE2b over the parts' components, layers, lanes and lengths, and the node's word which model it is |
| 16 | key, made of page keys and a namespace (`tier.keys`): model, revision, fingerprint, adapter, all tokens up to a page's end |
| 8 | bytes of all parts |
| 4 | their CRC-32C, as of one stretch |
| 12 | BLAKE2b of these 52 bytes |

Two objects have the same name only if their bytes must be the same, whichever node has computed them. A reader can tell whether an
object belongs to its name. Digests find accidents, not malice: whoever may write into a store can give a wrong page a right
trailer.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.tier.keys import KEY_BYTES, Keys, Link
from kvbridge.tier.stores.base import BATCH_LIMIT, Outcome

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
        heads = [not index or not _together(ordered[index - 1], region) for index, region in enumerate(ordered)]
        runs = np.flatnonzero(heads)
        self.lengths: list[int] = np.add.reduceat([region.page_bytes for region in ordered], runs).tolist()
        """Bytes of each stretch of memory that a page's parts lie in; parts side by side are one stretch."""
        ordered = [ordered[index] for index in runs]
        self.payload_bytes = sum(self.lengths)
        self.object_bytes = TRAILER_BYTES + self.payload_bytes
        self.spaces: tuple[IndexSpace, ...] = tuple(sorted({region.space for region in ordered}))
        """The spaces of a page's ids, in the order in which requests name them."""
        self._columns = np.array([self.spaces.index(region.space) for region in ordered])
        self._per_extent = np.array([region.pages_per_extent for region in ordered], dtype=np.int64)
        self._strides = np.array([region.page_stride_bytes for region in ordered], dtype=np.int64)
        counts = [len(region.extent_addresses) for region in ordered]
        self._first_extents = np.cumsum([0, *counts[:-1]])
        self._addresses = np.array([one for region in ordered for one in region.extent_addresses], dtype=np.int64)
        self._page_counts = [
            min(region.page_count for region in ordered if region.space is space) for space in self.spaces
        ]

    def check(self, pages: PageIds, count: int) -> None:
        """Raise InvalidInputError unless `pages` has a row for each of `count` objects, with the id of a page in each space."""
        if pages.shape != (count, len(self.spaces)):
            raise InvalidInputError(
                f"each of {count} objects needs a page id of each of {', '.join(self.spaces)}, got ids of shape {pages.shape}"
            )
        for column, (space, existing) in enumerate(zip(self.spaces, self._page_counts, strict=True)):
            wrong = (pages[:, column] < 0) | (pages[:, column] >= existing)
            if wrong.any():
                page = pages[wrong, column][0]
                raise PageOutOfBoundsError(f"page {page} of space {space} does not exist; there are {existing}")

    def addresses(self, pages: PageIds) -> npt.NDArray[np.int64]:
        """Return the addresses of each stretch of pages: shape (..., stretches). `pages`: ids of shape (..., spaces)."""
        extents, indexes = np.divmod(pages[..., self._columns].astype(np.int64), self._per_extent)
        found: npt.NDArray[np.int64] = self._addresses[self._first_extents + extents] + indexes * self._strides
        return found

    def stretches(self, trailers: int, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """Return the `base.Stretches` of each object: its `addresses`, then its trailer. Trailers lie side by side."""
        found = np.empty((len(addresses), len(self.lengths) + 1, 2), dtype=np.uint64)
        found[:, :-1, 0] = addresses
        found[:, -1, 0] = trailers + np.arange(len(addresses)) * TRAILER_BYTES
        found[:, :, 1] = [*self.lengths, TRAILER_BYTES]
        return found


def _together(one: Region, next_one: Region) -> bool:
    """True if the second region's bytes follow the first one's in every page."""
    same = ("space", "pages_per_extent", "page_count", "page_stride_bytes")
    ends = tuple(address + one.page_bytes for address in one.extent_addresses)
    return ends == next_one.extent_addresses and all(getattr(one, name) == getattr(next_one, name) for name in same)


def names_of(form: ObjectForm) -> str:
    """Return the beginning of the names of all objects of a form, and of no others."""
    return f"{form.name.hex()}-"


def object_name(form: ObjectForm, key: bytes) -> str:
    """Return the name of an object in a store. Raises InvalidInputError for what is no page key."""
    if len(key) != KEY_BYTES:
        raise InvalidInputError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
    return f"{form.name.hex()}-{key.hex()}"


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
    """Return whether `object_name` can have made this name."""
    return _NAME.fullmatch(name) is not None


def encode_trailer(form: ObjectForm, key: bytes, digest: int) -> bytes:
    """Return the trailer of an object. `digest`: the CRC-32C of its parts."""
    head = _HEAD.pack(MAGIC, VERSION, form.name, key, form.payload_bytes, digest)
    return head + _hash(head, _CHECK_BYTES)


def read_trailer(form: ObjectForm, key: bytes, data: bytes) -> int | Outcome:
    """Return the digest that a trailer states, or the outcome for a trailer that is not of this form and key. Never raises."""
    if len(data) != TRAILER_BYTES:
        return Outcome.WRONG_DIGEST
    magic, version, name, found_key, payload_bytes, digest = _HEAD.unpack_from(data)
    if magic != MAGIC:
        return Outcome.WRONG_DIGEST
    if version != VERSION:
        return Outcome.OTHER_VERSION
    if _hash(data[:-_CHECK_BYTES], _CHECK_BYTES) != data[-_CHECK_BYTES:]:
        return Outcome.WRONG_DIGEST
    if (name, found_key, payload_bytes) != (form.name, key, form.payload_bytes):
        return Outcome.OTHER_KEY
    return int(digest)


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
