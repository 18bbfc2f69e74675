"""Prefixes that a store has, on their way into a node: whatever it says or has, no request fails by it and no page stays away."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.tier import FileStoreSettings, HostTier, TierConfig
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.stores.client import Operation
from kvbridge.tier.stores.objects import Answer, Outcome, Verb, linked
from tests.helpers.prefix_bench import keys as keys_of
from tests.helpers.prefix_recount import check_cache

FULL, SWA, FULL_COPY, SWA_COPY = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
PAGES, ENDS = 0, 1


class Store:
    """A store that answers at once, or when it is let."""

    def __init__(self) -> None:
        self.objects: tuple[set[bytes], set[bytes]] = (set(), set())
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_answered: Callable[[], object] = lambda: None
        """Called when an answer is on its way to whoever asked."""
        self.raises: Exception | None = None
        self.asked: list[Keys] = []
        self.was_asked = asyncio.Event()

    def put(self, keys: Keys, *, end: bool = False) -> None:
        self.objects[PAGES].update(linked(keys).to_list())
        if end:
            self.objects[ENDS].add(keys[-1])

    def begin(
        self, verb: Verb, form: int, keys: Keys, pages: np.ndarray | None = None, *, timeout_s: float
    ) -> Operation:
        if verb is Verb.HAS:
            operation = self._answer(Verb.HAS, form, keys, Outcome.PRESENT, timeout_s)
            operation.answer.add_done_callback(lambda _: self.has_answered())
            return operation
        self.asked.append(keys)
        self.was_asked.set()
        if self.raises is not None:
            raise self.raises
        assert len(pages) == len(keys)
        return self._answer(Verb.GET, form, keys, Outcome.HIT, timeout_s)

    def _answer(self, verb: Verb, form: int, keys: Keys, there: Outcome, timeout_s: float) -> Operation:
        assert timeout_s > 0
        operation = Operation(verb, None, [])
        found = tuple(there if key in self.objects[form] else Outcome.ABSENT for key in keys.to_list())
        asyncio.get_running_loop().create_task(self._end(operation, found))
        return operation

    async def _end(self, operation: Operation, found: tuple[Outcome, ...]) -> None:
        if operation.verb is Verb.GET:
            await self.may_answer.wait()
        operation.answer.set_result(Answer(outcomes=found))
        operation.settled.set_result(None)


class Bench:
    """A node with a few pages of host memory: a prefill node with `ends`, whose requests go on behind checkpoints only."""

    def __init__(self, *, twins: int = 8, ends: bool = False) -> None:
        self.book = PageBook({FULL: 32, SWA: 4, FULL_COPY: twins, SWA_COPY: 4})
        index = PrefixIndex((FULL,), 32 + twins, has_copies=True)
        self.cache = PrefixCache(self.book, index, restores=True)
        assert self.cache.copies is not None
        settings = TierConfig(
            enabled=True,
            model_name="tiny",
            model_revision="1",
            host=HostTier(pages=twins),
            store=FileStoreSettings(kind="files", directory=Path("/nowhere"), max_bytes=1 << 30),
            prefetch_s=60.0,
        )
        self.stored = StoredPrefixes(self.cache, self.cache.copies, self.book, settings, preset("tiny-v4"))
        self.store = Store()
        self.stored.client = self.store
        self.stored.spaces = ((FULL_COPY,), (SWA_COPY,)) if ends else ((FULL_COPY,),)
        self.rooms = 0

    def kept(self, keys: Keys) -> None:
        """A room has computed a prompt, and its pages stay on the device."""
        self.rooms += 1
        owner = Owner(self.rooms, 1)
        got = self.cache.admit(owner, keys, lambda shared: {FULL: len(keys) - shared[FULL]})
        self.cache.keep(owner, keys, got.prefix_pages, {FULL: got.own[FULL]})
        self.cache.let_go(owner)
        self.book.free(owner)

    async def prefetch(self, keys: Keys) -> int:
        await asyncio.wait_for(self.stored.prefetch(keys), 30)
        self.check()
        return self.cache.known(keys)

    def check(self) -> None:
        check_cache(self.cache)
        for space, states in self.book.counts().items():
            taken = {state: states[state] for state in (PageState.HELD, PageState.LEASED, PageState.QUARANTINED)}
            assert not any(taken.values()), f"pages of {space} that nobody has a use for: {taken}"
        assert not self.cache.copies._pinned


@pytest.mark.parametrize("stored", [8, 9, 40])
async def test_a_prompt_of_which_the_store_has_more_than_fits_comes_as_far_as_there_are_pages(stored: int):
    bench = Bench(twins=8)
    keys = keys_of("a", stored)
    bench.store.put(keys)
    assert await bench.prefetch(keys) == 8
    assert await bench.prefetch(keys) == 8, "and again"
    assert await bench.prefetch(keys_of("b", 40)) == 0


async def test_a_checkpoint_behind_more_pages_than_fit_leaves_none_away():
    bench = Bench(twins=8, ends=True)
    long, short = keys_of("a", 12), keys_of("b", 6)
    bench.store.put(long, end=True)
    bench.store.put(short, end=True)
    for _ in range(5):
        assert await bench.prefetch(long) == 0
    assert await bench.prefetch(short) == 6
    assert bench.cache.restorable(short) == 6


@pytest.mark.parametrize("ends", [False, True])
async def test_a_page_that_hangs_elsewhere_fails_no_request_and_takes_no_page(ends: bool):
    bench = Bench(twins=8, ends=ends)
    keys = keys_of("a", 6)
    bench.store.put(keys, end=True)
    bench.kept(Keys(keys_of("x", 2).data + keys[2:4].data))
    for _ in range(5):
        assert await bench.prefetch(keys) == 2
    others = keys_of("b", 6)
    bench.store.put(others, end=True)
    assert await bench.prefetch(others) == 6


@pytest.mark.parametrize("error", [InvalidInputError("no"), RuntimeError("a defect")])
@pytest.mark.parametrize("place", ["insert", "get"])
async def test_whatever_is_raised_on_the_way_the_pages_go_back_and_the_request_goes_on(place, error, monkeypatch):
    bench = Bench(twins=64)
    keys = keys_of("a", 60)
    bench.store.put(keys)

    def fail(*_: object, **__: object) -> int:
        raise error

    with monkeypatch.context() as patch:
        if place == "insert":
            patch.setattr(bench.cache.copies, "insert", fail)
        else:
            bench.store.raises = error
        assert await bench.prefetch(keys) == 0
        asked = len(bench.store.asked)
        bench.store.raises = None
    await asyncio.sleep(0)
    assert len(bench.store.asked) == asked, "nothing is fetched into pages that have gone back"
    assert bench.stored.prefetches == {"failed": 1}
    assert await bench.prefetch(keys) == 60


@pytest.mark.parametrize("ends", [False, True])
async def test_what_is_stored_for_one_namespace_is_not_there_for_another(ends: bool):
    bench = Bench(ends=ends)
    keys = keys_of("a", 6)
    bench.store.put(keys.in_namespace("globex"), end=True)
    assert await bench.prefetch(keys.in_namespace("acme")) == 0
    assert await bench.prefetch(keys.in_namespace("")) == 0
    assert await bench.prefetch(keys.in_namespace("globex")) == 6


async def test_who_fetches_the_same_page_behind_another_one_waits_for_nobody():
    """Else a request that names keys of somebody else would see from its time whether these are being fetched just now."""
    bench = Bench(twins=16)
    theirs = keys_of("a", 4)
    bench.store.put(theirs)
    bench.kept(theirs[:1])
    ours = Keys(keys_of("b", 1).data + theirs[1:].data)
    bench.kept(ours[:1])
    bench.store.may_answer.clear()
    fetching = asyncio.create_task(bench.stored.prefetch(theirs))
    await asyncio.wait_for(bench.store.was_asked.wait(), 30)
    await asyncio.wait_for(bench.stored.prefetch(ours), 30)
    assert not fetching.done()
    assert bench.cache.known(ours) == 1
    bench.store.may_answer.set()
    await fetching
    assert bench.cache.known(theirs) == 4
    bench.check()


async def test_pages_that_are_dropped_while_the_store_is_asked_for_them_are_not_waited_for():
    """A checkpoint behind dropped pages is still there; the request must go to the one before them."""
    bench = Bench(twins=16, ends=True)
    keys = keys_of("a", 9)
    bench.store.put(keys[:4], end=True)
    bench.store.put(keys, end=True)
    bench.stored.forget([*pairwise(keys)][3:])

    def dropped() -> None:
        bench.store.objects[PAGES].difference_update(linked(keys).to_list()[4:])
        bench.stored.to_forget.clear()

    bench.store.has_answered = dropped
    assert await bench.prefetch(keys) == 4
    assert bench.cache.restorable(keys) == 4
