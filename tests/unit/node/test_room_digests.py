"""Digests in the life of a room: asked for, reported, compared; on both sides, without memory."""

from __future__ import annotations

import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.session.sender import SenderState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import Abort, Digests, Done, Drained, Failed, Offer, to_wire
from kvbridge.core.wire.worker_messages import Digested, Send, Sent, Verified
from tests.helpers.rooms import (
    ADDRESS,
    DECODE,
    GEOMETRY,
    PAGE,
    PREFILL,
    R0,
    R1,
    ReceiverBench,
    SenderBench,
    full_amounts,
    pick,
)
from tests.helpers.simulated_nodes import digested

TOKENS = 2 * PAGE
KIND = GEOMETRY.components[0].kind
ABOUT = Drained(room=1, generation=1)
"""Any message about the room."""


def page_digests(value: int):
    return digested(ABOUT, R0, value).digests


# ------------------------------------------------------------------------------------------- decode


def offered(digest: DigestKind = DigestKind.CRC32C) -> ReceiverBench:
    bench = ReceiverBench(digest=digest)
    bench.nodes.know()
    bench.service.requests.admit(AdmissionRequest(room=1, prompt_tokens=TOKENS, prefill=(ADDRESS,)))
    return bench


def expect(bench: ReceiverBench, value: int, part: int = 0, peer: str = PREFILL, writer=R0) -> None:
    message = Digests(room=1, generation=1, writer=writer, part=part, digests=page_digests(value))
    bench.service.peers.hear(peer, message)


def done(bench: ReceiverBench, parts: int = 1) -> None:
    message = Done(
        room=1, generation=1, writer=R0, amounts=full_amounts(TOKENS), phases_s={"digest": 0.5}, digest_parts=parts
    )
    bench.service.peers.hear(PREFILL, message)


def arrived(value: int = 5) -> ReceiverBench:
    """A bench with a room of which everything has come, and whose writer says that a page has this digest."""
    bench = offered()
    expect(bench, value)
    done(bench)
    return bench


def find(bench: ReceiverBench, value: int) -> None:
    bench.service.workers.digested(digested(ABOUT, R0, value))


def verified(bench: ReceiverBench, **fields) -> None:
    fields = {"seconds": {"verify": 2.0}} | fields
    bench.service.workers.verified(Verified(room=1, generation=1, rank=R0, **fields))


def state(bench) -> object:
    return bench.service.book.get(1).state


@pytest.mark.parametrize(("sent", "found"), [(5, 4), (5, 0), (0, 5)])
def test_a_page_that_differs_fails_the_room_by_name_on_both_sides(sent, found):
    bench = arrived(sent)
    table = next(iter(bench.service.book.get(1).tables.values()))
    find(bench, found)
    verified(bench)
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "digest_mismatch")
    assert f"{KIND} of layer 0, logical page 0: page {table.ids[0]} of space 'full' in rank pp0.tp0" in report.reason
    assert f"the digest {found:08x}, the prefill node read {sent:08x}" in report.reason
    assert bench.events.mismatches == {KIND: 1}
    [told] = pick(bench.nodes.messages, Failed, PREFILL)
    assert not pick(bench.nodes.messages, Abort), "an Abort would be answered, when the room may be long forgotten"
    assert (told.code, told.message) == ("digest_mismatch", report.reason)
    assert bench.free == 16
    assert bench.engines.kinds == ["failed"]


@pytest.mark.parametrize("parts", [[1], [0, 0], [0, 2]])
def test_parts_that_are_missing_or_come_twice_fail_the_room(parts):
    bench = offered()
    for part in parts:
        expect(bench, 5, part=part)
    assert state(bench) is ReceiverState.FAILING
    assert "part" in bench.service.book.report(1).reason
    done(bench, parts=len(parts))
    assert bench.free == 16


def test_a_done_that_knows_of_more_parts_than_have_come_fails_the_room():
    bench = offered()
    expect(bench, 5)
    done(bench, parts=2)
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "protocol")
    assert "2 parts of digests, but 1" in report.reason
    assert bench.free == 16


def test_digests_of_what_the_room_does_not_have_fail_it():
    bench = offered()
    wrong = page_digests(5)[0].model_copy(update={"first_page": 2})
    bench.service.peers.hear(PREFILL, Digests(room=1, generation=1, writer=R0, part=0, digests=(wrong,)))
    assert bench.service.book.report(1).reason_code == "protocol"
    assert "pages [0, 2)" in bench.service.book.report(1).reason


def test_a_rank_that_cannot_look_fails_the_room():
    bench = arrived()
    verified(bench, error_code="unsupported", error="no kernel")
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "unsupported")
    assert "rank worker pp0.tp0 could not verify what has arrived: no kernel" in report.reason
    assert bench.free == 16


# ------------------------------------------------------------------------------------------- prefill


def sending(digest: DigestKind = DigestKind.CRC32C, ranks=(R0,)) -> SenderBench:
    bench = SenderBench(ranks=ranks)
    room = bench.service.requests.admit(AdmissionRequest(room=1, prompt_tokens=TOKENS)).room
    tables = bench.service.book.get(room).tables
    bench.service.peers.hear(
        DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=to_wire(tables), digest=digest)
    )
    bench.verbs.begin("engine", ranks, 1, prompt_tokens=TOKENS, tables={})
    for upto in (PAGE, TOKENS):
        bench.verbs.publish("engine", ranks, 1, upto_token=upto, layers=None)
    bench.verbs.finish("engine", ranks, 1, metadata=b"")
    return bench


def answer(bench: SenderBench, order: Send, rank=R0, value: int | None = None) -> None:
    if value is not None:
        bench.service.workers.hear(digested(order, rank, value, order=order.order))
    bench.service.workers.hear(Sent(room=1, generation=1, rank=rank, order=order.order, seconds={"digest": 0.25}))


def test_late_digests_and_those_of_unknown_orders_count_for_nothing():
    bench = sending()
    first, second = pick(bench.workers.messages, Send)
    answer(bench, first, value=3)
    bench.service.workers.hear(digested(first, R0, 9, order=first.order))
    bench.service.workers.hear(digested(first, R1, 9, order=second.order))
    bench.service.workers.hear(Digested(room=8, generation=1, rank=R0, order=1, digests=()))
    answer(bench, second, value=0)
    [digests] = pick(bench.peers.messages, Digests)
    assert int.from_bytes(digests.digests[0].values[:4], "little") == 3


def test_a_worker_that_reports_what_the_room_does_not_have_fails_it():
    bench = sending()
    order = pick(bench.workers.messages, Send)[0]
    wrong = page_digests(1)[0].model_copy(update={"first_page": 7})
    bench.service.workers.hear(Digested(room=1, generation=1, rank=R0, order=order.order, digests=(wrong,)))
    assert state(bench) is SenderState.FAILING
    assert "rank pp0.tp0" in bench.service.book.report(1).reason


def test_a_completed_room_keeps_why_its_bytes_were_refused():
    bench = sending()
    for order in pick(bench.workers.messages, Send):
        answer(bench, order, value=1)
    assert state(bench) is SenderState.COMPLETED
    bench.service.peers.hear("eeee000000000001", Failed(room=1, generation=1, code="digest_mismatch", message="no"))
    assert bench.service.book.report(1).reason_code == ""
    before = len(bench.peers.messages)
    bench.service.peers.hear(DECODE, Failed(room=1, generation=1, code="digest_mismatch", message="c4_kv of layer 2"))
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.COMPLETED, "digest_mismatch")
    assert report.reason == "by the decode side: c4_kv of layer 2"
    assert len(bench.peers.messages) == before, "nothing follows"
