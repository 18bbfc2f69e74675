"""The admission controller over a real page book: waiting, caps, hints, cancels, and what it looks like from outside."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import Awaitable

import pytest
import pytest_asyncio

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ClientLimitError,
    ConflictError,
    NamespaceError,
    NotReadyError,
)
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.prefixes import Namespaces
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


class Rooms:
    """Rooms whose pages are their prompt tokens."""

    def __init__(self, book: PageBook) -> None:
        self.book = book
        self.rooms = self
        self.used: Counter[str] = Counter()
        self.clients: dict[int, str] = {}
        self.lacking = ""
        self.admitted: list[int] = []
        self.store: object = None
        self.fetched: list[int | None] = []

    async def fetch(self, request: AdmissionRequest) -> None:
        self.demand(request)
        await asyncio.sleep(0)
        self.fetched.append(request.room)

    def missing(self) -> str:
        return self.lacking

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        if self.lacking:
            raise NotReadyError(self.lacking)
        if request.room in self.clients:
            raise ConflictError(f"room {request.room} is in flight")
        demand = {FULL: request.prompt_tokens}
        self.book.require_possible(demand)
        return demand

    def admit(self, request: AdmissionRequest, **_: object) -> RoomReport:
        demand = self.demand(request)
        room = request.room or 1_000 + len(self.admitted)
        self.book.reserve(Owner(room, 1), demand)
        self.clients[room] = request.client
        self.used[request.client] += 1
        self.admitted.append(room)
        return self.report(room)

    @property
    def in_use(self) -> Counter[str]:
        return self.used

    def end(self, room: int) -> None:
        self.used[self.clients.pop(room)] -= 1
        self.book.free(Owner(room, 1))

    def report(self, room: int) -> RoomReport:
        return RoomReport(room=room, generation=1, role=Role.PREFILL, state=RoomState.ADMITTED, prompt_tokens=1)

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        return self.report(room)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        self.end(room)
        return self.report(room)


class Bench:
    def __init__(self, book: PageBook | None = None, rooms: Rooms | None = None, **limits: object) -> None:
        self.clock = ManualClock(100.0)
        self.book = book or PageBook({FULL: PAGES})
        self.rooms = rooms or Rooms(self.book)
        self.events = RecordedEvents()
        self.admission = AdmissionController(
            self.rooms,
            self.book,
            limits=AdmissionConfig(**limits),  # type: ignore[arg-type]
            events=self.events,
            clock=self.clock,
            draw=lambda: 0.0,
        )
        self.tasks: list[asyncio.Task[RoomReport]] = []

    def now(self, room: int, pages: int = 1, client: str = "") -> RoomReport:
        return self.admission.admit_now(AdmissionRequest(room=room, prompt_tokens=pages, client=client))

    async def waits(
        self, room: int, pages: int = 1, client: str = "", wait_s: float = LONG_S
    ) -> asyncio.Task[RoomReport]:
        """Hand a request in that waits, and let it come to wait (or to its answer)."""
        request = AdmissionRequest(room=room, prompt_tokens=pages, client=client, wait_s=wait_s)
        task = asyncio.ensure_future(self.admission.admit(request))
        self.tasks.append(task)
        await turn()
        return task

    @property
    def free(self) -> int:
        return self.book.available_pages()[FULL]


async def turn() -> None:
    """Let everything happen that is due."""
    for _ in range(5):
        await asyncio.sleep(0)


async def refused(code: str, call: Awaitable[object]) -> BridgeError:
    with pytest.raises(BridgeError) as caught:
        await asyncio.wait_for(call, 20)
    assert caught.value.code == code
    return caught.value


@pytest_asyncio.fixture
async def made():
    benches: list[Bench] = []

    def make(**limits: object) -> Bench:
        benches.append(Bench(**limits))
        return benches[-1]

    yield make
    for bench in benches:
        for task in bench.tasks:
            task.cancel()
        await asyncio.gather(*bench.tasks, return_exceptions=True)
        assert bench.admission.waiting == 0
        bench.book.check_integrity()


# ------------------------------------------------------------------------------------------- waiting


async def test_what_fits_is_admitted_at_once(made):
    bench = made()
    bench.now(1, 3)
    assert (await bench.waits(2, 5)).done()
    assert bench.rooms.admitted == [1, 2]
    assert bench.events.waits == []


async def test_what_is_stored_of_a_prompt_is_fetched_before_it_is_admitted_and_for_nobody_who_is_refused(made):
    bench = made(client_max_rooms=1)
    bench.rooms.store = bench.rooms
    keys = base64.b64encode(bytes(16)).decode()

    def asked(room: int, **more: object) -> AdmissionRequest:
        return AdmissionRequest(prompt_tokens=2, room=room, page_hashes=keys, **more)

    task = asyncio.create_task(bench.admission.admit(asked(1, client="a")))
    await asyncio.sleep(0)
    assert bench.rooms.admitted == [], "its prompt comes first"
    await task
    assert (bench.rooms.fetched, bench.rooms.admitted) == ([1], [1])
    with pytest.raises(ClientLimitError):
        await bench.admission.admit(asked(2, client="a"))
    with pytest.raises(ConflictError):
        await bench.admission.admit(asked(1, client="b"))
    with pytest.raises(NamespaceError):
        await bench.admission.admit(asked(3, client="c", namespace="secret"), Namespaces())
    await bench.admission.admit(AdmissionRequest(prompt_tokens=2, room=4, client="d"))
    bench.admission.close("the end")
    with pytest.raises(NotReadyError):
        await bench.admission.admit(asked(5, client="e"))
    assert bench.rooms.fetched == [1]


async def test_who_waits_too_long_is_refused_with_the_limit(made):
    bench = made()
    bench.now(1, 6)
    error = await refused("capacity", await bench.waits(2, 4, wait_s=0.01))
    assert "0.01 s (limit: the request's wait_s" in str(error)
    assert "4 of 'full' (2 available)" in str(error)
    assert error.lacking == {FULL: 2}
    assert bench.events.refusals == {"wait_timeout": 1}
    assert bench.events.waits[0][0] == "timeout"
    assert bench.admission.waiting == 0


async def test_a_request_that_does_not_wait_does_not_pass(made):
    bench = made()
    bench.now(1, 6)
    await bench.waits(2, 4)
    with pytest.raises(CapacityError, match="1 requests wait for pages of 'full' before this one"):
        bench.now(3, 1)
    await refused("capacity", bench.admission.admit(AdmissionRequest(room=3, prompt_tokens=1)))
    bench.rooms.end(1)
    await turn()
    bench.now(3, 1)
    assert bench.rooms.admitted == [1, 2, 3]


async def test_a_caller_cancelled_after_its_admission_leaves_no_room(made):
    bench = made()
    bench.now(1, PAGES)
    task = await bench.waits(2, 4)
    bench.rooms.end(1)
    bench.admission.tick()
    assert bench.rooms.admitted == [1, 2]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.free == PAGES
    assert not bench.rooms.clients


async def test_a_room_id_taken_meanwhile_is_a_conflict_for_the_second(made):
    bench = made()
    bench.now(1, PAGES)
    first, second, third = [await bench.waits(room) for room in (2, 2, 3)]
    bench.rooms.end(1)
    assert (await asyncio.wait_for(first, 20)).room == 2
    await refused("conflict", second)
    assert (await asyncio.wait_for(third, 20)).room == 3
    assert bench.events.refusals == {"conflict": 1}


async def test_what_can_never_be_served_does_not_wait(made):
    bench = made(max_wait_s=5)
    bench.now(1, PAGES)
    error = await refused("invalid_input", await bench.waits(2, wait_s=5.5))
    assert "admission.max_wait_s" in str(error)
    await bench.waits(3, wait_s=5)
    await refused("invalid_input", await bench.waits(4, PAGES + 1, wait_s=5))
    bench.rooms.lacking = "a worker is starting"
    await refused("not_ready", await bench.waits(5, wait_s=5))
    assert bench.admission.waiting == 1


async def test_the_queue_is_bounded(made):
    bench = made(max_waiting=1)
    bench.now(1, PAGES)
    await bench.waits(2)
    error = await refused("capacity", await bench.waits(3))
    assert "admission.max_waiting" in str(error)
    assert bench.events.refusals == {"queue_full": 1}


async def test_the_end_refuses_everybody_who_waits(made):
    bench = made()
    bench.now(1, PAGES)
    tasks = [await bench.waits(room) for room in (2, 3)]
    bench.admission.close("the daemon is shutting down")
    for task in tasks:
        assert "shutting down" in str(await refused("not_ready", task))


# ------------------------------------------------------------------------------------------- caps


async def test_a_client_at_its_cap_is_refused_whatever_is_free(made):
    bench = made(client_max_rooms=2, clients={"vip": {"max_rooms": 3}})
    for room in (1, 2):
        bench.now(room, client="a")
    with pytest.raises(
        ClientLimitError, match=r"client 'a' has 2 rooms and 0 waiting .*admission.client_max_rooms is 2"
    ):
        bench.now(3, client="a")
    for room in (3, 4, 5):
        bench.now(room, client="vip")
    with pytest.raises(ClientLimitError, match=r"admission.clients.vip.max_rooms is 3"):
        bench.now(6, client="vip")
    bench.now(6)
    bench.rooms.end(1)
    bench.now(7, client="a")
    assert bench.events.refusals == {"client_limit": 2}
    assert ClientLimitError.http_status == 429


async def test_a_client_keeps_everybody_s_cap_where_it_has_none_of_its_own(made):
    clients = {"batch": {"max_rooms": 64}, "free": {"max_rooms": 0, "max_waiting": 0}}
    bench = made(client_max_rooms=4, client_max_waiting=2, clients=clients)
    for client in ("anybody", "batch", "free"):
        bench.now(None, client=client)
    shown = {one.client: (one.max_rooms, one.max_waiting) for one in bench.admission.status().clients}
    assert shown == {"anybody": (4, 2), "batch": (64, 2), "free": (0, 0)}


async def test_rooms_and_waiting_requests_share_the_cap(made):
    bench = made(client_max_rooms=2)
    bench.now(1, PAGES, client="a")
    task = await bench.waits(2, client="a")
    await refused("client_limit", await bench.waits(3, client="a"))
    await bench.waits(4, client="b")
    bench.rooms.end(1)
    await turn()
    assert task.done()
    assert bench.rooms.used["a"] == 1


async def test_a_client_may_have_so_many_waiting(made):
    bench = made(client_max_waiting=1)
    bench.now(1, PAGES, client="a")
    await bench.waits(2, client="a")
    error = await refused("client_limit", await bench.waits(3, client="a"))
    assert "1 waiting requests on this daemon, as many as it may (admission.client_max_waiting is 1)" in str(error)
    await bench.waits(4, client="b")
    assert bench.admission.waiting == 2


# ------------------------------------------------------------------------------------------- when to come back


def churn(bench: Bench, *, every_s: float, times: int) -> None:
    """Rooms of one page end at a steady rate; the pool is full before and after."""
    for number in range(times):
        bench.clock.advance(every_s)
        bench.rooms.end(100 + number)
        bench.now(100 + PAGES + number)


async def test_a_refusal_says_when_the_pages_will_be_there(made):
    bench = made()
    for room in range(100, 100 + PAGES):
        bench.now(room)
    churn(bench, every_s=0.5, times=200)
    with pytest.raises(CapacityError) as caught:
        bench.now(1, 6)
    assert caught.value.retry_after_s == pytest.approx(3.0, rel=0.1)
    bench.clock.advance(0.5)
    await bench.waits(2, 4)
    with pytest.raises(CapacityError) as caught:
        bench.now(1, 6)
    assert caught.value.retry_after_s == pytest.approx(5.0, rel=0.1), "four more have to come free for who waits"


# ------------------------------------------------------------------------------------------- starvation


async def test_a_node_that_admits_nothing_says_so_with_the_cause(made):
    bench = made(unready_after_s=30)
    bench.now(1, 5)
    bench.now(2, 3)
    bench.book.quarantine(Owner(2, 1), "worker pp0.tp0 is silent")
    bench.admission.tick()
    bench.clock.advance(29.9)
    bench.admission.tick()
    assert bench.admission.problem() == ""
    bench.clock.advance(0.1)
    bench.admission.tick()
    assert bench.admission.problem() == (
        "nothing could be admitted for 30 s (limit: admission.unready_after_s): space 'full' has no available page of 8 "
        "(5 held, 3 quarantined); quarantined for: worker pp0.tp0 is silent"
    )
    assert bench.admission.starved_s() == 30.0
    bench.rooms.end(1)
    assert (bench.admission.problem(), bench.admission.starved_s()) == ("", 0.0), "at once, without a tick"


async def test_a_full_pool_whose_rooms_come_and_go_is_ready(made):
    bench = made(unready_after_s=30)
    bench.now(1, PAGES)
    for room in range(2, 10):
        bench.admission.tick()
        await bench.waits(room, PAGES)
        bench.clock.advance(20)
        bench.admission.tick()
        bench.rooms.end(room - 1)
        await turn()
        bench.admission.tick()
        assert bench.rooms.admitted[-1] == room
        assert bench.admission.problem() == ""


# ------------------------------------------------------------------------------------------- what is shown


async def test_what_operators_see(made):
    bench = made(client_max_rooms=5)
    bench.now(1, PAGES, client="a")
    await bench.waits(2, client="b")
    await bench.waits(3, client="b")
    bench.clock.advance(1.5)
    shown = bench.admission.status()
    assert (shown.waiting, shown.oldest_wait_s, bench.admission.oldest_wait_s()) == (2, 1.5, 1.5)
    assert [client.model_dump() for client in shown.clients] == [
        {"client": "b", "rooms": 0, "waiting": 2, "head_waits_s": 1.5, "max_rooms": 5, "max_waiting": 0},
        {"client": "a", "rooms": 1, "waiting": 0, "head_waits_s": 0.0, "max_rooms": 5, "max_waiting": 0},
    ]


async def test_status_is_bounded(made):
    bench = made()
    bench.now(1, PAGES)
    for room in range(2, 62):
        await bench.waits(room, client=f"client{room}")
    assert len(bench.admission.status().clients) == 20
    assert bench.admission.waiting == 60


async def test_rooms_are_bounded_even_where_they_take_no_pages_of_ours():
    book = PageBook({FULL: PAGES})
    rooms = Rooms(book)
    admission = AdmissionController(rooms, book, limits=AdmissionConfig(max_rooms=2), events=RecordedEvents())
    for room in (1, 2):
        admission.admit_now(AdmissionRequest(room=room, prompt_tokens=1))
    for wait_s in (0.0, 0.01):
        with pytest.raises(CapacityError, match=r"has 2 rooms, as many as it may \(admission.max_rooms\)"):
            await admission.admit(AdmissionRequest(room=3, prompt_tokens=1, wait_s=wait_s))
    rooms.end(1)
    assert (await admission.admit(AdmissionRequest(room=3, prompt_tokens=1))).room == 3


async def test_requests_that_wait_are_not_refused_when_only_the_number_of_rooms_is_at_its_bound(made):
    bench = made(max_rooms=2)
    bench.now(1)
    bench.now(2)
    waiting = [await bench.waits(room) for room in (3, 4, 5)]
    bench.admission.tick()
    await turn()
    assert not any(task.done() for task in waiting)
    bench.rooms.end(1)
    await turn()
    assert [task.done() for task in waiting] == [True, False, False]
    with pytest.raises(CapacityError, match=r"admission\.max_rooms"):
        bench.now(6)
    bench.clock.advance(1)
    bench.rooms.end(2)
    with pytest.raises(CapacityError, match="2 requests wait for one of the 1 rooms"):
        bench.now(7)
    await turn()
    assert [task.done() for task in waiting] == [True, True, False]
    assert bench.events.refusals == {"capacity": 2}


# ------------------------------------------------------------------------------------------- prefixes that stay


def prompt(name: str, pages: int) -> Keys:
    return Keys.of([f"{name} {page}".encode().ljust(16) for page in range(pages)])


class SharingRooms(Rooms):
    """A client's name is the prompt of its rooms."""

    def __init__(self, book: PageBook, cache: PrefixCache) -> None:
        super().__init__(book)
        self.cache = cache
        self.got: dict[int, Admitted] = {}

    def admit(self, request: AdmissionRequest, **_: object) -> RoomReport:
        pages, room = request.prompt_tokens, request.room or 1_000
        keys = prompt(request.client, pages)
        self.got[room] = self.cache.admit(Owner(room, 1), keys, lambda shared: {FULL: pages - shared[FULL]})
        self.clients[room] = request.client
        self.used[request.client] += 1
        return self.report(room)

    def commit(self, room: int) -> None:
        got = self.got[room]
        pages = got.prefix_pages + len(got.own[FULL])
        self.cache.keep(Owner(room, 1), prompt(self.clients[room], pages), got.prefix_pages, got.own)

    def end(self, room: int) -> None:
        self.cache.let_go(Owner(room, 1))
        super().end(room)


class SharingBench(Bench):
    def __init__(self, *, twins: int = 0, **limits: object) -> None:
        book = PageBook({FULL: PAGES} | ({IndexSpace.FULL_TWIN: twins} if twins else {}))
        index = PrefixIndex((FULL,), PAGES + twins, has_twins=bool(twins))
        self.cache = PrefixCache(book, index)
        super().__init__(book, SharingRooms(book, self.cache), **limits)

    def warm(self, name: str = "a", pages: int = PAGES) -> None:
        """Fill the pool with a prompt that nobody reads."""
        self.now(900, pages, name)
        self.rooms.commit(900)
        self.rooms.end(900)
        assert self.book.counts()[FULL][PageState.CACHED] == pages


@pytest.fixture
def sharing():
    bench = SharingBench(unready_after_s=30.0)
    yield bench
    bench.cache.check_integrity()


async def test_what_is_read_is_waited_for_and_the_end_of_its_last_reader_wakes_the_queue(sharing):
    sharing.warm(pages=6)
    for room in (1, 2):
        sharing.now(room, 6, "a")
        assert sharing.rooms.got[room].prefix_pages == 6
    waiting = await sharing.waits(3, 4, "b")
    assert (waiting.done(), sharing.admission.waiting) == (False, 1)
    sharing.rooms.end(1)
    await turn()
    assert not waiting.done(), "somebody reads them still"
    sharing.rooms.end(2)
    assert (await asyncio.wait_for(waiting, 20)).room == 3
    assert sharing.rooms.got[3].own[FULL].size == 4
    assert sharing.book.available_pages() == {FULL: PAGES - 4}


async def test_a_pool_full_of_what_is_read_starves_and_says_so_until_a_reader_ends(sharing):
    sharing.warm()
    sharing.now(1, PAGES, "a")
    sharing.admission.tick()
    sharing.clock.advance(31.0)
    assert "space 'full' has no available page of 8 (8 cached and read)" in sharing.admission.problem()
    sharing.rooms.end(1)
    assert (sharing.admission.problem(), sharing.admission.starved_s()) == ("", 0.0), "at once, without a tick"


async def test_a_host_that_is_full_keeps_nobody_waiting_and_the_end_of_a_backup_wakes_those_who_wait():
    bench = SharingBench(twins=2, unready_after_s=30.0)
    bench.warm()
    backup = bench.cache.twins.start_backup(Owner(NO_ROOM, 1), prompt("a", 2), at_most=2)
    bench.admission.tick()
    bench.clock.advance(60.0)
    bench.admission.tick()
    assert (bench.book.available_pages()[IndexSpace.FULL_TWIN], bench.admission.problem()) == (0, "")
    waiting = await bench.waits(1, PAGES, "b")
    assert not waiting.done(), "two pages are being copied"
    bench.cache.twins.end_backup(backup, done=True)
    assert (await asyncio.wait_for(waiting, 20)).room == 1
    bench.cache.check_integrity()


async def test_a_prefix_that_is_gone_when_the_turn_comes_is_not_counted_on(sharing):
    sharing.warm(pages=4)
    sharing.now(1, 4, "a")
    sharing.now(2, 4, "b")
    waiting = await sharing.waits(3, 6, "a")
    sharing.cache.drop()
    sharing.rooms.end(2)
    await turn()
    assert not waiting.done(), "two pages beside its prefix would be there, but that is gone"
    sharing.rooms.end(1)
    await asyncio.wait_for(waiting, 20)
    assert (sharing.rooms.got[3].prefix_pages, sharing.rooms.got[3].own[FULL].size) == (0, 6)
