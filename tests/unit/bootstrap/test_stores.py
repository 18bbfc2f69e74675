"""The contract of a store, kept by the one in memory and the one in Redis alike."""

from dataclasses import replace

from kvbridge.api.directory import Ticket, TicketEnd
from kvbridge.bootstrap.store import Claim, PairingState, RoomInUse
from kvbridge.core.ids import Role
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, TIMES, beat, entry_of, half, loaded, node


def ticket_for(claim: Claim, generation: int) -> Ticket:
    end = TicketEnd(instance="i", http_urls=("http://i",))
    return Ticket(room=claim.room, generation=generation, prefill=end, decode=end, expires_in_s=60.0)


async def test_a_change_that_was_decided_on_old_knowledge_is_not_made(world):
    store = world.store
    version, _ = await store.of_instance("p")
    assert await store.put(entry_of(half("p", Role.PREFILL, 0)), version=version)
    assert not await store.put(entry_of(half("p", Role.PREFILL, 1)), version=version)
    assert [record.entry.key for record in await store.nodes()] == [("p", "node-0")]
    version, _ = await store.of_instance("p")
    assert await store.put(entry_of(half("p", Role.PREFILL, 1)), version=version)
    assert {record.entry.key for record in await store.nodes()} == {("p", "node-0"), ("p", "node-1")}


async def test_a_heartbeat_of_another_life_changes_nothing(world):
    store = world.store
    await world.directory(node("p", Role.PREFILL))
    world.advance(EXPIRE_AFTER_S - 10)
    holder = await store.beat(("p", "node-0"), beat("another", load=loaded(rooms=9)))
    assert (holder.registration.incarnation, holder.view().load.rooms) == ("p-incarnation-1", 0)
    assert holder.silent_s > EXPIRE_AFTER_S - 11
    assert not await store.remove(("p", "node-0"), "another")
    assert len(await store.nodes()) == 1
    world.advance(20)
    assert await store.beat(("p", "node-0"), beat("p-incarnation-1")) is None
    assert await store.nodes() == ()


async def test_a_look_finds_those_that_are_asked_for_and_alive(world):
    await world.directory(node("p", Role.PREFILL), half("d", Role.DECODE, 0), half("d", Role.DECODE, 1))
    keys = [("d", "node-1"), ("p", "node-0"), ("p", "node-1"), ("x", "node-0")]
    assert {record.entry.key for record in await world.store.look(keys)} == {("d", "node-1"), ("p", "node-0")}
    assert await world.store.look([]) == ()
    world.advance(EXPIRE_AFTER_S + 1)
    assert await world.store.look(keys) == ()


async def test_a_heartbeat_keeps_a_node_who_fell_silent_is_told_once_and_each_is_removed_once(world):
    await world.directory(node("p", Role.PREFILL), node("d", Role.DECODE))
    for number in range(4):
        world.advance(EXPIRE_AFTER_S - 10)
        record = await world.store.beat(("p", "node-0"), beat("p-incarnation-1", load=loaded(rooms=number)))
        assert (record.view().load.rooms, record.registration.http_url) == (number, "http://p")
    assert await world.store.expire() == (("d", "node-0"),)
    assert await world.store.expire() == ()
    assert [await world.store.remove(("p", "node-0"), "p-incarnation-1") for _ in range(2)] == [True, False]


async def test_a_claim_that_was_taken_over_has_no_say(world):
    store = world.store
    old = await store.claim(7, generations=3)
    world.advance(TIMES.claim_s + 0.1)
    new = await store.claim(7, generations=3)
    assert (old.base, new.base) == (0, 3)
    await store.give_up(old, 1)
    assert isinstance(await store.claim(7, generations=3), RoomInUse)
    assert not await store.settle(old, ticket_for(old, 1))
    assert await store.settle(new, ticket_for(new, 4))
    await store.give_up(old, 1)
    assert (await store.ticket(7)).generation == 4
    given_up = await store.claim(8, generations=3)
    await store.give_up(given_up, 2)
    assert (await store.claim(8, generations=3)).base == 2, "its generations stay used"


async def test_the_oldest_settled_room_makes_place_and_one_being_paired_does_not(world):
    world.limit(replace(TIMES, max_rooms=2))
    store = world.store
    pairing = await store.claim(1, generations=1)
    world.advance(0.01)
    for room in (2, 3):
        claim = await store.claim(room, generations=1)
        assert await store.settle(claim, ticket_for(claim, 1))
        world.advance(0.01)
    assert [(await store.ticket(room)) is not None for room in (2, 3)] == [False, True]
    await store.cancelled(3, 1)
    world.advance(0.01)
    claim = await store.claim(4, generations=1)
    assert await store.settle(claim, ticket_for(claim, 1))
    assert [(await store.ticket(room)) is not None for room in (3, 4)] == [False, True]
    assert (await store.room_counts())[PairingState.PAIRING] == 1
    assert await store.settle(pairing, ticket_for(pairing, 1))


async def test_rooms_are_counted_by_state_and_forgotten_by_age(world):
    store = world.store
    settled = await store.claim(1, generations=1)
    await store.settle(settled, ticket_for(settled, 1))
    await store.give_up(await store.claim(2, generations=1), 1)
    await store.claim(3, generations=1)
    expected = {PairingState.PAIRING: 1, PairingState.PAIRED: 1, PairingState.CANCELLED: 1}
    assert await store.room_counts() == expected
    world.advance(TIMES.keep_s - 20)
    assert await store.room_counts() == expected
    world.advance(20.1)
    assert await store.room_counts() == dict.fromkeys(expected, 0)
    assert await store.ticket(1) is None
