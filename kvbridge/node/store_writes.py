"""Writes to the store below a node's host memory: prompts are put, and disputed or unwanted pages are dropped.

Written pages are pinned on the host until the store has let go of them.
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
from kvbridge.tier.host_copies import HostCopies, PinnedCopies
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.stores.base import BATCH_LIMIT, Outcome
from kvbridge.tier.stores.client import BreakerState, StoreClient
from kvbridge.tier.stores.objects import linked, of_links, part_keys

log = structlog.get_logger(__name__)

PAGES, CHECKPOINTS = 0, 1
"""Forms of objects, by their number: a page of a prompt, and the windows and states at the end of one."""
ORDER_PAGES = 16
"""Objects of one order to the store."""
MOST_WAITING, MOST_FORGOTTEN = 4_096, 65_536
"""Prompts that wait to be written, and pages that wait to be dropped; the oldest of more are forgotten."""
PAUSE_S = 1.0
"""After a put that has failed."""
JUST_THE_END = 1 << 30
"""Stands for the first page to be written where only a checkpoint is."""


class StoreWrites:
    """Watches the host copies of a cache. Called from the event loop's thread only."""

    def __init__(self, copies: HostCopies, settings: TierConfig, clock: Clock) -> None:
        self._copies, self._settings, self._clock = copies, settings, clock
        self.client: StoreClient | None = None
        """None until there is memory to put."""
        self.spaces: tuple[tuple[IndexSpace, ...], ...] = ()
        """The spaces of each form, in the order in which orders name them."""
        self.waiting: dict[bytes, int] = {}
        """Prompts to be written, by the keys of their last pages: the first page to write."""
        self.to_forget: dict[bytes, None] = {}
        """Pages to be dropped, by the keys under which they are kept; nobody fetches them meanwhile. A set in order."""
        self.forgets = self.drops = 0
        """How often pages were to be dropped, some or all (its beginnings and its ends): a fetch that began before is not kept, nor
        is a prompt written on."""
        self.dropping = 0
        """Drops of everything that are under way."""
        self.is_inserting = False
        """Pages come from the store: they are not written to it."""
        self._woken = asyncio.Event()
        self.writing = asyncio.Lock()

    async def drop(self) -> DroppedObjects:
        """Drop all objects of this node's model, of all nodes. To be called when the cache has been dropped.

        A write that is under way ends before, and a fetch that began before is not kept.
        """
        self.waiting.clear()
        client = self.client
        if client is None:
            return DroppedObjects(outcome="failed", reason="the store's process is not ready: its memory is being made")
        until_s = self._clock() + self._settings.store_limits.drop_s
        self.drops += 1
        self.dropping += 1
        try:
            async with asyncio.timeout(until_s - self._clock()):
                await self.writing.acquire()
            try:
                answers = [
                    await client.clear(form, timeout_s=max(0.0, until_s - self._clock()))
                    for form in range(len(self.spaces))
                ]
            finally:
                self.writing.release()
        except TimeoutError:
            why = "the store did not end what was being written (store_limits.drop_s)"
            return DroppedObjects(outcome="failed", reason=why)
        finally:
            self.drops += 1
            self.dropping -= 1
        reason = "; ".join(
            answer.detail or answer.outcomes[0].value for answer in answers if answer.outcomes[0] is not Outcome.DROPPED
        )
        dropped = sum(answer.cleared for answer in answers)
        log.info("stored_prefixes_dropped", objects=dropped, reason=reason)
        return DroppedObjects(outcome="failed" if reason else "dropped", objects=dropped, reason=reason)

    def forget(self, links: Sequence[Link]) -> None:
        """Drop the pages of these links as soon as possible, also those that are being written or fetched; no checkpoints."""
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

    def close(self) -> None:
        """Tell of the pages that could not be dropped."""
        self._tell_not_forgotten(len(self.to_forget))

    async def _forget_some(self, client: StoreClient) -> bool:
        """Drop disputed pages. Returns whether the store has dropped all that it was asked to."""
        names = list(self.to_forget)[:BATCH_LIMIT]
        async with self.writing:
            answer = await client.drop(PAGES, Keys(b"".join(names)), timeout_s=self._settings.store_limits.put_s)
        for name, outcome in zip(names, answer.outcomes, strict=True):
            if outcome is Outcome.DROPPED:
                self.to_forget.pop(name, None)
        return all(outcome is Outcome.DROPPED for outcome in answer.outcomes)

    def added(self, keys: Keys, start: int, pages: Pages) -> None:  # noqa: ARG002 - the keys say it all
        """Write the pages of a prompt that have come to the host, from `start` on."""
        self._wait(keys[-1], start)

    def checkpoint_added(self, key: bytes, pages: PageIdArray) -> None:  # noqa: ARG002 - the key says it all
        """Write a checkpoint that has come to the host."""
        self._wait(key, JUST_THE_END)

    def removed(self, pages: Pages) -> None:
        """Do nothing for pages that have left the host: their objects stay in the store."""

    def _wait(self, key: bytes, start: int) -> None:
        if self.is_inserting:
            return
        self.waiting[key] = min(start, self.waiting.get(key, start))
        if len(self.waiting) > MOST_WAITING:
            del self.waiting[next(iter(self.waiting))]
        self._woken.set()

    async def run(self, client: StoreClient) -> None:
        """Drop and write for ever, one order after the other, so that a fetch finds the store's process free."""
        while True:
            if not (self.waiting or self.to_forget):
                self._woken.clear()
                await self._woken.wait()
            if self.to_forget and not await self._forget_some(client):
                await asyncio.sleep(PAUSE_S)
            if not self.waiting:
                continue
            key = next(iter(self.waiting))
            start = self.waiting.pop(key)
            drops = self.drops
            async with self.writing:
                asked = await self._write(client, self._copies.index.prompt_of(key), start)
            if not asked and drops == self.drops:
                self.waiting.setdefault(key, start)
                await asyncio.sleep(PAUSE_S)

    async def _write(self, client: StoreClient, keys: Keys, start: int) -> bool:
        """Write the pages of a prompt from `start` on, and checkpoints. Returns whether the store took the question."""
        looking = self._copies.pin(keys)
        settled: list[asyncio.Future[None]] = []
        asked, drops, put_s = True, self.drops, self._settings.store_limits.put_s
        for form, some, ids in self._objects(looking, keys, start):
            if drops != self.drops:
                break
            answer = await client.has(form, some, timeout_s=put_s)
            lacking = [at for at, outcome in enumerate(answer.outcomes) if outcome is Outcome.ABSENT]
            if lacking and not answer.failed:
                put = client.put(form, Keys(b"".join(some[at] for at in lacking)), ids[lacking], timeout_s=put_s)
                settled.append(put.settled)
                answer = await put
            if answer.failed:
                asked = client.capabilities is not None and client.breaker.state is BreakerState.CLOSED
                break
        # Not when this fails or is cancelled: then the store's process is ended.
        for future in settled:
            await asyncio.shield(future)
        self._copies.unpin(looking)
        return asked

    def _objects(
        self, looking: PinnedCopies, keys: Keys, start: int
    ) -> Iterator[tuple[int, Keys, npt.NDArray[np.int32]]]:
        """Yield the form, keys and pages of the objects to write, an order at a time."""
        end, links = len(looking), linked(keys)
        for at in range(start, end, ORDER_PAGES):
            some = slice(at, min(end, at + ORDER_PAGES))
            yield PAGES, links[some], np.stack([looking.pages[space][some] for space in self.spaces[PAGES]], axis=1)
        for page_count, copies in looking.checkpoints.items():
            if page_count > start or page_count == end:
                yield CHECKPOINTS, part_keys(keys[page_count - 1], len(copies)), copies.reshape(-1, 1)
