"""Frames: what comes back is what was sent, and what is refused says why."""

import msgpack
import numpy as np
import pytest

from kvbridge.core.ids import MAX_ROOM, IndexSpace, PageTable
from kvbridge.core.wire.codec import PEER, FrameError, FrameFault
from kvbridge.core.wire.messages import PROTOCOL_VERSION, Offer, to_wire


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
