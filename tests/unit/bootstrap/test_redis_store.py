"""What only a shared store has to get right: replicas, a Redis that goes away, values that are not ours."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from kvbridge.api.directory import NodeHeartbeat, PairRequest
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.redis_store import redis_client
from kvbridge.core.errors import ConfigError, NotFoundError, NotReadyError, StaleError
from kvbridge.core.ids import Role
from tests.helpers.redis_server import redis_server
from tests.unit.bootstrap.fleet import FLEET, LIMITS, FakeDaemons, RedisFleet, node

pytestmark = [pytest.mark.asyncio, pytest.mark.outside]

REQUEST = PairRequest(room=7, prompt_tokens=1000)


def replicas(world: RedisFleet, port: FakeDaemons) -> list[PairingService]:
    """Two bootstraps over one Redis."""
    stores = [world.store, world.replica()]
    return [PairingService(Directory(store, FakeDaemons()), store, port, **LIMITS) for store in stores]


def beat(incarnation: str, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": incarnation, "ready": True, **changes})


# ------------------------------------------------------------------------------------------ replicas


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


# ------------------------------------------------------------------------------- a Redis that goes away


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
