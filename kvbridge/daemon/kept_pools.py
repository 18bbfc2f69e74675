"""The pages of kept pools: their digests, the journal that this daemon writes, and the pages of the daemon before.

An entry of the journal is written once the digest of its page is known, and wiped before the page is used again. The journal that
the end of a process leaves, at any moment, is right.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import structlog
from crc32c import crc32c

from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind, PageIdArray, Pages
from kvbridge.daemon.kept_journal import (
    ENTRY_BYTES,
    FIRST,
    NO_PAGE,
    Contents,
    Held,
    KeptHeader,
    Place,
    entry_bases,
    header_bytes,
)
from kvbridge.kernels.digest import raw_checksums
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook
from kvbridge.tier.host_copies import HostCopies
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

PAGES_AT_ONCE = 32
"""Pages whose digests are computed between two checks of what has changed."""
DIGEST_THREADS = 2
_TAKER = Owner(NO_ROOM, 0)
"""Owner of all pages that a journal names, until they have been compared. Owners of host copies are counted from 1."""


class PageDigests:
    """Digests of pages in memory of this process. Any thread may ask."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._of_space: dict[IndexSpace, list[Region]] = {}
        for region in regions:
            self._of_space.setdefault(region.space, []).append(region)

    def __call__(self, pages: Sequence[Place]) -> int:
        """Return one digest of all bytes of some pages, which must not be written meanwhile."""
        found = [
            (
                region.extent_addresses[page // region.pages_per_extent]
                + page % region.pages_per_extent * region.page_stride_bytes,
                region.page_bytes,
            )
            for space, page in pages
            for region in self._of_space[space]
        ]
        starts, lengths = np.array(found, dtype=np.uint64).T
        return int(crc32c(raw_checksums(starts, lengths.astype(np.int64), MemoryKind.DRAM).tobytes()))

    def size_bytes(self, pages: Sequence[Place]) -> int:
        """Return the number of bytes of these pages."""
        return sum(region.page_bytes for space, _ in pages for region in self._of_space[space])


class KeptJournal:
    """Writes the journal while it watches the host copies. Called from the event loop's thread only."""

    def __init__(self, path: Path, header: KeptHeader, digest: PageDigests, contents: Contents) -> None:
        """Begin a journal with `contents`, in place of the one before. A journal that cannot be made is logged, and missing."""
        self._digest = digest
        self._serial = 0
        self._written: set[Place] = set()
        self._arriving: dict[Place, Held] = {}
        """By host copy, the pages that are being read, or will be."""
        self._queue: list[Held] = []
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
            with contextlib.suppress(OSError):  # another user's; digests tell what of it is wrong
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

    A page is used when its bytes have the digest in the journal. Reading some GiB takes a second, so the daemon serves meanwhile:
    pages that are not compared yet are used by nobody.
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
        """Take these pages from a book whose pages are all free. `lost` is called with those that will not come back.

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
            self.found.waiting_pages = len(self._contents.pages) - len(self._right)
            self.found.seconds = round(time.monotonic() - begun_s, 3)

    def _read(self, batch: Sequence[Held]) -> None:
        for page in batch:
            self._right[page.key] = self._is_right(page)
            end = self._contents.checkpoints.get(page.key)
            if end is not None and self._is_right(end):
                self._ends[page.key] = end

    def _is_right(self, held: Held) -> bool:
        return tuple(map(self._digest, held.sets)) == held.digests

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
        ends = {
            at: np.array(self._ends[page.key].copies, dtype=np.int32)
            for at, page in enumerate(new, start + 1)
            if page.key in self._ends
        }
        try:
            entered = self._copies.insert(_TAKER, keys[: len(path)], start, pages, checkpoints=ends)
        except BridgeError as error:  # it contradicts a prompt that is cached already
            log.warning("prefix_not_restored", pages=len(new), reason=str(error))
            return
        self.found.restored_pages += entered
        self.found.restored_bytes += entered * self._digest.size_bytes(new[0].sets[0])
        self.found.checkpoints += len(ends)
        self._entered.update(page.key for page in new)
