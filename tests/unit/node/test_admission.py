"""Admission over a real page book: waits, the order of the queue, refusals with their hints, caps, and how all that is shown."""

import asyncio
from collections import Counter
from collections.abc import Awaitable

import pytest

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.limits import AdmissionConfig
from kvbridge.core import errors
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.prefixes import Namespaces
from kvbridge.core.session.tables import RoomState
from kvbridge.node.admission import AdmissionController
from kvbridge.node.admission_queue import AdmissionQueue, Waiting
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.prefix_cache import Admitted, PrefixCache
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_bench import keys as prompt
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import RecordedEvents

FULL = IndexSpace.FULL
PAGES = 8
LONG_S = 20.0


class Rooms:
    """Rooms whose pages are their prompt tokens."""

    def __init__(self, book: PageBook) -> None:
        self.pages = book
        self.book = self.workers = self
        self.in_use: Counter[str] = Counter()
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
            raise errors.NotReadyError(self.lacking)
        if request.room in self.clients:
            raise errors.ConflictError(f"room {request.room} is in flight")
        demand = {FULL: request.prompt_tokens}
        self.pages.require_possible(demand)
        return demand

    def admit(self, request: AdmissionRequest, **_: object) -> RoomReport:
        room = request.room or 1_000 + len(self.admitted)
        self._reserve(Owner(room, 1), request)
        self.clients[room] = request.client
        self.in_use[request.client] += 1
        self.admitted.append(room)
        return self.report(room)

    def _reserve(self, owner: Owner, request: AdmissionRequest) -> None:
        self.pages.reserve(owner, self.demand(request))

    def end(self, room: int) -> None:
        self.in_use[self.clients.pop(room)] -= 1
        self.pages.free(Owner(room, 1))

    def report(self, room: int) -> RoomReport:
        return RoomReport(room=room, generation=1, role=Role.PREFILL, state=RoomState.ADMITTED, prompt_tokens=1)

    async def cancel(self, room: int, reason: str) -> None:
        self.end(room)


class Bench:
    def __init__(self, book: PageBook | None = None, rooms: Rooms | None = None, **limits: object) -> None:
        self.clock = ManualClock(100.0)
        self.book = book or PageBook({FULL: PAGES})
        self.rooms = rooms or Rooms(self.book)
        self.events = RecordedEvents()
        about = {"events": self.events, "clock": self.clock, "draw": lambda: 0.0}
        self.admission = AdmissionController(self.rooms, self.book, limits=AdmissionConfig(**limits), **about)
        self.tasks: list[asyncio.Task[RoomReport]] = []

    def now(self, room: int | None, pages: int = 1, client: str = "") -> RoomReport:
        return self.admission.admit_now(AdmissionRequest(room=room, prompt_tokens=pages, client=client))

    async def waits(self, room: int, pages: int = 1, client: str = "", wait_s: float = LONG_S) -> asyncio.Task:
        """Hand a request in that waits, and let it come to wait (or to its answer)."""
        request = AdmissionRequest(room=room, prompt_tokens=pages, client=client, wait_s=wait_s)
        self.tasks.append(asyncio.ensure_future(self.admission.admit(request)))
        await turn()
        return self.tasks[-1]

    def look(self, after_s: float = 0.0) -> str:
        self.clock.advance(after_s)
        self.admission.tick()
        return self.admission.problem()


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def refused(code: str, call: Awaitable[object]) -> str:
    with pytest.raises(errors.BridgeError) as caught:
        await asyncio.wait_for(call, 20)
    assert caught.value.code == code
    return str(caught.value)


@pytest.fixture
async def made():
    benches: list[Bench] = []

    def make(kind: type[Bench] = Bench, **limits: object) -> Bench:
        benches.append(kind(**limits))
        return benches[-1]

    yield make
    for bench in benches:
        for task in bench.tasks:
            task.cancel()
        await asyncio.gather(*bench.tasks, return_exceptions=True)
        assert bench.admission.status().waiting == 0
        check_book(bench.book)


async def test_what_is_stored_of_a_prompt_is_fetched_before_it_is_admitted_and_for_nobody_who_is_refused(made):
    bench = made(client_max_rooms=1)
    bench.rooms.store = bench.rooms

    def asked(room: int, **more: object) -> AdmissionRequest:
        return AdmissionRequest(prompt_tokens=2, room=room, page_hashes=bytes(16), **more)

    task = asyncio.create_task(bench.admission.admit(asked(1, client="a")))
    await asyncio.sleep(0)
    assert bench.rooms.admitted == [], "its prompt comes first"
    await task
    assert (bench.rooms.fetched, bench.rooms.admitted) == ([1], [1])
    with pytest.raises(errors.ClientLimitError):
        await bench.admission.admit(asked(2, client="a"))
    with pytest.raises(errors.ConflictError):
        await bench.admission.admit(asked(1, client="b"))
    with pytest.raises(errors.NamespaceError):
        await bench.admission.admit(asked(3, client="c", namespace="secret"), Namespaces())
    await bench.admission.admit(AdmissionRequest(prompt_tokens=2, room=4, client="d"))
    bench.admission.close("the end")
    with pytest.raises(errors.NotReadyError):
        await bench.admission.admit(asked(5, client="e"))
    assert bench.rooms.fetched == [1]


async def test_who_waits_too_long_is_refused_with_the_limit(made):
    bench = made()
    bench.now(1, 6)
    error = await refused("capacity", await bench.waits(2, 4, wait_s=0.01))
    assert "0.01 s (limit: the request's wait_s" in error
    assert "4 of 'full' (2 available)" in error
    assert bench.events.refusals == {"wait_timeout": 1}
    assert bench.events.waits[0][0] == "timeout"


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
    assert (bench.book.available_pages()[FULL], bench.rooms.clients) == (PAGES, {})


async def test_what_can_never_be_served_does_not_wait_and_the_end_refuses_everybody_who_does(made):
    bench = made(max_wait_s=5, max_waiting=2)
    bench.now(1, PAGES)
    assert "admission.max_wait_s" in await refused("invalid_input", await bench.waits(2, wait_s=5.5))
    tasks = [await bench.waits(room, wait_s=5) for room in (3, 4)]
    await refused("invalid_input", await bench.waits(5, PAGES + 1, wait_s=5))
    assert "admission.max_waiting" in await refused("capacity", await bench.waits(6, wait_s=5))
    assert bench.events.refusals["queue_full"] == 1
    bench.rooms.lacking = "a worker is starting"
    await refused("not_ready", await bench.waits(7, wait_s=5))
    assert bench.admission.status().waiting == 2
    bench.admission.close("the daemon is shutting down")
    for task in tasks:
        assert "shutting down" in await refused("not_ready", task)


async def test_a_client_at_its_cap_is_refused_whatever_is_free(made):
    bench = made(client_max_rooms=2, clients={"vip": {"max_rooms": 3}})
    for room in (1, 2):
        bench.now(room, client="a")
    with pytest.raises(errors.ClientLimitError, match=r"client 'a' has 2 rooms and 0 waiting .*client_max_rooms is 2"):
        bench.now(3, client="a")
    for room in (3, 4, 5):
        bench.now(room, client="vip")
    with pytest.raises(errors.ClientLimitError, match=r"admission.clients.vip.max_rooms is 3"):
        bench.now(6, client="vip")
    bench.now(6)
    bench.rooms.end(1)
    bench.now(7, client="a")
    assert bench.events.refusals == {"client_limit": 2}


async def test_rooms_are_bounded_even_where_they_take_no_pages_of_ours_and_who_waits_for_one_is_not_refused(made):
    bench = made(max_rooms=2)
    bench.now(1)
    bench.now(2)
    waiting = [await bench.waits(room) for room in (3, 4, 5)]
    bench.rooms.end(1)
    await turn()
    assert [task.done() for task in waiting] == [True, False, False]
    with pytest.raises(errors.CapacityError, match=r"has 2 rooms, as many as it may \(admission\.max_rooms\)"):
        bench.now(6)
    bench.rooms.end(2)
    with pytest.raises(errors.CapacityError, match="2 requests wait for one of the 1 rooms"):
        bench.now(7)


async def test_a_refusal_says_when_the_pages_will_be_there(made):
    """Rooms of one page end at a steady rate; the pool is full before and after."""
    bench = made()
    for room in range(100, 100 + PAGES):
        bench.now(room)
    for number in range(200):
        bench.clock.advance(0.5)
        bench.rooms.end(100 + number)
        bench.now(100 + PAGES + number)
    with pytest.raises(errors.CapacityError) as caught:
        bench.now(1, 6)
    assert caught.value.retry_after_s == pytest.approx(3.0, rel=0.1)
    bench.clock.advance(0.5)
    await bench.waits(2, 4)
    with pytest.raises(errors.CapacityError) as caught:
        bench.now(1, 6)
    assert caught.value.retry_after_s == pytest.approx(5.0, rel=0.1), "four more have to come free for who waits"


async def test_the_scarcest_space_decides_and_pages_of_rooms_that_are_ending_are_not_waited_for():
    bench = Bench(PageBook({FULL: 100, IndexSpace.HOST: 100}), retry_after_min_s=0.1)
    admission, book = bench.admission, bench.book

    def hint(**lacking: int) -> float:
        spaces = {IndexSpace(space): count for space, count in lacking.items()}
        return admission.retry_after_s(errors.CapacityError("", lacking=spaces))

    assert hint(full=6) == 0.1, "nothing is known"
    for number in range(100):
        bench.clock.advance(1.0)
        admission.freed({FULL: 10, IndexSpace.HOST: 1})
        admission.gone(Owner(number + 1, 1))
    assert hint(full=10, host=6) == hint(host=6) == pytest.approx(6.0, rel=0.1)
    book.reserve(Owner(1, 1), {IndexSpace.HOST: 4})
    book.expect_free(Owner(1, 1))
    assert hint(host=6) == pytest.approx(2.0, rel=0.1)
    assert hint(host=4) == 0.1
    bench.rooms.in_use.update(a=10, b=30)
    before_s = admission._room_ends_s(of=10)
    assert before_s == pytest.approx(4.0, rel=0.1)
    admission.gone(Owner(NO_ROOM, 1))
    assert admission._room_ends_s(of=10) == before_s, "the end of a copy between tiers is no room's"


async def test_a_node_that_admits_nothing_says_so_with_the_cause(made):
    bench = made(unready_after_s=30)
    bench.now(1, 5)
    bench.now(2, 3)
    bench.book.quarantine(Owner(2, 1), "worker pp0.tp0 is silent")
    bench.look()
    assert bench.look(29.9) == ""
    assert bench.look(0.1) == (
        "nothing could be admitted for 30 s (limit: admission.unready_after_s): space 'full' has no available page of 8 "
        "(5 held, 3 quarantined); quarantined for: worker pp0.tp0 is silent"
    )
    assert bench.admission.starved_s == 30.0
    bench.rooms.end(1)
    assert (bench.admission.problem(), bench.admission.starved_s) == ("", 0.0), "at once, without a tick"


class SharingRooms(Rooms):
    """A client's name is the prompt of its rooms."""

    def __init__(self, book: PageBook, cache: PrefixCache) -> None:
        super().__init__(book)
        self.cache = cache
        self.got: dict[int, Admitted] = {}

    def _reserve(self, owner: Owner, request: AdmissionRequest) -> None:
        pages, keys = request.prompt_tokens, prompt(request.client, request.prompt_tokens)
        self.got[owner.room] = self.cache.admit(owner, keys, lambda shared: {FULL: pages - shared[FULL]})

    def end(self, room: int) -> None:
        self.cache.let_go(Owner(room, 1))
        super().end(room)


class SharingBench(Bench):
    def __init__(self, *, twins: int = 0, **limits: object) -> None:
        book = PageBook({FULL: PAGES} | ({IndexSpace.FULL_COPY: twins} if twins else {}))
        self.cache = PrefixCache(book, PrefixIndex((FULL,), PAGES + twins, has_copies=bool(twins)))
        super().__init__(book, SharingRooms(book, self.cache), unready_after_s=30.0)

    def warm(self, pages: int = PAGES) -> None:
        """Fill the pool with a prompt that nobody reads."""
        self.now(900, pages, "a")
        got = self.rooms.got[900]
        self.cache.keep(Owner(900, 1), prompt("a", pages), got.prefix_pages, got.own)
        self.rooms.end(900)


async def test_a_host_that_is_full_keeps_nobody_waiting_and_the_end_of_a_backup_wakes_those_who_wait(made):
    bench = made(SharingBench, twins=2)
    bench.warm()
    backup = bench.cache.copies.start_backup(Owner(NO_ROOM, 1), prompt("a", 2), at_most=2)
    bench.look()
    assert (bench.look(60.0), bench.book.available_pages()[IndexSpace.FULL_COPY]) == ("", 0)
    waiting = await bench.waits(1, PAGES, "b")
    assert not waiting.done(), "two pages are being copied"
    bench.cache.copies.end_backup(backup, done=True)
    assert (await asyncio.wait_for(waiting, 20)).room == 1
    check_cache(bench.cache)


async def test_a_prefix_that_is_gone_when_the_turn_comes_is_not_counted_on(made):
    bench = made(SharingBench)
    bench.warm(4)
    bench.now(1, 4, "a")
    bench.now(2, 4, "b")
    waiting = await bench.waits(3, 6, "a")
    bench.cache.drop()
    bench.rooms.end(2)
    await turn()
    assert not waiting.done(), "two pages beside its prefix would be there, but that is gone"
    bench.rooms.end(1)
    await asyncio.wait_for(waiting, 20)
    assert (bench.rooms.got[3].prefix_pages, bench.rooms.got[3].own[FULL].size) == (0, 6)


FULL, HOST = IndexSpace.FULL, IndexSpace.HOST


def join(line: AdmissionQueue[Waiting], client: str, full: int, host: int = 0) -> Waiting:
    entry = Waiting(client, {FULL: full, HOST: host}, 0.0)
    line.join(entry, {})
    return entry


async def test_a_head_that_was_passed_often_enough_comes_before_clients_with_fewer_rooms():
    line: AdmissionQueue[Waiting] = AdmissionQueue(max_waiting=9, max_overtakes=1)
    large, small = join(line, "large", 8), join(line, "small", 1)
    line.granted(small)
    join(line, "small", 1)
    assert line.next({FULL: 9, HOST: 9}, {"large": 5}) is large


async def test_what_lacks_counts_everybody_who_waits():
    line: AdmissionQueue[Waiting] = AdmissionQueue(max_waiting=2, max_overtakes=9)
    assert line.lacking({FULL: 2}, {FULL: 2}) == {}
    first, _ = join(line, "a", 3), join(line, "a", 4)
    assert line.lacking({FULL: 2, HOST: 1}, {FULL: 5, HOST: 1}) == {FULL: 4}
    assert line.lacking({FULL: 0}, {FULL: 0}) == {}, "who needs none of the pages that are waited for does not wait"
    with pytest.raises(errors.CapacityError, match=r"admission\.max_waiting") as caught:
        join(line, "c", 1)
    assert (caught.value.lacking, len(line), line.waiting_of("c")) == ({FULL: 8}, 2, 0)
    for _ in range(2):
        line.leave(first)
    assert (len(line), line.lacking({FULL: 2}, {FULL: 5})) == (1, {FULL: 1})
