"""Reservation on both ends: all or nothing, bounded, once, also by two replicas at once."""

import asyncio
import random

import pytest

from kvbridge.api.directory import PairRequest, Ticket
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.store import PairingState
from kvbridge.core import errors
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity, Namespaces, Retention
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.facts import PairingEnded
from tests.unit.bootstrap.fleet import FLEET, LIMITS, TIMES, FakeDaemons, node

REQUEST = PairRequest(room=7, prompt_tokens=1000, max_new_tokens=100, client="c")


async def under_way(pairing, port, request: PairRequest = REQUEST) -> asyncio.Task:
    """A pairing that waits for a daemon."""
    task = asyncio.create_task(pairing.pair(request))
    await asyncio.wait_for(port.stuck.wait(), 20)
    return task


async def ends(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)


@pytest.mark.parametrize("slow", ["http://p1", "http://d1"])
async def test_a_ticket_that_runs_out_while_it_is_made_is_none(world, port, slow):
    port.takes_s = dict.fromkeys([slow, slow.replace("1", "2")], 3.0)
    pairing = await world.pairing(port, clock=port.clock, ticket_s=3.0)
    with pytest.raises((errors.DeadlineError, errors.NotReadyError), match=r"had run out .*timeouts\.ticket_s"):
        await pairing.pair(REQUEST)
    assert port.rooms() == {}


@pytest.mark.parametrize("wrong", [{"room": 8}, {"generation": 9}, {"role": Role.DECODE}], ids=str)
async def test_a_daemon_that_admits_something_else_is_avoided(world, port, wrong):
    port.misreports["http://p1"] = wrong
    ticket = await (await world.pairing(port)).pair(REQUEST)
    assert ticket.prefill.instance == "p2"
    port.misreports["http://p2"] = wrong
    with pytest.raises(errors.NotReadyError, match=r"'p2': http://p2 has admitted room . gen.* as \w+, asked for 6"):
        await (await world.pairing(port)).pair(REQUEST.model_copy(update={"room": 6}))


async def test_a_daemon_that_answers_too_late_is_given_back(world, port):
    port.late.add("http://d1")
    ticket = await (await world.pairing(port, reserve_s=0.02)).pair(REQUEST)
    assert ticket.decode.instance == "d2"
    assert port.rooms() == {"http://p1": [7], "http://d2": [7]}


async def test_pairing_as_a_whole_has_a_deadline(world, port):
    port.late.add("http://d1")
    with pytest.raises(errors.DeadlineError, match=r"timeouts\.pair_s"):
        await (await world.pairing(port, pair_s=0.02)).pair(REQUEST)
    assert port.rooms() == {}


async def test_a_pairing_that_is_cancelled_while_it_gives_back_still_gives_back(world, port):
    port.refuse["http://d1"] = errors.InvalidInputError("bad prefix")
    port.cancel_gate = asyncio.Event()
    task = await under_way(await world.pairing(port), port)
    task.cancel()
    await asyncio.sleep(0)
    port.cancel_gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 20)
    assert port.rooms() == {}


async def test_no_more_are_paired_at_once_than_may_be(world, port):
    port.hang.add("http://p1")
    pairing = await world.pairing(port, max_under_way=1)
    task = await under_way(pairing, port)
    with pytest.raises(errors.CapacityError, match=r"1 requests are .* \(pairing\.max_under_way\)") as caught:
        await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    assert caught.value.retry_after_s == 1.0
    await ends(task)
    port.hang.clear()
    assert (await pairing.pair(REQUEST.model_copy(update={"room": 8}))).room == 8


async def test_a_room_that_is_being_paired_cannot_be_paired_again(world, port):
    port.hang.add("http://p1")
    pairing = await world.pairing(port)
    task = await under_way(pairing, port)
    with pytest.raises(errors.ConflictError):
        await pairing.pair(REQUEST)
    assert await world.store.room_counts() == dict.fromkeys(PairingState, 0) | {PairingState.PAIRING: 1}
    await ends(task)


async def test_cancel_reaches_both_ends_and_frees_the_id(world, port):
    pairing = await world.pairing(port)
    await pairing.pair(REQUEST)
    report = await pairing.cancel(7, "user left")
    assert report.state is RoomState.ABORTED
    assert [end.report.reason for end in (*report.decode, *report.prefill)] == ["user left"] * 2
    assert port.calls[-2:] == [("cancel", "http://d1", 1), ("cancel", "http://p1", 1)]
    assert (await pairing.pair(REQUEST)).generation == 2


async def test_a_room_that_could_not_be_cancelled_stays_in_use(world, port):
    pairing = await world.pairing(port)
    await pairing.pair(REQUEST)
    port.cancel_errors["http://d1"] = errors.PeerError("gone")
    report = await pairing.cancel(7, "x")
    assert (report.decode[0].error_code, report.prefill[0].report.state) == ("peer_failed", RoomState.ABORTED)
    with pytest.raises(errors.ConflictError):
        await pairing.pair(REQUEST)


async def test_a_room_that_is_paired_again_is_young_again(world):
    pairing = await world.pairing(FakeDaemons())
    await pairing.pair(REQUEST)
    await pairing.cancel(7, "x")
    world.advance(1)
    await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    world.advance(20)
    await pairing.pair(REQUEST)
    world.advance(TIMES.keep_s - 10)
    assert (await pairing.report(7)).generation == 2
    with pytest.raises(errors.UnknownRoomError):
        await pairing.report(8)


async def test_a_pairing_whose_claim_was_taken_over_reserves_nothing(world, port):
    port.pauses["http://d1"] = asyncio.Event()
    pairing = await world.pairing(port)
    slow = await under_way(pairing, port)
    world.advance(TIMES.claim_s + 0.1)
    await world.directory(*FLEET)  # the nodes' heartbeats have gone on meanwhile
    answer = port.pauses.pop("http://d1")
    second = await pairing.pair(REQUEST)
    answer.set()
    with pytest.raises(errors.NotReadyError, match="nothing is reserved"):
        await asyncio.wait_for(slow, 20)
    assert second.generation == 4
    assert port.generations() == {("http://p1", 7, 4), ("http://d1", 7, 4)}
    assert (await pairing.report(7)).generation == 4


WAITING = REQUEST.model_copy(update={"wait_s": 10.0})


async def test_those_who_wait_are_no_burden_to_those_who_do_not_and_are_bounded(world, port):
    port.full = {"http://d1", "http://d2"}
    port.pauses = {url: asyncio.Event() for url in port.full}
    pairing = await world.pairing(port, max_under_way=1, max_waiting=1)
    waits = await under_way(pairing, port, WAITING)
    with pytest.raises(errors.CapacityError, match="full now"):
        await pairing.pair(WAITING.model_copy(update={"room": 8}))
    for pause in port.pauses.values():
        pause.set()
    assert (await waits).room == 7


async def test_a_wait_longer_than_is_served_is_refused(world, port):
    pairing = await world.pairing(port, max_wait_s=5.0)
    with pytest.raises(errors.InvalidInputError, match=r"wait_s is 10 s, at most 5 s .* \(pairing.max_wait_s\)"):
        await pairing.pair(WAITING)
    assert port.calls == []


MATTERS = Retention(priority=3, for_s=60)
KEYED = PairRequest(room=7, prompt_tokens=1000, namespace="acme", page_hashes=bytes(range(48)), retention=MATTERS)
ONE, TWO = ModelIdentity(name="v4", revision="1"), ModelIdentity(name="v4", revision="2")


async def test_a_namespace_that_may_not_be_named_is_refused_before_anybody_is_asked(world, port):
    outcomes = []
    pairing = await world.pairing(port)
    pairing.events.add_reader({PairingEnded: lambda _now_s, fact: outcomes.append(fact.outcome)})
    with pytest.raises(errors.NamespaceError, match="'acme': it may name the default one"):
        await pairing.pair(KEYED, Namespaces())
    assert (port.calls, outcomes) == ([], ["namespace_forbidden"])
    await pairing.pair(KEYED, Namespaces(frozenset({"acme"})))


async def test_pages_of_other_weights_are_never_paired(world, port):
    fleet = (
        node("p1", Role.PREFILL, free=100, model_identity=ONE),
        node("p2", Role.PREFILL, free=90, model_identity=TWO),
        node("p3", Role.PREFILL, free=80),
        node("d", Role.DECODE, model_identity=TWO),
    )
    ticket = await (await world.pairing(port, *fleet)).pair(REQUEST)
    assert ticket.prefill.instance == "p2"
    listing = {one.instance: one for one in await (await world.directory()).listing()}
    assert (listing["p2"].ready, listing["d"].ready, listing["p2"].model_identity) == (True, True, TWO)
    for lonely in ("p1", "p3"):
        assert not listing[lonely].ready
        assert "the decode side holds 'v4' revision '2'" in listing[lonely].reasons[0]


ROOMS_EACH = 3
CALLERS = 24
IDS = 8


class ScarceDaemons(FakeDaemons):
    """Daemons with place for few rooms, each of whose answers takes its time; a room in use there is not replaced."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance

    async def _think(self) -> None:
        for _ in range(self._chance.randrange(6)):
            await asyncio.sleep(0)

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        await self._think()
        rooms = self.admitted.setdefault(url, {})
        if request.room in rooms:
            kind = errors.StaleError if request.generation < rooms[request.room].generation else errors.ConflictError
            raise kind(f"room {request.room} is in use at {url}")
        if len(rooms) >= ROOMS_EACH:
            raise errors.CapacityError(f"{url} is full")
        rooms[request.room] = request
        await self._think()
        return self._report(url, request.room)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        await self._think()
        return await super().cancel(url, room, reason, generation=generation)


@pytest.mark.parametrize("seed", range(6))
async def test_no_double_ticket_and_no_leaked_reservation(world, seed):
    chance = random.Random(seed)
    port = ScarceDaemons(chance)
    fleet = [node(name, Role.PREFILL) for name in ("p1", "p2")] + [node(name, Role.DECODE) for name in ("d1", "d2")]
    await world.directory(*fleet)
    stores = [world.store, world.store if not hasattr(world, "replica") else world.replica()]
    replicas = [PairingService(Directory(store, FakeDaemons()), store, port, **LIMITS) for store in stores]
    live: dict[int, Ticket] = {}
    generations: dict[int, list[int]] = {}
    outcomes: dict[str, int] = {}

    def note(what: str) -> None:
        outcomes[what] = outcomes.get(what, 0) + 1

    async def caller(number: int) -> None:
        room = chance.randrange(IDS)
        pairing = asyncio.ensure_future(replicas[number % 2].pair(PairRequest(room=room, prompt_tokens=300)))
        if chance.random() < 0.2:  # a caller that goes away somewhere on the way
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            pairing.cancel()
        try:
            ticket = await pairing
        except (errors.CapacityError, errors.ConflictError) as error:
            note(error.code)
            return
        except asyncio.CancelledError:
            note("gone")
            return
        assert room not in live, "two tickets for one room"
        live[room] = ticket
        generations.setdefault(room, []).append(ticket.generation)
        note("ticket")
        if chance.random() < 0.7:
            del live[room]
            report = await replicas[chance.randrange(2)].cancel(room, "done")
            assert report.state is RoomState.ABORTED
            note("cancelled")

    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    reserved = port.generations()
    expected = {
        (url, room, ticket.generation)
        for room, ticket in live.items()
        for url in (*ticket.prefill.http_urls, *ticket.decode.http_urls)
    }
    assert reserved == expected
    for used in generations.values():
        assert used == sorted(set(used)), "a generation was used twice, or one fell"
    for room in live:
        await replicas[0].cancel(room, "end")
    assert port.rooms() == {}
    with pytest.raises(errors.UnknownRoomError):
        await replicas[1].report(IDS + 1)
    assert outcomes["ticket"] >= ROOMS_EACH
