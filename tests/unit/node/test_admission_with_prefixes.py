"""A node whose pool is full of prefixes that stay: it looks empty as long as nobody reads them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

import pytest

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.states import RoomState
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.readers import Admitted
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import RecordedEvents

pytestmark = pytest.mark.asyncio

FULL = IndexSpace.FULL
PAGES = 8
LONG_S = 20.0


def prompt(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class Rooms:
    """Rooms whose pages are their prompt tokens; a client's name is its prompt."""

    store = None

    def __init__(self, book: PageBook, cache: PrefixCache) -> None:
        self.book, self.cache, self.rooms = book, cache, self
        self.got: dict[int, Admitted] = {}
        self.keys: dict[int, Keys] = {}

    def missing(self) -> str:
        return ""

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        demand = {FULL: request.prompt_tokens}
        self.book.require_possible(demand)
        return demand

    def admit(self, request: AdmissionRequest, **_: object) -> RoomReport:
        pages, room = request.prompt_tokens, request.room or 1_000
        keys = prompt(request.client, pages)
        self.got[room] = self.cache.admit(Owner(room, 1), keys, lambda shared: {FULL: pages - shared[FULL]})
        self.keys[room] = keys
        return self.report(room)

    @property
    def in_use(self) -> Mapping[str, int]:
        return Counter({"": len(self.got)})

    def commit(self, room: int) -> None:
        got = self.got[room]
        self.cache.keep(Owner(room, 1), self.keys[room], got.prefix_pages, got.own)

    def end(self, room: int) -> None:
        del self.got[room]
        self.cache.let_go(Owner(room, 1))
        self.book.free(Owner(room, 1))

    def report(self, room: int) -> RoomReport:
        return RoomReport(room=room, generation=1, role=Role.DECODE, state=RoomState.ADMITTED, prompt_tokens=1)


class Bench:
    def __init__(self, *, twins: int = 0, **limits: object) -> None:
        self.clock = ManualClock(100.0)
        self.book = PageBook({FULL: PAGES} | ({IndexSpace.FULL_TWIN: twins} if twins else {}))
        index = PrefixIndex((FULL,), PAGES + twins, has_twins=bool(twins))
        self.cache = PrefixCache(self.book, index, clock=self.clock)
        self.rooms = Rooms(self.book, self.cache)
        self.admission = AdmissionController(
            self.rooms,
            self.book,
            limits=AdmissionConfig(**limits),  # type: ignore[arg-type]
            events=RecordedEvents(),
            clock=self.clock,
            draw=lambda: 0.0,
        )

    def now(self, room: int, name: str, pages: int) -> Admitted:
        self.admission.admit_now(AdmissionRequest(room=room, prompt_tokens=pages, client=name))
        return self.rooms.got[room]

    async def waits(self, room: int, name: str, pages: int, wait_s: float = LONG_S) -> asyncio.Task[RoomReport]:
        request = AdmissionRequest(room=room, prompt_tokens=pages, client=name, wait_s=wait_s)
        task = asyncio.ensure_future(self.admission.admit(request))
        await turn()
        return task

    def warm(self, name: str = "a", pages: int = PAGES) -> None:
        """Fill the pool with a prompt that nobody reads."""
        self.now(900, name, pages)
        self.rooms.commit(900)
        self.rooms.end(900)
        assert self.book.counts()[FULL][PageState.CACHED] == pages


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def bench():
    bench = Bench(unready_after_s=30.0)
    yield bench
    bench.cache.check_integrity()


async def test_what_is_read_is_waited_for_and_the_end_of_its_last_reader_wakes_the_queue(bench):
    bench.warm(pages=6)
    for room in (1, 2):
        assert bench.now(room, "a", 6).prefix_pages == 6
    waiting = await bench.waits(3, "b", 4)
    assert (waiting.done(), bench.admission.waiting) == (False, 1)
    bench.rooms.end(1)
    await turn()
    assert not waiting.done(), "somebody reads them still"
    bench.rooms.end(2)
    assert (await asyncio.wait_for(waiting, 20)).room == 3
    assert bench.rooms.got[3].own[FULL].size == 4
    assert bench.book.available_pages() == {FULL: PAGES - 4}


async def test_a_pool_full_of_what_is_read_starves_and_says_so_until_a_reader_ends(bench):
    bench.warm()
    bench.now(1, "a", PAGES)
    bench.admission.tick()
    bench.clock.advance(31.0)
    assert "space 'full' has no available page of 8 (8 cached and read)" in bench.admission.problem()
    bench.rooms.end(1)
    assert (bench.admission.problem(), bench.admission.starved_s()) == ("", 0.0), "at once, without a tick"


async def test_a_host_that_is_full_keeps_nobody_waiting_and_the_end_of_a_backup_wakes_those_who_wait():
    bench = Bench(twins=2, unready_after_s=30.0)
    bench.warm()
    backup = bench.cache.twins.start_backup(Owner(NO_ROOM, 1), prompt("a", 2), at_most=2)
    bench.admission.tick()
    bench.clock.advance(60.0)
    bench.admission.tick()
    assert (bench.book.available_pages()[IndexSpace.FULL_TWIN], bench.admission.problem()) == (0, "")
    waiting = await bench.waits(1, "b", PAGES)
    assert not waiting.done(), "two pages are being copied"
    bench.cache.twins.end_backup(backup, done=True)
    assert (await asyncio.wait_for(waiting, 20)).room == 1
    bench.cache.check_integrity()


async def test_a_prefix_that_is_gone_when_the_turn_comes_is_not_counted_on(bench):
    bench.warm(pages=4)
    bench.now(1, "a", 4)
    bench.now(2, "b", 4)
    waiting = await bench.waits(3, "a", 6)
    bench.cache.drop()
    bench.rooms.end(2)
    await turn()
    assert not waiting.done(), "two pages beside its prefix would be there, but that is gone"
    bench.rooms.end(1)
    await asyncio.wait_for(waiting, 20)
    assert (bench.rooms.got[3].prefix_pages, bench.rooms.got[3].own[FULL].size) == (0, 6)
