"""The prefixes of a node in the store below its host memory: written when pages come to the host, fetched before admission.

Fetched objects go to host pages that are reserved for them, all or nothing, and enter the index only when the store's process has
compared every byte. A request waits for a fetch at most `tier.prefetch_s` and goes on with the pages that have come. A get that has
not ended by then keeps its pages until it ends, by the store's word or with the store's process. Written pages are pinned on the
host until the store has let go of them. Whatever the store does, a request finds what is cached or computes it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, pairwise, takewhile

import numpy as np
import structlog

from kvbridge.api.rooms import DroppedObjects
from kvbridge.api.status import PrefixStoreStatus
from kvbridge.config.tier import TierConfig
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.ids import IndexSpace, PageIdArray, Pages
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import NO_ROOM, Owner, PageState
from kvbridge.tier.host_copies import HostCopies, PinnedCopies
from kvbridge.tier.keys import Keys, Link
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.stores.client import BreakerState, Operation, StoreClient
from kvbridge.tier.stores.objects import BATCH_LIMIT, Outcome, Verb, linked, of_links, part_keys

log = structlog.get_logger(__name__)

PAGES, CHECKPOINTS = 0, 1
"""Forms of objects, by their number: a page of a prompt, and the windows and states at the end of one."""
ORDER_PAGES = 16
"""Objects of one order to the store."""
GETS_AT_ONCE = 2
"""Gets of one prompt that are under way at once: a store that is too slow fails so few in a row that its breaker stays closed."""
MOST_WAITING, MOST_FORGOTTEN = 4_096, 65_536
"""Prompts that wait to be written, and pages that wait to be dropped; the oldest of more are forgotten."""
PAUSE_S = 1.0
"""Pause of the writer after a put that has failed."""
JUST_THE_END = 1 << 30
"""Stands for the first page to write of a prompt of which only a checkpoint is written."""


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
        """How fetches ended: `found`, all that the store was known to have; `late`, not in time; `part`; `nothing`; `failed`, by a
        defect."""
        self._fetched_pages = 0
        self.waiting: dict[bytes, int] = {}
        """Prompts to be written, by the keys of their last pages: the first page to write."""
        self.to_forget: dict[bytes, None] = {}
        """Pages to be dropped, by the keys under which they are kept; nobody fetches them meanwhile. A set in order."""
        self._forgets = self._drops = 0
        """How often some pages were to be dropped, and how often all (a drop counts at its beginning and at its end). A fetch that
        began before is not kept, and a prompt is not written on."""
        self.dropping = 0
        """Drops of everything that are under way."""
        self._is_inserting = False
        """Pages come from the store: they are not written to it."""
        self._woken = asyncio.Event()
        self.writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        copies.watch(self)

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
        self._spaces = tuple(tuple(sorted({shared.region.space for shared in form})) for form in forms)
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
            waiting_prompts=len(self.waiting),
            unsettled=0 if client is None else len(client.unsettled),
        )

    # ------------------------------------------------------------------ from the store

    async def prefetch(self, keys: Keys) -> None:
        """Bring the pages of these keys to the host that only the store has, for at most `tier.prefetch_s`.

        Requests for the same prompt wait for the same pages. The store's errors never reach the caller.
        """
        if self.client is None:
            return
        counts = self._book.counts()
        keys = keys[
            : min(sum(counts[space].values()) for space in self._spaces[PAGES])
        ]  # all that the host has pages for
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
        return self._cache.restorable(keys) if self._has_checkpoints else self._cache.known(keys)

    async def _fetch(self, client: StoreClient, keys: Keys, have: int) -> None:
        begun_s, current = self._clock(), (self._drops, self._forgets)
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
            is_late = seconds > 0.99 * self._settings.prefetch_s  # timers are as exact as the loop's clock
            outcome = "late" if is_late else "part" if came else "nothing"
            if is_defect:
                outcome = "failed"
            elif came and self._usable(keys) >= stop:
                outcome = "found"
            self.prefetches[outcome] += 1
            self._fetched_pages += came
            log.debug("prefix_fetched", outcome=outcome, wanted_pages=stop - have, pages=came, seconds=seconds)

    async def _stored(self, client: StoreClient, keys: Keys, have: int, until_s: float) -> int:
        """Return up to which page the store seems to have what lacks here; `have` when that is of no use."""
        stop, links, found = self._cache.known(keys), linked(keys), BATCH_LIMIT
        while stop < len(keys) and found == BATCH_LIMIT:
            some = links[stop : stop + BATCH_LIMIT]
            found = len(list(takewhile(bool, await self._present(client, PAGES, some, until_s))))
            stop += found
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
        wanted = [form == CHECKPOINTS or key not in self.to_forget for key in keys]
        found = (await client.begin(Verb.HAS, form, keys, timeout_s=left_s)).outcomes
        return [is_wanted and one is Outcome.PRESENT for is_wanted, one in zip(wanted, found, strict=True)]

    async def _bring(self, client: StoreClient, keys: Keys, until_s: float, current: tuple[int, int]) -> int:
        """Fetch the pages of these keys that the host lacks; return how many are new.

        `current`: the counts of drops when the store was first asked.
        """
        pinned = self._copies.pin(keys)
        gets: list[_Get] = []
        try:
            gets = self._reserve(keys, len(pinned))
            await self._get_all(client, gets, until_s)
        finally:
            try:
                is_wanted = current == (self._drops, self._forgets) and not self.dropping
                came = self._keep(gets, keys, is_wanted=is_wanted)
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
            for form, at, some in wanted:
                owner = Owner(NO_ROOM, -next(self._numbers))  # the owners of backups count upwards
                demand = dict.fromkeys(self._spaces[form], len(some))
                gets.append(_Get(form, owner, at, some, self._book.reserve(owner, demand)))
        except BridgeError as error:  # now, or never in a pool of this size
            for get in gets:
                self._book.free(get.owner)
            log.debug("prefix_not_fetched", pages=stop - start, reason=str(error))
            return []
        for get in gets:
            self._book.move(get.owner, PageState.HELD, PageState.LEASED)
        return gets

    async def _get_all(self, client: StoreClient, gets: Sequence[_Get], until_s: float) -> None:
        """Get all objects, some at a time, until the deadline or until one is missing."""
        some_at_a_time = asyncio.Semaphore(GETS_AT_ONCE)
        has_failed = False

        async def ask(get: _Get) -> None:
            nonlocal has_failed
            async with some_at_a_time:
                left_s = until_s - self._clock()
                if left_s <= 0 or has_failed:
                    return
                ids = np.stack([get.pages[space] for space in self._spaces[get.form]], axis=1)
                get.operation = client.begin(Verb.GET, get.form, get.keys, ids, timeout_s=left_s)
                answer = await get.operation
                get.hits = len(list(takewhile(lambda outcome: outcome is Outcome.HIT, answer.outcomes)))
                has_failed = has_failed or not get.is_whole

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
            self._is_inserting = True
            back.callback(setattr, self, "_is_inserting", False)
            for get in sorted(gets, key=lambda get: get.form):  # a checkpoint is at the end of pages
                is_whole = get in quiet and get.is_whole
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

    # ------------------------------------------------------------------ dropped from the store

    async def drop(self) -> DroppedObjects:
        """Drop all objects of this node's model, also of other nodes. To be called when the cache has been dropped.

        A write that is under way ends before, and a fetch that began before is not kept.
        """
        self.waiting.clear()
        client = self.client
        if client is None:
            return DroppedObjects(outcome="failed", reason="the store's process is not ready: its memory is being made")
        until_s = self._clock() + self._settings.store_limits.drop_s
        self._drops += 1
        self.dropping += 1
        try:
            async with asyncio.timeout(until_s - self._clock()):
                await self.writing.acquire()
            try:
                answers = [
                    await client.begin(Verb.CLEAR, form, timeout_s=max(0.0, until_s - self._clock()))
                    for form in range(len(self._spaces))
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
        if self._is_inserting:
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
                asked = await self._write(client, self._copies.index.prompt_of(key), start)
            if not asked and drops == self._drops:
                self.waiting.setdefault(key, start)
                await asyncio.sleep(PAUSE_S)

    async def _forget_some(self, client: StoreClient) -> bool:
        """Drop disputed pages. Returns whether the store has dropped all that it was asked to."""
        names = list(self.to_forget)[:BATCH_LIMIT]
        async with self.writing:
            keys, put_s = Keys(b"".join(names)), self._settings.store_limits.put_s
            answer = await client.begin(Verb.DROP, PAGES, keys, timeout_s=put_s)
        for name, outcome in zip(names, answer.outcomes, strict=True):
            if outcome is Outcome.DROPPED:
                self.to_forget.pop(name, None)
        return all(outcome is Outcome.DROPPED for outcome in answer.outcomes)

    async def _write(self, client: StoreClient, keys: Keys, start: int) -> bool:
        """Write the pages of a prompt from `start` on, and checkpoints. Returns whether the store took the question."""
        pinned = self._copies.pin(keys)
        settled: list[asyncio.Future[None]] = []
        asked, drops, put_s = True, self._drops, self._settings.store_limits.put_s
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
                asked = client.capabilities is not None and client.breaker.state is BreakerState.CLOSED
                break
        # Not when this fails or is cancelled: then the store's process is ended.
        for future in settled:
            await asyncio.shield(future)
        self._copies.unpin(pinned)
        return asked

    def _objects(self, pinned: PinnedCopies, keys: Keys, start: int) -> Iterator[tuple[int, Keys, PageIdArray]]:
        """Yield the form, keys and pages of the objects to write, an order at a time."""
        end, links = len(pinned), linked(keys)
        for at in range(start, end, ORDER_PAGES):
            some = slice(at, min(end, at + ORDER_PAGES))
            yield PAGES, links[some], np.stack([pinned.pages[space][some] for space in self._spaces[PAGES]], axis=1)
        for page_count, copies in pinned.checkpoints.items():
            if page_count > start or page_count == end:
                yield CHECKPOINTS, part_keys(keys[page_count - 1], len(copies)), copies.reshape(-1, 1)
