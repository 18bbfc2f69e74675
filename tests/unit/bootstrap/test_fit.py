"""The choice of a pair: the best of few instances, whatever the size of the fleet, and who is thought to hold the prompt."""

from collections import Counter
from functools import cache

import pytest

from kvbridge.api.directory import Load, NodeRegistration, PairRequest, Ticket, TicketEnd
from kvbridge.bootstrap import redis_store, store
from kvbridge.bootstrap.directory import DRAWN, Directory
from kvbridge.bootstrap.fit import HOLDERS, Guess, Ranking, guess_held_pages, holders, judge
from kvbridge.bootstrap.nodes import Instance, NodeEntry, NodeRecord, by_instance
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.store import Claim
from kvbridge.core.errors import CapacityError, FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.telemetry.facts import PrefixGuessed
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.unit.bootstrap.fleet import LIMITS, TIMES, FakeDaemons, beat, half, instances_of, loaded, node


def ranking(*registrations, **request) -> Ranking:
    asked = PairRequest(**{"prompt_tokens": 1000, **request})
    return Ranking(instances_of(*registrations), asked, {}, 0)


def best(*registrations, without=(), **request) -> tuple[str, str] | None:
    found = ranking(*registrations, **request).best(without=without)
    return None if found is None else (found.prefill.name, found.decode.name)


def test_the_fullest_node_of_an_instance_decides():
    decode = (half("d", Role.DECODE, 0), half("d", Role.DECODE, 1, load=loaded(2)))
    assert best(node("p", Role.PREFILL), *decode, node("e", Role.DECODE, free=5)) == ("p", "e")


def test_a_request_that_no_pool_could_hold_is_the_callers_mistake():
    with pytest.raises(InvalidInputError, match="larger than the pools"):
        ranking(node("p", Role.PREFILL), node("d", Role.DECODE), prompt_tokens=101 * 256)


def test_an_instance_that_could_never_hold_the_request_is_left_out():
    spaces = ("full", "swa", "request", "host")
    small = Load(available_pages=dict.fromkeys(spaces, 3), total_pages=dict.fromkeys(spaces, 3))
    fleet = (node("p", Role.PREFILL), node("d", Role.DECODE, load=small), node("e", Role.DECODE, free=0))
    assert best(*fleet) == ("p", "e")
    assert best(*fleet, without={"e"}) is None


@pytest.mark.parametrize(
    ("registrations", "expected"),
    [
        ([node("p", Role.PREFILL)], "no decode instance is ready: none is registered"),
        ([node("p", Role.PREFILL), half("d", Role.DECODE, 0)], "'d': 1 of its ranks are missing"),
        ([node("p", Role.PREFILL, ready=False), node("d", Role.DECODE)], "'p': node 'node-0' is not ready"),
    ],
)
def test_an_absent_side_is_named(registrations, expected):
    with pytest.raises(NotReadyError, match=expected):
        ranking(*registrations)


def test_each_model_finds_its_own_pair():
    fleet = (
        node("p", Role.PREFILL),
        node("p-gqa", Role.PREFILL, model="tiny-gqa"),
        node("d", Role.DECODE),
        node("d-gqa", Role.DECODE, model="tiny-gqa"),
    )
    assert best(*fleet) == ("p", "d")
    assert best(*fleet, without={"p"}) == ("p-gqa", "d-gqa")
    assert best(*fleet, fingerprint=fingerprint(preset("tiny-gqa"))) == ("p-gqa", "d-gqa")
    with pytest.raises(NotReadyError, match="with fingerprint nope"):
        ranking(*fleet, fingerprint="nope")


MANY = 4 * DRAWN[0]
REQUEST = PairRequest(prompt_tokens=1000)


def fleet(count: int, role: Role = Role.DECODE, **changes) -> list[NodeRegistration]:
    return [node(f"{role}-{number}", role, **changes) for number in range(count)]


def sizes(instances: tuple[Instance, ...]) -> Counter[str]:
    return Counter({instance.name: len(instance.nodes) for instance in instances})


class Looks:
    """Counts what a store is asked for."""

    def __init__(self, store) -> None:
        self.records, self.whole = 0, 0
        self._look, self._nodes = store.look, store.nodes
        store.look, store.nodes = self.look, self.nodes

    async def look(self, keys):
        found = await self._look(keys)
        self.records += len(found)
        return found

    async def nodes(self):
        self.whole += 1
        return await self._nodes()


async def test_as_many_are_drawn_of_each_role_as_were_asked_for_and_everybody_now_and_then(world):
    directory = await world.directory(*fleet(20), *fleet(3, Role.PREFILL))
    found = Counter[str]()
    for _ in range(60):
        drawn = sizes(await directory.draw(5))
        assert Counter(name.split("-")[0] for name in drawn) == {"decode": 5, "prefill": 3}
        found += drawn
    assert len(found) == 23
    assert sizes(await directory.draw(0)) == {}


async def test_whoever_registered_with_another_replica_is_drawn_after_the_next_look_at_all(world):
    directory, other = await world.directory(*fleet(2)), await world.directory()
    assert await other.draw(5) == ()
    await other.instances()
    await directory.register(node("p", Role.PREFILL))
    assert sizes(await other.draw(5)) == {"decode-0": 1, "decode-1": 1}
    await other.instances()
    assert sizes(await other.draw(5)) == {"decode-0": 1, "decode-1": 1, "p": 1}


async def test_what_a_pairing_looks_at_does_not_grow_with_the_fleet(world):
    pairing = await world.pairing(FakeDaemons(), *fleet(MANY), *fleet(MANY, Role.PREFILL))
    looks = Looks(world.store)
    for _ in range(10):
        await pairing.pair(REQUEST)
    assert (looks.records, looks.whole) == (10 * 2 * DRAWN[0], 0)


async def test_a_large_request_finds_the_one_instance_that_has_place_for_it(world):
    most = fleet(DRAWN[1] * 3, load=loaded(10))
    directory = await world.directory(*most, node("free", Role.DECODE), node("p", Role.PREFILL))
    port = FakeDaemons()
    pairing = PairingService(directory, world.store, port, **LIMITS)
    await directory.instances()  # as the overview does
    for _ in range(3):
        ticket = await pairing.pair(PairRequest(prompt_tokens=20 * 256))
        assert ticket.decode.instance == "free"
    assert not [call for call in port.calls if call[0] == "cancel"]


async def test_a_pair_that_is_rare_is_found_before_it_is_said_that_there_is_none(world):
    ours, theirs = ModelIdentity(name="v4", revision="1"), ModelIdentity(name="v4", revision="2")
    most = fleet(DRAWN[1] * 3, model_identity=theirs)
    rare = node("rare", Role.DECODE, model_identity=ours)
    pairing = await world.pairing(FakeDaemons(), *most, rare, node("p", Role.PREFILL, model_identity=ours))
    assert (await pairing.pair(REQUEST)).decode.instance == "rare"
    directory = await world.directory()
    await directory.deregister("rare", "node-0", rare.incarnation)
    with pytest.raises(FingerprintMismatchError, match="weights"):
        await pairing.pair(REQUEST)


async def test_while_most_are_drained_the_others_serve(world):
    nodes = fleet(MANY)
    pairing = await world.pairing(FakeDaemons(), *nodes, node("p", Role.PREFILL))
    directory = Directory(world.store, FakeDaemons())
    for one in nodes[1:]:
        await directory.heartbeat(one.instance, one.node, beat(one.incarnation, ready=False, reasons=("draining",)))
    for _ in range(5):
        assert (await pairing.pair(REQUEST)).decode.instance == "decode-0"
    await directory.heartbeat("decode-0", "node-0", beat(nodes[0].incarnation, ready=False))
    with pytest.raises(NotReadyError, match=f"is ready: 'decode-0': node 'node-0'.*; and {MANY - 8} more"):
        await pairing.pair(REQUEST)


async def test_who_holds_the_prompt_is_found_outside_of_what_is_drawn(world):
    held = ModelIdentity(name="tiny", revision="1")
    everybody = {"model_identity": held, "load": loaded(kept_s=500.0)}
    nodes = [*fleet(MANY, **everybody), *fleet(MANY, Role.PREFILL, **everybody)]
    pairing = await world.pairing(FakeDaemons(), *nodes)
    asked = PairRequest(prompt_tokens=1025, page_hashes=bytes(range(64)))
    first = await pairing.pair(asked)
    for _ in range(5):
        for one in nodes:
            await world.store.beat((one.instance, one.node), one.heartbeat)
        again = await pairing.pair(asked)
        assert (again.prefill, again.decode) == (first.prefill, first.decode)


async def test_holders_are_those_of_the_longest_beginnings_and_few():
    notes = [{"a": 9.0, "b": 1.0, "c": 5.0}, {"a": 9.0, "c": 5.0}, {"a": 9.0}]
    assert holders(notes) == ["a", "c", "b"]
    assert len(holders([{f"d{number}": 1.0 for number in range(3 * HOLDERS)}])) == HOLDERS
    assert holders([]) == []


PAGE = 256
HELD = ModelIdentity(name="tiny", revision="1")
KEPT_S = 500.0


@cache
def plain(name: str) -> NodeRegistration:
    return node(name, Role.PREFILL if name.startswith("p") else Role.DECODE, model_identity=HELD)


def keeper(name: str, kept_s: float | None = KEPT_S) -> NodeRegistration:
    return plain(name).model_copy(update={"load": loaded(kept_s=kept_s)})


FLEET = tuple(keeper(name) for name in ("p1", "p2", "d1", "d2"))
IDENTITY = PrefixIdentity(model="tiny", revision="1", fingerprint="f", tokens_per_page=PAGE)


def prompt(*parts: tuple[int, int]) -> Keys:
    """Keys of a prompt that has so many pages of a number, then so many of another."""
    return page_keys(IDENTITY, [number for number, pages in parts for _ in range(pages * PAGE)])


def request(keys: Keys, **more) -> PairRequest:
    return PairRequest(prompt_tokens=len(keys) * PAGE + 1, page_hashes=keys.data, **more)


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


def ticketed(claim: Claim, prefill: str, decode: str) -> Ticket:
    ends = {"prefill": prefill, "decode": decode}
    parts = {side: TicketEnd(instance=name, http_urls=(f"http://{name}",)) for side, name in ends.items()}
    return Ticket(room=claim.room, generation=claim.base + 1, expires_in_s=60.0, **parts)


async def give(world, room: int, prefill: str, decode: str, keys) -> bool:
    claim = await world.store.claim(room, generations=1)
    return await world.store.settle(claim, ticketed(claim, prefill, decode), keys)


A, B, C = prompt((1, 3)).to_list()


async def test_a_ticket_that_does_not_count_leaves_no_note(world):
    old = await world.store.claim(1, generations=1)
    world.advance(40)
    await world.store.claim(1, generations=1)
    assert not await world.store.settle(old, ticketed(old, "p1", "d1"), [A])
    assert await world.store.noted([A]) == ({},)


async def test_only_the_last_instances_are_remembered(world, monkeypatch):
    for module in (store, redis_store):
        monkeypatch.setattr(module, "NOTE_INSTANCES", 4)
    world.limit(TIMES)
    for number in range(4):
        assert await give(world, number, f"p{number}", f"d{number}", [A])
        world.advance(1)
    (found,) = await world.store.noted([A])
    assert set(found) == {"p2", "d2", "p3", "d3"}


async def test_notes_take_bounded_memory_and_the_oldest_go_first(world, monkeypatch):
    """Whoever may pair can have notes made under any bytes, also by requests that are cancelled at once."""
    for module in (store, redis_store):
        monkeypatch.setattr(module, "NOTES", 2)
    world.limit(TIMES)
    for number, key in enumerate((A, B, A, C)):
        assert await give(world, number, "p1", "d1", [key])
        world.advance(1)
    assert [bool(found) for found in await world.store.noted([A, B, C])] == [True, False, True]


async def pairing_of(world, port, *fleet):
    service = await world.pairing(port, *(fleet or FLEET))
    guesses: Counter[tuple[str, str]] = Counter()
    service.events.add_reader({PrefixGuessed: lambda _, fact: guesses.update([(fact.role, fact.guess)])})
    return service, guesses


async def beats(world, fleet=FLEET, *, kept_s=KEPT_S) -> None:
    """Every node says that it is empty again: what was charged is forgotten."""
    for one in fleet:
        heartbeat = beat(one.incarnation, load=loaded(kept_s=kept_s))
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


async def test_a_holder_that_refuses_or_is_gone_is_passed_over(world, port):
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    port.refuse = {"http://d2": CapacityError("full")}
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")
    assert guesses["decode", "passed_over"] == 1
    await world.store.remove(("d2", "node-0"), "d2-incarnation-1")
    assert names(await service.pair(request(SECOND))) == ("p2", "d1")


async def test_keys_of_another_namespace_find_no_note(world, port):
    """Keys are public arithmetic and a note is made before anything is proved: where a prompt went is its namespace's to know."""
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    assert names(await service.pair(request(SECOND, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}
    await beats(world)
    assert names(await service.pair(request(SECOND))) == ("p2", "d2")


async def test_prompts_of_two_namespaces_are_noted_apart(world, port):
    service, guesses = await pairing_of(world, port)
    await first_turn_on_second_pair(world, port, service)
    identity = PrefixIdentity(**IDENTITY.model_dump() | {"namespace": "acme"})
    ours = page_keys(identity, [1] * (4 * PAGE))
    assert names(await service.pair(request(ours, namespace="acme"))) == ("p1", "d1")
    assert guesses == {("prefill", "none"): 2, ("decode", "none"): 2}
