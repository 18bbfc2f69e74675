"""The directory: incarnations, expiry, completeness, agreement; over both stores."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import (
    ConflictError,
    FingerprintMismatchError,
    InvalidInputError,
    NotFoundError,
    StaleError,
)
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.service.directory import Directory, absences
from kvbridge.service.ports import Load, NodeHeartbeat
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, half, node

pytestmark = pytest.mark.asyncio


def beat(incarnation: str, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": incarnation, "ready": True, **changes})


async def test_a_node_is_listed_until_it_falls_silent(world):
    directory = await world.directory(node("p", Role.PREFILL))
    world.advance(EXPIRE_AFTER_S - 1)
    assert [view.instance for view in await directory.listing()] == ["p"]
    world.advance(1.001)
    assert await directory.expire() == (("p", "node-0"),)
    assert await directory.expire() == ()
    assert await directory.listing() == ()
    with pytest.raises(NotFoundError, match="register again"):
        await directory.heartbeat("p", "node-0", beat("p-life-1"))


async def test_listing_alone_takes_silent_nodes_off(world):
    directory = await world.directory(node("p", Role.PREFILL))
    world.advance(EXPIRE_AFTER_S + 1)
    assert await directory.instances() == ()


async def test_a_heartbeat_keeps_a_node_and_brings_its_load(world):
    directory = await world.directory(node("p", Role.PREFILL))
    world.advance(EXPIRE_AFTER_S - 1)
    view = await directory.heartbeat("p", "node-0", beat("p-life-1", ready=False, load=Load(rooms=7)))
    assert (view.load.rooms, view.ready) == (7, False)
    assert view.silent_s < 1
    world.advance(EXPIRE_AFTER_S - 1)
    (instance,) = await directory.listing()
    assert (instance.ready, instance.reasons) == (False, ("node 'node-0' is not ready",))


async def test_a_new_incarnation_replaces_the_old_one(world):
    directory = await world.directory(node("p", Role.PREFILL))
    view = await directory.register(node("p", Role.PREFILL, incarnation="second", http_url="http://new"))
    assert view.epoch == 2
    with pytest.raises(StaleError, match="now incarnation second at http://new"):
        await directory.heartbeat("p", "node-0", beat("p-life-1"))
    with pytest.raises(StaleError, match="was replaced by second"):
        await directory.register(node("p", Role.PREFILL))
    with pytest.raises(StaleError):
        await directory.deregister("p", "node-0", "p-life-1")
    assert (await directory.heartbeat("p", "node-0", beat("second"))).epoch == 2


async def test_registering_again_changes_nothing_but_the_facts(world):
    directory = await world.directory(node("p", Role.PREFILL))
    assert (await directory.register(node("p", Role.PREFILL, http_url="http://moved"))).epoch == 1
    assert (await directory.instances())[0].http_urls == ("http://moved",)


async def test_a_node_that_leaves_is_gone(world):
    directory = await world.directory(node("p", Role.PREFILL))
    await directory.deregister("p", "node-0", "p-life-1")
    assert await directory.listing() == ()
    with pytest.raises(NotFoundError):
        await directory.deregister("p", "node-0", "p-life-1")


async def test_an_instance_is_complete_when_all_ranks_are_there(world):
    directory = await world.directory(half("p", Role.PREFILL, 1))
    (view,) = await directory.listing()
    assert (view.complete, view.ready, view.reasons) == (False, False, ("1 of its ranks are missing, first pp0.tp0",))
    await directory.register(half("p", Role.PREFILL, 0))
    (view,) = await directory.listing()
    assert (view.complete, view.ready, [each.node for each in view.nodes]) == (True, True, ["node-0", "node-1"])


async def test_nodes_of_an_instance_agree_on_the_model(world):
    directory = await world.directory(half("p", Role.PREFILL, 0))
    with pytest.raises(FingerprintMismatchError, match=r"components\.\w+ exists only"):
        await directory.register(half("p", Role.PREFILL, 1, model="tiny-gqa"))
    assert len((await directory.instances())[0].nodes) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pp_size": 2}, "its pp_size is 2"),
        ({"tp_size": 4}, "its tp_size is 4"),
        ({"ranks": (Rank(pp=0, tp=0),)}, "rank pp0.tp0 already lives on node 'node-0' at http://p-0"),
    ],
)
async def test_nodes_of_an_instance_agree_on_their_places(world, changes, expected):
    directory = await world.directory(half("p", Role.PREFILL, 0))
    with pytest.raises(ConflictError, match=expected.replace(".", r"\.")):
        await directory.register(half("p", Role.PREFILL, 1, **changes))


async def test_nodes_of_an_instance_agree_on_their_stages(world):
    directory = await world.directory(half("p", Role.PREFILL, 0, pp_size=2, stage_boundaries=(3,)))
    with pytest.raises(ConflictError, match=r"its stage_boundaries is \(2,\), that of node 'node-0' is \(3,\)"):
        await directory.register(half("p", Role.PREFILL, 1, pp_size=2, stage_boundaries=(2,)))


async def test_nodes_of_an_instance_agree_on_the_role(world):
    directory = await world.directory(half("p", Role.PREFILL, 0))
    with pytest.raises(ConflictError, match="its role is decode, that of node 'node-0' is prefill"):
        await directory.register(half("p", Role.DECODE, 1))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fingerprint": "0" * 32}, "is not that of its geometry"),
        ({"ranks": ()}, "has no rank"),
        ({"ranks": (Rank(pp=0, tp=1),)}, "rank pp0.tp1 does not exist"),
        ({"ranks": (Rank(pp=0, tp=0),) * 2}, "listed twice"),
        ({"pp_size": 2, "stage_boundaries": (99,)}, "node 'node-0' of instance 'p': boundaries of 2 stages"),
    ],
)
async def test_a_registration_that_contradicts_itself_is_refused(world, changes, expected):
    with pytest.raises(InvalidInputError, match=expected.replace(".", r"\.")):
        await world.directory(node("p", Role.PREFILL, **changes))


async def test_a_sole_node_may_come_back_with_another_model(world):
    directory = await world.directory(node("p", Role.PREFILL))
    await directory.register(node("p", Role.PREFILL, model="tiny-gqa", incarnation="second"))
    assert (await directory.instances())[0].fingerprint == fingerprint(preset("tiny-gqa"))


async def test_a_charge_lasts_until_the_next_heartbeat(world):
    directory = await world.directory(node("p", Role.PREFILL, free=10))
    (instance,) = await directory.instances()
    await directory.charge(instance, {"full": 4, "host": 3})
    load = await load_of(directory)
    assert (load.free_pages["full"], load.free_pages["swa"], load.rooms) == (6, 10, 1)
    await directory.charge(instance, {"full": 40})
    load = await load_of(directory)
    assert (load.free_pages["full"], load.rooms) == (0, 2)
    await directory.heartbeat("p", "node-0", beat("p-life-1", load=Load(free_pages={"full": 9})))
    load = await load_of(directory)
    assert (load.free_pages["full"], load.rooms) == (9, 0)


async def load_of(directory: Directory) -> Load:
    """The load of the only node."""
    (instance,) = await directory.instances()
    (record,) = instance.nodes
    return record.load


async def test_a_charge_against_who_has_left_is_nothing(world):
    directory = await world.directory(node("p", Role.PREFILL))
    (instance,) = await directory.instances()
    await directory.deregister("p", "node-0", "p-life-1")
    await directory.charge(instance, {"full": 4})
    assert await directory.listing() == ()
    await directory.register(node("p", Role.PREFILL, free=10))
    assert (await load_of(directory)).free_pages["full"] == 10


async def test_what_the_host_pool_holds_is_checked(world):
    with pytest.raises(InvalidInputError, match="cannot live in its host pool"):
        await world.directory(node("d", Role.DECODE, host=("swa_kv",)))


async def test_who_is_absent_is_told(world):
    directory = await world.directory(node("p", Role.PREFILL))
    assert absences(await directory.listing()) == ("no decode instance is ready (0 known)",)
    await directory.register(node("d", Role.DECODE, ready=False))
    assert absences(await directory.listing()) == ("no decode instance is ready (1 known)",)
    await directory.heartbeat("d", "node-0", beat("d-life-1"))
    assert absences(await directory.listing()) == ()
