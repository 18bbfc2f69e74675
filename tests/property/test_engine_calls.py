"""Any well-formed calls of an engine: each is answered once, and none fails by a defect.

Each reader of a message takes every value that the message may have, or refuses the value with a reason.
"""

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import MAX_ROOM, IndexSpace, Role
from kvbridge.core.wire import engine_messages as calls
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.messages import FEATURES, WireTable
from tests.helpers.hooked_vllm import Node, Wire
from tests.helpers.rooms import ADDRESS, PAGE, R0

MOST = 2**62
TOKENS = st.sampled_from([1, PAGE - 1, PAGE, 2 * PAGE, 16 * PAGE, 17 * PAGE, 2**31, 2**40, MOST])
SOME = st.just(0) | TOKENS
IDS = st.lists(st.sampled_from([-1, 0, 1, 15, 16, 2**31 - 1]), max_size=3).map(
    lambda ids: b"".join(one.to_bytes(4, "little", signed=True) for one in ids)
)
TABLES = st.lists(
    st.builds(WireTable, space=st.sampled_from(IndexSpace), first_page=SOME, ids=IDS | st.just(b"abc")), max_size=2
).map(tuple)
COMMON = {"call": st.sampled_from([1, MOST]), "room": st.sampled_from([0, 1, 2, MAX_ROOM])}
KEYS = st.sampled_from([b"", b"k" * 15, b"k" * 16, b"k" * 32])
ENDPOINTS = st.sampled_from([ADDRESS.endpoint, "tcp://", "ipc://", "ipc://x", "tcp://[::1]:99999", "tcp://\0"])
PLACES = st.lists(st.builds(PeerAddress, endpoint=ENDPOINTS, public_key=st.text(max_size=40)), min_size=1, max_size=2)
GENERATIONS = st.sampled_from([1, 2, MOST])
FOR_ADMISSION = {"generation": GENERATIONS, "prompt_tokens": TOKENS}
DIGESTS = st.sampled_from([b"", b"d" * 32])
BY_ENGINES = COMMON | FOR_ADMISSION | {"prompt_digest": DIGESTS, "tables": st.none() | TABLES}
METADATA = st.just(b"") | st.just(b"m" * 65_536)
CALLS = st.one_of(
    st.builds(calls.Admit, **COMMON, **FOR_ADMISSION, max_new_tokens=SOME, page_hashes=KEYS),
    st.builds(calls.Hold, **BY_ENGINES, computed_tokens=SOME, published_tokens=SOME, metadata=METADATA),
    st.builds(calls.Fetch, **BY_ENGINES, prefill=PLACES.map(tuple), held=st.booleans(), prefix_tokens=SOME),
    st.builds(
        calls.Begin,
        **COMMON,
        prompt_tokens=TOKENS,
        page_hashes=KEYS,
        tables=TABLES,
        at_most=st.none() | SOME,
        computed_tokens=SOME,
        by_gpu=st.booleans(),
    ),
    st.builds(calls.AskRestorable, **COMMON),
    st.builds(
        calls.Publish,
        **COMMON,
        upto_token=SOME,
        layers=st.none() | st.lists(st.sampled_from([0, 1, 99, MOST]), max_size=3).map(tuple),
        tables=TABLES,
    ),
    st.builds(
        calls.Finish, **COMMON, by_gpu=st.booleans(), checkpoints=st.lists(TOKENS, max_size=2, unique=True).map(tuple)
    ),
    st.builds(calls.Provide, **COMMON, tables=TABLES, prefix_tokens=SOME),
    st.builds(calls.Claim, **COMMON, page_hashes=KEYS),
    st.builds(calls.Loaded, **COMMON, generation=GENERATIONS, bytes=SOME),
    st.builds(calls.Extend, **COMMON, tokens=TOKENS),
    st.builds(calls.Release, **COMMON, generation=st.just(0) | GENERATIONS, valid_tokens=SOME, page_hashes=KEYS),
    st.builds(calls.AbortRoom, **COMMON, reason=st.just("x" * 4_000), load_failed=st.booleans(), again=st.booleans()),
)


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("role", Role)
@given(said=st.lists(CALLS, max_size=12))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_every_call_is_answered_once_and_none_fails_by_a_defect(role, adopted, said):
    node = Node(role, adopted=adopted)
    if role is Role.DECODE:
        node.bench.nodes.know()
    wire = node.wires["e"] = Wire("e", node)
    node.api.handle("e", calls.Attach(call=1, role=role, ranks=(R0,), features=FEATURES))
    wire.inbox.clear()
    for call in said:
        node.api.handle("e", ENGINE_TO_NODE.decode_body(ENGINE_TO_NODE.encode_body(call)))
        heard = [NODE_TO_ENGINE.decode_body(wire.inbox.popleft()) for _ in range(len(wire.inbox))]
        [answer] = [one for one in heard if not isinstance(one, calls.RoomEvent)]
        assert answer.call == call.call
        assert not isinstance(answer, calls.Refused) or answer.code != BridgeError.code, answer
        node.bench.tick()
