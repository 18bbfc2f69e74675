"""Pairing by overlap: who is thought to hold a prompt's beginning, what that is worth, and what a wrong thought costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest, Ticket, TicketEnd
from kvbridge.bootstrap.fit import HELD_WEIGHT, Ranking
from kvbridge.bootstrap.nodes import NodeEntry, NodeRecord, by_instance
from kvbridge.bootstrap.prefixes import Guess, guess_held_pages, judge, noted_keys, noted_pages
from kvbridge.bootstrap.stores import memory, redis
from kvbridge.bootstrap.stores.base import NOTE_KEEP_S, Claim, RoomTimes
from kvbridge.bootstrap.stores.memory import MemoryStore
from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.telemetry.events import PrefixGuessed
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers.manual_clock import ManualClock
from tests.unit.bootstrap.fleet import FakeDaemons, half, instances_of, node

PAGE = 256
HELD = ModelIdentity(name="tiny", revision="1")
KEPT_S = 500.0


def load(free: int = 100, *, rooms: int = 0, kept_s: float | None = KEPT_S) -> Load:
    spaces = ("full", "swa", "request", "host")
    pages = {"available_pages": dict.fromkeys(spaces, free), "total_pages": dict.fromkeys(spaces, 100)}
    return Load(rooms=rooms, prefixes_kept_s=kept_s, **pages)


@cache
def plain(name: str) -> NodeRegistration:
    return node(name, Role.PREFILL if name.startswith("p") else Role.DECODE, model_identity=HELD)


def keeper(name: str, **of_load) -> NodeRegistration:
    return plain(name).model_copy(update={"load": load(**of_load)})


FLEET = tuple(keeper(name) for name in ("p1", "p2", "d1", "d2"))
IDENTITY = PrefixIdentity(model="tiny", revision="1", fingerprint="f", tokens_per_page=PAGE)


def prompt(*parts: tuple[int, int]) -> Keys:
    """Keys of a prompt that has so many pages of a number, then so many of another."""
    return page_keys(IDENTITY, [number for number, pages in parts for _ in range(pages * PAGE)])


def request(keys: Keys, **more) -> PairRequest:
    return PairRequest(prompt_tokens=len(keys) * PAGE + 1, page_hashes=keys.data, **more)


# ------------------------------------------------------------------------------------------- pure


def test_a_prompt_is_noted_at_few_places():
    assert noted_pages(0) == []
    assert noted_pages(1) == [1]
    assert noted_pages(7) == [1, 2, 3, 4, 6]
    assert noted_pages(24) == [1, 2, 3, 4, 6, 8, 12, 16, 24]
    assert len(noted_pages(4096)) == 24
    keys = prompt((1, 7))
    assert noted_keys(keys, "acme") == [noted_keys(keys[:pages], "acme")[-1] for pages in (1, 2, 3, 4, 6)]


@given(ours=st.integers(1, 5000), theirs=st.integers(1, 5000), shared=st.integers(1, 5000))
def test_two_thirds_of_what_is_shared_is_seen(ours, theirs, shared):
    shared = min(ours, theirs, shared)
    both = {pages for pages in noted_pages(ours) if pages <= shared} & set(noted_pages(theirs))
    assert max(both) * 3 >= shared * 2


def record(registration, *, silent_s: float = 0.0) -> NodeRecord:
    entry = NodeEntry(registration=registration)
    return NodeRecord(entry, entry.beat, silent_s)


@pytest.mark.parametrize(
    ("kept_s", "silent_s", "age_s", "believed"),
    [
        (10.0, 0.0, 9.0, True),
        (10.0, 0.0, 11.0, False),  # evicted since, or the node was started after that
        (10.0, 2.0, 11.0, True),  # what was true at its last heartbeat is 2 s older now
        (10.0, 2.0, 13.0, False),
        (None, 2.0, 1.0, False),
    ],
)
def test_a_note_is_believed_for_as_long_as_its_node_keeps_prefixes(kept_s, silent_s, age_s, believed):
    instances = by_instance([record(keeper("d1", kept_s=kept_s), silent_s=silent_s)])
    assert guess_held_pages(instances, [{}, {"d1": age_s}, {}], 3) == ({"d1": 2} if believed else {})


def test_of_several_nodes_the_one_that_keeps_least_decides():
    nodes = [half("d", Role.DECODE, number, load=load(kept_s=kept_s)) for number, kept_s in enumerate((100.0, 5.0))]
    assert guess_held_pages(instances_of(*nodes), [{"d": 6.0}], 1) == {}
    assert guess_held_pages(instances_of(*nodes), [{"d": 4.0}], 1) == {"d": 1}
    nodes[1] = half("d", Role.DECODE, 1, load=load(kept_s=None))
    assert guess_held_pages(instances_of(*nodes), [{"d": 4.0}], 1) == {}


def test_the_longest_beginning_counts_and_strangers_do_not():
    notes = [{"d1": 1.0, "d2": 1.0, "gone": 1.0}, {"d1": 1.0}, {"d1": 1.0}, {}]
    assert guess_held_pages(instances_of(*FLEET), notes, 5) == {"d1": 3, "d2": 1}


@pytest.mark.parametrize(
    ("chosen", "held_tokens", "expected"),
    [("d1", 256, Guess.RIGHT), ("d1", 0, Guess.STALE), ("d2", 0, Guess.PASSED_OVER), ("d2", 512, Guess.PASSED_OVER)],
)
def test_what_became_of_a_guess(chosen, held_tokens, expected):
    assert judge(chosen, held_tokens, {"d1": 3}, ["d1", "d2"]) is expected


def test_who_holds_nothing_was_not_guessed():
    assert judge("p1", 0, {"d1": 3}, ["p1", "p2"]) is Guess.NONE


def best(*fleet, held, without=()):
    found = Ranking(instances_of(*fleet), PairRequest(prompt_tokens=1000), held).best(without=without)
    return None if found is None else (found.prefill.name, found.decode.name, found.looks_full)


def test_an_instance_that_holds_the_prompt_comes_before_one_that_is_somewhat_emptier():
    fleet = (keeper("p1"), keeper("p2", free=70, rooms=3), keeper("d1"), keeper("d2", free=70, rooms=3))
    assert best(*fleet, held={}) == ("p1", "d1", False)
    assert best(*fleet, held={"p2": 1.0}) == ("p2", "d1", False)
    assert best(*fleet, held={"p2": 1.0, "d2": 1.0}) == ("p2", "d2", False)
    assert best(*fleet, held={"p2": 0.5, "d2": 0.1}) == ("p1", "d1", False), "30 % fuller for a part of the prompt"
    assert best(*fleet, held={"p1": 0.1, "p2": 1.0, "d1": 1.0, "d2": 1.0}) == ("p2", "d1", False)


def test_to_hold_everything_is_worth_half_a_pool_and_never_a_full_one():
    for free in range(100, 3, -1):
        fleet = (keeper("p1"), keeper("d1", free=free), keeper("d2"))
        assert best(*fleet, held={"d1": 1.0}) == ("p1", "d1" if free >= 100 * (1 - HELD_WEIGHT) else "d2", False)
    for free in range(4):
        fleet = (keeper("p1"), keeper("d1", free=free), keeper("d2", free=4))
        assert best(*fleet, held={"d1": 1.0}) == ("p1", "d2", False), "d2 has just enough"
        assert best(*fleet, held={"d1": 1.0}, without={"d2"}) == ("p1", "d1", True)


loads = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=4)


@given(prefill=loads, decode=loads, share=st.sampled_from([0.0, 0.25, 0.5, 1.0]), more=st.integers(0, 3))
def test_with_equal_overlap_the_order_is_that_of_load(prefill, decode, share, more):
    fleet = [
        keeper(f"{letter}{number}", free=free, rooms=rooms)
        for letter, sides in (("p", prefill), ("d", decode))
        for number, (free, rooms) in enumerate(sides)
    ]
    held = {one.instance: share for one in fleet}
    without = {f"p{more}", f"d{more}"}
    for left_out in (set(), without):
        assert best(*fleet, held=held, without=left_out) == best(*fleet, held={}, without=left_out)


@given(prefill=loads, decode=loads, holder=st.sampled_from(["p0", "d0"]))
def test_more_overlap_never_takes_a_request_away_nor_to_a_full_pair(prefill, decode, holder):
    fleet = [
        keeper(f"{letter}{number}", free=free, rooms=rooms)
        for letter, sides in (("p", prefill), ("d", decode))
        for number, (free, rooms) in enumerate(sides)
    ]
    chosen = [best(*fleet, held={holder: share}) for share in (0.0, 0.3, 0.6, 1.0)]
    got_it = [holder in pair for pair in chosen]
    assert got_it == sorted(got_it), "once preferred, more of it does not undo that"
    assert len({pair[2] for pair in chosen}) == 1, "whether a pair looks full comes first"


# ------------------------------------------------------------------------------------------- stores


def ticketed(claim: Claim, prefill: str, decode: str) -> Ticket:
    ends = {"prefill": prefill, "decode": decode}
    parts = {side: TicketEnd(instance=name, http_urls=(f"http://{name}",)) for side, name in ends.items()}
    return Ticket(room=claim.room, generation=claim.base + 1, expires_in_s=60.0, **parts)


async def give(world, room: int, prefill: str, decode: str, keys) -> bool:
    claim = await world.store.claim(room, generations=1)
    return await world.store.settle(claim, ticketed(claim, prefill, decode), keys)


A, B, C = prompt((1, 3)).to_list()


@pytest.mark.asyncio
async def test_a_store_remembers_who_was_given_what_and_when(world):
    assert await world.store.noted([A, B]) == ({}, {})
    assert await world.store.noted([]) == ()
    assert await give(world, 1, "p1", "d1", [A, B])
    world.advance(10)
    assert await give(world, 2, "p2", "d1", [A])
    first, second, third = await world.store.noted([A, B, C])
    assert {name: round(age_s) for name, age_s in first.items()} == {"p1": 10, "d1": 0, "p2": 0}
    assert {name: round(age_s) for name, age_s in second.items()} == {"p1": 10, "d1": 10}
    assert third == {}
    world.advance(NOTE_KEEP_S - 5)
    first, second = await world.store.noted([A, B])
    assert {"d1", "p2"} <= first.keys(), "it has come again"
    assert second == {}


@pytest.mark.asyncio
async def test_old_notes_take_no_memory():
    clock = ManualClock()
    store = MemoryStore(expire_after_s=10, rooms=RoomTimes(claim_s=10, keep_s=10, max_rooms=10), clock=clock)
    for room, keys in enumerate(([A, B], [C])):
        claim = await store.claim(room, generations=1)
        assert await store.settle(claim, ticketed(claim, "p", "d"), keys)
        clock.advance(NOTE_KEEP_S + 1)
    assert "1 notes" in repr(store)


@pytest.mark.asyncio
async def test_a_ticket_that_does_not_count_leaves_no_note(world):
    old = await world.store.claim(1, generations=1)
    world.advance(40)
    await world.store.claim(1, generations=1)
    assert not await world.store.settle(old, ticketed(old, "p1", "d1"), [A])
    assert await world.store.noted([A]) == ({},)


@pytest.mark.asyncio
async def test_only_the_last_instances_are_remembered(world, monkeypatch):
    for store in (memory, redis):
        monkeypatch.setattr(store, "NOTE_INSTANCES", 4)
    for number in range(4):
        assert await give(world, number, f"p{number}", f"d{number}", [A])
        world.advance(1)
    (found,) = await world.store.noted([A])
    assert set(found) == {"p2", "d2", "p3", "d3"}


@pytest.mark.asyncio
async def test_notes_take_bounded_memory_and_the_oldest_go_first(world, monkeypatch):
    """Whoever may pair can have notes made under any bytes, also by requests that are cancelled at once."""
    for store in (memory, redis):
        monkeypatch.setattr(store, "NOTES", 2)
    for number, key in enumerate((A, B, A, C)):
        assert await give(world, number, "p1", "d1", [key])
        world.advance(1)
    assert [bool(found) for found in await world.store.noted([A, B, C])] == [True, False, True]


@pytest.mark.asyncio
@pytest.mark.outside
async def test_redis_holds_no_key_for_a_note_that_was_forgotten(redis_fleet, monkeypatch):
    monkeypatch.setattr(redis, "NOTES", 30)

    def keys() -> int:
        with redis_fleet.server.client() as client:
            return len(client.keys(f"{redis_fleet.namespace}:prefix*"))

    for number in range(20):
        assert await give(redis_fleet, number, "p1", "d1", prompt((number, 7)).to_list())
        redis_fleet.advance(1)
    assert keys() == 30 + 1
    redis_fleet.advance(NOTE_KEEP_S + 1)
    assert keys() == 0


# ------------------------------------------------------------------------------------------- pairing


class Daemons(FakeDaemons):
    """They hold what they are told to."""

    def holds(self, name: str, tokens: int) -> None:
        self.misreports[f"http://{name}"] = {"prefix_tokens" if name.startswith("d") else "computed_tokens": tokens}


async def pairing_of(world, port, *fleet):
    service = await world.pairing(port, *(fleet or FLEET))
    guesses: Counter[tuple[str, str]] = Counter()
    service.events.add_reader({PrefixGuessed: lambda _, fact: guesses.update([(fact.role, fact.guess)])})
    return service, guesses


async def beats(world, fleet=FLEET, *, kept_s=KEPT_S) -> None:
    """Every node says that it is empty again: what was charged is forgotten."""
    for one in fleet:
        heartbeat = NodeHeartbeat(incarnation=one.incarnation, ready=True, load=load(kept_s=kept_s))
        await world.store.beat((one.instance, one.node), heartbeat)


FIRST = prompt((1, 4))
SECOND = prompt((1, 4), (2, 3))
OTHER = prompt((9, 4))


def names(ticket) -> tuple[str, str]:
    return ticket.prefill.instance, ticket.decode.instance


async def first_turn_on_second_pair(world, port, service) -> None:
    """Leave the first prompt where a request that nobody knows would not go."""
    port.refuse = {"http://p1": CapacityError("full"), "http://d1": CapacityError("full")}
    assert names(await service.pair(request(FIRST))) == ("p2", "d2")
    port.refuse = {}
    await beats(world)


@pytest.mark.asyncio
async def test_the_second_turn_goes_to_who_holds_the_first(world):
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    assert guesses == {("prefill", "none"): 1, ("decode", "none"): 1}
    port.holds("p2", 768)
    port.holds("d2", 1024)
    ticket = await service.pair(request(SECOND))
    assert names(ticket) == ("p2", "d2")
    assert (ticket.prefix_tokens, ticket.computed_tokens) == (1024, 768), "the word of the nodes"
    assert (await service.report(ticket.room)).ticket.prefix_tokens == 1024
    assert guesses["prefill", "right"] == guesses["decode", "right"] == 1
    await beats(world)
    assert names(await service.pair(request(OTHER))) == ("p1", "d1"), "one that nobody knows goes by load"
    assert names(await service.pair(PairRequest(prompt_tokens=1000))) == ("p2", "d2"), "and one without keys"


@pytest.mark.asyncio
async def test_a_guess_that_was_wrong_costs_nothing_but_the_wrong_place(world):
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    ticket = await service.pair(request(SECOND))
    assert names(ticket) == ("p2", "d2")
    assert (ticket.prefix_tokens, ticket.computed_tokens) == (0, 0)
    assert guesses["prefill", "stale"] == guesses["decode", "stale"] == 1


@pytest.mark.asyncio
async def test_a_node_that_was_started_again_is_not_thought_to_hold_anything(world):
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    world.advance(2)
    await beats(world, FLEET[:2])
    await beats(world, FLEET[2:], kept_s=1.0)
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")
    assert guesses["decode", "none"] == 2


@pytest.mark.asyncio
async def test_a_holder_that_refuses_or_is_gone_is_passed_over(world):
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    port.refuse = {"http://d2": CapacityError("full")}
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")
    assert guesses["decode", "passed_over"] == 1
    await world.store.remove(("d2", "node-0"), "d2-incarnation-1")
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")


@pytest.mark.asyncio
async def test_prompts_of_two_namespaces_are_noted_apart(world):
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    identity = PrefixIdentity(**IDENTITY.model_dump() | {"namespace": "acme"})
    ours = page_keys(identity, [1] * (4 * PAGE))
    assert names(await service.pair(request(ours, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}


@pytest.mark.asyncio
async def test_keys_of_another_namespace_find_no_note(world):
    """Keys are public arithmetic and a note is made before anything is proved: where a prompt went is its namespace's to know."""
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    assert names(await service.pair(request(SECOND, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}
    await beats(world)
    assert names(await service.pair(request(SECOND))) == ("p2", "d2")


@pytest.mark.asyncio
async def test_nobody_looks_for_notes_without_keys_or_without_keepers(world):
    asked = []
    noted = world.store.noted

    async def counted(keys):
        asked.append(len(keys))
        return await noted(keys)

    world.store.noted = counted
    port = Daemons()
    service, guesses = await pairing_of(world, port)
    await service.pair(PairRequest(prompt_tokens=1000))
    assert (asked, guesses) == ([], {})
    await beats(world, kept_s=None)
    await service.pair(request(FIRST))
    assert asked == []
    await beats(world)
    await service.pair(request(FIRST))
    assert asked == [4]


@pytest.mark.asyncio
async def test_a_burst_with_one_beginning_is_spread_as_the_first_ones_fill_up(world):
    port = Daemons()
    service, _ = await pairing_of(world, port)
    big = request(FIRST, max_new_tokens=10 * PAGE)  # 15 pages of 100
    chosen = [names(await service.pair(big))[1] for _ in range(12)]
    assert chosen[:4] == ["d1"] * 4
    assert Counter(chosen) == {"d1": 6, "d2": 6}


def test_records_keep_what_they_say_when_they_are_charged():
    charged = replace(record(keeper("d1")), charged_rooms=1, charged_pages={"full": 3})
    assert charged.load.prefixes_kept_s == KEPT_S
