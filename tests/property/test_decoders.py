"""Every decoder that faces a socket, fed with nonsense: it answers with what it is documented to, soon, and in little memory."""

import time
import tracemalloc

import msgpack
import pytest
from hypothesis import HealthCheck, given, strategies as st

from kvbridge.core.wire.codec import PEER, Envelope
from kvbridge.core.wire.messages import Done, Heartbeat
from tests.fuzz.decoders import DECODERS, MESSAGES, Decoder, family, hostile_frames
from tests.helpers.examples import fewer

EXAMPLES = fewer(2, suppress_health_check=[HealthCheck.function_scoped_fixture])
SECONDS_A_MEGABYTE = 3.0
MEMORY_A_BYTE = 200
"""Bytes of Python objects that one byte of a frame may become while it is decoded. Small numbers in lists cost most."""

every = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)


@every
def test_the_seeds_are_real(decoder: Decoder):
    for seed in decoder.seeds:
        assert not isinstance(decoder.feed(seed), Exception), decoder.feed(seed)


@every
@EXAMPLES
@given(data=st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
def test_any_bytes(decoder: Decoder, data: bytes):
    decoder.feed(data)


@every
@EXAMPLES
@given(data=st.data())
def test_a_real_message_with_some_changed_bytes(decoder: Decoder, data: st.DataObject):
    changed = bytearray(data.draw(st.sampled_from(decoder.seeds)))
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(("set", "insert", "cut", "double"))):
            case "set":
                changed[place] = data.draw(st.integers(0, 255))
            case "insert":
                changed[place:place] = data.draw(st.binary(min_size=1, max_size=8))
            case "cut":
                del changed[place : place + data.draw(st.integers(1, 16))]
            case "double":
                changed += changed[place : place + 64]
        if not changed:
            return
    decoder.feed(bytes(changed))


@every
@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000, b'"' + b"x" * 500_000 + b'"'])
def test_deep_and_long_texts(decoder: Decoder, data: bytes):
    began_s = time.thread_time()
    decoder.feed(data)
    assert time.thread_time() - began_s < SECONDS_A_MEGABYTE


@pytest.mark.parametrize("codec", MESSAGES, ids=lambda codec: codec.name)
def test_a_frame_takes_no_more_memory_and_time_than_its_length_allows(codec):
    [decoder] = [each for each in family("frames") if each.name == codec.name]
    for data in hostile_frames(codec):
        tracemalloc.start()
        began_s = time.thread_time()
        try:
            answer = decoder.feed(data)
            took_s, (_, peak_bytes) = time.thread_time() - began_s, tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert isinstance(answer, Exception)
        assert took_s < SECONDS_A_MEGABYTE * (1 + len(data) / 1e6), data[:80]
        assert peak_bytes < (1 << 20) + MEMORY_A_BYTE * len(data), data[:80]


@pytest.mark.parametrize("retry_after_s", [b"1e999", b"-1", b"NaN", b"1e300", b'"x"'])
def test_a_problem_of_a_hostile_server_is_still_one_of_ours(retry_after_s: bytes):
    [problem] = [each for each in DECODERS if each.name == "problem"]
    seed = problem.seeds[0]
    assert b"2.5" in seed
    problem.feed(seed.replace(b"2.5", retry_after_s))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(VALUES, max_size=9), VALUES)
def test_a_frame_of_any_structure(fields, body):
    [peer] = [each for each in family("frames") if each.name == PEER.name]
    for structure in (
        fields,
        [1, "a", "", 1, 1, 1, [0, []], body],
        [1, "a", "", 1, 1, 1, [0, []], {"type": "abort", "room": body, "generation": 1}],
    ):
        answer = peer.feed(msgpack.packb(structure))
        assert not isinstance(answer, Exception) or (len(str(answer)) <= 200 and str(answer).isprintable())


@given(
    st.integers(0, 2**53 - 1),
    st.binary(max_size=200),
    st.dictionaries(st.sampled_from(["c4_kv", "swa_kv"]), st.fixed_dictionaries({"bytes": st.integers(0, 2**40)})),
)
def test_an_envelope_comes_back(room, metadata, amounts):
    done = {"room": room, "generation": 1, "writer": {"pp": 0, "tp": 1}, "amounts": amounts, "metadata": metadata}
    message = Done.model_validate(done | {"phases_s": {"move": 0.25}})
    envelope = Envelope("sender", "recipient", 12, 34, 5, message)
    assert PEER.decode(PEER.encode(envelope)) == envelope
    assert PEER.decode(PEER.encode(Envelope("sender", body=Heartbeat()))).body == Heartbeat()
