"""The store in Redis: replicas, a Redis that goes away, values that somebody else has written."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import random
import time

import pytest
from hypothesis import given, strategies as st

from kvbridge.api.directory import Load, PairRequest
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.redis_store import redis_client
from kvbridge.bootstrap.store import Claim
from kvbridge.core.errors import ConfigError, ConflictError, NotFoundError, NotReadyError, StaleError
from kvbridge.core.ids import Role
from tests.helpers.examples import fewer
from tests.helpers.later_release import UNKNOWN, later
from tests.helpers.redis_server import redis_server
from tests.unit.bootstrap.fleet import FLEET, LIMITS, FakeDaemons, RedisFleet, beat, node

pytestmark = pytest.mark.outside


REQUEST = PairRequest(room=7, prompt_tokens=1000)


def replicas(world: RedisFleet, port: FakeDaemons) -> list[PairingService]:
    stores = [world.store, world.replica()]
    return [PairingService(Directory(store, FakeDaemons()), store, port, **LIMITS) for store in stores]


async def test_two_incarnations_that_register_at_once_follow_one_another(redis_fleet):
    one, other = Directory(redis_fleet.store, FakeDaemons()), Directory(redis_fleet.replica(), FakeDaemons())
    for number in range(10):
        lives = [node("p", Role.PREFILL, incarnation=f"incarnation-{number}-{side}") for side in "ab"]
        views = await asyncio.gather(one.register(lives[0]), other.register(lives[1]))
        assert sorted(view.epoch for view in views) == [2 * number + 1, 2 * number + 2]
        (instance,) = await one.instances()
        winner = max(views, key=lambda view: view.epoch)
        assert instance.nodes[0].registration.incarnation == winner.incarnation
        loser = min(views, key=lambda view: view.epoch)
        for directory in (one, other):
            with pytest.raises(StaleError, match=f"now incarnation {winner.incarnation}"):
                await directory.heartbeat("p", "node-0", beat(loser.incarnation))
        assert (await other.instances())[0].nodes[0].registration.incarnation == winner.incarnation


async def test_namespaces_do_not_see_each_other(redis_fleet):
    await redis_fleet.directory(*FLEET)
    stranger = RedisFleet(redis_fleet.server, f"{redis_fleet.namespace}-other")
    async with stranger:
        assert await stranger.store.nodes() == ()


async def test_a_redis_that_hangs_is_told_within_the_deadline_and_works_again_afterwards(redis_fleet):
    with redis_server() as server:
        async with RedisFleet(server, "hangs") as world:
            store = world.replica(timeout_s=1.5)
            directory = Directory(store, FakeDaemons())
            await directory.register(node("p", Role.PREFILL))
            server.halt()
            begun_s = time.monotonic()
            with pytest.raises(NotReadyError, match=r"did not answer within 1\.5 s \(timeouts\.store_s\)"):
                await directory.instances()
            assert time.monotonic() - begun_s < 15
            with pytest.raises(NotReadyError):
                await store.claim(7, generations=3)
            server.go_on()
            assert len(await directory.instances()) == 1
            assert world.counted["call timeout"] == 2


async def test_a_callers_deadline_is_not_lost_when_it_meets_the_end_of_a_call(redis_fleet):
    await redis_fleet.store.nodes()
    chance = random.Random(1)
    expired = 0
    for _ in range(300):
        try:
            async with asyncio.timeout(chance.random() * 0.002) as limit:
                await redis_fleet.store.nodes()
                assert not limit.expired(), "the deadline came and the call went on"
        except TimeoutError:
            expired += 1
    assert expired
    assert await redis_fleet.store.nodes() == ()


async def test_a_redis_that_died_is_named_by_every_call_and_is_filled_again():
    with redis_server() as server:
        async with RedisFleet(server, "dies") as world:
            directory = await world.directory(*FLEET)
            pairing = PairingService(directory, world.store, FakeDaemons(), **LIMITS)
            await pairing.pair(REQUEST)
            server.kill()
            for call in (
                pairing.pair(REQUEST.model_copy(update={"room": 8})),
                pairing.report(7),
                directory.heartbeat("p1", "node-0", beat("p1-incarnation-1")),
                directory.register(node("p3", Role.PREFILL)),
            ):
                with pytest.raises(NotReadyError, match=r"Redis at .*redis\.sock .*directory\.redis_url"):
                    await call
            server.start()
            with pytest.raises(NotFoundError, match="register again"):
                await directory.heartbeat("p1", "node-0", beat("p1-incarnation-1"))
            for each in FLEET:
                await directory.register(each)
            assert (await pairing.pair(REQUEST.model_copy(update={"room": 8}))).generation == 1
            assert world.counted["call connection"] == 4


async def test_a_ticket_that_cannot_be_kept_is_given_back():
    """Redis dies between the reservations and the ticket: nothing stays reserved, and the caller may try again."""
    with redis_server() as server:
        async with RedisFleet(server, "dies") as world:
            port = FakeDaemons()
            port.pauses["http://d1"] = asyncio.Event()
            pairing = await world.pairing(port)
            task = asyncio.create_task(pairing.pair(REQUEST))
            await asyncio.wait_for(port.stuck.wait(), 20)
            server.kill()
            port.pauses["http://d1"].set()
            with pytest.raises(NotReadyError, match="cannot be reached"):
                await asyncio.wait_for(task, 20)
            assert port.rooms() == {}


async def test_a_password_is_used_and_never_shown():
    with redis_server(password="hush-hush") as server:
        async with RedisFleet(server, "secret") as world:
            with pytest.raises(NotReadyError, match=r"refused|cannot be reached") as raised:
                await world.store.nodes()
            assert "hush" not in str(raised.value)
            store = world.over(redis_client(server.url, lambda: "hush-hush", timeout_s=5.0))
            assert await store.nodes() == ()
            assert "hush" not in repr(store)


async def test_a_url_that_cannot_be_read_is_a_mistake_of_the_configuration():
    with pytest.raises(ConfigError, match=r"directory\.redis_url") as raised:
        redis_client("gopher://u:hush@x", timeout_s=5.0)
    assert "hush" not in str(raised.value)


def test_a_url_may_name_several_sentinels():
    client = redis_client("redis+sentinel://u:hush@a:1,b,[::1]:3/kv", timeout_s=5.0)
    asked = [one.connection_pool.connection_kwargs for one in client.connection_pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("a", 1), ("b", 26379), ("::1", 3)]


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
                    await seen.heartbeat(each.instance, each.node, each.heartbeat)
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


async def test_a_malformed_value_is_counted_each_time_and_logged_once(redis_fleet, capsys):
    directory = await redis_fleet.directory(*FLEET)
    await PairingService(directory, redis_fleet.store, FakeDaemons(), **LIMITS).pair(REQUEST)
    with redis_fleet.server.client() as client:
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", b"\xff")
        client.hset(f"{redis_fleet.namespace}:room:7", "ticket", b'{"room":7}')
    capsys.readouterr()
    for _ in range(3):
        await directory.instances()
        assert await redis_fleet.store.ticket(7) is None
    assert (redis_fleet.counted["value node"], redis_fleet.counted["value room"]) == (3, 3)
    assert "".join(capsys.readouterr()).count("stored_value_refused") == 2


async def test_what_a_later_release_adds_to_a_record_is_ignored(redis_fleet):
    await redis_fleet.directory(*FLEET)
    told = later(FLEET[0].heartbeat.model_copy(update={"load": Load(rooms=3)}))
    with redis_fleet.server.client() as client:
        added = UNKNOWN | {"registration": later(FLEET[0])}
        write_entry(client, redis_fleet.namespace, lambda entry: entry.update(added))
        client.hset(f"{redis_fleet.namespace}:node:{MEMBER}", "beat", json.dumps(told))
    for store in (redis_fleet.store, redis_fleet.replica()):
        [found] = [record for record in await store.nodes() if record.entry.key[0] == "p1"]
        assert (found.registration, found.view().load.rooms) == (FLEET[0], 3)


async def test_a_version_that_is_no_text_keeps_no_node_out(redis_fleet):
    directory = await redis_fleet.directory()
    with redis_fleet.server.client() as client:
        client.set(f"{redis_fleet.namespace}:version:p1", b"\xff\xfe")
    assert (await directory.register(FLEET[0])).epoch == 1
