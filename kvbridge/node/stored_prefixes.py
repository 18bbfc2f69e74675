"""Prefixes of a node in the store below its host memory: fetched before a request is admitted (`store_writes.py` writes them).

Fetched objects go to host pages that are reserved for them, all or nothing, and enter the index only when the store's process has
compared every byte. A request waits for that at most `tier.prefetch_s` and goes on with the pages that have come. Pages of a get
that has not ended by then belong to nobody until it has, by the store's word or by the end of its process. Written pages are
pinned on the host until the store has let go of them. Whatever the store does, a request finds what is cached or computes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise, takewhile

import numpy as np
import structlog

from kvbridge.api.status import PrefixStoreStatus
from kvbridge.config.tier import TierConfig
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import IndexSpace, Pages
from kvbridge.core.wire.shared_memory import SharedRegion
from kvbridge.node.store_writes import CHECKPOINTS, ORDER_PAGES, PAGES, StoreWrites
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner, PageState
from kvbridge.tier.host_copies import HostCopies
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.stores.base import BATCH_LIMIT, Outcome
from kvbridge.tier.stores.client import Operation, StoreClient
from kvbridge.tier.stores.objects import linked, part_keys

log = structlog.get_logger(__name__)

GETS_AT_ONCE = 2
"""Gets of one prompt that are under way at once. A store that is too slow for a prompt fails so many in a row, which alone does not
open its breaker."""


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
    has_failed: bool = False


class StoredPrefixes:
    """The way between a node's host memory and its store. Called from the event loop's thread only."""

    def __init__(
        self,
        cache: PrefixCache,
        copies: HostCopies,
        book: PageBook,
        settings: TierConfig,
        geometry: ModelGeometry,
        *,
        clock: Clock = monotonic,
    ) -> None:
        """`copies`: those of the cache. `settings.store` is set."""
        self._cache, self._copies, self._book, self._settings, self._clock = cache, copies, book, settings, clock
        self._geometry = geometry
        self.client: StoreClient | None = None
        """None until there is memory to put and get."""
        self._spaces: tuple[tuple[IndexSpace, ...], ...] = ()
        """The spaces of each form, in the order in which orders name them."""
        self._numbers = count(1)
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        """By the first key that is fetched and the one before it: a key alone is not one namespace's."""
        self.prefetches: Counter[str] = Counter()
        """How fetches ended: `found`, all that the store was known to have; `late`, the time was over before; `part`; `nothing`;
        `failed`, by a defect."""
        self._fetched_pages = 0
        self.writes = StoreWrites(copies, settings, clock)
        self.drop, self.forget = self.writes.drop, self.writes.forget
        self._task: asyncio.Task[None] | None = None
        copies.watch(self.writes)

    def open(self, copies: Sequence[SharedRegion], host: Sequence[SharedRegion], *, log_level: str = "info") -> None:
        """Start the store's process: the memory is there. `host`: pages that prefixes have on the host anyway.

        Raises InvalidInputError for memory that a store cannot hold.
        """
        ends = [shared for shared in copies if shared.region.space is IndexSpace.SWA_COPY]
        pages = [*host, *(shared for shared in copies if shared.region.space is IndexSpace.FULL_COPY)]
        forms = [pages, ends] if ends else [pages]
        settings = self._settings
        assert settings.store is not None, "nobody makes this without a store"
        model = f"{settings.model_name}\n{settings.model_revision}\n{fingerprint(self._geometry)}"
        self.client = StoreClient(settings.store, forms, settings.store_limits, model=model, log_level=log_level)
        spaces = self._spaces = tuple(tuple(sorted({shared.region.space for shared in form})) for form in forms)
        self.client.start()
        self.writes.client, self.writes.spaces = self.client, spaces
        self._task = asyncio.create_task(self.writes.run(self.client), name="write prefixes to the store")

    async def failed(self) -> None:
        """Raise when a part of this has ended by a defect. Not to be called before `open`."""
        assert self.client is not None
        assert self._task is not None
        ways = [self._task, asyncio.create_task(self.client.failed())]
        ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def close(self, timeout_s: float) -> None:
        """End the process and all that is under way, by force after that time. Harmless when nothing is open."""
        tasks = [task for task in (self._task, *self._fetching.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.client is not None:
            await self.client.close(timeout_s)
        self.writes.close()

    def status(self) -> PrefixStoreStatus:
        """Return the state of the store and of the fetches, for `/status`."""
        client, store = self.client, self._settings.store
        objects: dict[str, dict[str, int]] = {}
        for (verb, outcome), number in ({} if client is None else client.counts).items():
            objects.setdefault(verb.value, {})[outcome.value] = number
        is_ready = client is not None and client.capabilities is not None
        return PrefixStoreStatus(
            kind="" if store is None else store.kind,
            state=client.breaker.state.value if client is not None and is_ready else "starting",
            why_not="its memory is being made" if client is None else client.why_not,
            pid=0 if client is None else client.pid,
            objects=objects,
            fetched_pages=self._fetched_pages,
            prefetches=dict(self.prefetches),
            waiting_prompts=len(self.writes.waiting),
            unsettled=0 if client is None else len(client.unsettled),
        )

    # ------------------------------------------------------------------ from the store

    async def prefetch(self, keys: Keys) -> None:
        """Bring the pages of these keys to the host that only the store has, until `tier.prefetch_s` has passed.

        Never more than the host has pages for. The store's errors never reach the caller. Requests for the same prompt wait for the
        same pages.
        """
        if self.client is None:
            return
        counts = self._book.counts()
        keys = keys[: min(sum(counts[space].values()) for space in self._spaces[PAGES])]
        have = self._usable(keys)
        if have == len(keys) or len(set(keys.to_list())) != len(keys):
            return
        first = keys[max(0, have - 1) : have + 1].data
        task = self._fetching.get(first)
        if task is None:
            task = asyncio.create_task(self._fetch(self.client, keys, have), name="fetch a prefix from the store")
            self._fetching[first] = task
            task.add_done_callback(lambda _: self._fetching.pop(first, None))
        await asyncio.shield(task)

    @property
    def _has_checkpoints(self) -> bool:
        return len(self._spaces) > CHECKPOINTS

    def _usable(self, keys: Keys) -> int:
        """Return how many pages a request could have now."""
        return self._cache.restorable(keys) if self._has_checkpoints else self._cache.known(keys)

    async def _fetch(self, client: StoreClient, keys: Keys, have: int) -> None:
        begun_s, current = self._clock(), (self.writes.drops, self.writes.forgets)
        until_s = begun_s + self._settings.prefetch_s
        stop, came, is_defect = have, 0, False
        try:
            stop = await self._stored(client, keys, have, until_s)
            if stop > have:
                came = await self._bring(client, keys[:stop], until_s, current)
        except Exception:  # a fetch only saves a request time, so no request fails by it
            is_defect = True
            log.exception("prefix_fetch_failed", wanted_pages=stop - have)
        finally:
            seconds = self._clock() - begun_s
            outcome = "part" if came else "nothing"
            if is_defect:
                outcome = "failed"
            elif came and self._usable(keys) >= stop:
                outcome = "found"
            elif seconds > 0.99 * self._settings.prefetch_s:  # timers are as exact as the loop's clock
                outcome = "late"
            self.prefetches[outcome] += 1
            self._fetched_pages += came
            log.debug(
                "prefix_fetched", outcome=outcome, wanted_pages=stop - have, pages=came, seconds=round(seconds, 4)
            )

    async def _stored(self, client: StoreClient, keys: Keys, have: int, until_s: float) -> int:
        """Return up to which page the store seems to have what lacks here; `have` when that is of no use."""
        stop = self._cache.known(keys)
        links = linked(keys)
        while stop < len(keys):
            some = links[stop : stop + BATCH_LIMIT]
            found = len(list(takewhile(bool, await self._present(client, PAGES, some, until_s))))
            stop += found
            if found < len(some):
                break
        if not self._has_checkpoints:
            return stop
        first = max(have, stop - BATCH_LIMIT)
        ends = await self._present(client, CHECKPOINTS, keys[first:stop], until_s) if stop > first else []
        return max((first + at + 1 for at, is_there in enumerate(ends) if is_there), default=have)

    async def _present(self, client: StoreClient, form: int, keys: Keys, until_s: float) -> list[bool]:
        left_s = until_s - self._clock()
        if left_s <= 0:
            return []
        # The store may drop pages before its answer is here, so the look at what is to be dropped comes before the question.
        wanted = [form == CHECKPOINTS or key not in self.writes.to_forget for key in keys]
        answer = await client.has(form, keys, timeout_s=left_s)
        return [
            is_wanted and outcome is Outcome.PRESENT for is_wanted, outcome in zip(wanted, answer.outcomes, strict=True)
        ]

    async def _bring(self, client: StoreClient, keys: Keys, until_s: float, current: tuple[int, int]) -> int:
        """Fetch the pages of these keys that the host lacks; return how many are new.

        `current`: how often pages had been dropped, all and some, when the store was first asked.
        """
        pinned = self._copies.pin(keys)
        gets: list[_Get] = []
        try:
            gets = self._reserve(keys, len(pinned))
            await self._get_all(client, gets, until_s)
        finally:
            try:
                is_current = current == (self.writes.drops, self.writes.forgets)
                came = self._keep(gets, keys, is_wanted=is_current and not self.writes.dropping)
            finally:
                self._copies.unpin(pinned)
        return came

    def _reserve(self, keys: Keys, start: int) -> list[_Get]:
        """Reserve pages for all objects from `start` on, all or nothing."""
        stop, links = len(keys), linked(keys)
        cuts = [*range(start, stop, ORDER_PAGES), stop]
        wanted = [(PAGES, at, links[at:end]) for at, end in pairwise(cuts)]
        if self._has_checkpoints:
            pages = len(window_pages(self._geometry, stop * self._geometry.tokens_per_page))
            wanted.insert(0, (CHECKPOINTS, stop, part_keys(keys[stop - 1], pages)))
        gets: list[_Get] = []
        try:
            with ExitStack() as back:
                for form, at, some in wanted:
                    owner = Owner(NO_ROOM, -next(self._numbers))  # the owners of backups count upwards
                    demand = dict.fromkeys(self._spaces[form], len(some))
                    gets.append(_Get(form, owner, at, some, self._book.reserve(owner, demand)))
                    back.callback(self._book.free, owner)
                back.pop_all()
        except BridgeError as error:  # now, or never in a pool of this size
            log.debug("prefix_not_fetched", pages=stop - start, reason=str(error))
            return []
        for get in gets:
            self._book.move(get.owner, PageState.HELD, PageState.LEASED)
        return gets

    async def _get_all(self, client: StoreClient, gets: Sequence[_Get], until_s: float) -> None:
        """Get all objects, some at a time, until the deadline or until one is missing."""
        some_at_a_time = asyncio.Semaphore(GETS_AT_ONCE)

        async def ask(get: _Get) -> None:
            async with some_at_a_time:
                left_s = until_s - self._clock()
                if left_s <= 0 or any(other.has_failed for other in gets):
                    return
                ids = np.stack([get.pages[space] for space in self._spaces[get.form]], axis=1)
                get.operation = client.get(get.form, get.keys, ids, timeout_s=left_s)
                answer = await get.operation
                get.hits = len(list(takewhile(lambda outcome: outcome is Outcome.HIT, answer.outcomes)))
                get.has_failed = get.hits < len(get.keys)

        async with asyncio.TaskGroup() as asking:  # a failed one leaves none that asks for pages which have gone back
            for get in gets:
                asking.create_task(ask(get))

    def _keep(self, gets: Sequence[_Get], keys: Keys, *, is_wanted: bool) -> int:
        """Put whole objects into the index, up to the first one that is missing; return how many pages are new."""
        came, is_behind = 0, is_wanted
        with ExitStack() as back:
            quiet = [get for get in gets if self._let_go(get)]
            for get in quiet:
                back.callback(self._book.free, get.owner)
            self.writes.is_inserting = True
            back.callback(setattr, self.writes, "is_inserting", False)
            for get in sorted(gets, key=lambda get: get.form):  # a checkpoint is at the end of pages
                is_whole = get in quiet and get.hits == len(get.keys)
                if get.form == PAGES and get in quiet and is_behind and get.hits:
                    pages = {space: ids[: get.hits] for space, ids in get.pages.items()}
                    came += self._copies.insert(get.owner, keys[: get.start + get.hits], get.start, pages)
                elif get.form == CHECKPOINTS and is_behind and is_whole:
                    none: Pages = {space: np.empty(0, dtype=np.int32) for space in self._spaces[PAGES]}
                    [copies] = get.pages.values()
                    self._copies.insert(get.owner, keys[: get.start], get.start, none, checkpoints={get.start: copies})
                is_behind = is_behind and is_whole
        return came

    def _let_go(self, get: _Get) -> bool:
        """Return whether nobody writes these pages any more; else quarantine them until the store has let go."""
        operation = get.operation
        if operation is None or operation.settled.done():
            self._book.move(get.owner, PageState.LEASED, PageState.HELD)
            return True
        why = f"{get.owner}: the store may still write pages that it did not fetch in time (limit: tier.prefetch_s)"
        self._book.quarantine(get.owner, why)
        operation.settled.add_done_callback(lambda _: self._book.release_quarantined(get.owner))
        return False
