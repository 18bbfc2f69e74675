"""The pure choice of a pair."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import CapacityError, FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from kvbridge.service.fit import candidates, demand, free_share
from kvbridge.service.ports import Load, PairRequest
from tests.unit.bootstrap.fleet import directory_of, half, node


def names(*registrations, **request) -> list[tuple[str, str]]:
    asked = PairRequest(**{"prompt_tokens": 1000, **request})
    found = candidates(directory_of(*registrations).instances(), asked, retry_after_s=2.0)
    return [(pair.prefill.name, pair.decode.name) for pair in found]


def loaded(free: int, rooms: int = 0) -> Load:
    spaces = ("full", "swa", "request", "host")
    return Load(rooms=rooms, free_pages=dict.fromkeys(spaces, free), total_pages=dict.fromkeys(spaces, 100))


def test_the_freest_pair_comes_first():
    found = names(
        node("p1", Role.PREFILL, free=50),
        node("p2", Role.PREFILL, free=90),
        node("d1", Role.DECODE, free=80),
        node("d2", Role.DECODE, free=20),
    )
    assert found == [("p2", "d1"), ("p1", "d1"), ("p2", "d2"), ("p1", "d2")]


def test_equal_pairs_are_taken_by_rooms_and_then_by_name():
    prefill = [node(name, Role.PREFILL) for name in ("pb", "pa")]
    decode = [node("da", Role.DECODE, load=loaded(100, rooms=1)), node("db", Role.DECODE, load=loaded(100))]
    expected = [("pa", "db"), ("pb", "db"), ("pa", "da"), ("pb", "da")]
    assert names(*prefill, *decode) == expected
    assert names(*reversed(decode), *reversed(prefill)) == expected


def test_demand_counts_appended_tokens_and_the_prefix_on_decode_only():
    prefill, decode = directory_of(node("d", Role.DECODE), node("p", Role.PREFILL)).instances()[::-1]
    request = PairRequest(prompt_tokens=512, max_new_tokens=256, prefix_tokens=256)
    assert demand(prefill, request)["full"] == 2
    assert demand(decode, request)["full"] == 2
    assert demand(decode, request)["host"] == 2
    assert demand(decode, request.model_copy(update={"prefix_tokens": 0}))["full"] == 3
    assert "host" not in demand(prefill, request)


def test_the_scarcest_pool_decides_and_unused_ones_do_not():
    load = Load(free_pages={"full": 50, "swa": 3}, total_pages={"full": 100, "swa": 10, "host": 0})
    assert free_share(load, {"full": 10, "swa": 2, "host": 10, "request": 1}) == pytest.approx(0.1)
    assert free_share(Load(), {"full": 10}) == 1.0


def test_the_fullest_node_of_an_instance_decides():
    decode = (half("d", Role.DECODE, 0), half("d", Role.DECODE, 1, load=loaded(2)))
    with pytest.raises(CapacityError) as raised:
        names(node("p", Role.PREFILL), *decode)
    assert raised.value.retry_after_s == 2.0


def test_a_request_that_no_pool_could_hold_is_the_callers_mistake():
    with pytest.raises(InvalidInputError, match="larger than the pools"):
        names(node("p", Role.PREFILL), node("d", Role.DECODE), prompt_tokens=101 * 256)


def test_a_full_pair_can_be_tried_again_later():
    with pytest.raises(CapacityError, match="now"):
        names(node("p", Role.PREFILL), node("d", Role.DECODE, free=3))


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
        names(*registrations)


def test_two_models_never_meet():
    with pytest.raises(FingerprintMismatchError, match=r"between 'p' \(here\) and 'd' \(peer\).*components"):
        names(node("p", Role.PREFILL), node("d", Role.DECODE, model="tiny-gqa"))


def test_each_model_finds_its_own_pair():
    fleet = (
        node("p", Role.PREFILL),
        node("p-gqa", Role.PREFILL, model="tiny-gqa"),
        node("d", Role.DECODE),
        node("d-gqa", Role.DECODE, model="tiny-gqa"),
    )
    assert sorted(names(*fleet)) == [("p", "d"), ("p-gqa", "d-gqa")]
    assert names(*fleet, fingerprint=fingerprint(preset("tiny-gqa"))) == [("p-gqa", "d-gqa")]
    with pytest.raises(NotReadyError, match="with fingerprint nope"):
        names(*fleet, fingerprint="nope")
