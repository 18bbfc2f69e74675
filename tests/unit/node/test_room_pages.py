"""What the rooms of a node share: the prefix in front of their own pages, and that they let go of it once, however they end."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.decode import DecodeState
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import DECODE_LIMITS, RecordedEvents

FLASH = preset("deepseek-v4-flash")
PAGE = FLASH.tokens_per_page
FULL, HOST, SWA, REQUEST = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA, IndexSpace.REQUEST
POOL = {FULL: 12, HOST: 10, SWA: 12, REQUEST: 4}
C4 = frozenset({next(part.kind for part in FLASH.components if part.host_capable)})


def keys_of(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class Bench:
    """The pages of a decode node whose C4 rows are in its host pool."""

    def __init__(self) -> None:
        self.book = PageBook(POOL)
        self.cache = PrefixCache(self.book, PrefixIndex((FULL, HOST), min(POOL[FULL], POOL[HOST])))
        settings = RoomSettings(geometry=FLASH, limits=DECODE_LIMITS, shares_prefixes=True, host=C4)
        self.pages = RoomPages(self.book, settings, RecordedEvents(), self.cache)
        self.last = 0

    def room(self, tokens: int, name: str = "a", *, more: int = 0) -> DecodeRoom:
        self.last += 1
        room = DecodeRoom(
            room=self.last,
            generation=1,
            prompt_tokens=tokens,
            prefix_tokens=0,
            max_new_tokens=more,
            client="",
            state=DecodeState.RESERVED,
            created_s=0.0,
            keys=keys_of(name, tokens // PAGE),
        )
        self.pages.reserve(room, self.pages.needed(tokens + more, tokens))
        return room

    def cached(self) -> dict[IndexSpace, int]:
        return {space: counts[PageState.CACHED] for space, counts in self.book.counts().items()}


@pytest.fixture
def bench():
    bench = Bench()
    yield bench
    check_cache(bench.cache)


@pytest.mark.parametrize("over", [0, 1, 4, 128])
def test_a_room_reads_what_is_cached_and_has_its_own_pages_behind_it(bench, over):
    first = bench.room(3 * PAGE + over)
    bench.pages.keep(first, first.keys)
    assert (first.prefix_tokens, bench.cache.reads(first.owner)) == (0, 3)
    second = bench.room(3 * PAGE + over, more=PAGE)
    assert second.prefix_tokens == 3 * PAGE
    for space in (FULL, HOST):
        held = second.tables[space]
        assert held.first_page == 0
        assert np.array_equal(held.ids[:3], first.tables[space].ids[:3])
        own = bench.pages.own_tables(second)[space]
        assert (own.first_page, own.ids.tolist()) == (3, held.ids[3:].tolist())
        assert np.array_equal(own.ids, bench.book.pages(second.owner)[space])
        assert len(held) == bench.pages.needed(4 * PAGE + over, 3 * PAGE + over)[space]
    for space in (SWA, REQUEST):
        assert bench.pages.own_tables(second)[space] is second.tables[space]
        assert not set(second.tables[space].ids.tolist()) & set(first.tables[space].ids.tolist()), "never shared"
    assert bench.cached() == {FULL: 3, HOST: 3, SWA: 0, REQUEST: 0}
    for room in (first, second):
        bench.pages.give_back(room)
    assert bench.book.available_pages() == POOL
