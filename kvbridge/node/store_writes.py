"""What goes from a node's host memory to the store below it: prompts to be written, and pages to be dropped there.

What is written is pinned on the host until the store has let go of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import structlog

from kvbridge.api.rooms import DroppedObjects
from kvbridge.config.tier import TierConfig
from kvbridge.core.clock import Clock
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.readers import PathPages
from kvbridge.tier.stores.base import BATCH_LIMIT, Outcome
from kvbridge.tier.stores.breaker import BreakerState
from kvbridge.tier.stores.client import StoreClient
from kvbridge.tier.stores.objects import linked, of_links, part_keys

log = structlog.get_logger(__name__)

PAGES, CHECKPOINTS = 0, 1
"""Forms of objects, by their number: what a page of a prompt consists of, and windows and states at the end of one."""
ORDER_PAGES = 16
"""Objects of one order to the store."""
MOST_WAITING = 4_096
"""Prompts that wait to be written; the one that has waited longest is forgotten then."""
PAUSE_S = 1.0
"""After a put that has failed."""
MOST_FORGOTTEN = 65_536
"""Pages that wait to be dropped."""
JUST_THE_END = 1 << 30
"""Stands for the first page to be written where none is, only a checkpoint."""


class StoreWrites:
    """Watches the twins of a cache. Called from the event loop's thread only."""

    def __init__(self, cache: PrefixCache, settings: TierConfig, clock: Clock) -> None:
        self._cache, self._settings, self._clock = cache, settings, clock
        self._client: StoreClient | None = None
        self._spaces: tuple[tuple[IndexSpace, ...], ...] = ()
        """Those of each form, in the order in which orders name them."""
        self.waiting: dict[bytes, int] = {}
        """Prompts to be written, by the keys of their last pages: from which page on."""
        self.to_forget: dict[bytes, None] = {}
        """Pages to be dropped, by the keys under which they are kept; nobody fetches them meanwhile. A set in order."""
        self.forgets = 0
        """How often pages were to be dropped: what was asked for before may be such a page, and is not kept."""
        self.drops = self.dropping = 0
        """Beginnings and ends of drops, and how many are under way: what was begun before is neither kept nor written on."""
        self.is_inserting = False
        """While pages come from the store: these are not written to it."""
        self._woken = asyncio.Event()
        self._writing = asyncio.Lock()

    def open(self, client: StoreClient, spaces: tuple[tuple[IndexSpace, ...], ...]) -> None:
        """The memory is there. `run` may begin."""
        self._client, self._spaces = client, spaces

    def close(self) -> None:
        """Tell of what could not be dropped."""
        self._tell_not_forgotten(len(self.to_forget))

    async def drop(self) -> DroppedObjects:
        """Drop all objects of this node's model, whoever has put them there. To be called when the cache has been dropped.

        What is being written has ended before, and what was fetched before the end is not kept.
        """
        self.waiting.clear()
        if self._client is None:
            return DroppedObjects(outcome="failed", reason="the store's process is not ready: its memory is being made")
        self.drops += 1
        self.dropping += 1
        try:
            return await self._drop_all(self._client)
        finally:
            self.drops += 1
            self.dropping -= 1

    def forget(self, links: Sequence[Link]) -> None:
        """Drop the pages of these links, as soon as it can, and what is being written or fetched meanwhile; no checkpoints."""
        self.to_forget |= dict.fromkeys(of_links(links))
        self.forgets += 1
        late = len(self.to_forget) - MOST_FORGOTTEN
        for name in list(self.to_forget)[: max(0, late)]:
            del self.to_forget[name]
        self._tell_not_forgotten(late)
        self._woken.set()

    @staticmethod
    def _tell_not_forgotten(pages: int) -> None:
        if pages > 0:
            why = "engines say different tokens of them, and they could not be dropped from the store; drop all of it"
            log.error("stored_pages_not_forgotten", pages=pages, reason=why)

    async def _drop_all(self, client: StoreClient) -> DroppedObjects:
        until_s = self._clock() + self._settings.store_limits.drop_s
        try:
            async with asyncio.timeout(until_s - self._clock()):
                await self._writing.acquire()
        except TimeoutError:
            return DroppedObjects(
                outcome="failed", reason="the store did not end what was being written (store_limits.drop_s)"
            )
        try:
            answers = [
                await client.clear(form, timeout_s=max(0.0, until_s - self._clock()))
                for form in range(len(self._spaces))
            ]
        finally:
            self._writing.release()
        reason = "; ".join(
            answer.detail or answer.outcomes[0].value for answer in answers if answer.outcomes[0] is not Outcome.DROPPED
        )
        dropped = sum(answer.cleared for answer in answers)
        log.info("stored_prefixes_dropped", objects=dropped, reason=reason)
        return DroppedObjects(outcome="failed" if reason else "dropped", objects=dropped, reason=reason)

    def added(self, keys: Keys, start: int, pages: Pages) -> None:
        """Pages of a prompt have come to the host, from `start` on."""
        del pages
        self._wait(keys[-1], start)

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:
        """A checkpoint has come to the host."""
        del pages
        self._wait(key, JUST_THE_END)

    def removed(self, pages: Pages) -> None:
        """Pages have left the host: what the store has of them stays."""

    def _wait(self, key: bytes, start: int) -> None:
        if self.is_inserting:  # it comes from there
            return
        self.waiting[key] = min(start, self.waiting.get(key, start))
        if len(self.waiting) > MOST_WAITING:
            del self.waiting[next(iter(self.waiting))]
        self._woken.set()

    async def run(self) -> None:
        """Drop and write what waits, one order after the other: whoever fetches finds the store's process free."""
        while True:
            if not (self.waiting or self.to_forget):
                self._woken.clear()
                await self._woken.wait()
            if self.to_forget and not await self._forget_some():
                await asyncio.sleep(PAUSE_S)
            if not self.waiting:
                continue
            key = next(iter(self.waiting))
            start = self.waiting.pop(key)
            drops = self.drops
            async with self._writing:
                asked = await self._write(self._cache.index.prompt_of(key), start)
            if not asked and drops == self.drops:
                self.waiting.setdefault(key, start)
                await asyncio.sleep(PAUSE_S)

    async def _forget_some(self) -> bool:
        """Drop pages that engines say different tokens of. Returns whether the store has dropped all that it was asked to."""
        assert self._client is not None
        names = list(self.to_forget)[:BATCH_LIMIT]
        async with self._writing:
            answer = await self._client.drop(PAGES, Keys(b"".join(names)), timeout_s=self._settings.store_limits.put_s)
        for name, outcome in zip(names, answer.outcomes, strict=True):
            if outcome is Outcome.DROPPED:
                self.to_forget.pop(name, None)
        return all(outcome is Outcome.DROPPED for outcome in answer.outcomes)

    async def _write(self, keys: Keys, start: int) -> bool:
        """Write the pages of a prompt from `start` on, and checkpoints. Returns whether the store took the question."""
        looking = self._cache.looks.begin_on_host(keys)
        settled: list[asyncio.Future[None]] = []
        asked = True
        drops = self.drops
        for form, some, ids in self._objects(looking, keys, start):
            if drops != self.drops:
                break
            assert self._client is not None
            put_s = self._settings.store_limits.put_s
            there = self._client.has(form, some, timeout_s=put_s)
            answer = await there
            lacking = [at for at, outcome in enumerate(answer.outcomes) if outcome is Outcome.ABSENT]
            if lacking and not answer.failed:
                put = self._client.put(form, Keys(b"".join(some[at] for at in lacking)), ids[lacking], timeout_s=put_s)
                settled.append(put.settled)
                answer = await put
            if answer.failed:
                asked = (
                    self._client.process.capabilities is not None and self._client.breaker.state is BreakerState.CLOSED
                )
                break
        # Not in case of failure: whoever cancels this ends the store's process.
        for future in settled:
            await asyncio.shield(future)
        self._cache.looks.end(looking)
        return asked

    def _objects(self, looking: PathPages, keys: Keys, start: int) -> Iterator[tuple[int, Keys, npt.NDArray[np.int32]]]:
        """Yield forms, page keys and pages of what is to be written, an order at a time."""
        end, links = len(looking.path), linked(keys)
        for at in range(start, end, ORDER_PAGES):
            some = slice(at, min(end, at + ORDER_PAGES))
            yield PAGES, links[some], np.stack([looking.pages[space][some] for space in self._spaces[PAGES]], axis=1)
        for page_count, twins in looking.checkpoints.items():
            if page_count > start or page_count == end:
                yield CHECKPOINTS, part_keys(keys[page_count - 1], len(twins)), twins.reshape(-1, 1)
