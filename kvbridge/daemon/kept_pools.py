"""The pools in host memory that outlive a daemon: those that it finds, and those that it leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError, IntegrityError, RegistrationError
from kvbridge.core.ids import IndexSpace, Pages
from kvbridge.daemon.kept_journal import (
    NO_PAGE,
    Contents,
    Held,
    KeptFile,
    KeptHeader,
    PageDigests,
    read_journal,
)
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner
from kvbridge.pool.memory.extent import Progress
from kvbridge.pool.memory.layout import Placement
from kvbridge.pool.memory.leftovers import KeptFiles
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.tier.host_copies import HostCopies
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

DIGEST_THREADS = 2
_TAKER = Owner(NO_ROOM, 0)
"""Has all pages that a journal names until it is known what they hold; copies are counted from 1."""


@dataclass(slots=True)
class Restored:
    """The outcome for the pages that a daemon finds in kept pools, by the names of its status (`KeptPoolsStatus`)."""

    waiting_pages: int = 0
    restored_pages: int = 0
    restored_bytes: int = 0
    checkpoints: int = 0
    lost_pages: int = 0
    refused_pages: int = 0
    refused: str = ""
    seconds: float = 0.0


@dataclass
class KeptPools:
    """The kept pools of a node, for one daemon."""

    files: KeptFiles
    header: KeptHeader
    """Header of this daemon's journal; `files` are filled in as pools come."""
    wait_s: float
    """Time within which processes of the daemon before let go."""
    found: Contents = field(default_factory=Contents)
    """Contents of the pools by the journal of the daemon before, as far as they can be reused."""
    restored: Restored = field(default_factory=Restored)
    _old: dict[str, Path] = field(default_factory=dict)
    """The files that are to be taken over, by what their names have after the incarnation."""

    @classmethod
    def read(cls, files: KeptFiles, header: KeptHeader, wait_s: float) -> KeptPools:
        """Read what there is, and remove it when this daemon cannot reuse it. `files` are this process's."""
        kept = cls(files, header, wait_s)
        try:
            before, kept.found = read_journal(files.read_journal())
            why_not = before.why_not(header)
            kept._old = {} if why_not else _same_files(files, before)
        except FileNotFoundError:
            files.remove_pools()
            return kept
        except (IntegrityError, OSError) as error:
            why_not = str(error)
        if why_not:
            kept.refuse(why_not)
        else:
            kept.restored.waiting_pages = len(kept.found.pages)
            log.info("kept_pools_found", of=before.incarnation, pages=len(kept.found.pages), damaged=kept.found.damaged)
        return kept

    def refuse(self, why: str) -> None:
        """Have the pools made anew: the ones that there are cannot be reused."""
        pages = len(self.found.pages)
        log.warning("kept_pools_refused", pages=pages, reason=why)
        self.restored = Restored(refused_pages=pages, refused=why)
        self.found, self._old = Contents(), {}
        self.files.remove_pools(besides=self.header.incarnation)

    def pool(self, placement: Placement, name: str, on_progress: Progress) -> MemoryPool:
        """Take a pool over, or make it. Raises RegistrationError when it can neither be had nor made."""
        prefix = self.files.new_path(f"{self.header.incarnation}.{name}")
        pool = self._take_over(placement, name, prefix, on_progress) if self._old else None
        if pool is None:
            pool = MemoryPool.in_files(placement, prefix.parent, prefix.name, on_progress=on_progress)
        pool.leave()  # the end of this process, at any moment, leaves what the journal says
        made = tuple(
            KeptFile(name=f"{name}.{planned.name}", length_bytes=planned.length_bytes, inode=mapping.path.stat().st_ino)
            for planned, mapping in zip(placement.mappings, pool.mappings, strict=True)
        )
        self.header = self.header.model_copy(update={"files": (*self.header.files, *made)})
        return pool

    def _take_over(self, placement: Placement, name: str, prefix: Path, on_progress: Progress) -> MemoryPool | None:
        try:
            old = [self._old[f"{name}.{planned.name}"] for planned in placement.mappings]
            return MemoryPool.taken_over(placement, old, prefix, wait_s=self.wait_s, on_progress=on_progress)
        except (KeyError, RegistrationError) as error:
            self.refuse(str(error))
            return None

    def close(self) -> None:
        """Give them up, behind the pools themselves; without a journal they are removed. Harmless when closed."""
        self.files.close(keep=self.files.journal.exists())


def _same_files(files: KeptFiles, before: KeptHeader) -> dict[str, Path]:
    """Return the files that a journal is about. Raises IntegrityError when one is missing, or is another."""
    there = files.pools()
    found = {}
    for wanted in before.files:
        for path in there.get(wanted.name, ()):
            status = path.stat()
            if (status.st_ino, status.st_size) == (wanted.inode, wanted.length_bytes):
                found[wanted.name] = path
        if wanted.name not in found:
            raise IntegrityError(f"its file {wanted.name} of {wanted.length_bytes} bytes is gone")
    return found


class RestoredCopies:
    """The pages that a journal names, on their way into the index. Called from the event loop's thread only.

    A page is believed when it holds, byte for byte, what the journal says. Reading some GiB takes a second, so the daemon serves
    meanwhile: pages that are not compared yet are nobody's.
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
        """Take these pages, of a book of which all is free. `lost` is told of those that will not come back.

        `found` says at any moment how far it is.
        """
        self._book, self._copies, self._digest, self._contents, self._lost = book, copies, digest, contents, lost
        self._right: dict[bytes, bool] = {}
        """Whether the pages that have been read hold what the journal says, by their keys."""
        self._ends: dict[bytes, Held] = {}
        """Checkpoints that hold what the journal says, by the keys of their pages."""
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
        """Compare every page with its digest, in threads, and let in what is right, prompt by prompt.

        A defect ends the comparison, not the daemon: what was let in before stays, and every other page is free.
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
