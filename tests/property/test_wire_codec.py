"""Whatever bytes arrive, the codec answers with an envelope or a FrameError."""

import msgpack
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.wire.codec import PEER, Acks, Envelope, FrameError
from kvbridge.core.wire.messages import Abort, Done, Heartbeat

FRAME = PEER.encode(
    Envelope(
        "a" * 16, "b" * 16, 3, 7, 5, Acks(4, (6, 9)), Abort(room=1, generation=2, code="cancelled", message="text")
    )
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)


def decode(frame):
    try:
        return PEER.decode(frame)
    except FrameError as error:
        caught = error
    assert 0 < len(str(caught)) <= 200
    assert str(caught).isprintable()
    return caught


@given(st.binary(max_size=400))
def test_any_bytes(frame):
    decode(frame)


@given(st.integers(0, len(FRAME) - 1), st.integers(0, 255))
def test_one_changed_byte(position, value):
    decode(FRAME[:position] + bytes([value]) + FRAME[position + 1 :])


@given(st.integers(0, len(FRAME) - 1))
def test_cut_short(length):
    assert isinstance(decode(FRAME[:length]), FrameError)


@given(st.lists(values, max_size=9), values)
def test_any_structure(fields, body):
    decode(msgpack.packb(fields))
    decode(msgpack.packb([1, "a", "", 1, 1, 1, [0, []], body]))
    decode(msgpack.packb([1, "a", "", 1, 1, 1, [0, []], {"type": "abort", "room": body, "generation": 1}]))


@given(
    st.integers(0, 2**53 - 1),
    st.binary(max_size=200),
    st.dictionaries(st.sampled_from(["c4_kv", "swa_kv"]), st.fixed_dictionaries({"bytes": st.integers(0, 2**40)})),
)
def test_round_trip(room, metadata, amounts):
    message = Done.model_validate(
        {
            "room": room,
            "generation": 1,
            "writer": {"pp": 0, "tp": 1},
            "amounts": amounts,
            "phases_s": {"move": 0.25},
            "metadata": metadata,
        }
    )
    envelope = Envelope("sender", "recipient", 12, 34, 30, Acks(5, (7,)), message)
    assert PEER.decode(PEER.encode(envelope)) == envelope
    assert PEER.decode(PEER.encode(Envelope("sender", body=Heartbeat()))).body == Heartbeat()
