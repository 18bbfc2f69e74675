"""What a kept pool holds, written down so that a later process can find it: which page of twins holds which page of a prompt.

Owns: the journal's form, and what its bytes come to. Must not know: files, memory, how digests are computed, when an entry is due.

A journal is a header and entries of 64 bytes. One that says what a page holds comes after the page is whole; one that takes it back
comes before the page is used again. So what the end of a process leaves is right as it stands. Every entry has a checksum of its
own: one that is damaged or cut off is left out, and the pages after it in a prompt with it. Should an entry that takes a page back
be lost, the page's digest tells.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, NamedTuple

from crc32c import crc32c
from pydantic import Field, ValidationError

from kvbridge.core.errors import IntegrityError
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.tier.keys import KEY_BYTES, Keys

ENTRY_BYTES = 64
_MAGIC = b"kvbridge twins 1"
_LENGTHS = struct.Struct("<II")
"""Bytes of the header's JSON, and their checksum."""
_MOST_HEADER_BYTES = 1 << 20
_ENTRY = struct.Struct(f"<IIiI{KEY_BYTES}s{KEY_BYTES}sIHH")
"""Kind, twin, home, depth, key, parent's key, digest, place, places; after them zeros and the checksum of all before it."""
_CHECKED_BYTES = ENTRY_BYTES - 4
_CHECKSUM = struct.Struct("<I")
NO_PAGE = -1


class EntryKind(IntEnum):
    """What an entry says of a page of twins."""

    PAGE = 1
    """It holds the page of a prompt that a key names."""
    CHECKPOINT = 2
    """It is one of the pages that hold the windows and states at the end of that page."""
    PAGE_GONE = 3
    CHECKPOINT_GONE = 4


class KeptFile(FrozenModel):
    """A file of the pool, as the kernel knows it."""

    name: Annotated[str, Field(max_length=255)]
    length_bytes: Positive
    inode: NonNegative


class KeptHeader(FrozenModel):
    """Which pool a journal is about. All but incarnation and files must be equal for another process to go on with it."""

    incarnation: Annotated[str, Field(max_length=64)]
    """Of the process that has written it."""
    fingerprint: Annotated[str, Field(max_length=200)]
    """Of the geometry."""
    model_identity: ModelIdentity
    ranks: tuple[str, ...]
    """Those whose lanes and layers the pages hold."""
    layout: Annotated[str, Field(max_length=64)]
    """A digest of where every region lies, with all sizes."""
    files: tuple[KeptFile, ...]

    def why_not(self, wanted: KeptHeader) -> str:
        """Why a process that wants a pool of this form cannot go on with the one of this journal; empty when it can."""
        for name, what in _COMPARED.items():
            found, asked = getattr(self, name), getattr(wanted, name)
            if found != asked:
                return f"its {name} is {found}, this daemon's is {asked} ({what})"
        return ""


_COMPARED = {
    "model_identity": "tier.model_name, tier.model_revision",
    "fingerprint": "a digest of the model's geometry",
    "ranks": "those of this node",
    "layout": "a digest of sizes and layouts: pools.host, tier.host",
}


@dataclass(frozen=True, slots=True)
class HeldPage:
    """A page of twins that holds a page of a prompt, and the page of the home that belongs to it."""

    key: bytes
    parent: bytes
    """The key of the page before it; empty for a prompt's first."""
    depth: int
    """How many pages are before it."""
    twin: int
    home: int
    """NO_PAGE where there is no home."""
    digest: int

    def entry(self) -> bytes:
        """Return the entry that says so."""
        told = {"home": self.home, "depth": self.depth, "digest": self.digest}
        return _sealed(EntryKind.PAGE, self.twin, key=self.key, parent=self.parent, **told)


@dataclass(frozen=True, slots=True)
class HeldCheckpoint:
    """The pages of twins that hold the windows and states at the end of a page, in their order."""

    key: bytes
    twins: tuple[int, ...]
    digests: tuple[int, ...]

    def entries(self) -> dict[int, bytes]:
        """Return the entries that say so, by twin."""
        kind, places = EntryKind.CHECKPOINT, len(self.twins)
        return {
            twin: _sealed(kind, twin, key=self.key, digest=digest, place=place, places=places)
            for place, (twin, digest) in enumerate(zip(self.twins, self.digests, strict=True))
        }


@dataclass(slots=True)
class Contents:
    """What a journal comes to."""

    pages: dict[int, HeldPage] = field(default_factory=dict)
    """By twin, in the order in which they came."""
    checkpoints: dict[bytes, HeldCheckpoint] = field(default_factory=dict)
    """By the key of the page at whose end they are."""
    entries: int = 0
    damaged: int = 0
    """Entries that were left out."""

    def leave_out_beyond(self, page_counts: Mapping[IndexSpace, int]) -> dict[IndexSpace, list[int]]:
        """Leave out what names a page that pools of these sizes do not have, and return the twins that it is about.

        A page has a home where there are homes, and none where there are not.
        """
        homes = (NO_PAGE, NO_PAGE + 1) if IndexSpace.HOST not in page_counts else (0, page_counts[IndexSpace.HOST])
        twins = page_counts[IndexSpace.FULL_TWIN]
        pages = [page for page in self.pages.values() if page.twin >= twins or page.home not in range(*homes)]
        for page in pages:
            del self.pages[page.twin]
        most = page_counts.get(IndexSpace.SWA_TWIN, 0)
        ends = [end for end in self.checkpoints.values() if max(end.twins) >= most]
        for end in ends:
            del self.checkpoints[end.key]
        return {
            IndexSpace.FULL_TWIN: [page.twin for page in pages],
            IndexSpace.SWA_TWIN: [twin for end in ends for twin in end.twins],
        }

    def prompts(self) -> list[tuple[Keys, list[HeldPage]]]:
        """Return every longest prompt of which all pages are there, with its pages, the one that came last last.

        A page that prompts share is in each of them; one whose parent is missing is in none.
        """
        by_key = {page.key: page for page in self.pages.values()}
        inner = {page.parent for page in by_key.values()}
        found = []
        for page in by_key.values():
            if page.key in inner:
                continue
            path = [page]
            while path[-1].depth and path[-1].parent in by_key and len(path) <= page.depth:
                path.append(by_key[path[-1].parent])
            path.reverse()
            if [each.depth for each in path] == list(range(len(path))):
                found.append((Keys(b"".join(each.key for each in path)), path))
        return found


def header_bytes(header: KeptHeader) -> bytes:
    """Return what a journal begins with: a multiple of an entry's length."""
    text = header.model_dump_json().encode()
    head = _MAGIC + _LENGTHS.pack(len(text), crc32c(text)) + text
    return head + bytes(-len(head) % ENTRY_BYTES)


def read_header(data: bytes) -> tuple[KeptHeader, int]:
    """Return the header of a journal and where its entries begin. Raises IntegrityError for bytes that are none."""
    start = len(_MAGIC) + _LENGTHS.size
    if len(data) < start or data[: len(_MAGIC)] != _MAGIC:
        raise IntegrityError("it is no journal of this release")
    length, checksum = _LENGTHS.unpack_from(data, len(_MAGIC))
    text = data[start : start + length]
    if length > _MOST_HEADER_BYTES or len(text) != length or crc32c(text) != checksum:
        raise IntegrityError("the header of the journal is damaged")
    try:
        header = KeptHeader.model_validate_json(text)
    except ValidationError as error:
        raise IntegrityError(f"the header of the journal is none of this release: {error}") from error
    return header, start + length + -(start + length) % ENTRY_BYTES


def gone(twins: Iterable[int], kind: EntryKind) -> bytes:
    """Return entries that take back what pages of twins hold; `kind` is one of the two for that."""
    return b"".join(_sealed(kind, twin) for twin in twins)


def replay(data: bytes) -> Contents:
    """Return what the entries of a journal come to: the later one counts, of a page as of a key and of a home.

    `data`: without the header. What is damaged or cut off is left out.
    """
    contents = Contents(damaged=int(len(data) % ENTRY_BYTES != 0))
    twin_of: dict[bytes | int, int] = {}
    """By key, and by home."""
    parts: dict[int, _Part] = {}
    for start in range(0, len(data) - ENTRY_BYTES + 1, ENTRY_BYTES):
        if crc32c(data[start : start + _CHECKED_BYTES]) != _CHECKSUM.unpack_from(data, start + _CHECKED_BYTES)[0]:
            contents.damaged += 1
            continue
        contents.entries += 1
        kind, twin, home, depth, key, parent, digest, place, places = _ENTRY.unpack_from(data, start)
        match kind:
            case EntryKind.PAGE:
                contents.pages.pop(twin, None)  # so that it comes last
                contents.pages[twin] = HeldPage(key, parent if depth else b"", depth, twin, home, digest)
                twin_of[key] = twin_of[home] = twin
            case EntryKind.PAGE_GONE:
                contents.pages.pop(twin, None)
            case EntryKind.CHECKPOINT:
                parts[twin] = _Part(key, place, places, digest)
            case EntryKind.CHECKPOINT_GONE:
                parts.pop(twin, None)
            case _:
                contents.damaged += 1
    twin_of.pop(NO_PAGE, None)
    for twin in [
        twin for twin, page in contents.pages.items() if not twin_of[page.key] == twin == twin_of.get(page.home, twin)
    ]:
        del contents.pages[twin]
    contents.checkpoints = _checkpoints(parts)
    return contents


class _Part(NamedTuple):
    """One page of a checkpoint."""

    key: bytes
    place: int
    places: int
    digest: int


def _checkpoints(parts: Mapping[int, _Part]) -> dict[bytes, HeldCheckpoint]:
    by_key: dict[bytes, dict[int, int]] = {}
    for twin, part in parts.items():
        by_key.setdefault(part.key, {})[part.place] = twin
    found = {}
    for key, twin_at in by_key.items():
        twins = tuple(twin_at[place] for place in sorted(twin_at))
        if sorted(twin_at) == list(range(len(twins))) and all(parts[twin].places == len(twins) for twin in twins):
            found[key] = HeldCheckpoint(key, twins, tuple(parts[twin].digest for twin in twins))
    return found


def _sealed(  # noqa: PLR0913 - the fields of an entry
    kind: EntryKind,
    twin: int,
    *,
    home: int = NO_PAGE,
    depth: int = 0,
    key: bytes = b"",
    parent: bytes = b"",
    digest: int = 0,
    place: int = 0,
    places: int = 0,
) -> bytes:
    entry = _ENTRY.pack(kind, twin, home, depth, key, parent, digest, place, places).ljust(_CHECKED_BYTES, b"\0")
    return entry + _CHECKSUM.pack(crc32c(entry))
