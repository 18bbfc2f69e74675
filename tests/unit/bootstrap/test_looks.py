"""Few instances are looked at for a request, whatever the fleet's size, and nobody is passed over for good by that."""

from __future__ import annotations

from collections import Counter

import pytest

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.bootstrap.directory import DRAWN, Directory
from kvbridge.bootstrap.fit import HOLDERS, holders
from kvbridge.bootstrap.nodes import Instance
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.core.errors import FingerprintMismatchError, NotReadyError
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from tests.unit.bootstrap.fleet import LIMITS, FakeDaemons, node

pytestmark = pytest.mark.asyncio

MANY = 4 * DRAWN[0]
REQUEST = PairRequest(prompt_tokens=1000)


def fleet(count: int, role: Role = Role.DECODE, **changes) -> list[NodeRegistration]:
    return [node(f"{role}-{number}", role, **changes) for number in range(count)]


def names(instances: tuple[Instance, ...]) -> Counter[str]:
    return Counter({instance.name: len(instance.nodes) for instance in instances})


def beat(of: NodeRegistration, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": of.incarnation, "ready": True, "load": of.load, **changes})


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
        drawn = names(await directory.draw(5))
        assert Counter(name.split("-")[0] for name in drawn) == {"decode": 5, "prefill": 3}
        found += drawn
    assert len(found) == 23
    assert names(await directory.draw(0)) == {}


async def test_whoever_registered_with_another_replica_is_drawn_after_the_next_look_at_all(world):
    directory, other = await world.directory(*fleet(2)), await world.directory()
    assert await other.draw(5) == ()
    await other.instances()
    await directory.register(node("p", Role.PREFILL))
    assert names(await other.draw(5)) == {"decode-0": 1, "decode-1": 1}
    await other.instances()
    assert names(await other.draw(5)) == {"decode-0": 1, "decode-1": 1, "p": 1}


async def test_what_a_pairing_looks_at_does_not_grow_with_the_fleet(world):
    pairing = await world.pairing(FakeDaemons(), *fleet(MANY), *fleet(MANY, Role.PREFILL))
    looks = Looks(world.store)
    for _ in range(10):
        await pairing.pair(REQUEST)
    assert (looks.records, looks.whole) == (10 * 2 * DRAWN[0], 0)


async def test_a_large_request_finds_the_one_instance_that_has_place_for_it(world):
    spaces = dict.fromkeys(("full", "swa", "request", "host"), 100)
    full = Load(available_pages=dict.fromkeys(spaces, 10), total_pages=spaces)
    most = fleet(DRAWN[1] * 3, load=full)
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
        await directory.heartbeat(one.instance, one.node, beat(one, ready=False, reasons=("draining",)))
    for _ in range(5):
        assert (await pairing.pair(REQUEST)).decode.instance == "decode-0"
    await directory.heartbeat("decode-0", "node-0", beat(nodes[0], ready=False))
    with pytest.raises(
        NotReadyError, match=r"no decode instance is ready: 'decode-0': node 'node-0'.*; and " + f"{MANY - 8} more"
    ):
        await pairing.pair(REQUEST)


async def test_who_holds_the_prompt_is_found_outside_of_what_is_drawn(world):
    held = ModelIdentity(name="tiny", revision="1")
    spaces = dict.fromkeys(("full", "swa", "request", "host"), 100)
    load = Load(available_pages=spaces, total_pages=spaces, prefixes_kept_s=500.0)
    everybody = {"model_identity": held, "load": load}
    nodes = [*fleet(MANY, **everybody), *fleet(MANY, Role.PREFILL, **everybody)]
    pairing = await world.pairing(FakeDaemons(), *nodes)
    asked = PairRequest(prompt_tokens=1025, page_hashes=bytes(range(64)))
    first = await pairing.pair(asked)
    for _ in range(5):
        for one in nodes:
            await world.store.beat((one.instance, one.node), beat(one))
        again = await pairing.pair(asked)
        assert (again.prefill, again.decode) == (first.prefill, first.decode)


async def test_holders_are_those_of_the_longest_beginnings_and_few():
    notes = [{"a": 9.0, "b": 1.0, "c": 5.0}, {"a": 9.0, "c": 5.0}, {"a": 9.0}]
    assert holders(notes) == ["a", "c", "b"]
    assert len(holders([{f"d{number}": 1.0 for number in range(3 * HOLDERS)}])) == HOLDERS
    assert holders([]) == []
