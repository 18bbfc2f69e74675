"""What the daemon before has left in kept pools, compared with its digests and let into the index.

Owns: which pages are believed after a restart, and the order in which they come back. Must not know: the journal's form, files.

A page is believed when it holds, byte for byte, what the journal says. Reading all of them takes a second for some GiB, so the
daemon serves meanwhile: what is not compared yet is nobody's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.kept_pools import Restored
from kvbridge.daemon.twin_journal import PAGES_AT_ONCE, PageDigests, checkpoint_sets, page_set
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner
from kvbridge.tier.journal import NO_PAGE, Contents, HeldPage
from kvbridge.tier.keys import Keys
from kvbridge.tier.residence import Pages
from kvbridge.tier.twins import Twins

log = structlog.get_logger(__name__)

DIGEST_THREADS = 2
_TAKER = Owner(NO_ROOM, 0)
"""Has all pages that a journal names until it is known what they hold; copies are counted from 1."""


class RestoredTwins:
    """The pages that a journal names, on their way into the index. Called from the event loop's thread only."""

    def __init__(
        self,
        book: PageBook,
        twins: Twins,
        digest: PageDigests,
        contents: Contents,
        found: Restored,
        *,
        lost: Callable[[Pages], None],
    ) -> None:
        """Take these pages, of a book of which all is free. `lost` is told of those that will not come back.

        `found` says at any moment how far it is.
        """
        self._book, self._twins, self._digest, self._contents, self._lost = book, twins, digest, contents, lost
        self._right: dict[int, bool] = {}
        """Of the pages that have been read, by twin, those that hold what the journal says."""
        self._right_ends: set[bytes] = set()
        """Of checkpoints, by their key."""
        self._entered: set[bytes] = set()
        self.found = found
        counts = {space: sum(states.values()) for space, states in book.counts().items()}
        self._beyond = self._leave_out_beyond(counts)
        """How many pages of prompts the journal names that there are not."""
        named = _named(contents)
        taken = book.reserve(_TAKER, {space: counts[space] for space in named if space in counts})
        self._free({space: ids[~np.isin(ids, named[space])] for space, ids in taken.items()})

    async def run(self) -> None:
        """Compare every page with its digest, in threads, and let in what is right, prompt by prompt.

        A defect ends the comparison, not the daemon: what was let in before stays, and every other page is free.
        """
        found = self.found
        try:
            await self._compare()
        except Exception as error:
            found.refused = len(self._contents.pages) - found.pages
            found.why_not = (
                f"the comparison of kept pages has failed ({type(error).__name__}: {error}); please report it"
            )
            log.exception("kept_pools_refused", pages=found.refused, reason=found.why_not)
        found.waiting = 0
        found.lost = self._beyond + len(self._contents.pages) - found.pages - found.refused
        if _TAKER in self._book:
            self._lost(self._book.pages(_TAKER))
            self._book.free(_TAKER)
        log.info(
            "prefixes_restored",
            pages=found.pages,
            bytes=found.bytes,
            checkpoints=found.checkpoints,
            lost=found.lost,
            seconds=found.seconds,
        )

    async def _compare(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="kept pools") as pool:
            for keys, path in self._contents.prompts():
                unread = [page for page in path if page.twin not in self._right]
                batches = [unread[at : at + PAGES_AT_ONCE] for at in range(0, len(unread), PAGES_AT_ONCE)]
                await asyncio.gather(*(loop.run_in_executor(pool, self._read, batch) for batch in batches))
                self._enter(keys, path)
                self.found.waiting = len(self._contents.pages) - len(self._right)
                self.found.seconds = round(loop.time() - begun_s, 3)

    def _leave_out_beyond(self, counts: Mapping[IndexSpace, int]) -> int:
        beyond = self._contents.leave_out_beyond(counts)
        pages, checkpoints = len(beyond[IndexSpace.FULL_TWIN]), len(beyond[IndexSpace.SWA_TWIN])
        if pages or checkpoints:
            log.warning(
                "kept_pages_beyond_pools",
                pages=pages,
                checkpoint_pages=checkpoints,
                reason="the journal names pages that the pools do not have; they are left out. If nobody has edited the journal, "
                "please report it",
            )
            self._lost({space: np.array(twins, dtype=np.int64) for space, twins in beyond.items()})
        return pages

    def _read(self, batch: Sequence[HeldPage]) -> None:
        for page in batch:
            self._right[page.twin] = self._digest(page_set(page.twin, page.home)) == page.digest
            end = self._contents.checkpoints.get(page.key)
            if end is not None and tuple(map(self._digest, checkpoint_sets(end.twins))) == end.digests:
                self._right_ends.add(page.key)

    def _enter(self, keys: Keys, path: Sequence[HeldPage]) -> None:
        right = next((at for at, page in enumerate(path) if not self._right[page.twin]), len(path))
        start = next((at for at, page in enumerate(path[:right]) if page.key not in self._entered), right)
        if start == right:
            return
        new = path[start:right]
        pages: Pages = {IndexSpace.FULL_TWIN: np.array([page.twin for page in new], dtype=np.int32)}
        if new[0].home != NO_PAGE:
            pages[IndexSpace.HOST] = np.array([page.home for page in new], dtype=np.int32)
        ends = {
            page.depth + 1: np.array(self._contents.checkpoints[page.key].twins, dtype=np.int32)
            for page in new
            if page.key in self._right_ends
        }
        try:
            entered = self._twins.insert(_TAKER, keys[:right], start, pages, checkpoints=ends)
        except BridgeError as error:  # it contradicts a prompt that is cached already
            log.warning("prefix_not_restored", pages=len(new), reason=str(error))
            return
        self.found.pages += entered
        self.found.bytes += entered * self._digest.size_bytes(page_set(new[0].twin, new[0].home))
        self.found.checkpoints += len(ends)
        self._entered.update(page.key for page in new)

    def _free(self, pages: Pages) -> None:
        some = {space: ids for space, ids in pages.items() if len(ids)}
        self._book.cache(_TAKER, some)
        self._book.uncache(some)


def _named(contents: Contents) -> dict[IndexSpace, list[int]]:
    """The pages that a journal names, and those of a checkpoint: each once, of each space that there is."""
    pages = contents.pages.values()
    return {
        IndexSpace.FULL_TWIN: [page.twin for page in pages],
        IndexSpace.HOST: [page.home for page in pages if page.home != NO_PAGE],
        IndexSpace.SWA_TWIN: [twin for end in contents.checkpoints.values() for twin in end.twins],
    }
