"""Two releases: what they agree on, and what a later one may add to its messages."""

from __future__ import annotations

import msgpack
import pytest

from kvbridge.core.errors import FeatureError, errors_by_code
from kvbridge.core.wire.codec import Envelope, pack_rank, unpack_rank
from kvbridge.core.wire.messages import Features, agree
from tests.fuzz.decoders import DESCRIPTION, ME, MESSAGES, YOU
from tests.helpers.later_release import LaterCodec

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
