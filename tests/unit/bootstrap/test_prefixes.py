"""Pairing by overlap: who is thought to hold a prompt's beginning, what that is worth, and what a wrong thought costs."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest, Ticket, TicketEnd
from kvbridge.bootstrap import redis_store, store
from kvbridge.bootstrap.fit import Guess, guess_held_pages, judge
from kvbridge.bootstrap.nodes import NodeEntry, NodeRecord, by_instance
from kvbridge.bootstrap.store import Claim
from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.telemetry.facts import PrefixGuessed
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.unit.bootstrap.fleet import TIMES, node

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


@pytest.mark.parametrize(
    ("chosen", "held_tokens", "expected"),
    [("d1", 256, Guess.RIGHT), ("d1", 0, Guess.STALE), ("d2", 0, Guess.PASSED_OVER), ("d2", 512, Guess.PASSED_OVER)],
)
def test_what_became_of_a_guess(chosen, held_tokens, expected):
    assert judge(chosen, held_tokens, {"d1": 3}, ["d1", "d2"]) is expected


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
async def test_a_ticket_that_does_not_count_leaves_no_note(world):
    old = await world.store.claim(1, generations=1)
    world.advance(40)
    await world.store.claim(1, generations=1)
    assert not await world.store.settle(old, ticketed(old, "p1", "d1"), [A])
    assert await world.store.noted([A]) == ({},)


@pytest.mark.asyncio
async def test_only_the_last_instances_are_remembered(world, monkeypatch):
    for module in (store, redis_store):
        monkeypatch.setattr(module, "NOTE_INSTANCES", 4)
    world.limit(TIMES)
    for number in range(4):
        assert await give(world, number, f"p{number}", f"d{number}", [A])
        world.advance(1)
    (found,) = await world.store.noted([A])
    assert set(found) == {"p2", "d2", "p3", "d3"}


@pytest.mark.asyncio
async def test_notes_take_bounded_memory_and_the_oldest_go_first(world, monkeypatch):
    """Whoever may pair can have notes made under any bytes, also by requests that are cancelled at once."""
    for module in (store, redis_store):
        monkeypatch.setattr(module, "NOTES", 2)
    world.limit(TIMES)
    for number, key in enumerate((A, B, A, C)):
        assert await give(world, number, "p1", "d1", [key])
        world.advance(1)
    assert [bool(found) for found in await world.store.noted([A, B, C])] == [True, False, True]


# ------------------------------------------------------------------------------------------- pairing


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


def names(ticket) -> tuple[str, str]:
    return ticket.prefill.instance, ticket.decode.instance


async def first_turn_on_second_pair(world, port, service) -> None:
    """Leave the first prompt where a request that nobody knows would not go."""
    port.refuse = {"http://p1": CapacityError("full"), "http://d1": CapacityError("full")}
    assert names(await service.pair(request(FIRST))) == ("p2", "d2")
    port.refuse = {}
    await beats(world)


@pytest.mark.asyncio
async def test_a_holder_that_refuses_or_is_gone_is_passed_over(world, port):
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    port.refuse = {"http://d2": CapacityError("full")}
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")
    assert guesses["decode", "passed_over"] == 1
    await world.store.remove(("d2", "node-0"), "d2-incarnation-1")
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")


@pytest.mark.asyncio
async def test_keys_of_another_namespace_find_no_note(world, port):
    """Keys are public arithmetic and a note is made before anything is proved: where a prompt went is its namespace's to know."""
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    assert names(await service.pair(request(SECOND, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}
    await beats(world)
    assert names(await service.pair(request(SECOND))) == ("p2", "d2")


@pytest.mark.asyncio
async def test_prompts_of_two_namespaces_are_noted_apart(world, port):
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    identity = PrefixIdentity(**IDENTITY.model_dump() | {"namespace": "acme"})
    ours = page_keys(identity, [1] * (4 * PAGE))
    assert names(await service.pair(request(ours, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}
