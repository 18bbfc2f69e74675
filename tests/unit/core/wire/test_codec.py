"""Frames come back as they were sent, and a refused one says why; two releases agree, and a later one may add to its messages."""

import msgpack
import numpy as np
import pytest

from kvbridge.core.errors import FeatureError, errors_by_code
from kvbridge.core.ids import MAX_ROOM, IndexSpace, PageTable
from kvbridge.core.wire.codec import PEER, Envelope, FrameError, FrameFault, pack_rank, unpack_rank
from kvbridge.core.wire.messages import PROTOCOL_VERSION, Features, Offer, agree, to_wire
from tests.fuzz.decoders import DESCRIPTION, ME, MESSAGES, YOU
from tests.helpers.later_release import LaterCodec


def offer(pages=64):
    table = PageTable(IndexSpace.FULL, np.arange(pages, dtype=np.int32), first_page=3)
    return Offer(room=MAX_ROOM, generation=1, prompt_tokens=16_384, tables=to_wire({IndexSpace.FULL: table}))


def frame(*, version=PROTOCOL_VERSION, sender="s", link=1, sequence=1, acknowledged=0, body=None):
    return msgpack.packb([version, sender, "", link, sequence, acknowledged, body])


def refused(data, codec=PEER):
    with pytest.raises(FrameError) as caught:
        codec.decode(data)
    return caught.value.fault, str(caught.value)


@pytest.mark.parametrize(
    ("data", "fault", "words"),
    [
        (b"", FrameFault.MALFORMED, "0 bytes"),
        (b"\xc1", FrameFault.MALFORMED, "not a frame"),
        (b"GET / HTTP/1.1\r\n\r\n", FrameFault.MALFORMED, "follow its end"),
        (frame()[:-1], FrameFault.MALFORMED, "incomplete"),
        (frame() + b"\0", FrameFault.MALFORMED, "follow its end"),
        (msgpack.packb({"type": "heartbeat"}), FrameFault.MALFORMED, "expected an array"),
        (b"\x91" * 5_000, FrameFault.MALFORMED, "nested too deeply"),
        (b"\x91" * 900 + b"\xc0", FrameFault.VERSION, "version"),
        (msgpack.packb(msgpack.ExtType(5, b"code")), FrameFault.MALFORMED, "max_ext_len"),
        (msgpack.packb(msgpack.Timestamp(1)), FrameFault.MALFORMED, "max_ext_len"),
        (b"\xa2\xff\xff", FrameFault.MALFORMED, "UTF-8"),
        (b"\xdd\xff\xff\xff\xff", FrameFault.MALFORMED, "max_array_len"),
        (b"\xdc\x10\x00" + b"\xdc\x10\x00" * 10, FrameFault.MALFORMED, "max_array_len"),
        (b"\xdf\xff\xff\xff\xff", FrameFault.MALFORMED, "max_map_len"),
        (b"\xc6\xff\xff\xff\xff", FrameFault.MALFORMED, "incomplete"),
        (frame(body={"x": bytes((1 << 20) + 1)}), FrameFault.MALFORMED, "max_bin_len"),
        (frame(body={"x": "x" * 65_537}), FrameFault.MALFORMED, "max_str_len"),
        (msgpack.packb({1: 2}), FrameFault.MALFORMED, "strict_map_key"),
        (frame(version=2), FrameFault.VERSION, "the sender 2"),
        (frame(version=True), FrameFault.VERSION, "version"),
        (msgpack.packb([1, "s"]), FrameFault.ENVELOPE, "got 2"),
        (frame(sender=""), FrameFault.ENVELOPE, "'sender'"),
        (frame(sender="a\nb"), FrameFault.ENVELOPE, "'sender'"),
        (frame(sender="a" * 201), FrameFault.ENVELOPE, "'sender'"),
        (frame(link="1"), FrameFault.ENVELOPE, "'link'"),
        (frame(sequence=-1), FrameFault.ENVELOPE, "'sequence'"),
        (frame(sequence=2**63), FrameFault.ENVELOPE, "'sequence'"),
        (frame(sequence=1.0), FrameFault.ENVELOPE, "'sequence'"),
        (frame(acknowledged=[]), FrameFault.ENVELOPE, "'acknowledged'"),
        (frame(acknowledged=-1), FrameFault.ENVELOPE, "'acknowledged'"),
        (frame(body=[1]), FrameFault.ENVELOPE, "'body'"),
        (frame(body={}), FrameFault.TYPE, "'type'"),
        (frame(body={"type": "shutdown"}), FrameFault.TYPE, "'type'"),
        (frame(body={"type": "drained", "room": 1}), FrameFault.FIELD, "drained.generation"),
        (frame(body={"type": "drained", "room": -1, "generation": 1}), FrameFault.FIELD, "drained.room"),
        (
            frame(body=offer().model_dump() | {"tables": [{"space": "full", "ids": "", "first_page": -1}]}),
            FrameFault.FIELD,
            "offer.tables.0.first_page",
        ),
    ],
)
def test_what_is_wrong_is_named(data, fault, words):
    found, text = refused(data)
    assert found is fault
    assert words in text
    assert len(text) <= 200


def test_the_senders_text_is_not_repeated():
    secret = "hunter2-" * 4
    for body in (
        {"type": secret},
        {"type": "drained", "room": secret, "generation": secret},
        {"type": "offer", "room": 1, "generation": 1, "prompt_tokens": 1, "tables": [{"space": secret, "ids": b""}]},
    ):
        assert "hunter2" not in refused(frame(body=body))[1]


OLDER, LATER = Features(), Features(has=("digests", "traces"))


def test_agreed_is_what_both_have():
    assert agree(Features(has=("b", "digests")), LATER, us="p", them="d") == ("digests",)
    assert agree(LATER, OLDER, us="p", them="d") == ()


@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [
        (
            Features(has=("a",), requires=("a",)),
            OLDER,
            "us requires feature 'a', which them does not have: upgrade them",
        ),
        (OLDER, Features(requires=("z", "y")), "them requires features 'y', 'z', which us does not have: upgrade us"),
    ],
)
def test_a_required_feature_that_one_side_lacks_is_named_with_the_side_to_upgrade(ours, theirs, text):
    with pytest.raises(FeatureError) as caught:
        agree(ours, theirs, us="us", them="them")
    assert str(caught.value).startswith(text)
    assert (caught.value.http_status, errors_by_code()["feature_missing"]) == (409, FeatureError)


@pytest.mark.parametrize(("codec", "message"), [(codec, message) for codec in MESSAGES for message in MESSAGES[codec]])
def test_what_a_later_release_adds_to_a_message_is_ignored(codec, message):
    envelope = Envelope(ME, YOU, 7, 3, 1, body=message)
    frame = LaterCodec.of(codec).encode(envelope)
    assert b"of_a_later_release" in frame
    assert codec.decode(frame) == envelope


def test_what_a_later_release_adds_to_a_packed_rank_is_ignored():
    packed = pack_rank(DESCRIPTION)
    parts = msgpack.unpackb(packed)
    parts["groups"] = [group | {"form": group["form"] | {"later": 1}, "later": 2} for group in parts["groups"]]
    grown = msgpack.packb(parts | {"manifest": parts["manifest"] | {"later": "x"}, "later": {}})
    assert unpack_rank(grown) == unpack_rank(packed)
