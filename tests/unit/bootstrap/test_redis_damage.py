"""Values in Redis that are not ours: refused, counted, logged once, healed by the next heartbeat; nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, PairRequest
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.store import Claim
from kvbridge.core.errors import ConflictError, NotFoundError
from tests.helpers.examples import fewer
from tests.helpers.later_release import UNKNOWN, later
from tests.unit.bootstrap.fleet import FLEET, LIMITS, FakeDaemons, RedisFleet

pytestmark = pytest.mark.outside

MEMBER = '["p1","node-0"]'
KEYS = [bytes(16), bytes(range(16))]
NAMES = {each.instance for each in FLEET}
_NUMBERS = itertools.count()

VALUES = st.sampled_from([b"", b"-1", b"nan", b"1e300", b"{}", b"\xff\xfe", b"\x80\x04K\x01."]) | st.binary(max_size=20)
DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 99),
        st.sampled_from(["drop", "string", "list", "part", "part", "part"]),
        st.integers(0, 9),
        VALUES,
    ),
    min_size=1,
    max_size=4,
)
"""Which key, what happens to it, which part of it, and what is written there."""


def beat_of(of: NodeRegistration) -> NodeHeartbeat:
    return NodeHeartbeat(incarnation=of.incarnation, ready=True, load=of.load)


def damage(client, key: bytes, what: str, part: int, value: bytes) -> None:
    kind = client.type(key)
    if what != "part":
        client.delete(key)
    if what == "string":
        client.set(key, value)
    elif what == "list":
        client.lpush(key, value)
    elif what == "part" and kind == b"hash":
        field = sorted(client.hkeys(key))[part % client.hlen(key)]
        client.hset(key, field, value) if part % 2 else client.hdel(key, field)
    elif what == "part" and kind == b"set":
        client.sadd(key, value)
    elif what == "part" and kind == b"zset":
        client.zadd(key, {value: 1})


async def heals(server, damages) -> None:
    async with RedisFleet(server, f"damaged-{next(_NUMBERS)}") as world:
        directory = await world.directory(*FLEET)
        pairing = PairingService(directory, world.store, FakeDaemons(), **LIMITS)
        ticket = await pairing.pair(PairRequest(room=7, prompt_tokens=1000))
        claim = await world.store.claim(9, generations=1)
        assert await world.store.settle(claim, ticket.model_copy(update={"room": 9, "generation": 1}), KEYS)
        with server.client() as client:
            keys = sorted(client.keys(f"{world.namespace}:*"))
            chosen = [keys[number % len(keys)] for number, *_ in damages]
            for key, (_, *how) in zip(chosen, damages, strict=True):
                if client.exists(key):
                    damage(client, key, *how)
        for store in (world.store, world.replica()):  # one has parsed all of it before
            seen = Directory(store, FakeDaemons())
            listed = {instance.name for instance in await seen.instances()}
            if all(b":node:" in key and MEMBER.encode() in key for key in chosen):
                assert listed >= NAMES - {"p1"}, "others are not harmed"
            await seen.expire()
            await store.room_counts()
            await store.noted(KEYS)
            for call in (pairing.report(7), store.cancelled(7, ticket.generation)):
                with contextlib.suppress(NotFoundError):
                    await call
            for each in FLEET:
                try:
                    await seen.heartbeat(each.instance, each.node, beat_of(each))
                except NotFoundError:
                    await seen.register(each)
            found = {instance.name: instance for instance in await seen.instances()}
            assert found.keys() == NAMES
            assert [found[each.instance].nodes[0].view().load for each in FLEET] == [each.load for each in FLEET]
            again = PairingService(seen, store, FakeDaemons(), **LIMITS)
            with contextlib.suppress(ConflictError):
                await again.pair(PairRequest(room=7, prompt_tokens=1000))
            await again.pair(PairRequest(prompt_tokens=1000))
            fresh = await store.claim(store_room := 1000 + next(_NUMBERS), generations=1)
            assert isinstance(fresh, Claim)
            settled = ticket.model_copy(update={"room": store_room, "generation": fresh.base + 1})
            assert await store.settle(fresh, settled, KEYS)
            assert [set(ages) >= {"p1", "d1"} for ages in await store.noted(KEYS)] == [True, True]


@fewer(4)
@given(damages=DAMAGE)
def test_any_damage_heals_with_the_next_heartbeats(redis, damages):
    asyncio.run(heals(redis, damages))


def write_entry(client, namespace, change) -> None:
    """Write another entry, which the record points to by its digest as it should."""
    key = f"{namespace}:node:{MEMBER}"
    entry = json.loads(client.hget(key, "entry"))
    change(entry)
    text = json.dumps(entry).encode()
    client.hset(key, mapping={"entry": text, "digest": hashlib.sha256(text).hexdigest()})


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "change",
    [{"http_url": "file:///etc/passwd"}, {"fingerprint": "0" * 32}, {"node": "node-9"}],
    ids=["an endpoint that is a file", "a fingerprint that is not its geometry's", "the entry of another node"],
)
async def test_a_false_entry_is_not_there_and_is_counted(redis_fleet, change):
    await redis_fleet.directory(*FLEET)
    with redis_fleet.server.client() as client:
        write_entry(client, redis_fleet.namespace, lambda entry: entry["registration"].update(change))
    for store in (redis_fleet.store, redis_fleet.replica()):
        before = redis_fleet.counted["value node"]
        assert {record.entry.key[0] for record in await store.nodes()} == {"p2", "d1", "d2"}
        assert redis_fleet.counted["value node"] == before + 1


@pytest.mark.asyncio
async def test_a_malformed_value_is_counted_each_time_and_logged_once(redis_fleet, capsys):
    directory = await redis_fleet.directory(*FLEET)
    await PairingService(directory, redis_fleet.store, FakeDaemons(), **LIMITS).pair(
        PairRequest(room=7, prompt_tokens=9)
    )
    with redis_fleet.server.client() as client:
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", b"\xff")
        client.hset(f"{redis_fleet.namespace}:room:7", "ticket", b'{"room":7}')
    capsys.readouterr()
    for _ in range(3):
        await directory.instances()
        assert await redis_fleet.store.ticket(7) is None
    assert (redis_fleet.counted["value node"], redis_fleet.counted["value room"]) == (3, 3)
    assert "".join(capsys.readouterr()).count("stored_value_refused") == 2


@pytest.mark.asyncio
async def test_what_a_later_release_adds_to_a_record_is_ignored(redis_fleet):
    await redis_fleet.directory(*FLEET)
    told = later(beat_of(FLEET[0]).model_copy(update={"load": Load(rooms=3)}))
    with redis_fleet.server.client() as client:
        write_entry(
            client,
            redis_fleet.namespace,
            lambda entry: entry.update(UNKNOWN | {"registration": later(FLEET[0])}),
        )
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", json.dumps(told))
    for store in (redis_fleet.store, redis_fleet.replica()):
        [found] = [record for record in await store.nodes() if record.entry.key[0] == "p1"]
        assert (found.registration, found.view().load.rooms) == (FLEET[0], 3)


@pytest.mark.asyncio
async def test_a_version_that_is_no_text_keeps_no_node_out(redis_fleet):
    directory = await redis_fleet.directory()
    with redis_fleet.server.client() as client:
        client.set(f"{redis_fleet.namespace}:version:p1", b"\xff\xfe")
    assert (await directory.register(FLEET[0])).epoch == 1
