"""The pure choice of a pair."""

from __future__ import annotations

import pytest

from kvbridge.api.directory import Load, PairRequest
from kvbridge.bootstrap.fit import Ranking
from kvbridge.core.errors import InvalidInputError, NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Role
from tests.unit.bootstrap.fleet import half, instances_of, node


def ranking(*registrations, **request) -> Ranking:
    asked = PairRequest(**{"prompt_tokens": 1000, **request})
    return Ranking(instances_of(*registrations), asked)


def best(*registrations, without=(), **request) -> tuple[str, str] | None:
    found = ranking(*registrations, **request).best(without=without)
    return None if found is None else (found.prefill.name, found.decode.name)


def loaded(free: int, rooms: int = 0) -> Load:
    spaces = ("full", "swa", "request", "host")
    return Load(rooms=rooms, available_pages=dict.fromkeys(spaces, free), total_pages=dict.fromkeys(spaces, 100))


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
