"""The directory: incarnations, expiry, completeness, agreement."""

from __future__ import annotations

import pytest

from kvbridge.core.clock import ManualClock
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
from kvbridge.service.ports import Load, NodeHeartbeat
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, directory_of, half, node


def beat(incarnation: str, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": incarnation, "ready": True, **changes})


def test_a_node_is_listed_until_it_falls_silent():
    clock = ManualClock()
    directory = directory_of(node("p", Role.PREFILL), clock=clock)
    clock.advance(EXPIRE_AFTER_S)
    assert [view.instance for view in directory.listing()] == ["p"]
    clock.advance(0.001)
    assert directory.expire() == (("p", "node-0"),)
    assert directory.listing() == ()
    with pytest.raises(NotFoundError, match="register again"):
        directory.heartbeat("p", "node-0", beat("p-life-1"))


def test_listing_alone_takes_silent_nodes_off():
    clock = ManualClock()
    directory = directory_of(node("p", Role.PREFILL), clock=clock)
    clock.advance(EXPIRE_AFTER_S + 1)
    assert directory.instances() == ()


def test_a_heartbeat_keeps_a_node_and_brings_its_load():
    clock = ManualClock()
    directory = directory_of(node("p", Role.PREFILL), clock=clock)
    clock.advance(EXPIRE_AFTER_S - 1)
    view = directory.heartbeat("p", "node-0", beat("p-life-1", ready=False, load=Load(rooms=7)))
    assert (view.load.rooms, view.ready, view.silent_s) == (7, False, 0.0)
    clock.advance(EXPIRE_AFTER_S - 1)
    (instance,) = directory.listing()
    assert (instance.ready, instance.reasons) == (False, ("node 'node-0' is not ready",))


def test_a_new_incarnation_replaces_the_old_one():
    directory = directory_of(node("p", Role.PREFILL))
    view = directory.register(node("p", Role.PREFILL, incarnation="second", http_url="http://new"))
    assert view.epoch == 2
    with pytest.raises(StaleError, match="now incarnation second at http://new"):
        directory.heartbeat("p", "node-0", beat("p-life-1"))
    with pytest.raises(StaleError, match="was replaced by second"):
        directory.register(node("p", Role.PREFILL))
    with pytest.raises(StaleError):
        directory.deregister("p", "node-0", "p-life-1")
    assert directory.heartbeat("p", "node-0", beat("second")).epoch == 2


def test_registering_again_changes_nothing_but_the_facts():
    directory = directory_of(node("p", Role.PREFILL))
    assert directory.register(node("p", Role.PREFILL, http_url="http://moved")).epoch == 1
    assert directory.instances()[0].http_urls == ("http://moved",)


def test_a_node_that_leaves_is_gone():
    directory = directory_of(node("p", Role.PREFILL))
    directory.deregister("p", "node-0", "p-life-1")
    assert directory.listing() == ()
    with pytest.raises(NotFoundError):
        directory.deregister("p", "node-0", "p-life-1")


def test_an_instance_is_complete_when_all_ranks_are_there():
    directory = directory_of(half("p", Role.PREFILL, 1))
    (view,) = directory.listing()
    assert (view.complete, view.ready, view.reasons) == (False, False, ("1 of its ranks are missing, first pp0.tp0",))
    directory.register(half("p", Role.PREFILL, 0))
    (view,) = directory.listing()
    assert (view.complete, view.ready, [each.node for each in view.nodes]) == (True, True, ["node-0", "node-1"])


def test_nodes_of_an_instance_agree_on_the_model():
    directory = directory_of(half("p", Role.PREFILL, 0))
    with pytest.raises(FingerprintMismatchError, match=r"components\.\w+ exists only"):
        directory.register(half("p", Role.PREFILL, 1, model="tiny-gqa"))
    assert len(directory.instances()[0].nodes) == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pp_size": 2}, "its pp_size is 2"),
        ({"tp_size": 4}, "its tp_size is 4"),
        ({"ranks": (Rank(pp=0, tp=0),)}, "rank pp0.tp0 already lives on node 'node-0' at http://p-0"),
    ],
)
def test_nodes_of_an_instance_agree_on_their_places(changes, expected):
    directory = directory_of(half("p", Role.PREFILL, 0))
    with pytest.raises(ConflictError, match=expected.replace(".", r"\.")):
        directory.register(half("p", Role.PREFILL, 1, **changes))


def test_nodes_of_an_instance_agree_on_the_role():
    directory = directory_of(half("p", Role.PREFILL, 0))
    with pytest.raises(ConflictError, match="its role is decode, that of node 'node-0' is prefill"):
        directory.register(half("p", Role.DECODE, 1))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"fingerprint": "0" * 32}, "is not that of its geometry"),
        ({"ranks": ()}, "has no rank"),
        ({"ranks": (Rank(pp=0, tp=1),)}, "rank pp0.tp1 does not exist"),
        ({"ranks": (Rank(pp=0, tp=0),) * 2}, "listed twice"),
    ],
)
def test_a_registration_that_contradicts_itself_is_refused(changes, expected):
    with pytest.raises(InvalidInputError, match=expected.replace(".", r"\.")):
        directory_of(node("p", Role.PREFILL, **changes))


def test_a_sole_node_may_come_back_with_another_model():
    directory = directory_of(node("p", Role.PREFILL))
    directory.register(node("p", Role.PREFILL, model="tiny-gqa", incarnation="second"))
    assert directory.instances()[0].fingerprint == fingerprint(preset("tiny-gqa"))


def test_a_charge_lasts_until_the_next_heartbeat():
    directory = directory_of(node("p", Role.PREFILL, free=10))
    directory.charge("p", {"full": 4, "host": 3})
    (record,) = directory.instances()[0].nodes
    assert (record.load.free_pages["full"], record.load.free_pages["swa"], record.load.rooms) == (6, 10, 1)
    directory.charge("p", {"full": 40})
    assert directory.instances()[0].nodes[0].load.free_pages["full"] == 0
    directory.heartbeat("p", "node-0", beat("p-life-1", load=Load(free_pages={"full": 9})))
    assert directory.instances()[0].nodes[0].load.free_pages["full"] == 9


def test_bootstrap_is_ready_before_anybody_registered():
    directory = directory_of(node("p", Role.PREFILL))
    readiness = directory.readiness()
    assert readiness.ready
    assert readiness.reasons == ("no decode instance is ready (0 known)",)
    assert repr(directory) == "Directory(1 instances, 1 ready, 1 nodes)"
