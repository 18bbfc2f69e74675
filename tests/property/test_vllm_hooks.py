"""Whatever a client sends as `kv_transfer_params`: no hook of vLLM raises, and nothing of the request is left when it has ended."""

from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Role
from tests.helpers.hooked_vllm import Status, Vllm, connector_module, request
from tests.helpers.rooms import ADDRESS, PREFILL_LIMITS

BLOCKS = [4, 5]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
"""Any JSON, and what Python's parser takes for it."""
ENDPOINTS = st.sampled_from([ADDRESS.endpoint, "tcp://[::1]:1", "ipc:///x", "no endpoint", "", "tcp://" + "x" * 500])
PLACES = st.fixed_dictionaries(
    {"endpoint": ENDPOINTS | ANYTHING}, optional={"public_key": st.text(max_size=45), "x": ANYTHING}
)
OURS = st.fixed_dictionaries(
    {},
    optional={
        "room": st.integers(0, 9) | st.integers(0, 9).map(str) | st.sampled_from([2**53, -1]) | ANYTHING,
        "prefill": st.lists(PLACES | ANYTHING, max_size=2) | st.just([{"endpoint": ADDRESS.endpoint}] * 257) | ANYTHING,
        "held": st.booleans() | ANYTHING,
        "prompt_tokens": st.sampled_from([0, 1, 512, 2**62, 2**62 + 1, 2**70]) | ANYTHING,
        "prompt_digest": st.sampled_from(["", "00", "0" * 64, "0" * 66, "xy"]) | ANYTHING,
    },
)
PARAMS = ANYTHING | st.fixed_dictionaries(
    {},
    optional={
        "do_remote_prefill": st.just(True) | ANYTHING,
        "do_remote_decode": st.just(True) | ANYTHING,
        "kvbridge": OURS | ANYTHING,
    },
)


@pytest.fixture(scope="module")
def connector() -> Iterator[ModuleType]:
    with connector_module() as module:
        yield module


def live(vllm: Vllm, name: str, params: object, *, refused: bool) -> None:
    """The life of one request, until vLLM knows nothing of it any more."""
    asked = request(name, params, refused=refused)
    vllm.arrives(asked, BLOCKS)
    vllm.steps()
    if refused:
        return
    if name in vllm.waiting:  # for a prefill node that says nothing: the client leaves
        vllm.ends(asked, BLOCKS, Status.FINISHED_ABORTED)
    else:
        vllm.ends(asked, BLOCKS)
    vllm.steps()
    if name in vllm.waiting:  # nobody comes for it
        vllm.node.bench.clock.advance(PREFILL_LIMITS.offer_s + 1)
        vllm.node.bench.tick()
        vllm.steps()


@pytest.mark.parametrize("role", Role)
@given(said=st.lists(st.tuples(PARAMS, st.booleans()), min_size=1, max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_no_params_raise_out_of_a_hook_or_leave_anything_behind(connector, role, said):
    vllm = Vllm(connector, role)
    for number, (params, refused) in enumerate(said):
        live(vllm, f"r{number}", params, refused=refused)
    assert not vllm.waiting
    assert BridgeError.code not in vllm.failures, "what a client sends is foreseen"
    assert role is Role.PREFILL or not vllm.rooms._withdrawals
    assert not vllm.rooms.attachment._unsent
    assert vllm.rooms.idle
    assert not vllm.scheduler._requests
    assert not [room for room in vllm.node.bench.service.book if not room.is_over]
    live(vllm, "last", {}, refused=False)
    assert not vllm.waiting


PLACE = {"endpoint": ADDRESS.endpoint}
FORGED = [
    *("x", 1, ["do_remote_prefill"]),
    *(
        {"do_remote_prefill": True, "kvbridge": {"room": "42", **ours}}
        for ours in (
            {"prefill": []},
            {"prefill": [PLACE] * 257},
            {"prefill": [{"endpoint": "x"}]},
            {"prefill": [PLACE], "prompt_tokens": 2**70},
            {"prefill": [], "prompt_tokens": 512},
            {"prefill": [{"endpoint": ""}], "prompt_tokens": 512},
        )
    ),
]
"""Params that no prefill server has answered: no objects, no nodes or too many, no endpoint, a number that we do not have."""


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("params", FORGED, ids=range(len(FORGED)))
def test_params_that_no_prefill_has_answered_are_computed_here_and_counted(connector, params, refused):
    vllm = Vllm(connector, Role.DECODE)
    live(vllm, "r", params, refused=refused)
    assert vllm.failures == {"invalid_input": 1}
    assert not vllm.failed
    assert vllm.rooms.idle
    assert not list(vllm.node.bench.service.book)


def test_a_prefill_node_that_is_not_there_is_waited_for_by_the_node_and_refused_there(connector):
    """Else the cases above may show nothing."""
    vllm = Vllm(connector, Role.DECODE)
    asked = request("r", {"do_remote_prefill": True, "kvbridge": {"room": "42", "prefill": [PLACE]}})
    vllm.arrives(asked, BLOCKS)
    vllm.steps()
    assert list(vllm.waiting) == ["r"]
    assert [room.room for room in vllm.node.bench.service.book] == [42]
    vllm.ends(asked, BLOCKS, Status.FINISHED_ABORTED)
    vllm.steps()
    assert not vllm.waiting
    assert vllm.failed == {"r"}
    assert vllm.failures == {"aborted": 1}
