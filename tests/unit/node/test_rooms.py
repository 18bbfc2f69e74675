"""The book of rooms, and the pages of rooms: waits, receipts, lists, quarantines, the cached prefix in front of their own pages."""

import asyncio

import numpy as np
import pytest

from kvbridge.api.rooms import RoomQuery
from kvbridge.core.errors import StaleError, UnknownRoomError
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.session.tables import RoomState
from kvbridge.node import room_book
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.node.room import Quarantine, Room
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_bench import keys as keys_of
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import DECODE_LIMITS, GEOMETRY, PREFILL_LIMITS, RecordedEvents

OWNER = Owner(1, 1)
OPEN, OVER = RoomState.ADMITTED, RoomState.COMPLETED


class UsedRoom(Room):
    @property
    def user_state(self) -> RoomState:
        return self.state

    @property
    def waits_for(self) -> str:
        return "somebody"


def make_room(room: int = 1, generation: int = 1, state: object = OPEN, kind: type[Room] = UsedRoom) -> Room:
    facts = {"prompt_tokens": 10, "max_new_tokens": 0, "client": "", "created_s": 0.0}
    return kind(room=room, generation=generation, state=state, **facts)


def make_book(*rooms: Room, clock: ManualClock | None = None, **settings) -> RoomBook:
    settings = {"keep_s": 100.0} | settings
    book = RoomBook(Role.DECODE, clock=clock or ManualClock(), **settings)
    for room in rooms:
        book.add(room)
    return book


def test_receipts_are_bounded_without_a_sweep():
    book = make_book(keep_rooms=3)
    for number in range(1, 8):
        room = make_room(number, state=OVER)
        book.add(room)
        book.ended(room)
    assert [number for number in range(1, 8) if book.newest_generation(number)] == [5, 6, 7]
    assert book.states() == {"completed": 3}


def test_a_receipt_is_kept_while_an_earlier_attempt_could_answer_for_it():
    """Else the earlier one is the newest that is known, and the generation that has ended may be admitted again."""
    clock = ManualClock()
    old = make_room(state=RoomState.FAILED)
    book = make_book(old, clock=clock)
    for generation in (2, 3):
        attempt = make_room(generation=generation, state=OVER)
        book.add(attempt)
        book.ended(attempt)
        clock.advance(150)
        book.sweep()
        assert book.get(1).generation == generation
        with pytest.raises(StaleError, match=f"use generation {generation + 1}"):
            book.check_free(1, generation)
    assert [attempt.generation for attempt in book.attempts(1)] == [1, 3]
    assert book.states() == {"completed": 1, "failed": 1}
    book.ended(old)
    clock.advance(150)
    book.sweep()
    assert (book.newest_generation(1), len(book), book.states()) == (0, 0, {})


def test_a_deadline_is_named_once_and_limits_that_nothing_hangs_on_any_more_are_let_go_of():
    clock, room, other = ManualClock(), make_room(), make_room(2)
    book = make_book(room, other, clock=clock)
    other.wait_until(100_000.0, "timeouts.room_s")
    assert room.late(5) == ""
    for number in range(10_000):
        room.wait_until(1_000.0 + number, "timeouts.room_s")
    assert len(book._limits) < 2 * room_book.LIMITS_KEPT
    clock.advance(11_000)
    assert set(book.due(clock())) == {room}, "a tick looks at rooms whose limit has passed, and at no other"
    assert room.late(clock()) == "timeouts.room_s"
    assert room.late(clock()) == ""


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_wait_wakes_on_every_change_and_returns_for_the_right_ones():
    room = make_room()
    book = make_book(room)
    waits = [asyncio.create_task(book.wait(1, 30, frozenset({RoomState.COMMITTED}))) for _ in range(2)]
    final = asyncio.create_task(book.wait(1, 30, frozenset()))
    await settled()
    room.state = RoomState.OFFERED
    assert book.changed(room) is RoomState.OFFERED
    assert book.changed(room) is None
    await settled()
    assert not any(wait.done() for wait in [*waits, final])
    room.state = RoomState.COMMITTED
    book.changed(room)
    assert [(await wait).state for wait in waits] == [RoomState.COMMITTED] * 2
    assert not final.done()
    room.state = RoomState.FAILED
    book.changed(room)
    assert (await final).state is RoomState.FAILED
    assert not book._waiters


@pytest.mark.parametrize("changes", [True, False])
async def test_a_caller_that_is_cancelled_is_cancelled_though_the_room_changes_in_that_moment(changes):
    room = make_room()
    book = make_book(room)
    wait = asyncio.create_task(book.wait(1, 30, frozenset()))
    await settled()
    if changes:
        room.state = OVER
        book.changed(room)
    wait.cancel()
    await asyncio.gather(wait, return_exceptions=True)
    assert wait.cancelled()
    assert not book._waiters


async def test_wait_ends_in_time():
    book = make_book(make_room())
    for timeout_s in (0.01, 0):
        assert (await book.wait(1, timeout_s, frozenset())).state is OPEN
    with pytest.raises(UnknownRoomError):
        await book.wait(2, 1, frozenset())


def pages_of_rooms(book: PageBook) -> RoomPages:
    return RoomPages(book, RoomSettings(geometry=GEOMETRY, limits=PREFILL_LIMITS), RecordedEvents())


@pytest.mark.parametrize("state", [PageState.HELD, PageState.LEASED, PageState.QUARANTINED, PageState.FREE])
def test_give_back_frees_from_every_state_and_touches_nobody_else(state):
    book = PageBook({IndexSpace.FULL: 8})
    other = Owner(2, 1)
    book.reserve(other, {IndexSpace.FULL: 2})
    book.quarantine(other, f"{other}: lost")
    if state is not PageState.FREE:
        book.reserve(OWNER, {IndexSpace.FULL: 3})
    if state in {PageState.LEASED, PageState.QUARANTINED}:
        book.move(OWNER, PageState.HELD, PageState.LEASED)
    if state is PageState.QUARANTINED:
        book.quarantine(OWNER, f"{OWNER}: lost")
    room = make_room()
    for _ in range(2):
        pages_of_rooms(book).give_back(room)
    assert tuple(book._holdings) == (other,)
    assert book.counts()[IndexSpace.FULL][PageState.FREE] == 6
    check_book(book)


def test_a_quarantine_is_said_once_and_counted_by_its_cause_until_the_pages_are_given_back():
    pages, room = PageBook({IndexSpace.FULL: 8}), make_room()
    pages_of_rooms(pages).quarantine(room, Quarantine.NOT_QUIET, "it has no pages")
    assert room.quarantine is None
    pages.reserve(OWNER, {IndexSpace.FULL: 3})
    pages.move(OWNER, PageState.HELD, PageState.LEASED)
    rooms = make_book(room)
    for _ in range(2):
        pages_of_rooms(pages).quarantine(room, Quarantine.NOT_RELEASED, "late")
    pages_of_rooms(pages).quarantine(room, Quarantine.WRITER_SHUT_OUT, "gone")
    assert set(pages.quarantine_reasons()) == {f"{OWNER}: late", f"{OWNER}: gone"}
    assert rooms.quarantined() == dict.fromkeys(map(str, Quarantine), 0) | {"writer_being_shut_out": 1}
    pages_of_rooms(pages).give_back(room)
    assert sum(rooms.quarantined().values()) == 0
    assert pages.quarantine_reasons() == {}


def listed(book: RoomBook, *, after: int = 0, limit: int = 100, state: RoomState | None = None):
    page = book.page(RoomQuery(state=frozenset({state} - {None}), after=after, limit=limit))
    return [room.room for room in page.rooms], page.next


def test_rooms_are_listed_in_the_order_of_their_admission_a_page_at_a_time():
    book = make_book(*(make_room(number, state=OVER if number == 3 else OPEN) for number in (9, 3, 7, 5)))
    assert listed(book) == ([9, 3, 7, 5], None)
    first, following = listed(book, limit=2)
    assert first == [9, 3]
    book.ended(book.get(3))  # its receipt is listed in its place
    assert listed(book, after=following, limit=2) == ([7, 5], None)
    assert listed(book, state=OVER) == ([3], None)
    assert listed(book, after=4) == ([], None)


def test_a_listing_looks_at_so_many_rooms_and_says_where_to_go_on(monkeypatch):
    monkeypatch.setattr(room_book, "LOOKED_AT", 3)
    book = make_book(*(make_room(number, state=RoomState.FAILED if number == 7 else OPEN) for number in range(1, 9)))
    assert listed(book, state=RoomState.FAILED) == ([], 3)
    assert listed(book, after=3, state=RoomState.FAILED) == ([], 6)
    assert listed(book, after=6, state=RoomState.FAILED) == ([7], None)


FLASH = preset("deepseek-v4-flash")
FLASH_PAGE = FLASH.tokens_per_page
FULL, HOST, SWA, REQUEST = IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA, IndexSpace.REQUEST
POOL = {FULL: 12, HOST: 10, SWA: 12, REQUEST: 4}
C4 = frozenset({next(part.kind for part in FLASH.components if part.host_capable)})


class PagesBench:
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
            keys=keys_of(name, tokens // FLASH_PAGE),
        )
        self.pages.reserve(room, self.pages.needed(tokens + more, tokens))
        return room

    def cached(self) -> dict[IndexSpace, int]:
        return {space: counts[PageState.CACHED] for space, counts in self.book.counts().items()}


@pytest.fixture
def bench():
    bench = PagesBench()
    yield bench
    check_cache(bench.cache)


@pytest.mark.parametrize("over", [0, 1, 4, 128])
def test_a_room_reads_what_is_cached_and_has_its_own_pages_behind_it(bench, over):
    first = bench.room(3 * FLASH_PAGE + over)
    bench.pages.keep(first, first.keys)
    assert (first.prefix_tokens, bench.cache.reads(first.owner)) == (0, 3)
    second = bench.room(3 * FLASH_PAGE + over, more=FLASH_PAGE)
    assert second.prefix_tokens == 3 * FLASH_PAGE
    for space in (FULL, HOST):
        held = second.tables[space]
        assert held.first_page == 0
        assert np.array_equal(held.ids[:3], first.tables[space].ids[:3])
        own = bench.pages.own_tables(second)[space]
        assert (own.first_page, own.ids.tolist()) == (3, held.ids[3:].tolist())
        assert np.array_equal(own.ids, bench.book.pages(second.owner)[space])
        assert len(held) == bench.pages.needed(4 * FLASH_PAGE + over, 3 * FLASH_PAGE + over)[space]
    for space in (SWA, REQUEST):
        assert bench.pages.own_tables(second)[space] is second.tables[space]
        assert not set(second.tables[space].ids.tolist()) & set(first.tables[space].ids.tolist()), "never shared"
    assert bench.cached() == {FULL: 3, HOST: 3, SWA: 0, REQUEST: 0}
    for room in (first, second):
        bench.pages.give_back(room)
    assert bench.book.available_pages() == POOL
