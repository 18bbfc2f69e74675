"""The prefixes of a node in the store below its host memory: written when pages come to the host, fetched before admission.

A request waits for a fetch (`prefix_fetch.py`) at most `tier.prefetch_s` and goes on with the pages that have come. Written pages
are pinned on the host until the store has let go of them. Whatever the store does, a request finds what is cached or computes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import structlog

from kvbridge.api.rooms import DroppedObjects
from kvbridge.api.status import PrefixStoreStatus
from kvbridge.config.tier import TierConfig
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.node.prefix_fetch import CHECKPOINTS, ORDER_PAGES, PAGES, PrefixFetch
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook
from kvbridge.tier.host_copies import HostCopies, PinnedCopies
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.stores.client import BreakerState, StoreClient
from kvbridge.tier.stores.objects import BATCH_LIMIT, Outcome, Verb, linked, of_links, part_keys

log = structlog.get_logger(__name__)

MOST_WAITING, MOST_FORGOTTEN = 4_096, 65_536
"""Prompts that wait to be written, and pages that wait to be dropped; the oldest of more are forgotten."""
PAUSE_S = 1.0
"""Pause of the writer after a put that has failed."""
JUST_THE_END = 1 << 30
"""In place of the first page to write: only the checkpoint at the prompt's end is written."""


class StoredPrefixes:
    """Fetches and writes the prefixes of one node, and watches the host copies of its cache. Runs on the event loop's thread."""

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
        self.cache, self.copies, self.book, self.settings, self.clock = cache, copies, book, settings, clock
        self.geometry = geometry
        self.client: StoreClient | None = None
        """None until there is memory to put and get."""
        self.spaces: tuple[tuple[IndexSpace, ...], ...] = ()
        """The spaces of each form, in the order in which orders name them."""
        self._numbers = count(1)
        self._fetching: dict[bytes, asyncio.Task[None]] = {}
        """By the first key that is fetched and the one before it: a key alone is not one namespace's."""
        self.prefetches: Counter[str] = Counter()
        """How fetches ended: `found`, all that the store was known to have; `late`, not in time; `part`; `nothing`; `failed`, by a
        defect."""
        self.fetched_pages = 0
        self.waiting: dict[bytes, int] = {}
        """Prompts to be written, by the keys of their last pages: the first page to write."""
        self.to_forget: dict[bytes, None] = {}
        """Pages to be dropped, by the keys under which they are kept; nobody fetches them meanwhile. A set in order."""
        self._drops = self._forgets = 0
        """How often all pages were to be dropped (a drop counts at its beginning and at its end), and how often some. After a drop
        of all, a prompt is not written on."""
        self.dropping = 0
        """Drops of everything that are under way."""
        self.is_inserting = False
        """Pages come from the store: they are not written to it."""
        self._woken = asyncio.Event()
        self.writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        copies.watchers.append(self)

    def open(self, copies: Sequence[SharedRegion], host: Sequence[SharedRegion], *, log_level: str = "info") -> None:
        """Start the store's process: the memory is there. `host`: pages that prefixes have on the host anyway.

        Raises InvalidInputError for memory that a store cannot hold.
        """
        ends = [shared for shared in copies if shared.region.space is IndexSpace.SWA_COPY]
        pages = [*host, *(shared for shared in copies if shared.region.space is IndexSpace.FULL_COPY)]
        forms = [pages, ends] if ends else [pages]
        settings = self.settings
        assert settings.store is not None, "nobody makes this without a store"
        model = f"{settings.model_name}\n{settings.model_revision}\n{fingerprint(self.geometry)}"
        self.client = StoreClient(settings.store, forms, settings.store_limits, model=model, log_level=log_level)
        self.spaces = tuple(tuple(sorted({shared.region.space for shared in form})) for form in forms)
        self.client.start()
        self._writer = asyncio.create_task(self._write_all(self.client), name="write prefixes to the store")

    async def failed(self) -> None:
        """Raise when the writer or the client has ended by a defect. Not to be called before `open`."""
        assert self.client is not None
        assert self._writer is not None
        ways = [self._writer, asyncio.create_task(self.client.failed())]
        ended, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()

    async def close(self, timeout_s: float) -> None:
        """End the process and all that is under way, by force after that time. Harmless when nothing is open."""
        tasks = [task for task in (self._writer, *self._fetching.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.client is not None:
            await self.client.close(timeout_s)
        self._give_up(len(self.to_forget))

    def status(self) -> PrefixStoreStatus:
        """Return the state of the store and of the fetches, for `/status`."""
        client, store = self.client, self.settings.store
        objects: dict[str, dict[str, int]] = {}
        for (verb, outcome), number in ({} if client is None else client.counts).items():
            objects.setdefault(verb.value, {})[outcome.value] = number
        is_ready = client is not None and not client.why_not
        return PrefixStoreStatus(
            kind="" if store is None else store.kind,
            state=client.breaker.state.value if client is not None and is_ready else "starting",
            why_not="its memory is being made" if client is None else client.why_not,
            pid=0 if client is None else client.pid,
            objects=objects,
            fetched_pages=self.fetched_pages,
            prefetches=dict(self.prefetches),
            waiting_prompts=len(self.waiting),
            unsettled=0 if client is None else len(client.unsettled),
        )

    # ------------------------------------------------------------------ from the store

    async def prefetch(self, keys: Keys) -> None:
        """Bring those pages of these keys to the host that only the store has, for at most `tier.prefetch_s`.

        Requests for the same prompt wait for the same pages. The store's errors never reach the caller.
        """
        if self.client is None:
            return
        counts = self.book.counts()
        keys = keys[
            : min(sum(counts[space].values()) for space in self.spaces[PAGES])
        ]  # all that the host has pages for
        have = self.usable(keys)
        if have == len(keys) or len(set(keys.to_list())) != len(keys):
            return
        first = keys[max(0, have - 1) : have + 1].data
        task = self._fetching.get(first)
        if task is None:
            fetch = PrefixFetch(self, self.client, keys, have)
            task = asyncio.create_task(fetch.run(), name="fetch a prefix from the store")
            self._fetching[first] = task
            task.add_done_callback(lambda _: self._fetching.pop(first, None))
        await asyncio.shield(task)

    @property
    def drops(self) -> tuple[int, int]:
        """A value that changes with every drop: pages of a fetch that began before the drop are not kept."""
        return self._drops, self._forgets

    @property
    def has_checkpoints(self) -> bool:
        """Whether the store has objects of both forms."""
        return len(self.spaces) > CHECKPOINTS

    def usable(self, keys: Keys) -> int:
        """Return how many pages of these keys are here, up to the last one after which an engine can go on."""
        return self.cache.restorable(keys) if self.has_checkpoints else self.cache.known(keys)

    def new_owner(self) -> Owner:
        """Return an owner for host pages of one get; each is new on this node, and none is of a backup, which count upwards."""
        return Owner(NO_ROOM, -next(self._numbers))

    # ------------------------------------------------------------------ dropped from the store

    async def drop(self) -> DroppedObjects:
        """Drop all objects of this node's model, also of other nodes. To be called when the cache has been dropped.

        A write that is under way ends before, and a fetch that began before is not kept.
        """
        self.waiting.clear()
        client = self.client
        if client is None:
            return DroppedObjects(outcome="failed", reason="the store's process is not ready: its memory is being made")
        until_s = self.clock() + self.settings.store_limits.drop_s
        self._drops += 1
        self.dropping += 1
        try:
            async with asyncio.timeout(until_s - self.clock()):
                await self.writing.acquire()
            try:
                answers = [
                    await client.begin(Verb.CLEAR, form, timeout_s=max(0.0, until_s - self.clock()))
                    for form in range(len(self.spaces))
                ]
            finally:
                self.writing.release()
        except TimeoutError:
            why = "the store did not end what was being written (store_limits.drop_s)"
            return DroppedObjects(outcome="failed", reason=why)
        finally:
            self._drops += 1
            self.dropping -= 1
        failed = [answer for answer in answers if answer.outcomes[0] is not Outcome.DROPPED]
        reason = "; ".join(answer.detail or answer.outcomes[0].value for answer in failed)
        dropped = sum(answer.cleared for answer in answers)
        log.info("stored_prefixes_dropped", objects=dropped, reason=reason)
        return DroppedObjects(outcome="failed" if reason else "dropped", objects=dropped, reason=reason)

    def forget(self, links: Sequence[Link]) -> None:
        """Drop the pages of these links as soon as possible, also those that are being written or fetched; no checkpoints."""
        self.to_forget |= dict.fromkeys(of_links(links))
        self._forgets += 1
        self._give_up(len(self.to_forget) - MOST_FORGOTTEN)
        self._woken.set()

    def _give_up(self, pages: int) -> None:
        for name in list(self.to_forget)[: max(0, pages)]:
            del self.to_forget[name]
        if pages > 0:
            why = "engines say different tokens of them, and they could not be dropped from the store; drop all of it"
            log.error("stored_pages_not_forgotten", pages=pages, reason=why)

    # ------------------------------------------------------------------ to the store

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

    async def _write_all(self, client: StoreClient) -> None:
        """Drop and write for ever, one order at a time, so that a fetch finds the store's process free."""
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
            drops = self._drops
            async with self.writing:
                asked = await self._write(client, self.copies.index.prompt_of(key), start)
            if not asked and drops == self._drops:
                self.waiting.setdefault(key, start)
                await asyncio.sleep(PAUSE_S)

    async def _forget_some(self, client: StoreClient) -> bool:
        """Drop disputed pages. Returns whether the store has dropped all that it was asked to."""
        names = list(self.to_forget)[:BATCH_LIMIT]
        async with self.writing:
            keys, put_s = Keys(b"".join(names)), self.settings.store_limits.put_s
            answer = await client.begin(Verb.DROP, PAGES, keys, timeout_s=put_s)
        for name, outcome in zip(names, answer.outcomes, strict=True):
            if outcome is Outcome.DROPPED:
                self.to_forget.pop(name, None)
        return all(outcome is Outcome.DROPPED for outcome in answer.outcomes)

    async def _write(self, client: StoreClient, keys: Keys, start: int) -> bool:
        """Write the pages of a prompt from `start` on, and checkpoints. Returns whether the store took the question."""
        pinned = self.copies.pin(keys)
        settled: list[asyncio.Future[None]] = []
        asked, drops, put_s = True, self._drops, self.settings.store_limits.put_s
        for form, some, ids in self._objects(pinned, keys, start):
            if drops != self._drops:
                break
            answer = await client.begin(Verb.HAS, form, some, timeout_s=put_s)
            lacking = [at for at, outcome in enumerate(answer.outcomes) if outcome is Outcome.ABSENT]
            if lacking and not answer.failed:
                keys_of_lacking = Keys(b"".join(some[at] for at in lacking))
                put = client.begin(Verb.PUT, form, keys_of_lacking, ids[lacking], timeout_s=put_s)
                settled.append(put.settled)
                answer = await put
            if answer.failed:
                asked = not client.why_not and client.breaker.state is BreakerState.CLOSED
                break
        # Not when this fails or is cancelled: then the store's process is ended.
        for future in settled:
            await asyncio.shield(future)
        self.copies.unpin(pinned)
        return asked

    def _objects(self, pinned: PinnedCopies, keys: Keys, start: int) -> Iterator[tuple[int, Keys, PageIdArray]]:
        """Yield the form, keys and pages of the objects to write, an order at a time."""
        end, links = len(pinned), linked(keys)
        for at in range(start, end, ORDER_PAGES):
            some = slice(at, min(end, at + ORDER_PAGES))
            yield PAGES, links[some], np.stack([pinned.pages[space][some] for space in self.spaces[PAGES]], axis=1)
        for page_count, copies in pinned.checkpoints.items():
            if page_count > start or page_count == end:
                yield CHECKPOINTS, part_keys(keys[page_count - 1], len(copies)), copies.reshape(-1, 1)
