"""The control sockets of running daemons, fed with what no correct peer sends.

Every test ends with the same question: is everybody ready, is every page free, and does the next good room cross byte for byte?
The codec and the sockets have their own tests; here it is the daemon as a whole that must not mind.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.plan.operations import Amount
from kvbridge.core.wire.codec import MAX_FRAME_BYTES, PEER
from kvbridge.core.wire.messages import (
    Abort,
    Done,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    NodeDescription,
    Offer,
    Rejected,
    TransportEndpoint,
    Welcome,
    WireTable,
)
from kvbridge.core.wire.packed_ranks import pack_rank, unpack_rank
from tests.helpers.cluster import DaemonProcess, daemon_config, eventually
from tests.helpers.live_rooms import (
    LiveCluster,
    all_free,
    ends,
    http,
    metric,
    refuses,
    report,
    status,
)
from tests.helpers.raw_peers import RawDecode, RawPrefill, raw_prefill
from tests.helpers.shared_cluster import FULL_PAGES, REQUEST_PAGES, WINDOW_PAGES

TOKENS = 600
RANK = Rank(pp=0, tp=0)


@pytest.fixture(scope="module")
def real(endpoints: LiveCluster) -> NodeDescription:
    """The decode node as it introduces itself."""
    with raw_prefill() as peer:
        room = offered_to(endpoints, peer)
        node = peer.take(Hello).node
        assert http("DELETE", endpoints.decode, f"/v1/requests/{room}").status_code == 200
    return node


@pytest.fixture
def raw(live: LiveCluster) -> Iterator[RawDecode]:
    """A fake decode node that has connected and said nothing."""
    with RawDecode(live.control) as peer:
        yield peer


@pytest.fixture
def met(raw: RawDecode, real: NodeDescription) -> RawDecode:
    """A fake decode node that was welcomed."""
    raw.send(raw.introduction(real))
    raw.recipient = raw.take(Welcome).incarnation
    return raw


def offered_to(live: LiveCluster, *peers: RawPrefill, tokens: int = TOKENS) -> int:
    """Admit a room on decode that these fake prefill nodes are to write."""
    body = {"prompt_tokens": tokens, "prefill": [{"endpoint": peer.endpoint} for peer in peers]}
    answer = http("POST", live.decode, "/v1/requests", json=body)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def admitted(live: LiveCluster, tokens: int = TOKENS) -> int:
    """Admit a room on prefill only."""
    answer = http("POST", live.prefill, "/v1/requests", json={"prompt_tokens": tokens})
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def table(space: IndexSpace, *ids: int, first_page: int = 0) -> WireTable:
    return WireTable(space=space, first_page=first_page, ids=np.array(ids, dtype="<i4").tobytes())


GOOD = {
    IndexSpace.FULL: table(IndexSpace.FULL, 1, 2, 3),
    IndexSpace.SWA: table(IndexSpace.SWA, 1, 2, first_page=1),
    IndexSpace.REQUEST: table(IndexSpace.REQUEST, 0),
    IndexSpace.HOST: table(IndexSpace.HOST, 1, 2, 3),
}
"""Pages of the real decode node that could hold a room of `TOKENS` tokens."""


def offer(room: int, **changed: Any) -> Offer:
    return Offer(**({"room": room, "generation": 1, "prompt_tokens": TOKENS, "tables": tuple(GOOD.values())} | changed))


# ------------------------------------------------------------------------------------------- frames


def test_frames_that_are_none(live: LiveCluster, raw: RawDecode) -> None:
    good = raw.frame(Drained(room=1, generation=1))
    envelope = [1, raw.incarnation, "", 1, 1, 1, [0, []]]
    for frame, reason in (
        (b"", "malformed"),
        (b"\xc1garbage", "malformed"),
        (good[:-5], "malformed"),
        (bytes(MAX_FRAME_BYTES + 1), "oversized"),
        (b"\x98\x07" + good[2:], "version"),
        (msgpack.packb([*envelope, {"type": "let_me_in"}]), "type"),
        (msgpack.packb([*envelope, {"type": "drained", "room": -1, "generation": 1}]), "field"),
        (msgpack.packb([1, "", "", 1, 1, 1, [0, []], None]), "envelope"),
        (raw.frame(None, recipient="f" * 16), "stale"),
    ):
        with refuses(live.prefill, reason):
            raw.put(frame)
    live.serves()


def test_a_frame_far_too_large_costs_its_sender_the_connection(live: LiveCluster, raw: RawDecode) -> None:
    monitor = raw.socket.get_monitor_socket(zmq.Event.DISCONNECTED)
    try:
        raw.put(bytes(3 * MAX_FRAME_BYTES))
        assert monitor.poll(15_000)
    finally:
        raw.socket.disable_monitor()
        monitor.close(0)
    live.serves()


def test_messages_of_the_other_direction(live: LiveCluster, met: RawDecode) -> None:
    wrong = (
        Welcome(instance="x", node="x", incarnation="x", pp_size=1, tp_size=1, ranks=()),
        Rejected(code="x", message="x"),
        Done(room=1, generation=1, writer=RANK, amounts={}, phases_s={}),
        Drained(room=1, generation=1),
    )
    with refuses(live.prefill, "wrong_direction", len(wrong)):
        for message in wrong:
            met.send(message)
    met.send(Failed(room=1, generation=1, code="x", message="of a room that nobody knows"))
    live.serves()


def test_a_peer_that_acknowledges_nothing_is_given_up_and_told_so(live: LiveCluster, met: RawDecode) -> None:
    before = metric(live.prefill, "kvbridge_control_undelivered_total")
    met.send(Abort(room=9, generation=1, code="x", message="x"))
    eventually("undelivered", lambda: metric(live.prefill, "kvbridge_control_undelivered_total") > before)
    eventually("forgotten", lambda: met.incarnation not in str(status(live.prefill)["peers"]))
    with refuses(live.prefill, "stale"):
        met.put(met.frame(Heartbeat(), sequence=0))
    told = 0
    while told >= 0 and met.socket.poll(15_000):  # what was sent before it may still be on its way
        told = PEER.decode(met.socket.recv()).link
    assert told == -met.link, "told that its link is over, a correct node introduces itself again"
    live.serves()


# ------------------------------------------------------------------------------------------- offers


def test_an_offer_for_an_unknown_room_is_answered_in_the_end(live: LiveCluster, met: RawDecode) -> None:
    met.send(offer(7))
    failed = met.take(Failed)
    assert (failed.room, failed.generation, failed.code) == (7, 1, "unknown_room")
    assert "timeouts.early_offer_s" in failed.message
    met.take(Drained, 7)
    live.serves()


def test_a_replayed_offer_counts_once(live: LiveCluster, met: RawDecode) -> None:
    frame = met.frame(offer(8))
    with refuses(live.prefill, "duplicate", 2):
        for _ in range(3):
            met.put(frame)
    met.sent += 1
    met.take(Failed, 8)
    met.take(Drained, 8)
    met.send(Abort(room=9, generation=1, code="x", message="x"))
    met.take(Drained, 9)
    assert not met.waiting, "the replay was answered a second time"
    live.serves()


def test_an_offer_of_a_stranger_does_not_take_a_room(live: LiveCluster, raw: RawDecode) -> None:
    room = admitted(live)
    with refuses(live.prefill, "unmet"):
        raw.send(offer(room))
    assert raw.take(Failed).code == "not_ready"
    raw.take(Drained, room)
    assert report(live.prefill, room)["state"] == "admitted"
    http("DELETE", live.prefill, f"/v1/requests/{room}")
    live.serves()


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"prompt_tokens": TOKENS + 1}, f"decode offers {TOKENS + 1} prompt tokens, prefill admitted {TOKENS}"),
        ({"prefix_tokens": 100}, "prefix of 100 tokens, which must be a multiple of 256"),
        ({"prefix_tokens": 1024}, "at most 600"),
        ({"tables": (WireTable(space=IndexSpace.FULL, ids=b"abc"),)}, "page tables are malformed"),
        ({"tables": (table(IndexSpace.FULL, 0, -1),)}, "page id -1 of space 'full' is negative"),
        ({"tables": (GOOD[IndexSpace.FULL], GOOD[IndexSpace.FULL])}, "name a space twice"),
    ],
)
def test_an_offer_that_cannot_be_right_fails_the_room_on_both_sides(
    live: LiveCluster, met: RawDecode, changed: dict[str, Any], text: str
) -> None:
    room = admitted(live)
    refused = metric(live.prefill, "kvbridge_room_messages_refused_total", code="invalid_input")
    met.send(offer(room, **changed))
    failed = met.take(Failed)
    assert failed.code == "invalid_input"
    assert text in failed.message
    met.take(Drained, room)
    assert text in ends(live.prefill, room, "failed", "invalid_input")
    assert metric(live.prefill, "kvbridge_room_messages_refused_total", code="invalid_input") == refused + 1
    live.serves()


@pytest.mark.parametrize(
    ("space", "ids"),
    [
        (IndexSpace.FULL, (1, 2, FULL_PAGES)),
        (IndexSpace.HOST, (1, 9_999, 3)),
        (IndexSpace.SWA, (1, WINDOW_PAGES)),
        (IndexSpace.REQUEST, (REQUEST_PAGES,)),
    ],
)
def test_page_ids_out_of_bounds_fail_the_room_on_both_sides(
    live: LiveCluster, met: RawDecode, space: IndexSpace, ids: tuple[int, ...]
) -> None:
    room = admitted(live)
    tables = GOOD | {space: table(space, *ids, first_page=GOOD[space].first_page)}
    met.send(offer(room, tables=tuple(tables.values())))
    live.write(room, TOKENS)
    failed = met.take(Failed)
    assert failed.code == "page_out_of_bounds"
    assert str(max(ids)) in failed.message
    met.take(Drained, room)
    assert str(max(ids)) in ends(live.prefill, room, "failed", "page_out_of_bounds")
    live.sender.abort(room, "told that it failed")
    live.serves()


@pytest.mark.parametrize("missing", [IndexSpace.FULL, IndexSpace.HOST, IndexSpace.SWA, IndexSpace.REQUEST])
def test_tables_that_are_missing_or_too_short_fail_the_room_on_both_sides(
    live: LiveCluster, met: RawDecode, missing: IndexSpace
) -> None:
    for tables in (
        {space: wire for space, wire in GOOD.items() if space is not missing},
        GOOD | {missing: table(missing)},
    ):
        room = admitted(live)
        met.send(offer(room, tables=tuple(tables.values())))
        live.write(room, TOKENS)
        failed = met.take(Failed)
        assert missing.value in failed.message
        met.take(Drained, room)
        assert ends(live.prefill, room, "failed", failed.code) == failed.message
        live.sender.abort(room, "told that it failed")
    live.serves()


def test_a_second_offer_for_a_room_is_the_first_ones_business(
    live: LiveCluster, met: RawDecode, real: NodeDescription
) -> None:
    room = admitted(live)
    met.send(offer(room))
    eventually("the offer taken", lambda: report(live.prefill, room)["state"] == "offered")
    met.send(offer(room, tables=()))
    with RawDecode(live.control) as other:
        other.send(other.introduction(real, instance="raw-2"))
        other.take(Welcome)
        other.send(offer(room))
        assert other.take(Failed).code == "conflict"
        other.take(Drained, room)
        other.send(Abort(room=room, generation=1, code="aborted", message="mine"))
        other.take(Drained, room)
    assert report(live.prefill, room)["state"] == "offered"
    met.send(offer(room, generation=2))
    assert met.take(Failed).code == "unknown_room"
    http("DELETE", live.prefill, f"/v1/requests/{room}")
    assert "cancelled by its client" in ends(live.prefill, room, "aborted", "aborted")
    live.serves()


# ------------------------------------------------------------------------------------------- introductions


def lie(real: NodeDescription, **changed: Any) -> dict[str, Any]:
    """The description's first rank with something else in its first region."""
    first, *others = unpack_rank(real.ranks[0]).manifest.regions
    return manifest_with(real, regions=(Region(**(dict(first) | changed)), *others))


def manifest_with(real: NodeDescription, **changed: Any) -> dict[str, Any]:
    rank = unpack_rank(real.ranks[0])
    return {"ranks": (pack_rank(rank.model_copy(update={"manifest": rank.manifest.model_copy(update=changed)})),)}


def overlapping(real: NodeDescription) -> dict[str, Any]:
    first, second, *others = unpack_rank(real.ranks[0]).manifest.regions
    moved = second.model_copy(update={"extent_addresses": first.extent_addresses})
    return manifest_with(real, regions=(first, moved, *others))


def interleaved(real: NodeDescription) -> dict[str, Any]:
    """Two regions of endless pages that never touch, and whose strides differ: a look at each page would take years."""
    first, second, *others = unpack_rank(real.ranks[0]).manifest.regions
    pages = {"page_count": 2**30, "pages_per_extent": 2**30, "extent_addresses": first.extent_addresses}
    wide = [
        region.model_copy(update=pages | {"page_stride_bytes": stride * region.page_bytes})
        for region, stride in ((first, 4), (second, 8))
    ]
    return manifest_with(real, regions=(*wide, *others))


def other_bytes(real: NodeDescription) -> dict[str, Any]:
    return manifest_with(real, fingerprint="0" * 32)


def no_way(real: NodeDescription) -> dict[str, Any]:
    endpoints = (TransportEndpoint(transport="local", data=b"?"),)
    return {"ranks": (pack_rank(unpack_rank(real.ranks[0]).model_copy(update={"endpoints": endpoints})),)}


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (lambda _: {"geometry": preset("tiny-gqa")}, "fingerprint_mismatch", "components."),
        (other_bytes, "fingerprint_mismatch", "0" * 32),
        (overlapping, "invalid_input", "share"),
        (interleaved, "invalid_input", "reach into each other"),
        (lambda _: {"ranks": (b"garbage",)}, "protocol", "packed rank message refused"),
        (lambda real: lie(real, page_bytes=64), "invalid_input", "pages of 64 bytes"),
        (lambda real: lie(real, layer=99), "invalid_input", "in this layer"),
        (lambda real: lie(real, lane_stop=3), "invalid_input", "lanes [0, 3)"),
        (lambda real: lie(real, extent_addresses=(2**64 - 1,)), "invalid_input", "2**64"),
        (lambda _: {"role": Role.PREFILL}, "invalid_input", "must come from a decode node"),
        (lambda _: {"incarnation": "somebody else"}, "invalid_input", "in its own name"),
        (no_way, "transport_failed", "no transport"),
    ],
)
def test_an_introduction_that_cannot_be_true_is_rejected(
    live: LiveCluster, raw: RawDecode, real: NodeDescription, change: Any, code: str, text: str
) -> None:
    raw.send(raw.introduction(real, **change(real)))
    rejected = raw.take(Rejected)
    assert rejected.code == code, rejected
    assert text in rejected.message
    assert raw.incarnation not in {peer["incarnation"] for peer in status(live.prefill)["peers"]}
    live.serves()


def test_a_decode_daemon_of_another_model_is_kept_apart(live: LiveCluster) -> None:
    """At the first meeting, where the room fails with the first difference, and before it, in bootstrap."""
    folder = live.cluster.folder / "x"
    other = DaemonProcess("decode", "a decode daemon of another model", folder)
    other.config = daemon_config(
        {"preset": "tiny-gqa"},
        instance="decode-other",
        runtime_dir=other.runtime_dir,
        transport="local",
        pools={"device": {"full": 8}, "host": {"components": []}},
        bootstrap={"url": live.cluster.bootstrap.url, "heartbeat_interval_s": 0.5},
    )
    other.start()
    try:
        other.wait_ready()
        body = {"prompt_tokens": TOKENS, "prefill": [{"endpoint": live.control}]}
        answer = http("POST", other, "/v1/requests", json=body)
        reason = ends(other, int(answer.json()["room"]), "failed", "fingerprint_mismatch")
        assert "hold different models: components." in reason
        all_free(other)

        fingerprint = status(other)["model"]["fingerprint"]
        eventually("registered", lambda: "decode-other" in http("GET", live.cluster.bootstrap, "/v1/instances").text)
        refused = http(
            "POST",
            live.cluster.bootstrap,
            "/v1/requests",
            json={"prompt_tokens": TOKENS, "fingerprint": fingerprint},
        )
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        assert "no prefill instance" in refused.json()["detail"]
        for _ in range(3):
            live.serves()  # bootstrap pairs with the right one only
    finally:
        assert other.stop() == 0


# ------------------------------------------------------------------------------------------- the decode side


def test_addresses_where_nobody_answers_cost_nothing_for_long(live: LiveCluster) -> None:
    assert live.decode.process is not None
    descriptors = Path(f"/proc/{live.decode.process.pid}/fd")
    live.serves()
    before = len(list(descriptors.iterdir()))
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        silent = {f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in listeners}
        codes = dict.fromkeys(silent, "deadline") | {f"tcp://127.0.0.1:{port}": "peer_failed" for port in range(1, 5)}

        def known() -> set[str]:
            return codes.keys() & {peer["endpoint"] for peer in status(live.decode)["peers"]}

        seen: set[str] = set()
        rooms = {}
        for endpoint in codes:
            body = {"prompt_tokens": 1, "prefill": [{"endpoint": endpoint}]}
            answer = http("POST", live.decode, "/v1/requests", json=body)
            assert answer.status_code == 201, answer.text
            rooms[endpoint] = int(answer.json()["room"])
            seen |= known()  # the first may be given up before the last is there
        assert seen >= silent
        for endpoint, room in rooms.items():
            ends(live.decode, room, "failed", codes[endpoint])
        live.serves()
        eventually("given up", lambda: not known())
        eventually("closed", lambda: len(list(descriptors.iterdir())) <= before)
        live.serves()


def welcomed(live: LiveCluster, peer: RawPrefill) -> tuple[int, Offer]:
    """A room on decode that a fake prefill node was offered."""
    room = offered_to(live, peer)
    peer.take(Hello)
    peer.send(Welcome(instance="raw", node="node-0", incarnation=peer.incarnation, pp_size=1, tp_size=1, ranks=(RANK,)))
    return room, peer.take(Offer)


def done(room: int, **changed: Any) -> Done:
    return Done(**({"room": room, "generation": 1, "writer": RANK, "amounts": {}, "phases_s": {}} | changed))


def test_decode_does_not_believe_sums_that_are_short(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room, _ = welcomed(live, peer)
        amounts = {"c4_kv": Amount(lane_rows=1, bytes=104, operations=1)}
        peer.send(done(room, amounts=amounts))
        assert "rank pp0.tp0 of prefill node raw/node-0 is done, but c4_kv: 1 of" in ends(
            live.decode, room, "failed", "integrity"
        )
    live.serves()


def test_decode_ignores_strangers_and_garbage_and_fails_a_room_that_was_given_up(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room, _ = welcomed(live, peer)
        with refuses(live.decode, "malformed"):
            peer.put(b"\xc1garbage")
        with refuses(live.decode, "wrong_direction"):
            peer.send(offer(room))
        peer.send(done(room, writer=Rank(pp=7, tp=0)))
        peer.send(done(room, generation=2))
        peer.send(done(4_711))
        peer.send(Drained(room=4_711, generation=1))
        peer.send(Failed(room=room, generation=9, code="x", message="another attempt"))
        eventually(
            "a Done of nobody counted",
            lambda: metric(live.decode, "kvbridge_room_messages_refused_total", code="stale_done") >= 2,
        )
        assert report(live.decode, room)["state"] == "offered"
        peer.send(Drained(room=room, generation=1))
        assert "stopped without having sent everything" in ends(live.decode, room, "failed", "protocol")
    live.serves()


def test_decode_gives_a_silent_prefill_node_its_time_and_no_more(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room = offered_to(live, peer)
        peer.take(Hello)
        assert "timeouts.handshake_s" in ends(live.decode, room, "failed", "deadline")
    live.serves()


def test_decode_passes_a_rejection_on(live: LiveCluster) -> None:
    with raw_prefill() as peer:
        room = offered_to(live, peer)
        peer.take(Hello)
        peer.send(Rejected(code="fingerprint_mismatch", message="rows of 7 bytes here"))
        assert "rows of 7 bytes here" in ends(live.decode, room, "failed", "fingerprint_mismatch")
    live.serves()


def test_prefill_nodes_of_two_instances_cannot_share_a_room(live: LiveCluster) -> None:
    with raw_prefill() as one, raw_prefill() as other:
        room = offered_to(live, one, other)
        for peer in (one, other):
            peer.take(Hello)
            peer.send(
                Welcome(
                    instance="raw",
                    node=peer.incarnation,
                    incarnation=peer.incarnation,
                    pp_size=1,
                    tp_size=1,
                    ranks=(RANK,),
                )
            )
        assert "both hold rank pp0.tp0" in ends(live.decode, room, "failed", "invalid_input")
    live.serves()
