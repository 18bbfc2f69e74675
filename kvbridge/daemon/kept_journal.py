"""The form of the journal of kept pools: for each host copy, an entry of 64 bytes that says what its page holds.

An entry has the place of its page. Each entry has a checksum: a damaged entry is left out, and with it the later pages of the
prompt. The digest of a page shows an entry that should have been wiped.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import structlog
from crc32c import crc32c
from pydantic import Field, ValidationError

from kvbridge.core.errors import IntegrityError
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, Positive
from kvbridge.tier.keys import KEY_BYTES, Keys

log = structlog.get_logger(__name__)

ENTRY_BYTES = 64
KEPT_SPACES = (IndexSpace.FULL_COPY, IndexSpace.SWA_COPY, IndexSpace.HOST)
NO_PAGE = -1
FIRST = bytes(KEY_BYTES)
"""The parent's key of a prompt's first page."""
_MAGIC = b"kvbridge twins 3"
_HEAD = struct.Struct(f"<{len(_MAGIC)}sII")
"""Magic, length and checksum of the header's text, which follows."""
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}siIQHH8x")
"""Key, parent's key, home, digest, serial number, place among the pages of a checkpoint, number of these; a checksum follows."""

Place = tuple[IndexSpace, int]
"""A page of a space."""


class KeptFile(FrozenModel):
    """A file of the pools, as the kernel knows it."""

    name: Annotated[str, Field(max_length=255)]
    length_bytes: Positive
    inode: NonNegative


class KeptHeader(FrozenModel):
    """The pools that a journal describes."""

    incarnation: Annotated[str, Field(max_length=64)]
    """Incarnation of the process that has written it."""
    form: dict[str, str]
    """Facts of the pools, by names for operators, that must be equal for another process to reuse the pools."""
    page_counts: dict[IndexSpace, NonNegative]
    """Page counts of the spaces of host copies, and of the home if there is one; these must be equal as well."""
    files: tuple[KeptFile, ...] = ()

    def why_not(self, wanted: KeptHeader) -> str:
        """Return why a process that wants pools of the form `wanted` cannot reuse those of this journal; empty when it can."""
        found, asked = ({**of.form, "page counts": of.page_counts} for of in (self, wanted))
        different = (name for name, fact in asked.items() if found.get(name) != fact)
        return next((f"its {name} is {found.get(name)}, this daemon's is {asked[name]}" for name in different), "")


class Held(NamedTuple):
    """A page of a prompt, in a host copy and in its home; or a checkpoint at the end of a page, in one or more host copies."""

    space: IndexSpace
    key: bytes
    copies: tuple[int, ...]
    parent: bytes = FIRST
    """The key of the page before it; zeros for a prompt's first, and for checkpoints."""
    home: int = NO_PAGE
    """NO_PAGE where there is no home."""
    digests: tuple[int, ...] = ()
    """One for each host copy, together with its home."""

    @property
    def sets(self) -> tuple[tuple[Place, ...], ...]:
        """Sets of pages with one digest each; the entry has the place of the first page."""
        home = () if self.home == NO_PAGE else ((IndexSpace.HOST, self.home),)
        return tuple(((self.space, copy), *home) for copy in self.copies)

    def entries(self, serial: int) -> Iterator[tuple[Place, bytes]]:
        """Yield its entries, each with its place. A later entry has a higher serial number."""
        for number, (pages, digest) in enumerate(zip(self.sets, self.digests, strict=True)):
            body = _ENTRY.pack(self.key, self.parent, self.home, digest, serial, number, len(self.copies))
            yield pages[0], _sealed(body)


@dataclass(slots=True)
class Contents:
    """The contents of a journal."""

    pages: dict[int, Held] = field(default_factory=dict)
    """By host copy, in the order in which they came."""
    checkpoints: dict[bytes, Held] = field(default_factory=dict)
    """By the key of the page at whose end they are."""
    damaged: int = 0
    """Entries that were left out."""

    def prompts(self) -> Iterator[tuple[Keys, list[Held]]]:
        """Yield each longest complete prompt with its pages, in the order in which the last pages came.

        A page that prompts share is in each of them. A page without its parent is in none.
        """
        by_key = {page.key: page for page in self.pages.values()}
        inner = {page.parent for page in by_key.values()}
        for page in by_key.values():
            if page.key in inner:
                continue
            path = [page]
            while path[-1].parent in by_key and len(path) <= len(by_key):
                path.append(by_key[path[-1].parent])
            if path[-1].parent == FIRST:
                path.reverse()
                yield Keys(b"".join(each.key for each in path)), path


def header_bytes(header: KeptHeader) -> bytes:
    """Return the beginning of a journal, padded to a multiple of an entry's length."""
    text = header.model_dump_json().encode()
    head = _HEAD.pack(_MAGIC, len(text), crc32c(text)) + text
    return head + bytes(-len(head) % ENTRY_BYTES)


def read_header(data: bytes) -> tuple[KeptHeader, int]:
    """Return the header of a journal, and the offset of its entries. Raises IntegrityError for bytes that are no journal."""
    try:
        magic, length, checksum = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        text = data[_HEAD.size : end]
        if magic != _MAGIC or len(text) != length or crc32c(text) != checksum:
            raise IntegrityError("its header is damaged, or of another release")
        return KeptHeader.model_validate_json(text), end + -end % ENTRY_BYTES
    except (struct.error, ValidationError) as error:
        raise IntegrityError(f"it is no journal of this release: {error}") from error


def entry_bases(page_counts: Mapping[IndexSpace, int], start: int) -> tuple[dict[IndexSpace, int], int]:
    """Return the offset of the entries of each space in a journal, the first one at `start`, and the end of the last entry."""
    middle = start + page_counts[IndexSpace.FULL_COPY] * ENTRY_BYTES
    bases = {IndexSpace.FULL_COPY: start, IndexSpace.SWA_COPY: middle}
    return bases, middle + page_counts.get(IndexSpace.SWA_COPY, 0) * ENTRY_BYTES


def read_journal(data: bytes) -> tuple[KeptHeader, Contents]:
    """Return the header of a journal and the contents of its entries. When two entries have one key or one home, the later counts.

    Damaged and cut-off entries are left out. Raises IntegrityError as `read_header` does.
    """
    header, start = read_header(data)
    contents, counts = Contents(), header.page_counts
    homes = range(counts[IndexSpace.HOST]) if IndexSpace.HOST in counts else (NO_PAGE,)
    pages: list[tuple[int, Held]] = []
    ends: dict[bytes, dict[tuple[int, int], tuple[int, int]]] = {}
    places = [(space, copy) for space in entry_bases(counts, 0)[0] for copy in range(counts.get(space, 0))]
    for at, (space, copy) in enumerate(places):
        entry = data[start + at * ENTRY_BYTES : start + (at + 1) * ENTRY_BYTES]
        if not any(entry):
            continue
        key, parent, home, digest, serial, number, count = _ENTRY.unpack_from(entry.ljust(ENTRY_BYTES))
        if entry != _sealed(entry[: _ENTRY.size]) or (space is IndexSpace.FULL_COPY and home not in homes):
            contents.damaged += 1
        elif space is IndexSpace.FULL_COPY:
            pages.append((serial, Held(space, key, (copy,), parent, home, (digest,))))
        else:
            ends.setdefault(key, {})[number, count] = copy, digest
    latest: dict[bytes | int, Held] = {}
    for _, page in sorted(pages):
        latest[page.key] = latest[page.home] = page
    for _, page in sorted(pages):
        if latest[page.key] is page and (page.home == NO_PAGE or latest[page.home] is page):
            contents.pages[page.copies[0]] = page
    for key, found in ends.items():
        if sorted(found) == [(number, len(found)) for number in range(len(found))]:
            copies, digests = zip(*(found[which] for which in sorted(found)), strict=True)
            contents.checkpoints[key] = Held(IndexSpace.SWA_COPY, key, copies, digests=digests)
    return header, contents


def _sealed(body: bytes) -> bytes:
    return body + crc32c(body).to_bytes(4, "little")
