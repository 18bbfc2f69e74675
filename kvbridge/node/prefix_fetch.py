"""One fetch of a prompt's pages from the store below host memory.

Fetched objects go to host pages that are reserved for them, all or nothing, and enter the index only when the store's process has
compared every byte. A get that has not ended in time keeps its pages until it ends, by the store's word or with the store's
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import TYPE_CHECKING

import numpy as np
import structlog

from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import Pages
from kvbridge.pool.accounts.book import Owner, PageState
from kvbridge.tier.keys import Keys
from kvbridge.tier.stores.client import Operation, StoreClient
from kvbridge.tier.stores.objects import BATCH_LIMIT, Outcome, Verb, linked, part_keys

if TYPE_CHECKING:
    from kvbridge.node.stored_prefixes import StoredPrefixes

log = structlog.get_logger(__name__)

PAGES, CHECKPOINTS = 0, 1
"""Forms of objects, by their number: a page of a prompt, and the windows and states at the end of one."""
ORDER_PAGES = 16
"""Objects of one order to the store."""
GETS_AT_ONCE = 2
"""Gets of one prompt that are under way at once: a store that is too slow fails so few in a row that its breaker stays closed."""


@dataclass(eq=False)
class _Get:
    """Objects of a prompt that are fetched, and their pages."""

    form: int
    owner: Owner
    start: int
    """Pages: the index of the first. Checkpoint: the number of pages before it."""
    keys: Keys
    pages: Pages
    operation: Operation | None = None
    """None: the store was not asked."""
    hits: int = 0
    """How many of the first objects have come whole."""

    @property
    def is_whole(self) -> bool:
        return self.hits == len(self.keys)


class PrefixFetch:
    """Fetches the pages of one prompt that only the store has, for at most `tier.prefetch_s` from now on."""

    def __init__(self, stored: StoredPrefixes, client: StoreClient, keys: Keys, have: int) -> None:
        """`have`: how many pages of these keys are usable here already."""
        self._stored, self._client, self._keys, self._have = stored, client, keys, have
        self._drops = stored.drops
        self._until_s = stored.clock() + stored.settings.prefetch_s

    async def run(self) -> None:
        """Fetch the pages of the prompt that the store has, and count the outcome. Raises only when it is cancelled."""
        stored, have = self._stored, self._have
        stop, came, is_defect = have, 0, False
        try:
            stop = await self._stop()
            if stop > have:
                came = await self._bring(self._keys[:stop])
        except Exception:  # a fetch only saves a request time, so no request fails by it
            is_defect = True
            log.exception("prefix_fetch_failed", wanted_pages=stop - have)
        finally:
            limit_s = stored.settings.prefetch_s
            seconds = limit_s - self._left_s
            is_late = seconds > 0.99 * limit_s  # timers are as exact as the loop's clock
            outcome = "late" if is_late else "part" if came else "nothing"
            if is_defect:
                outcome = "failed"
            elif came and stored.usable(self._keys) >= stop:
                outcome = "found"
            stored.prefetches[outcome] += 1
            stored.fetched_pages += came
            log.debug("prefix_fetched", outcome=outcome, wanted_pages=stop - have, pages=came, seconds=seconds)

    @property
    def _left_s(self) -> float:
        return self._until_s - self._stored.clock()

    async def _stop(self) -> int:
        """Return how far the store seems to have the pages that are missing here; `have` when they would be of no use."""
        keys, have = self._keys, self._have
        stop, links, found = self._stored.cache.known(keys), linked(keys), BATCH_LIMIT
        while stop < len(keys) and found == BATCH_LIMIT:
            some = links[stop : stop + BATCH_LIMIT]
            found = len(list(takewhile(bool, await self._present(PAGES, some))))
            stop += found
        if not self._stored.has_checkpoints:
            return stop
        first = max(have, stop - BATCH_LIMIT)
        ends = await self._present(CHECKPOINTS, keys[first:stop]) if stop > first else []
        return max((first + at + 1 for at, is_there in enumerate(ends) if is_there), default=have)

    async def _present(self, form: int, keys: Keys) -> list[bool]:
        left_s = self._left_s
        if left_s <= 0:
            return []
        # The store may drop pages before its answer is here, so pages that are to be dropped are looked up before it is asked.
        wanted = [form == CHECKPOINTS or key not in self._stored.to_forget for key in keys]
        found = (await self._client.begin(Verb.HAS, form, keys, timeout_s=left_s)).outcomes
        return [is_wanted and one is Outcome.PRESENT for is_wanted, one in zip(wanted, found, strict=True)]

    async def _bring(self, keys: Keys) -> int:
        """Fetch the pages of these keys that the host lacks; return how many are new."""
        stored = self._stored
        pinned = stored.copies.pin(keys)
        gets: list[_Get] = []
        try:
            gets = self._reserve(keys, len(pinned))
            await self._get_all(gets)
        finally:
            try:
                is_wanted = self._drops == stored.drops and not stored.dropping
                came = self._keep(gets, keys, is_wanted=is_wanted)
            finally:
                stored.copies.unpin(pinned)
        return came

    def _reserve(self, keys: Keys, start: int) -> list[_Get]:
        """Reserve pages for all objects from `start` on, all or nothing."""
        stored, stop, links = self._stored, len(keys), linked(keys)
        cuts = [*range(start, stop, ORDER_PAGES), stop]
        wanted = [(PAGES, at, links[at:end]) for at, end in pairwise(cuts)]
        if stored.has_checkpoints:
            pages = len(window_pages(stored.geometry, stop * stored.geometry.tokens_per_page))
            wanted.insert(0, (CHECKPOINTS, stop, part_keys(keys[stop - 1], pages)))
        gets: list[_Get] = []
        try:
            for form, at, some in wanted:
                owner = stored.new_owner()
                demand = dict.fromkeys(stored.spaces[form], len(some))
                gets.append(_Get(form, owner, at, some, stored.book.reserve(owner, demand)))
        except BridgeError as error:  # now, or never in a pool of this size
            for get in gets:
                stored.book.free(get.owner)
            log.debug("prefix_not_fetched", pages=stop - start, reason=str(error))
            return []
        for get in gets:
            stored.book.move(get.owner, PageState.HELD, PageState.LEASED)
        return gets

    async def _get_all(self, gets: Sequence[_Get]) -> None:
        """Get all objects, some at a time, until the deadline or until one is missing."""
        some_at_a_time = asyncio.Semaphore(GETS_AT_ONCE)
        has_failed = False

        async def ask(get: _Get) -> None:
            nonlocal has_failed
            async with some_at_a_time:
                left_s = self._left_s
                if left_s <= 0 or has_failed:
                    return
                ids = np.stack([get.pages[space] for space in self._stored.spaces[get.form]], axis=1)
                get.operation = self._client.begin(Verb.GET, get.form, get.keys, ids, timeout_s=left_s)
                answer = await get.operation
                get.hits = len(list(takewhile(lambda outcome: outcome is Outcome.HIT, answer.outcomes)))
                has_failed = has_failed or not get.is_whole

        async with asyncio.TaskGroup() as asking:  # a failed one leaves none that asks for pages which have gone back
            for get in gets:
                asking.create_task(ask(get))

    def _keep(self, gets: Sequence[_Get], keys: Keys, *, is_wanted: bool) -> int:
        """Put whole objects into the index, up to the first one that is missing; return how many pages are new."""
        stored, came, is_behind = self._stored, 0, is_wanted
        with ExitStack() as back:
            quiet = [get for get in gets if self._let_go(get)]
            for get in quiet:
                back.callback(stored.book.free, get.owner)
            stored.is_inserting = True
            back.callback(setattr, stored, "is_inserting", False)
            for get in sorted(gets, key=lambda get: get.form):  # a checkpoint is at the end of pages
                is_whole = get in quiet and get.is_whole
                if get.form == PAGES and get in quiet and is_behind and get.hits:
                    pages = {space: ids[: get.hits] for space, ids in get.pages.items()}
                    came += stored.copies.insert(get.owner, keys[: get.start + get.hits], get.start, pages)
                elif get.form == CHECKPOINTS and is_behind and is_whole:
                    none: Pages = {space: np.empty(0, dtype=np.int32) for space in stored.spaces[PAGES]}
                    [copies] = get.pages.values()
                    stored.copies.insert(get.owner, keys[: get.start], get.start, none, checkpoints={get.start: copies})
                is_behind = is_behind and is_whole
        return came

    def _let_go(self, get: _Get) -> bool:
        """Return whether nobody writes these pages any more; else quarantine them until the store has let go."""
        operation, book = get.operation, self._stored.book
        if operation is None or operation.settled.done():
            book.move(get.owner, PageState.LEASED, PageState.HELD)
            return True
        why = f"{get.owner}: the store may still write pages that it did not fetch in time (limit: tier.prefetch_s)"
        book.quarantine(get.owner, why)
        operation.settled.add_done_callback(lambda _: book.release_quarantined(get.owner))
        return False
