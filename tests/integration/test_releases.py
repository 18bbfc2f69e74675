"""Daemons and peers of another release: one feature less, and one unknown field more in every message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvbridge.core.wire.codec import PEER
from kvbridge.core.wire.features import PEER_FEATURES, Features
from kvbridge.core.wire.messages import Abort, Drained, Failed, Hello, NodeDescription, Offer, Rejected, Welcome
from tests.helpers.later_release import LaterCodec
from tests.helpers.live_rooms import LiveCluster, ends, http, live_cluster
from tests.helpers.raw_peers import RawDecode, RawPrefill
from tests.integration.test_endpoints_control import offered_to


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    """A decode daemon that wants digests of the prefill nodes that write to it."""
    with live_cluster(decode={"integrity": {"digest": "crc32c"}}) as running:
        yield running


@pytest.fixture(scope="module")
def real(live: LiveCluster) -> NodeDescription:
    """The decode node as it introduces itself."""
    with RawPrefill() as peer:
        room = offered_to(live, peer)
        node = peer.take(Hello).node
        assert http("DELETE", live.decode, f"/v1/requests/{room}").status_code == 200
    return node


@pytest.fixture
def writer() -> Iterator[RawPrefill]:
    """A fake prefill node of another release."""
    with RawPrefill() as peer:
        peer.codec = LaterCodec.of(PEER)
        yield peer


def welcome(writer: RawPrefill, features: Features) -> Welcome:
    facts = {"instance": "raw", "node": "n", "incarnation": writer.incarnation, "pp_size": 1, "tp_size": 1}
    return Welcome(**facts, ranks=({"pp": 0, "tp": 0},), features=features)


def test_a_room_of_this_release_crosses(live: LiveCluster) -> None:
    live.serves()


def test_a_later_decode_node_that_lacks_a_feature_is_met(live: LiveCluster, real: NodeDescription) -> None:
    with RawDecode(live.control) as reader:
        reader.codec = LaterCodec.of(PEER)
        reader.send(reader.introduction(real))
        answer = reader.take(Welcome)
        assert answer.features == PEER_FEATURES
        reader.recipient = answer.incarnation
        reader.send(Offer(room=4711, generation=1, prompt_tokens=64, tables=()))
        assert reader.take(Failed).code == "unknown_room"
        reader.take(Drained, 4711)
        reader.send(Abort(room=4712, generation=1, code="aborted", message="mine"))
        reader.take(Drained, 4712)


def test_a_decode_node_that_requires_what_this_prefill_node_lacks_is_rejected_by_name(
    live: LiveCluster, real: NodeDescription
) -> None:
    with RawDecode(live.control) as reader:
        hello = reader.introduction(real)
        reader.send(hello.model_copy(update={"features": Features(requires=("later",))}))
        rejected = reader.take(Rejected)
    assert rejected.code == "feature_missing"
    assert "requires feature 'later'" in rejected.message
    assert "upgrade prefill instance" in rejected.message


def test_a_later_prefill_node_is_offered_the_room(live: LiveCluster, writer: RawPrefill) -> None:
    room = offered_to(live, writer)
    writer.take(Hello)
    writer.send(welcome(writer, Features(has=("later",))))
    assert writer.take(Offer, room).digest == "crc32c"
    writer.send(Failed(room=room, generation=1, code="aborted", message="enough"))
    writer.send(Drained(room=room, generation=1))
    assert "enough" in ends(live.decode, room, "failed", "aborted")
    assert http("GET", live.decode, "/ready").status_code == 200
