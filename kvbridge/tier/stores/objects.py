"""The form of an object in a store: one page of one rank, all of its components and layers, and what proves that it is that.

Owns: names, the header, and what is wrong with one. Must not know: memory, files, libraries, how a digest is computed.

An object is a header and then its parts, each the page of one layer of one component, without anything between them and in the
order of `ObjectForm.parts`. The header, all numbers little-endian:

| bytes | what |
|---|---|
| 8 | `kvbpage` and a line feed |
| 2, 2, 4 | version; number of parts; bytes of the header |
| 16 | form: BLAKE2b over the version and the parts' components, layers, lanes and lengths |
| 16 | page key (`tier.keys`), which names model, revision, fingerprint, adapter, namespace, and all tokens up to the page's end |
| 8 | bytes of all parts |
| 8 a part | its length and its raw CRC-32C, as `kernels.digest` computes it |
| 16 | BLAKE2b of all that precedes |

So two objects have the same name only if their bytes must be the same, whoever has computed them; and whatever a store returns
under a name is known for what it is, or for not being that. Digests find accidents, not malice: who may write into a store can
give a wrong page a right header.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from enum import StrEnum
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.tier.keys import KEY_BYTES

VERSION = 1
MAGIC = b"kvbpage\n"
FORM_DOMAIN = b"kvbridge store forms v%d\n" % VERSION
"""So that releases of two versions never want the same name, and do not drop each other's objects."""
CHECK_BYTES = 16

Digests = npt.NDArray[np.uint32]

_FIXED = struct.Struct("<8sHHI16s16sQ")
_PART = np.dtype([("length", "<u4"), ("digest", "<u4")])
_LARGEST_PART_BYTES = 2**32 - 1
_MOST_PARTS = 2**16 - 1
_NAME = re.compile(r"[0-9a-f]{32}-[0-9a-f]{32}")


class HeaderFault(StrEnum):
    """Why bytes are not the header that they should be: kinds of misses, by the names that `base.Outcome` has for them."""

    OTHER_VERSION = "other_version"
    """Another release has written it, in a form that this one does not read."""
    OTHER_KEY = "other_key"
    """A whole header, of another page or of other layers and lanes."""
    WRONG_DIGEST = "wrong_digest"
    """No header, or one that has changed since it was written."""


class Part(FrozenModel):
    """A page of one layer of one component, as a rank holds it."""

    component: ComponentKind
    layer: NonNegative
    lane_start: NonNegative = 0
    lane_stop: Positive = 1
    page_bytes: Positive


class ObjectForm(FrozenModel):
    """What objects of one kind consist of, in order. Equal forms read each other's objects, whatever the layouts of their pools."""

    parts: tuple[Part, ...]

    @classmethod
    def of_regions(cls, regions: Iterable[Region]) -> Self:
        """Return the form of the pages of some regions: those that a rank keeps and restores together.

        Raises InvalidInputError for regions that cannot be one object.
        """
        found = sorted(regions, key=region_order)
        if len({(region.component, region.layer) for region in found}) != len(found):
            raise InvalidInputError("an object holds a component of a layer once; two regions are of the same one")
        if not found or len(found) > _MOST_PARTS:
            raise InvalidInputError(f"an object has 1 to {_MOST_PARTS} parts, got {len(found)}")
        if max(region.page_bytes for region in found) > _LARGEST_PART_BYTES:
            raise InvalidInputError(f"a part of an object has at most {_LARGEST_PART_BYTES} bytes")
        shared = ("component", "layer", "lane_start", "lane_stop", "page_bytes")
        return cls(parts=tuple(Part(**{name: getattr(region, name) for name in shared}) for region in found))

    @cached_property
    def name(self) -> bytes:
        """16 bytes that name it."""
        words = [
            f"{part.component} {part.layer} {part.lane_start} {part.lane_stop} {part.page_bytes}\n".encode()
            for part in self.parts
        ]
        return _hash(FORM_DOMAIN + b"".join(words))

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Bytes of each part."""
        return np.array([part.page_bytes for part in self.parts], dtype=np.int64)

    @cached_property
    def header_bytes(self) -> int:
        """Of every object's header."""
        return _FIXED.size + _PART.itemsize * len(self.parts) + CHECK_BYTES

    @cached_property
    def object_bytes(self) -> int:
        """Of a whole object."""
        return self.header_bytes + int(self.lengths.sum())


def region_order(region: Region) -> tuple[str, int]:
    """Where the pages of a region stand in an object."""
    return region.component, region.layer


def object_name(form: ObjectForm, key: bytes) -> str:
    """Under which name a store keeps the object of a page key. Raises InvalidInputError for what is no page key."""
    if len(key) != KEY_BYTES:
        raise InvalidInputError(f"a page key has {KEY_BYTES} bytes, got {len(key)}")
    return f"{form.name.hex()}-{key.hex()}"


def is_object_name(name: str) -> bool:
    """Whether `object_name` can have made it."""
    return _NAME.fullmatch(name) is not None


def encode_header(form: ObjectForm, key: bytes, digests: Digests) -> bytes:
    """Return the header of an object; `digests[i]` is the raw CRC-32C of part i."""
    parts = np.empty(len(form.parts), dtype=_PART)
    parts["length"], parts["digest"] = form.lengths, digests
    payload_bytes = form.object_bytes - form.header_bytes
    fixed = _FIXED.pack(MAGIC, VERSION, len(parts), form.header_bytes, form.name, key, payload_bytes)
    head = fixed + parts.tobytes()
    return head + _hash(head)


def read_header(form: ObjectForm, key: bytes, data: bytes) -> Digests | HeaderFault:
    """Return the digests of the parts that follow a header, or why it is not that of this form and key. Never raises."""
    if len(data) < _FIXED.size + CHECK_BYTES or data[: len(MAGIC)] != MAGIC:
        return HeaderFault.WRONG_DIGEST
    _, version, _, _, name, found_key, _ = _FIXED.unpack_from(data)
    if version != VERSION:
        return HeaderFault.OTHER_VERSION
    if _hash(data[:-CHECK_BYTES]) != data[-CHECK_BYTES:]:
        return HeaderFault.WRONG_DIGEST
    if (name, found_key) != (form.name, key):
        return HeaderFault.OTHER_KEY
    parts = np.frombuffer(data, _PART, len(form.parts), _FIXED.size)
    if data != encode_header(form, key, parts["digest"]):
        return HeaderFault.WRONG_DIGEST
    return parts["digest"].astype(np.uint32)


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECK_BYTES, usedforsecurity=False).digest()
