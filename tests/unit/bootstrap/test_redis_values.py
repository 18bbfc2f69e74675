"""Values in Redis that are not ours: refused, counted, logged once, healed by the next heartbeat; nobody else notices."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.stores.base import Claim
from kvbridge.core.errors import ConflictError, NotFoundError
from kvbridge.core.ids import Role
from tests.helpers.later_release import UNKNOWN, later
from tests.unit.bootstrap.fleet import FLEET, FakeDaemons, node

pytestmark = pytest.mark.asyncio

REQUEST = PairRequest(room=7, prompt_tokens=1000)


def beat(incarnation: str, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": incarnation, "ready": True, **changes})


MEMBER = '["p1","node-0"]'


def entry_of(client, namespace) -> dict:
    return json.loads(client.get(f"{namespace}:entry:{MEMBER}"))


def write_entry(client, namespace, text: bytes) -> None:
    """Another entry, which the record points to by its digest as it should."""
    client.set(f"{namespace}:entry:{MEMBER}", text)
    client.hset(f"{namespace}:node:{MEMBER}", "digest", hashlib.sha256(text).hexdigest())


def another_url(client, namespace) -> None:
    entry = entry_of(client, namespace)
    entry["registration"]["http_url"] = "file:///etc/passwd"
    write_entry(client, namespace, json.dumps(entry).encode())


def another_geometry(client, namespace) -> None:
    entry = entry_of(client, namespace)
    entry["registration"]["fingerprint"] = "0" * 32
    write_entry(client, namespace, json.dumps(entry).encode())


def another_node(client, namespace) -> None:
    entry = entry_of(client, namespace)
    entry["registration"]["node"] = "node-9"
    write_entry(client, namespace, json.dumps(entry).encode())


MALFORMED = {
    "an entry that is no JSON": lambda client, space: write_entry(client, space, b"\xff\x00{"),
    "an entry that is a pickle": lambda client, space: write_entry(client, space, b"\x80\x04K\x01."),
    "an entry with a file as its endpoint": another_url,
    "an entry whose fingerprint is not its own": another_geometry,
    "an entry of another node": another_node,
    "an entry that was exchanged": lambda client, space: client.set(f"{space}:entry:{MEMBER}", b"{}"),
    "a list in the entry's place": lambda client, space: (
        client.delete(f"{space}:entry:{MEMBER}"),
        client.lpush(f"{space}:entry:{MEMBER}", "x"),
    ),
    "no entry": lambda client, space: client.delete(f"{space}:entry:{MEMBER}"),
    "a beat that is no JSON": lambda client, space: client.hset(f"{space}:node:{MEMBER}", "beat", b"\xff"),
    "a beat with less than no pages": lambda client, space: client.hset(
        f"{space}:node:{MEMBER}",
        "beat",
        b'{"incarnation":"p1-incarnation-1","ready":true,"load":{"available_pages":{"full":-1}}}',
    ),
    "no beat": lambda client, space: client.hdel(f"{space}:node:{MEMBER}", "beat"),
    "a time that is none": lambda client, space: client.hset(f"{space}:node:{MEMBER}", "seen_ms", "soon"),
    "charges that are none": lambda client, space: client.hset(f"{space}:charge:{MEMBER}", "rooms", "-5"),
    "a list of charges": lambda client, space: client.lpush(f"{space}:charge:{MEMBER}", "x"),
    "a string in the node's place": lambda client, space: client.set(f"{space}:node:{MEMBER}", "x"),
    "a list in the index's place": lambda client, space: (
        client.delete(f"{space}:nodes"),
        client.lpush(f"{space}:nodes", 1),
    ),
    "a member that is no name": lambda client, space: client.zadd(f"{space}:nodes", {b"\xff\xfe": 1}),
    "a version of another type": lambda client, space: (
        client.delete(f"{space}:version:p1"),
        client.hset(f"{space}:version:p1", "a", "b"),
    ),
}


REFUSED = [
    damage
    for damage in MALFORMED
    if damage.startswith(("an entry", "a beat", "no beat", "a time", "charges"))
    and damage != "an entry that was exchanged"
]


@pytest.mark.parametrize("damage", REFUSED)
async def test_a_malformed_node_is_not_there_and_is_counted(redis_fleet, damage):
    await redis_fleet.directory(*FLEET)
    with redis_fleet.server.client() as client:
        MALFORMED[damage](client, redis_fleet.namespace)
    for store in (redis_fleet.store, redis_fleet.replica()):
        before = redis_fleet.counted["value node"]
        assert {record.key[0] for record in await store.nodes()} == {"p2", "d1", "d2"}
        assert redis_fleet.counted["value node"] == before + 1


@pytest.mark.parametrize("damage", MALFORMED)
async def test_a_malformed_node_harms_nobody_else_and_heals_with_its_heartbeats(redis_fleet, damage):
    directory = await redis_fleet.directory(*FLEET)
    for fresh in (redis_fleet.store, redis_fleet.replica()):  # with what it has parsed before, and without
        with redis_fleet.server.client() as client:
            MALFORMED[damage](client, redis_fleet.namespace)
        seen = Directory(fresh, FakeDaemons())
        others = {instance.name for instance in await seen.instances()} - {"p1"}
        assert others in ({"p2", "d1", "d2"}, set())  # the index is everybody's
        await seen.expire()
        for each in FLEET:
            try:
                await seen.heartbeat(each.instance, each.node, beat(each.incarnation, load=each.load))
            except NotFoundError:
                await seen.register(each)
        if damage == "a version of another type":  # met by the next registration only
            await directory.register(FLEET[0])
        assert {instance.name for instance in await seen.instances()} == {"p1", "p2", "d1", "d2"}


@pytest.mark.parametrize(
    "damage",
    [
        {"ticket": b"\x80\x04K\x01."},
        {"ticket": b'{"room":7}'},
        {"state": b"bewitched"},
        {"generation": b"many"},
        {"generation": b"1e300"},
        {"ticket": None},
    ],
)
async def test_a_malformed_room_is_as_good_as_forgotten(redis_fleet, damage):
    port = FakeDaemons()
    pairing = await redis_fleet.pairing(port)
    await pairing.pair(REQUEST)
    await pairing.pair(REQUEST.model_copy(update={"room": 8}))
    key = f"{redis_fleet.namespace}:room:7"
    with redis_fleet.server.client() as client:
        for field, value in damage.items():
            client.hset(key, field, value) if value is not None else client.hdel(key, field)
    before = redis_fleet.counted["value room"]
    with pytest.raises(NotFoundError):
        await pairing.report(7)
    assert redis_fleet.counted["value room"] == before + (damage != {"ticket": None})
    assert (await pairing.report(8)).room == 8
    await redis_fleet.store.room_counts()


async def test_a_room_of_another_type_can_be_paired_all_the_same(redis_fleet):
    pairing = await redis_fleet.pairing(FakeDaemons())
    with redis_fleet.server.client() as client:
        client.lpush(f"{redis_fleet.namespace}:room:7", "x")
    with pytest.raises(NotFoundError):
        await pairing.report(7)
    assert (await pairing.pair(REQUEST)).generation == 1
    assert redis_fleet.counted["value room"] == 1


async def test_a_malformed_value_is_counted_each_time_and_logged_once(redis_fleet, capsys):
    directory = await redis_fleet.directory(*FLEET)
    with redis_fleet.server.client() as client:
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", b"\xff")
    capsys.readouterr()
    for _ in range(3):
        await directory.instances()
    assert redis_fleet.counted["value node"] == 3
    assert "".join(capsys.readouterr()).count("stored_value_refused") == 1


NODE_FIELDS = ("incarnation", "digest", "beat", "seen_ms", "group")
FIELD_VALUES = pytest.mark.parametrize("value", [None, b"\xff", b"", b"-1", b"nan"])


def damage(world, key: str, field: str, value: bytes | None) -> None:
    """Take a field of a record away, or write another value there."""
    with world.server.client() as client:
        found = f"{world.namespace}:{key}"
        assert client.hexists(found, field)
        client.hdel(found, field) if value is None else client.hset(found, field, value)


@FIELD_VALUES
@pytest.mark.parametrize("field", NODE_FIELDS)
async def test_a_node_whose_record_lost_a_field_is_told_to_register_or_is_healed(redis_fleet, field, value):
    directory = await redis_fleet.directory(*FLEET)
    for seen in (directory, Directory(redis_fleet.replica(), FakeDaemons())):
        damage(redis_fleet, f"node:{MEMBER}", field, value)
        listed = {instance.name for instance in await seen.instances()}
        assert listed == {"p2", "d1", "d2"} | ({"p1"} if (field, value) == ("seen_ms", b"-1") else set())
        try:
            await seen.heartbeat("p1", "node-0", beat("p1-incarnation-1"))
        except NotFoundError:
            await seen.register(FLEET[0])
        assert {instance.name for instance in await seen.instances()} == {"p1", "p2", "d1", "d2"}
        assert (await seen.heartbeat("p1", "node-0", beat("p1-incarnation-1"))).silent_s < 1


@FIELD_VALUES
@pytest.mark.parametrize("field", NODE_FIELDS)
async def test_a_node_whose_record_lost_a_field_can_leave_and_come_back(redis_fleet, field, value):
    directory = await redis_fleet.directory(*FLEET)
    damage(redis_fleet, f"node:{MEMBER}", field, value)
    with contextlib.suppress(NotFoundError):
        await directory.deregister("p1", "node-0", "p1-incarnation-1")
    await directory.register(FLEET[0])
    assert {instance.name for instance in await directory.instances()} == {"p1", "p2", "d1", "d2"}


@FIELD_VALUES
@pytest.mark.parametrize("field", ["rooms", "full"])
async def test_a_charge_that_lost_a_field_stands_in_nobodys_way(redis_fleet, field, value):
    directory = await redis_fleet.directory(node("p1", Role.PREFILL))
    (instance,) = await directory.instances()
    await directory.charge([(instance, {"full": 4})])
    damage(redis_fleet, f"charge:{MEMBER}", field, value)
    await directory.charge([(instance, {"full": 4})])
    await directory.heartbeat("p1", "node-0", beat("p1-incarnation-1", load=FLEET[0].load))
    (instance,) = await directory.instances()
    assert instance.nodes[0].load == FLEET[0].load


@FIELD_VALUES
@pytest.mark.parametrize("field", ["state", "generation", "owner", "claimed_ms", "settled_ms", "ticket"])
async def test_a_room_whose_record_lost_a_field_fails_nobodys_call(redis_fleet, field, value):
    port = FakeDaemons()
    pairing = await redis_fleet.pairing(port)
    ticket = await pairing.pair(REQUEST)
    damage(redis_fleet, "room:7", field, value)
    for call in (pairing.report(7), pairing.cancel(7, "enough"), pairing.pair(REQUEST)):
        with contextlib.suppress(NotFoundError, ConflictError):
            await call
    store = redis_fleet.store
    await store.cancelled(7, ticket.generation)
    await store.room_counts()
    claim = await store.claim(7, generations=3)
    if isinstance(claim, Claim):
        damage(redis_fleet, "room:7", "owner", value)
        assert not await store.settle(claim, ticket)
        await store.give_up(claim, claim.base)
    else:
        assert claim.age_s >= 0


async def test_a_load_from_redis_is_what_was_announced(redis_fleet):
    directory = await redis_fleet.directory(node("p", Role.PREFILL))
    load = Load(rooms=3, available_pages={"full": 5}, total_pages={"full": 9})
    await directory.heartbeat("p", "node-0", beat("p-incarnation-1", ready=False, load=load))
    (record,) = await redis_fleet.replica().nodes()
    assert (record.load, record.beat.ready) == (load, False)


async def test_what_a_later_release_adds_to_a_record_is_ignored(redis_fleet):
    await redis_fleet.directory(*FLEET)
    with redis_fleet.server.client() as client:
        entry = entry_of(client, redis_fleet.namespace)
        registration = NodeRegistration.model_validate(entry["registration"])
        entry |= UNKNOWN | {"registration": later(registration)}
        write_entry(client, redis_fleet.namespace, json.dumps(entry).encode())
        told = later(beat("p1-incarnation-1", load=Load(rooms=3)))
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", json.dumps(told))
    for store in (redis_fleet.store, redis_fleet.replica()):
        [found] = [record for record in await store.nodes() if record.key[0] == "p1"]
        assert (found.registration, found.load.rooms) == (registration, 3)
