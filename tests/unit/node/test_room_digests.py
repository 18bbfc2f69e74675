"""Digests in the life of a room: asked for, reported, compared; on both sides, without memory."""

import pytest

from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.session.prefill import PrefillState
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Abort, Digests, Drained, Failed
from kvbridge.core.wire.worker_messages import Digested, Send, Verified
from tests.helpers.node_bench import DecodeBench, PrefillBench, offered
from tests.helpers.rooms import GEOMETRY, PAGE, PREFILL, R0
from tests.helpers.simulated_nodes import digested

KIND = GEOMETRY.components[0].kind
CRC = DigestKind.CRC32C
ABOUT = Drained(room=1, generation=1)
"""Any message about the room."""


def page_digests(value: int = 5, **changed):
    [one] = digested(ABOUT, R0, value).digests
    return (one.model_copy(update=changed),)


def expect(bench: DecodeBench, digests=None, part: int = 0) -> None:
    bench.hear(Digests(room=1, generation=1, writer=R0, part=part, digests=digests or page_digests()))


def arrived(value: int = 5) -> DecodeBench:
    """Everything has come, and the writer says that a page has this digest."""
    bench = offered(digest=CRC)
    expect(bench, page_digests(value))
    bench.done(digest_parts=1)
    return bench


def verified(bench: DecodeBench, **fields) -> None:
    bench.service.hear_rank(Verified(room=1, generation=1, rank=R0, **fields))


@pytest.mark.parametrize(("sent", "found"), [(5, 4), (5, 0), (0, 5)])
def test_a_page_that_differs_fails_the_room_by_name_on_both_sides(sent, found):
    bench = arrived(sent)
    table = next(iter(bench.room().tables.values()))
    bench.service.hear_rank(digested(ABOUT, R0, found))
    verified(bench)
    report = bench.report()
    assert (report.state, report.reason_code) == (RoomState.FAILED, "digest_mismatch")
    assert f"{KIND} of layer 0, logical page 0: page {table.ids[0]} of space 'full' in rank pp0.tp0" in report.reason
    assert f"the digest {found:08x}, the prefill node read {sent:08x}" in report.reason
    assert bench.events.mismatches == {KIND: 1}
    [told] = bench.told(Failed, PREFILL)
    assert not bench.told(Abort), "an Abort would be answered, when the room may be long forgotten"
    assert (told.code, told.message) == ("digest_mismatch", report.reason)
    assert (bench.free, bench.engines.kinds) == (16, ["failed"])


@pytest.mark.parametrize("parts", [[1], [0, 0], [0, 2]])
def test_parts_that_are_missing_or_come_twice_fail_the_room(parts):
    bench = offered(digest=CRC)
    for part in parts:
        expect(bench, part=part)
    assert bench.state() is DecodeState.FAILING
    assert "part" in bench.report().reason
    bench.done(digest_parts=len(parts))
    assert bench.free == 16


def test_digests_of_what_the_room_does_not_have_fail_it():
    bench = offered(digest=CRC)
    expect(bench, page_digests(first_page=2))
    assert bench.report().reason_code == "protocol"
    assert "pages [0, 2)" in bench.report().reason


def sending() -> PrefillBench:
    """All of a room is published, in two orders, and decode wants digests."""
    bench = PrefillBench()
    bench.admit()
    bench.offer(digest=CRC)
    bench.verbs.begin()
    bench.verbs.publish(upto_token=PAGE)
    bench.verbs.publish()
    bench.verbs.finish()
    return bench


def answer(bench: PrefillBench, order: Send, value: int) -> None:
    bench.service.hear_rank(digested(order, R0, value, order=order.order))
    bench.sent(order)


def test_a_worker_that_reports_what_the_room_does_not_have_fails_it():
    bench = sending()
    wrong = {"rank": R0, "order": bench.orders()[0].order, "digests": page_digests(first_page=7)}
    bench.service.hear_rank(Digested(room=1, generation=1, **wrong))
    assert bench.state() is PrefillState.FAILING
    assert "rank pp0.tp0" in bench.report().reason


def test_a_completed_room_keeps_why_its_bytes_were_refused():
    bench = sending()
    for order in bench.orders():
        answer(bench, order, 1)
    assert bench.state() is PrefillState.COMPLETED
    bench.hear(Failed(room=1, generation=1, code="digest_mismatch", message="no"), "eeee000000000001")
    assert bench.report().reason_code == ""
    before = len(bench.peers.messages)
    bench.hear(Failed(room=1, generation=1, code="digest_mismatch", message="c4_kv of layer 2"))
    report = bench.report()
    assert (report.state, report.reason_code) == (RoomState.COMPLETED, "digest_mismatch")
    assert report.reason == "by the decode side: c4_kv of layer 2"
    assert len(bench.peers.messages) == before, "nothing follows"
