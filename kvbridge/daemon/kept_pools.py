"""Kept pools: the journal of the pages in them, which this daemon writes, and the pages of the daemon before.

The journal has an entry of 64 bytes for each host copy, at the copy's place. An entry is written once the digest of its page is
known, and wiped before the page is used again, so the journal is right whenever its process ends. Each entry has a checksum; a
damaged entry is left out, and with it the later pages of the prompt. A page's digest shows an entry that was not wiped.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import structlog
from crc32c import crc32c
from pydantic import Field, ValidationError

from kvbridge.core.errors import BridgeError, IntegrityError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, PageIdArray, Pages, Positive
from kvbridge.core.plan.operations import IndexArray, PageArray
from kvbridge.kernels.digest import raw_checksums
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook
from kvbridge.tier.host_copies import HostCopies
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
PAGES_AT_ONCE = 32
"""Pages whose digests are computed between two looks for changes."""
DIGEST_THREADS = 2
_TAKER = Owner(NO_ROOM, 0)
"""Owner of all pages that a journal names, until they have been compared. Owners of host copies are counted from 1."""

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
    """Facts of the pools, by names for operators. For another process to reuse the pools, these must be equal, and so must the
    page counts."""
    page_counts: dict[IndexSpace, NonNegative]
    """Page counts of the spaces of host copies, and of the home if there is one."""
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
            yield pages[0], body + crc32c(body).to_bytes(4, "little")


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
        is_whole = entry[_ENTRY.size :] == crc32c(entry[: _ENTRY.size]).to_bytes(4, "little")
        if not is_whole or (space is IndexSpace.FULL_COPY and home not in homes):
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


class PageDigests:
    """Digests of pages in memory of this process. Any thread may ask."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._of_space: dict[IndexSpace, list[tuple[PageArray, IndexArray]]] = {}
        """Neighbouring regions of one form, in their order: where their pages are, and the length of a page of each."""
        for (space, _), alike in groupby(regions, key=lambda region: (region.space, region.form)):
            group = list(alike)
            lengths = np.array([region.page_bytes for region in group])
            self._of_space.setdefault(space, []).append((PageArray.of(group), lengths))

    def __call__(self, pages: Sequence[Place]) -> int:
        """Return one digest of all bytes of some pages, which must not be written meanwhile."""
        places = ((page, *group) for space, page in pages for group in self._of_space[space])
        found = [(array.addresses(np.array([page]))[:, 0], lengths) for page, array, lengths in places]
        starts, lengths = map(np.concatenate, zip(*found, strict=True))
        return int(crc32c(raw_checksums(starts, lengths, MemoryKind.DRAM).tobytes()))

    def size_bytes(self, pages: Sequence[Place]) -> int:
        """Return the number of bytes of these pages."""
        return sum(int(lengths.sum()) for space, _ in pages for _, lengths in self._of_space[space])


class KeptJournal:
    """Writes the journal while it watches the host copies. Called from the event loop's thread only."""

    def __init__(self, path: Path, header: KeptHeader, digest: PageDigests, contents: Contents) -> None:
        """Begin a journal with `contents`, in place of the one before. A journal that cannot be made is logged, and missing."""
        self._digest, self._serial, self._queue = digest, 0, list[Held]()
        self._written: set[Place] = set()
        self._arriving: dict[Place, Held] = {}
        """By host copy, the pages that are being read, or will be."""
        self._reading: asyncio.Task[None] | None = None
        self._map: mmap.mmap | None = None
        head, fresh = header_bytes(header), path.with_suffix(".journal.new")
        self._bases, length_bytes = entry_bases(header.page_counts, len(head))
        try:
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.closing(os.fdopen(descriptor, "r+b", buffering=0)):
                os.posix_fallocate(descriptor, 0, length_bytes)  # else a write after memory ran out would be a SIGBUS
                self._map = mmap.mmap(descriptor, length_bytes)
            self._map[: len(head)] = head
            for held in (*contents.pages.values(), *contents.checkpoints.values()):
                self._write(held)
            fresh.replace(path)
        except OSError as error:
            log.error("kept_pools_journal_lost", file=str(path), reason=str(error))
            self._map = None
            with contextlib.suppress(OSError):  # another user's; digests tell which pages are wrong
                path.unlink(missing_ok=True)

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """Take in host copies and their homes. Their entries are written when the pages have been read."""
        copies = pages[IndexSpace.FULL_COPY].tolist()
        homes = pages[IndexSpace.HOST].tolist() if IndexSpace.HOST in pages else [NO_PAGE] * len(copies)
        self._arrive(
            Held(IndexSpace.FULL_COPY, bytes(keys[at]), (copy,), bytes(keys[at - 1]) if at else FIRST, home)
            for at, (copy, home) in enumerate(zip(copies, homes, strict=True), start)
        )

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """Take in the pages of a checkpoint likewise."""
        self._arrive([Held(IndexSpace.SWA_COPY, bytes(key), tuple(pages.tolist()))])

    def removed(self, pages: Pages) -> None:
        """Wipe the entries of these host copies."""
        for place in ((space, copy) for space, copies in pages.items() for copy in copies.tolist()):
            self._arriving.pop(place, None)
            if place in self._written:
                self._written.discard(place)
                self._put(place, bytes(ENTRY_BYTES))

    async def finish(self, within_s: float) -> None:
        """Write the entries of pages that are still being read. Pages that are not read within `within_s` are lost."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=within_s)
        self.close()

    def close(self) -> None:
        """Write nothing more. Harmless when closed."""
        self._queue.clear()
        self._arriving.clear()
        self._map = None

    def _arrive(self, arriving: Iterable[Held]) -> None:
        for held in arriving:
            if not all(pages[0] in self._written for pages in held.sets):  # else it was known before
                self._arriving |= dict.fromkeys((pages[0] for pages in held.sets), held)
                self._queue.append(held)
        if self._queue and (self._reading is None or self._reading.done()):
            self._reading = asyncio.create_task(self._read(), name="digests of host copies")

    async def _read(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:PAGES_AT_ONCE], self._queue[PAGES_AT_ONCE:]
            for held, digests in zip(batch, await asyncio.to_thread(self._digests, batch), strict=True):
                places = [pages[0] for pages in held.sets]
                if all(self._arriving.get(place) is held for place in places):
                    for place in places:
                        del self._arriving[place]
                    if digests:
                        self._write(held._replace(digests=digests))

    def _digests(self, batch: Sequence[Held]) -> list[tuple[int, ...]]:
        """Return the digests of each page; none for a page that a defect keeps from being read, which then is in no journal."""
        found: list[tuple[int, ...]] = []
        defect: Exception | None = None
        for held in batch:
            try:
                found.append(tuple(map(self._digest, held.sets)))
            except Exception as error:  # noqa: BLE001 - it is logged, and the pages after this one are read
                found.append(())
                defect = error
        if defect is not None:
            log.error("kept_pages_not_read", pages=found.count(()), reason=repr(defect), exc_info=defect)
        return found

    def _write(self, held: Held) -> None:
        self._serial += 1
        for place, entry in held.entries(self._serial):
            self._put(place, entry)
            self._written.add(place)

    def _put(self, place: Place, entry: bytes) -> None:
        if self._map is not None:
            at = self._bases[place[0]] + place[1] * ENTRY_BYTES
            self._map[at : at + ENTRY_BYTES] = entry


@dataclass(slots=True)
class Restored:
    """The outcome for the pages that a daemon finds in kept pools, with the names of `KeptPoolsStatus`."""

    waiting_pages: int = 0
    restored_pages: int = 0
    restored_bytes: int = 0
    checkpoints: int = 0
    lost_pages: int = 0
    refused_pages: int = 0
    refused: str = ""
    seconds: float = 0.0


class RestoredCopies:
    """Brings the pages that a journal names into the index. Called from the event loop's thread only.

    A page is used once its bytes are known to have the digest in the journal. To read some GiB takes a second, so the daemon serves
    meanwhile.
    """

    def __init__(
        self,
        book: PageBook,
        copies: HostCopies,
        digest: PageDigests,
        contents: Contents,
        found: Restored,
        *,
        lost: Callable[[Pages], None],
    ) -> None:
        """Take these pages from a book whose pages are all free. `lost` is called with the pages that will not come back.

        `found` shows the progress at any moment.
        """
        self._book, self._copies, self._digest, self._contents, self._lost = book, copies, digest, contents, lost
        self._right: dict[bytes, bool] = {}
        """By key, whether the bytes of a page that has been read have the digest in the journal."""
        self._ends: dict[bytes, Held] = {}
        """By the key of its page, each checkpoint whose bytes have the digest in the journal."""
        self._entered: set[bytes] = set()
        self.found = found
        named = {
            IndexSpace.FULL_COPY: list(contents.pages),
            IndexSpace.HOST: [page.home for page in contents.pages.values()],
            IndexSpace.SWA_COPY: [copy for end in contents.checkpoints.values() for copy in end.copies],
        }
        counts = {space: sum(states.values()) for space, states in book.counts().items() if space in named}
        taken = book.reserve(_TAKER, counts)
        others = {space: ids[~np.isin(ids, named[space])] for space, ids in taken.items()}
        book.cache(_TAKER, others)
        book.uncache(others)

    async def run(self) -> None:
        """Compare every page with its digest, in threads, and enter equal pages into the index, prompt by prompt.

        A defect ends the comparison, not the daemon: pages that were entered before stay, and every other page becomes free.
        """
        found, named = self.found, len(self._contents.pages)
        try:
            await self._compare()
        except Exception as error:
            found.refused_pages = named - found.restored_pages
            found.refused = (
                f"the comparison of kept pages has failed ({type(error).__name__}: {error}); please report it"
            )
            log.exception("kept_pools_refused", pages=found.refused_pages, reason=found.refused)
        found.waiting_pages, found.lost_pages = 0, named - found.restored_pages - found.refused_pages
        if _TAKER in self._book:
            self._lost(self._book.pages(_TAKER))
            self._book.free(_TAKER)
        log.info(
            "prefixes_restored",
            pages=found.restored_pages,
            bytes=found.restored_bytes,
            checkpoints=found.checkpoints,
            lost=found.lost_pages,
            seconds=found.seconds,
        )

    async def _compare(self) -> None:
        begun_s = time.monotonic()
        for keys, path in self._contents.prompts():
            unread = [page for page in path if page.key not in self._right]
            parts = (unread[at::DIGEST_THREADS] for at in range(DIGEST_THREADS))
            await asyncio.gather(*(asyncio.to_thread(self._read, part) for part in parts))
            self._enter(keys, path)
            waiting = len(self._contents.pages) - len(self._right)
            self.found.waiting_pages, self.found.seconds = waiting, round(time.monotonic() - begun_s, 3)

    def _read(self, batch: Sequence[Held]) -> None:
        for page in batch:
            self._right[page.key] = tuple(map(self._digest, page.sets)) == page.digests
            end = self._contents.checkpoints.get(page.key)
            if end is not None and tuple(map(self._digest, end.sets)) == end.digests:
                self._ends[page.key] = end

    def _enter(self, keys: Keys, path: Sequence[Held]) -> None:
        path = list(takewhile(lambda page: self._right[page.key], path))
        # Each prompt is entered from its start, so the new pages are its last ones.
        new = [page for page in path if page.key not in self._entered]
        start = len(path) - len(new)
        if not new:
            return
        pages: Pages = {IndexSpace.FULL_COPY: np.array([page.copies[0] for page in new], dtype=np.int32)}
        if new[0].home != NO_PAGE:
            pages[IndexSpace.HOST] = np.array([page.home for page in new], dtype=np.int32)
        there = [(at, self._ends[page.key]) for at, page in enumerate(new, start + 1) if page.key in self._ends]
        ends = {at: np.array(end.copies, dtype=np.int32) for at, end in there}
        try:
            entered = self._copies.insert(_TAKER, keys[: len(path)], start, pages, checkpoints=ends)
        except BridgeError as error:  # it contradicts a prompt that is cached already
            log.warning("prefix_not_restored", pages=len(new), reason=str(error))
            return
        self.found.restored_pages += entered
        self.found.restored_bytes += entered * self._digest.size_bytes(new[0].sets[0])
        self.found.checkpoints += len(ends)
        self._entered.update(page.key for page in new)
