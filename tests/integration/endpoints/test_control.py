"""The control sockets of running daemons, fed with what no correct peer sends, and with what another release sends.

Every test ends with the question of `serves_afterwards`: does the next good room cross byte for byte?
The codec, the sockets and the rules of offers have tests of their own; here the daemon as a whole must not mind.
"""

from typing import Any

import numpy as np
import pytest

from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.plan.operations import Amount
from kvbridge.core.wire import messages
from kvbridge.core.wire.codec import PEER, pack_rank, unpack_rank
from tests.helpers.cluster import eventually
from tests.helpers.later_release import LaterCodec
from tests.helpers.live_rooms import FULL_PAGES, LiveCluster, ends, http, metric, refuses, report, status
from tests.helpers.raw_peers import RawDecode, raw_prefill
from tests.integration.endpoints.rooms import RANK, TOKENS, admitted, welcomed


def table(space: IndexSpace, *ids: int, first_page: int = 0) -> messages.WireTable:
    return messages.WireTable(space=space, first_page=first_page, ids=np.array(ids, dtype="<i4").tobytes())


GOOD = {
    IndexSpace.FULL: table(IndexSpace.FULL, 1, 2, 3),
    IndexSpace.SWA: table(IndexSpace.SWA, 1, 2, first_page=1),
    IndexSpace.REQUEST: table(IndexSpace.REQUEST, 0),
    IndexSpace.HOST: table(IndexSpace.HOST, 1, 2, 3),
}
"""Pages of the real decode node that could hold a room of `TOKENS` tokens."""


def offer(room: int, **changed: Any) -> messages.Offer:
    return messages.Offer(
        **({"room": room, "generation": 1, "prompt_tokens": TOKENS, "tables": tuple(GOOD.values())} | changed)
    )


def test_an_offer_for_an_unknown_room_is_answered_in_the_end_and_its_replay_counts_once(live, met):
    frame = met.frame(offer(8))
    with refuses(live.prefill, "duplicate", 2):
        for _ in range(3):
            met.put(frame)
    met.sent += 1
    failed = met.take(messages.Failed, 8)
    assert (failed.generation, failed.code) == (1, "unknown_room")
    assert "timeouts.early_offer_s" in failed.message
    met.take(messages.Drained, 8)
    met.send(messages.Abort(room=9, generation=1, code="x", message="x"))
    met.take(messages.Drained, 9)
    assert not met.waiting, "the replay was answered a second time"


def test_an_offer_of_a_stranger_does_not_take_a_room(live: LiveCluster, raw: RawDecode) -> None:
    room = admitted(live)
    with refuses(live.prefill, "unmet"):
        raw.send(offer(room))
    assert raw.take(messages.Failed).code == "not_ready"
    raw.take(messages.Drained, room)
    assert report(live.prefill, room)["state"] == "admitted"
    http("DELETE", live.prefill, f"/v1/requests/{room}")


@pytest.mark.parametrize(("space", "ids"), [(IndexSpace.FULL, (1, 2, FULL_PAGES)), (IndexSpace.HOST, (1, 9_999, 3))])
def test_page_ids_out_of_bounds_fail_the_room_on_both_sides(live, met, space, ids):
    room = admitted(live)
    met.send(offer(room, tables=tuple((GOOD | {space: table(space, *ids)}).values())))
    live.write(room, TOKENS)
    failed = met.take(messages.Failed)
    assert failed.code == "page_out_of_bounds"
    assert str(max(ids)) in failed.message
    met.take(messages.Drained, room)
    assert str(max(ids)) in ends(live.prefill, room, "failed", "page_out_of_bounds")
    live.sender.abort(room, "told that it failed")


def test_a_second_offer_for_a_room_is_the_first_ones_business(live, met, real):
    room = admitted(live)
    met.send(offer(room))
    eventually("the offer taken", lambda: report(live.prefill, room)["state"] == "offered")
    met.send(offer(room, tables=()))
    with RawDecode(live.control) as other:
        other.send(other.introduction(real, instance="raw-2"))
        other.take(messages.Welcome)
        other.send(offer(room))
        assert other.take(messages.Failed).code == "conflict"
        other.take(messages.Drained, room)
        other.send(messages.Abort(room=room, generation=1, code="aborted", message="mine"))
        other.take(messages.Drained, room)
    assert report(live.prefill, room)["state"] == "offered"
    met.send(offer(room, generation=2))
    assert met.take(messages.Failed).code == "unknown_room"
    http("DELETE", live.prefill, f"/v1/requests/{room}")
    assert "cancelled by its client" in ends(live.prefill, room, "aborted", "aborted")


def overlapping(real: messages.NodeDescription) -> dict[str, Any]:
    rank = unpack_rank(real.ranks[0])
    first, second, *others = rank.manifest.regions
    moved = second.model_copy(update={"extent_addresses": first.extent_addresses})
    manifest = rank.manifest.model_copy(update={"regions": (first, moved, *others)})
    return {"ranks": (pack_rank(rank.model_copy(update={"manifest": manifest})),)}


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda _: {"geometry": preset("tiny-gqa")}, "fingerprint_mismatch", "components."),
        (overlapping, "invalid_input", "share"),
        (lambda _: {"ranks": (b"garbage",)}, "protocol", "packed rank message refused"),
        (lambda _: {"role": Role.PREFILL}, "invalid_input", "must come from a decode node"),
        (lambda _: {"incarnation": "somebody else"}, "invalid_input", "in its own name"),
    ],
)
def test_an_introduction_that_cannot_be_true_is_rejected(live, raw, real, change, code, text):
    raw.send(raw.introduction(real, **change(real)))
    rejected = raw.take(messages.Rejected)
    assert rejected.code == code, rejected
    assert text in rejected.message
    assert raw.incarnation not in {peer["incarnation"] for peer in status(live.prefill)["peers"]}


def done(room: int, **changed: Any) -> messages.Done:
    return messages.Done(**({"room": room, "generation": 1, "writer": RANK, "amounts": {}, "phases_s": {}} | changed))


def test_decode_does_not_believe_sums_that_are_short(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room = welcomed(live, peer)
        peer.send(done(room, amounts={"c4_kv": Amount(lane_rows=1, bytes=104, operations=1)}))
        assert "rank pp0.tp0 of prefill node raw/node-0 is done, but c4_kv: 1 of" in ends(
            live.decode, room, "failed", "integrity"
        )


def test_decode_ignores_strangers_and_garbage_and_fails_a_room_that_was_given_up(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room = welcomed(live, peer)
        stale = metric(live.decode, "kvbridge_room_messages_refused_total", code="stale_done")
        with refuses(live.decode, "malformed"):
            peer.put(b"\xc1garbage")
        with refuses(live.decode, "wrong_direction"):
            peer.send(offer(room))
        for message in (done(room, writer=Rank(pp=7, tp=0)), done(room, generation=2), done(4_711)):
            peer.send(message)
        peer.send(messages.Failed(room=room, generation=9, code="x", message="another attempt"))
        eventually(
            "a Done of nobody counted",
            lambda: metric(live.decode, "kvbridge_room_messages_refused_total", code="stale_done") >= stale + 2,
        )
        assert report(live.decode, room)["state"] == "offered"
        peer.send(messages.Drained(room=room, generation=1))
        assert "stopped without having sent everything" in ends(live.decode, room, "failed", "protocol")


def test_a_decode_node_of_a_later_release_that_lacks_a_feature_is_met(live, raw, real):
    raw.codec = LaterCodec.of(PEER)
    raw.send(raw.introduction(real))
    answer = raw.take(messages.Welcome)
    assert answer.features == messages.FEATURES
    raw.recipient = answer.incarnation
    raw.send(messages.Abort(room=4712, generation=1, code="aborted", message="mine"))
    raw.take(messages.Drained, 4712)
