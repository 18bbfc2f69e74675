"""What the kept pools hold, written down as it changes.

Owns: the journal's file, and when an entry is due. Must not know: the journal's form (`tier/journal.py`), files of pools, why pages
come and go, what a journal is good for (`restored_twins.py`).

That a page holds something is written once its digest is known, a little after it came: a thread reads it meanwhile. That it
holds nothing any more is written at once, before anybody else gets it. So the end of this process at any moment leaves a journal
that says nothing wrong, and less than there was at most by what was still being read.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import structlog
from crc32c import crc32c

from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind, PageIdArray
from kvbridge.kernels.digest import raw_checksums
from kvbridge.tier.journal import (
    ENTRY_BYTES,
    NO_PAGE,
    Contents,
    EntryKind,
    HeldCheckpoint,
    HeldPage,
    KeptHeader,
    gone,
    header_bytes,
)
from kvbridge.tier.keys import Keys
from kvbridge.tier.residence import Pages

log = structlog.get_logger(__name__)

PAGES_AT_ONCE = 32
"""Whose digests are computed between two looks at what has changed."""
_SPARE_ENTRIES = 4096
_OUTDATED = 4
"""The journal is written anew when it has so many times the entries that count, and some to spare."""
PageSet = tuple[tuple[IndexSpace, int], ...]
"""Pages whose bytes belong together."""


def page_set(twin: int, home: int) -> PageSet:
    """Return the pages that hold a page of a prompt: of twins, and of the home if there is one."""
    return (
        ((IndexSpace.FULL_TWIN, twin),) if home == NO_PAGE else ((IndexSpace.FULL_TWIN, twin), (IndexSpace.HOST, home))
    )


def checkpoint_sets(twins: Iterable[int]) -> tuple[PageSet, ...]:
    """Return the pages that hold a checkpoint, each by itself."""
    return tuple(((IndexSpace.SWA_TWIN, twin),) for twin in twins)


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


@dataclass(eq=False, slots=True)
class _Arrival:
    """A page, or a checkpoint, whose digests are being computed."""

    held: HeldPage | HeldCheckpoint
    sets: tuple[PageSet, ...]
    digests: tuple[int, ...] = ()


class TwinJournal:
    """The journal of one node's kept pools. Implements TwinWatcher; called from the event loop's thread only."""

    def __init__(self, path: Path, header: KeptHeader, digest: PageDigests, contents: Contents) -> None:
        """Begin a journal that says `contents`. Raises OSError when it cannot be written."""
        self._path, self._header, self._digest = path, header, digest
        self._pages = {twin: page.entry() for twin, page in contents.pages.items()}
        """The entries that count, by twin, in the order in which they came."""
        self._checkpoints: dict[int, bytes] = {}
        for checkpoint in contents.checkpoints.values():
            self._checkpoints |= checkpoint.entries()
        self._arriving: dict[tuple[IndexSpace, int], _Arrival] = {}
        self._queue: list[_Arrival] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="twin digests")
        self._loop = asyncio.get_running_loop()
        self._reading: asyncio.Future[None] | None = None
        self._descriptor = -1
        self._entries = 0
        self._write_whole()

    # ------------------------------------------------------------------------------------- TwinWatcher

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """See TwinWatcher."""
        twins, homes = pages[IndexSpace.FULL_TWIN].tolist(), pages.get(IndexSpace.HOST)
        for at, twin in enumerate(twins):
            if twin in self._pages:
                continue  # it was known before
            number = start + at
            home = NO_PAGE if homes is None else int(homes[at])
            parent = bytes(keys[number - 1]) if number else b""
            self._arrives(HeldPage(bytes(keys[number]), parent, number, twin, home, 0), (page_set(twin, home),))
        self._read_on()

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """See TwinWatcher."""
        twins = tuple(pages.tolist())
        if not self._checkpoints.keys() >= set(twins):
            self._arrives(HeldCheckpoint(bytes(key), twins, ()), checkpoint_sets(twins))
            self._read_on()

    def removed(self, pages: Pages) -> None:
        """See TwinWatcher."""
        said = b""
        kinds = {
            IndexSpace.FULL_TWIN: (self._pages, EntryKind.PAGE_GONE),
            IndexSpace.SWA_TWIN: (self._checkpoints, EntryKind.CHECKPOINT_GONE),
        }
        for space, (written, kind) in kinds.items():
            for twin in pages[space].tolist() if space in pages else ():
                self._arriving.pop((space, twin), None)
                if written.pop(twin, None) is not None:
                    said += gone([twin], kind)
        self._append(said)

    # ------------------------------------------------------------------------------------- its end

    async def finish(self, within_s: float) -> None:
        """Write down what is still being read, and the whole journal anew. What is not read within `within_s` is lost."""
        deadline_s = self._loop.time() + within_s
        while self._reading is not None and (left_s := deadline_s - self._loop.time()) > 0:
            await asyncio.wait({self._reading}, timeout=left_s)
        self._queue.clear()
        self._arriving.clear()
        self._write_whole()
        self.close()

    def close(self) -> None:
        """Write nothing more. Harmless when closed."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # ------------------------------------------------------------------------------------- inside

    def _arrives(self, held: HeldPage | HeldCheckpoint, sets: tuple[PageSet, ...]) -> None:
        arrival = _Arrival(held, sets)
        for pages in sets:
            self._arriving[pages[0]] = arrival
        self._queue.append(arrival)

    def _read_on(self) -> None:
        if self._reading is not None or not self._queue:
            return
        batch, self._queue = self._queue[:PAGES_AT_ONCE], self._queue[PAGES_AT_ONCE:]
        self._reading = self._loop.run_in_executor(self._pool, self._read, batch)
        self._reading.add_done_callback(lambda _: self._have_read(batch))

    def _read(self, batch: Sequence[_Arrival]) -> None:
        for arrival in batch:
            arrival.digests = tuple(self._digest(pages) for pages in arrival.sets)

    def _have_read(self, batch: Sequence[_Arrival]) -> None:
        self._reading = None
        said = b""
        for arrival in batch:
            if not arrival.digests or any(self._arriving.get(pages[0]) is not arrival for pages in arrival.sets):
                continue  # it has gone meanwhile
            for pages in arrival.sets:
                del self._arriving[pages[0]]
            said += self._now_held(arrival)
        self._append(said)
        self._read_on()

    def _now_held(self, arrival: _Arrival) -> bytes:
        if isinstance(arrival.held, HeldPage):
            page = replace(arrival.held, digest=arrival.digests[0])
            entry = self._pages[page.twin] = page.entry()
            return entry
        entries = replace(arrival.held, digests=arrival.digests).entries()
        self._checkpoints |= entries
        return b"".join(entries.values())

    def _append(self, said: bytes) -> None:
        if not said or self._descriptor < 0:
            return
        try:
            _write_all(self._descriptor, said)
        except OSError as error:
            self._give_up(error)
            return
        self._entries += len(said) // ENTRY_BYTES
        if self._entries > _OUTDATED * (len(self._pages) + len(self._checkpoints)) + _SPARE_ENTRIES:
            self._write_whole()

    def _write_whole(self) -> None:
        """Write a journal of what counts beside the old one, and put it in its place."""
        if self._entries < 0:
            return
        entries = [*self._pages.values(), *self._checkpoints.values()]
        fresh = self._path.with_suffix(".journal.new")
        try:
            fresh.unlink(missing_ok=True)
            descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND, 0o600)
            try:
                _write_all(descriptor, header_bytes(self._header) + b"".join(entries))
                fresh.replace(self._path)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            self._give_up(error)
            return
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._entries = descriptor, len(entries)

    def _give_up(self, error: OSError) -> None:
        """A journal that does not say what has gone would be wrong: better none."""
        log.error("kept_pools_journal_lost", file=str(self._path), reason=str(error))
        try:
            self._path.unlink(missing_ok=True)
        except OSError as kept:  # another user's; digests tell what of it is wrong
            log.error("kept_pools_journal_not_removed", file=str(self._path), reason=str(kept))
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = self._entries = -1


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
