"""The journal of kept pools: an entry of 64 bytes for each page of twins, at the place of that page, that says what it holds.

An entry is written once the digest of its page is known, and wiped before the page is used again. So what the end of a process
leaves, at any moment, is right as it stands. Each entry has a checksum: a damaged one is left out, and the pages after it in a
prompt with it. Should an entry not have been wiped, the page's digest tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import structlog
from crc32c import crc32c
from pydantic import Field, ValidationError

from kvbridge.core.errors import IntegrityError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, PageIdArray, Positive
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.kernels.digest import raw_checksums
from kvbridge.tier.keys import KEY_BYTES, Keys
from kvbridge.tier.residence import Pages

log = structlog.get_logger(__name__)

PAGES_AT_ONCE = 32
"""Pages whose digests are computed between two looks at what has changed."""
ENTRY_BYTES = 64
KEPT_SPACES = (IndexSpace.FULL_TWIN, IndexSpace.SWA_TWIN, IndexSpace.HOST)
NO_PAGE = -1
_MAGIC = b"kvbridge twins 2"
_NUMBER = struct.Struct("<I")
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}siIQHH8x")
"""Key, parent's key, home, digest, serial number, place among the pages of a checkpoint, their number; a checksum follows."""
FIRST = bytes(KEY_BYTES)
"""The parent's key of a prompt's first page."""

PageSet = tuple[tuple[IndexSpace, int], ...]
"""Pages whose bytes have one digest."""


class KeptFile(FrozenModel):
    """A file of the pools, as the kernel knows it."""

    name: Annotated[str, Field(max_length=255)]
    length_bytes: Positive
    inode: NonNegative


class KeptHeader(FrozenModel):
    """The pools that a journal is about. All but incarnation and files must be equal for another process to go on with them."""

    incarnation: Annotated[str, Field(max_length=64)]
    """Incarnation of the process that has written it."""
    fingerprint: Annotated[str, Field(max_length=200)]
    """Fingerprint of the geometry."""
    model_identity: ModelIdentity
    ranks: tuple[str, ...]
    """The ranks whose lanes and layers the pages hold."""
    layout: Annotated[str, Field(max_length=64)]
    """A digest of where every region lies, with all sizes."""
    page_counts: dict[IndexSpace, NonNegative]
    """Page counts of the spaces of twins, and of the home if there is one."""
    files: tuple[KeptFile, ...]

    def why_not(self, wanted: KeptHeader) -> str:
        """Why a process that wants pools of this form cannot go on with those of this journal; empty when it can."""
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
    "page_counts": "pools.host, tier.host",
}


class HeldPage(NamedTuple):
    """A page of twins that holds a page of a prompt, and the page of the home that belongs to it."""

    twin: int
    key: bytes
    parent: bytes
    """The key of the page before it; zeros for a prompt's first."""
    home: int
    """NO_PAGE where there is no home."""
    digest: int = 0

    @property
    def sets(self) -> tuple[PageSet, ...]:
        """The pages that are to be digested."""
        twin = (IndexSpace.FULL_TWIN, self.twin)
        return ((twin,) if self.home == NO_PAGE else (twin, (IndexSpace.HOST, self.home)),)


class HeldCheckpoint(NamedTuple):
    """The pages of twins that hold the windows and states at the end of a page, in their order."""

    key: bytes
    twins: tuple[int, ...]
    digests: tuple[int, ...] = ()

    @property
    def sets(self) -> tuple[PageSet, ...]:
        """The pages that are to be digested."""
        return tuple(((IndexSpace.SWA_TWIN, twin),) for twin in self.twins)


@dataclass(slots=True)
class Contents:
    """The contents of a journal."""

    pages: dict[int, HeldPage] = field(default_factory=dict)
    """By twin, in the order in which they came."""
    checkpoints: dict[bytes, HeldCheckpoint] = field(default_factory=dict)
    """By the key of the page at whose end they are."""
    damaged: int = 0
    """Entries that were left out."""

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
            while path[-1].parent in by_key and len(path) <= len(by_key):
                path.append(by_key[path[-1].parent])
            if path[-1].parent == FIRST:
                path.reverse()
                found.append((Keys(b"".join(each.key for each in path)), path))
        return found


def header_bytes(header: KeptHeader) -> bytes:
    """Return what a journal begins with: a multiple of an entry's length."""
    text = header.model_dump_json().encode()
    head = _MAGIC + _NUMBER.pack(len(text)) + _NUMBER.pack(crc32c(text)) + text
    return head + bytes(-len(head) % ENTRY_BYTES)


def read_header(data: bytes) -> tuple[KeptHeader, int]:
    """Return the header of a journal, and where its entries begin. Raises IntegrityError for bytes that are none."""
    start = len(_MAGIC) + 2 * _NUMBER.size
    if len(data) < start or not data.startswith(_MAGIC):
        raise IntegrityError("it is no journal of this release")
    [length], [checksum] = _NUMBER.unpack_from(data, start - 8), _NUMBER.unpack_from(data, start - 4)
    text = data[start : start + length]
    if len(text) != length or crc32c(text) != checksum:
        raise IntegrityError("the header of the journal is damaged")
    try:
        header = KeptHeader.model_validate_json(text)
    except ValidationError as error:
        raise IntegrityError(f"the header of the journal is none of this release: {error}") from error
    return header, start + length + -(start + length) % ENTRY_BYTES


def read_journal(data: bytes) -> tuple[KeptHeader, Contents]:
    """Return the header of a journal, and what its entries say: of a key as of a home the later one counts.

    What is damaged or cut off is left out. Raises IntegrityError as `read_header`.
    """
    header, start = read_header(data)
    contents = Contents()
    homes = range(header.page_counts[IndexSpace.HOST]) if IndexSpace.HOST in header.page_counts else (NO_PAGE,)
    pages: list[tuple[int, HeldPage]] = []
    ends: dict[bytes, dict[tuple[int, int], tuple[int, int]]] = {}
    for space, twin, entry in _entries(data, header.page_counts, start):
        key, parent, home, digest, serial, place, places = _ENTRY.unpack_from(entry)
        if entry != _sealed(entry[: _ENTRY.size]) or (space is IndexSpace.FULL_TWIN and home not in homes):
            contents.damaged += 1
        elif space is IndexSpace.FULL_TWIN:
            pages.append((serial, HeldPage(twin, key, parent, home, digest)))
        else:
            ends.setdefault(key, {})[place, places] = twin, digest
    latest: dict[bytes | int, int] = {}
    for _, page in sorted(pages):
        contents.pages[page.twin] = page
        latest[page.key] = latest[page.home] = page.twin
    latest.pop(NO_PAGE, None)
    for page in list(contents.pages.values()):
        if not latest[page.key] == page.twin == latest.get(page.home, page.twin):
            del contents.pages[page.twin]
    for key, found in ends.items():
        if sorted(found) == [(place, len(found)) for place in range(len(found))]:
            twins, digests = zip(*(found[place] for place in sorted(found)), strict=True)
            contents.checkpoints[key] = HeldCheckpoint(key, twins, digests)
    return header, contents


def _entries(data: bytes, page_counts: Mapping[IndexSpace, int], start: int) -> Iterator[tuple[IndexSpace, int, bytes]]:
    """Yield every entry that is there, whole or not, with its page of twins."""
    for space, base in entry_places(page_counts, start)[0].items():
        for twin in range(page_counts.get(space, 0)):
            entry = data[base + twin * ENTRY_BYTES : base + (twin + 1) * ENTRY_BYTES]
            if any(entry):
                yield space, twin, entry.ljust(ENTRY_BYTES, b"\xff")


def entries_of(
    held: HeldPage | HeldCheckpoint, digests: tuple[int, ...], serial: int
) -> Iterator[tuple[tuple[IndexSpace, int], bytes]]:
    """Yield the entries that say what is held, each with its page of twins; a later one has a higher serial number."""
    parent, home = (held.parent, held.home) if isinstance(held, HeldPage) else (FIRST, NO_PAGE)
    for place, (pages, digest) in enumerate(zip(held.sets, digests, strict=True)):
        yield pages[0], _sealed(_ENTRY.pack(held.key, parent, home, digest, serial, place, len(digests)))


def entry_places(page_counts: Mapping[IndexSpace, int], start: int) -> tuple[dict[IndexSpace, int], int]:
    """Return where the entries of each space begin, and where the last ones end."""
    middle = start + page_counts[IndexSpace.FULL_TWIN] * ENTRY_BYTES
    bases = {IndexSpace.FULL_TWIN: start, IndexSpace.SWA_TWIN: middle}
    return bases, middle + page_counts.get(IndexSpace.SWA_TWIN, 0) * ENTRY_BYTES


def _sealed(body: bytes) -> bytes:
    return body + _NUMBER.pack(crc32c(body))


class PageDigests:
    """Digests of pages in memory of this process. Any thread may ask."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._of_space: dict[IndexSpace, list[Region]] = {}
        for region in regions:
            self._of_space.setdefault(region.space, []).append(region)

    def __call__(self, pages: PageSet) -> int:
        """Return one digest of all bytes of some pages, which nobody writes meanwhile."""
        found: list[tuple[int, int]] = []
        for space, page in pages:
            for region in self._of_space[space]:
                extent, within = divmod(page, region.pages_per_extent)
                start = region.extent_addresses[extent] + within * region.page_stride_bytes
                if found and sum(found[-1]) == start:
                    found[-1] = (found[-1][0], found[-1][1] + region.page_bytes)
                else:
                    found.append((start, region.page_bytes))
        starts, lengths = np.array(found, dtype=np.uint64).T
        return int(crc32c(raw_checksums(starts, lengths.astype(np.int64), MemoryKind.DRAM).tobytes()))

    def size_bytes(self, pages: PageSet) -> int:
        """Return how many bytes these pages have."""
        return sum(region.page_bytes for space, _ in pages for region in self._of_space[space])


@dataclass(eq=False)
class _Arrival:
    """Something that is being read."""

    held: HeldPage | HeldCheckpoint
    digests: tuple[int, ...] = ()


class TwinJournal:
    """Writes a journal. Watches twins. Called from the event loop's thread only."""

    def __init__(self, path: Path, header: KeptHeader, digest: PageDigests, contents: Contents) -> None:
        """Begin a journal that says `contents`, in place of the one before. Where it cannot be made there is none."""
        self._digest = digest
        self._serial = 0
        self._written: set[tuple[IndexSpace, int]] = set()
        self._arriving: dict[tuple[IndexSpace, int], _Arrival] = {}
        self._queue: list[_Arrival] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="twin digests")
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Future[None] | None = None
        self._map: mmap.mmap | None = None
        head, fresh = header_bytes(header), path.with_suffix(".journal.new")
        self._bases, length_bytes = entry_places(header.page_counts, len(head))
        try:
            fresh.unlink(missing_ok=True)
            self._map = _new_file(fresh, length_bytes)
            self._map[: len(head)] = head
            for page in contents.pages.values():
                self._write(page, (page.digest,))
            for checkpoint in contents.checkpoints.values():
                self._write(checkpoint, checkpoint.digests)
            fresh.replace(path)
        except OSError as error:
            log.error("kept_pools_journal_lost", file=str(path), reason=str(error))
            self._map = None
            with contextlib.suppress(OSError):  # another user's; digests tell what of it is wrong
                path.unlink(missing_ok=True)

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """Take in pages of twins, and their homes: they are written down when they have been read."""
        homes = pages.get(IndexSpace.HOST)
        for at, twin in enumerate(pages[IndexSpace.FULL_TWIN].tolist()):
            number = start + at
            parent = bytes(keys[number - 1]) if number else FIRST
            self._arrives(HeldPage(twin, bytes(keys[number]), parent, NO_PAGE if homes is None else int(homes[at])))
        self._read_on()

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """Take in the pages of a checkpoint likewise."""
        self._arrives(HeldCheckpoint(bytes(key), tuple(pages.tolist())))
        self._read_on()

    def removed(self, pages: Pages) -> None:
        """Wipe the entries of these twins."""
        for space, twins in pages.items():
            for twin in twins.tolist():
                self._arriving.pop((space, twin), None)
                if (space, twin) in self._written:
                    self._written.discard((space, twin))
                    self._put((space, twin), bytes(ENTRY_BYTES))

    async def finish(self, within_s: float) -> None:
        """Write down what is still being read. What is not read within `within_s` is lost."""
        deadline_s = self._loop.time() + within_s
        while self._reading is not None and (left_s := deadline_s - self._loop.time()) > 0:
            await asyncio.wait({self._reading}, timeout=left_s)
        self.close()

    def close(self) -> None:
        """Write nothing more. Harmless when closed."""
        self._queue.clear()
        self._arriving.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._map = None

    def _arrives(self, held: HeldPage | HeldCheckpoint) -> None:
        if all(pages[0] in self._written for pages in held.sets):
            return  # it was known before
        arrival = _Arrival(held)
        self._arriving |= {pages[0]: arrival for pages in held.sets}
        self._queue.append(arrival)

    def _read_on(self) -> None:
        if self._reading is not None or not self._queue:
            return
        batch, self._queue = self._queue[:PAGES_AT_ONCE], self._queue[PAGES_AT_ONCE:]
        self._reading = self._loop.run_in_executor(self._pool, self._read, batch)
        self._reading.add_done_callback(lambda _: self._have_read(batch))

    def _read(self, batch: Sequence[_Arrival]) -> None:
        for arrival in batch:
            arrival.digests = tuple(self._digest(pages) for pages in arrival.held.sets)

    def _have_read(self, batch: Iterable[_Arrival]) -> None:
        self._reading = None
        for arrival in batch:
            places = [pages[0] for pages in arrival.held.sets]
            if arrival.digests and all(self._arriving.get(place) is arrival for place in places):
                for place in places:
                    del self._arriving[place]
                self._write(arrival.held, arrival.digests)
        self._read_on()

    def _write(self, held: HeldPage | HeldCheckpoint, digests: tuple[int, ...]) -> None:
        self._serial += 1
        for place, entry in entries_of(held, digests, self._serial):
            self._put(place, entry)
            self._written.add(place)

    def _put(self, place: tuple[IndexSpace, int], entry: bytes) -> None:
        if self._map is not None:
            at = self._bases[place[0]] + place[1] * ENTRY_BYTES
            self._map[at : at + ENTRY_BYTES] = entry


def _new_file(path: Path, length_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length_bytes)  # else a write after memory ran out would be a SIGBUS
        return mmap.mmap(descriptor, length_bytes)
    finally:
        os.close(descriptor)
