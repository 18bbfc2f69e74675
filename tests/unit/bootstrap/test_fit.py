"""The pure choice of a pair."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.api.directory import ControlMode, Load, PairRequest
from kvbridge.bootstrap.fit import Ranking, demand, free_share
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Role
from tests.unit.bootstrap.fleet import half, instances_of, node

HOST = (ComponentKind.C4_KV,)


def ranking(*registrations, **request) -> Ranking:
    asked = PairRequest(**{"prompt_tokens": 1000, **request})
    return Ranking(instances_of(*registrations), asked)


def best(*registrations, without=(), **request) -> tuple[str, str] | None:
    found = ranking(*registrations, **request).best(without=without)
    return None if found is None else (found.prefill.name, found.decode.name)


def loaded(free: int, rooms: int = 0) -> Load:
    spaces = ("full", "swa", "request", "host")
    return Load(rooms=rooms, available_pages=dict.fromkeys(spaces, free), total_pages=dict.fromkeys(spaces, 100))


def test_the_freest_pair_comes_first():
    fleet = (
        node("p1", Role.PREFILL, free=50),
        node("p2", Role.PREFILL, free=90),
        node("d1", Role.DECODE, free=80),
        node("d2", Role.DECODE, free=20),
    )
    assert best(*fleet) == ("p2", "d1")
    assert best(*fleet, without={"d1"}) == ("p2", "d2")
    assert best(*fleet, without={"d1", "p2"}) == ("p1", "d2")
    assert best(*fleet, without={"d1", "d2"}) is None


def test_equal_pairs_are_taken_by_rooms_and_then_by_name():
    prefill = [node(name, Role.PREFILL) for name in ("pb", "pa")]
    decode = [node("da", Role.DECODE, load=loaded(100, rooms=1)), node("db", Role.DECODE, load=loaded(100))]
    for fleet in ((*prefill, *decode), (*reversed(decode), *reversed(prefill))):
        assert best(*fleet) == ("pa", "db")
        assert best(*fleet, without={"db"}) == ("pa", "da")
        assert best(*fleet, without={"pa"}) == ("pb", "db")


shares = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3)), min_size=1, max_size=4)


@given(prefill=shares, decode=shares, refused=st.sets(st.sampled_from(["p0", "p1", "d0", "d1"])))
def test_the_best_pair_is_the_best_of_all_pairs(prefill, decode, refused):
    """Against the plain definition: look at every pair."""
    fleet = [
        node(f"{letter}{number}", role, load=loaded(free, rooms=rooms))
        for letter, role, sides in (("p", Role.PREFILL, prefill), ("d", Role.DECODE, decode))
        for number, (free, rooms) in enumerate(sides)
    ]
    asked = PairRequest(prompt_tokens=1000)

    def order(pair):
        parts = [free_share(one.load, demand(one, asked), {}) for one in pair]
        return min(parts) < 0, -sum(parts), sum(one.load.rooms for one in pair), *(one.instance for one in pair)

    free = [one for one in fleet if one.instance not in refused]
    pairs = product((one for one in free if one.role is Role.PREFILL), (one for one in free if one.role is Role.DECODE))
    expected = min(pairs, key=order, default=None)
    found = ranking(*fleet).best(without=refused)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert (found.prefill.name, found.decode.name) == tuple(one.instance for one in expected)
        assert found.looks_full == order(expected)[0]


def test_demand_counts_appended_tokens_on_decode_only():
    prefill, decode = node("p", Role.PREFILL), node("d", Role.DECODE, host=HOST)
    request = PairRequest(prompt_tokens=512, max_new_tokens=256)
    assert demand(prefill, request)["full"] == 2
    assert demand(decode, request)["full"] == 3
    assert demand(decode, request)["host"] == 3
    assert "host" not in demand(prefill, request)
    assert "host" not in demand(node("d", Role.DECODE), request)


@pytest.mark.parametrize("tokens", [1, 3, 4, 256, 257, 259, 260, 1026])
def test_demand_is_what_the_decode_daemon_reserves(tokens):
    """The host pool holds complete rows of four tokens, so it needs a page less where the last one has none yet."""
    decode = node("d", Role.DECODE, host=HOST)
    pages = pages_needed(decode.geometry, tokens=tokens, prompt_tokens=tokens, host=frozenset(HOST))
    found = demand(decode, PairRequest(prompt_tokens=tokens))
    assert found == {space.value: count for space, count in pages.items()}
    assert found["host"] == found["full"] - (tokens % 256 in {1, 2, 3})


def test_the_scarcest_pool_decides_and_unused_ones_do_not():
    load = Load(available_pages={"full": 50, "swa": 3}, total_pages={"full": 100, "swa": 10, "host": 0})
    assert free_share(load, {"full": 10, "swa": 2, "host": 10, "request": 1}, {}) == pytest.approx(0.1)
    assert free_share(load, {"full": 10}, {"full": 20}) == pytest.approx(0.2)
    assert free_share(load, {"full": 10}, {"full": 45}) == pytest.approx(-0.05)
    assert free_share(Load(), {"full": 10}, {}) == 1.0


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


def test_a_pair_that_looks_full_is_offered_after_all_others():
    fleet = (node("p", Role.PREFILL), node("d", Role.DECODE, free=3), node("e", Role.DECODE, free=4))
    found = ranking(*fleet)
    assert (found.best().decode.name, found.best().looks_full) == ("e", False)
    assert (found.best(without={"e"}).decode.name, found.best(without={"e"}).looks_full) == ("d", True)


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


def test_two_models_never_meet():
    with pytest.raises(FingerprintMismatchError, match=r"between 'p' \(here\) and 'd' \(peer\).*components"):
        ranking(node("p", Role.PREFILL), node("d", Role.DECODE, model="tiny-gqa"))


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


KEY = PeerAddress(endpoint="tcp://p:1", public_key="k" * 40)
CURVE, PLAIN, LOCAL = (ControlMode.CURVE,), (ControlMode.PLAIN,), (ControlMode.LOCAL,)


def test_instances_meet_in_a_way_that_both_know():
    keyed, plain = (
        node("p-key", Role.PREFILL, control=KEY, meets_by=CURVE),
        node("p-plain", Role.PREFILL, meets_by=PLAIN),
    )
    secure = node("d-secure", Role.DECODE, meets_by=CURVE, free=90)
    bare = node("d-bare", Role.DECODE, meets_by=PLAIN + LOCAL, free=20)
    open_to_all = node("d-open", Role.DECODE, meets_by=CURVE + PLAIN + LOCAL, free=50)
    assert best(keyed, plain, secure, bare) == ("p-key", "d-secure")
    assert best(keyed, plain, secure, bare, without={"d-secure"}) == ("p-plain", "d-bare")
    assert best(plain, secure, bare, open_to_all) == ("p-plain", "d-open")
    assert best(plain, secure, open_to_all, without={"d-open"}) is None


def test_instances_that_cannot_meet_are_not_paired():
    fleet = (node("p", Role.PREFILL, control=KEY, meets_by=CURVE), node("d", Role.DECODE, meets_by=LOCAL))
    with pytest.raises(
        NotReadyError, match="'p' meets others by curve, decode instances of its model by local: give all of them keys"
    ):
        ranking(*fleet)
