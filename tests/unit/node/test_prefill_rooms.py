"""Rooms of a prefill node: who may write and read their pages, what rank workers are told, and when pages are free."""

import pytest

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import CapacityError, ConflictError, InvalidInputError, NotReadyError, UnknownRoomError
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.prefill import PrefillState
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Done, Drained, Failed, Intend, Offer, PathLost, StreamPoint, WireTable, to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, OpenRoom, Rerouted
from kvbridge.node.prefill import early_offers as offers, rooms as prefill_rooms
from kvbridge.node.prefill.early_offers import EarlyOffers, check_offer
from kvbridge.pool.accounts.book import Owner, PageState
from kvbridge.telemetry.facts import OrderBegan, OrderEnded, PhasesEnded, RoomRerouted
from kvbridge.telemetry.metrics import PHASES
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.node_bench import PrefillBench
from tests.helpers.rooms import DECODE, GEOMETRY, PAGE, R0, R1, TOKENS, full_amounts, pages_table, pick

STRANGER = "eeee000000000001"


def sending() -> PrefillBench:
    """Room 1 is offered and begun, and half of it is published."""
    bench = PrefillBench()
    bench.admit()
    bench.offer()
    bench.verbs.begin()
    bench.verbs.publish(upto_token=PAGE)
    return bench


def test_a_room_is_sent_while_it_is_computed():
    bench = PrefillBench()
    assert bench.admit().state is RoomState.ADMITTED
    room = bench.verbs.begin()
    bench.verbs.publish(upto_token=PAGE)
    assert not bench.workers.messages
    bench.clock.advance(2)
    bench.offer()
    [opening] = pick(bench.workers.messages, OpenRoom)
    assert (opening.peer, opening.source) == (DECODE, room.tables)
    assert bench.book.state(Owner(1, 1)) is PageState.LEASED
    bench.verbs.publish()
    bench.verbs.finish()
    first, second = bench.orders()
    assert (first.section.start_token, first.section.stop_token) == (0, PAGE)
    assert (second.section.start_token, second.section.stop_token) == (PAGE, TOKENS)
    bench.clock.advance(3)
    bench.sent(first, amounts={})
    assert not bench.peers.messages
    bench.clock.advance(1)
    bench.sent(second)
    [done] = bench.told(Done, DECODE)
    assert (done.amounts, done.metadata, done.phases_s["move"]) == (full_amounts(TOKENS), b"meta", 2.0)
    assert (done.transport, done.under_way_ago_s) == ("local", ((4.0, 0.0),))
    assert [message.all_sent for message in pick(bench.workers.messages, CloseRoom)] == [True]
    assert (bench.engines.kinds, bench.free) == (["completed"], 16)
    assert bench.report().phases_s["admit_to_offer_received"] == 2.0
    assert bench.events.states == [RoomState.ADMITTED, RoomState.TRANSFERRING, RoomState.COMPLETED]
    [ended] = bench.events.of(PhasesEnded)
    assert ended.phases_s["offer_to_sent"] == 4.0
    assert set(ended.phases_s) <= set(PHASES[Role.PREFILL])


def test_admission_is_refused_with_the_reason_and_keeps_nothing():
    bench = PrefillBench(pages=3)
    bench.workers.lacking = "rank worker pp0.tp0 is starting"
    with pytest.raises(NotReadyError, match="is starting"):
        bench.admit()
    bench.workers.lacking = ""
    bench.admit()
    with pytest.raises(ConflictError, match="in flight"):
        bench.admit(generation=2)
    with pytest.raises(CapacityError):
        bench.admit(2)
    with pytest.raises(InvalidInputError, match="is for the decode daemon"):
        bench.admit(3, 1, prefill=(PeerAddress(endpoint="tcp://x:1"),))
    with pytest.raises(UnknownRoomError):
        bench.report(3)
    assert bench.free == 1


def test_a_second_offerer_is_turned_away():
    bench = PrefillBench()
    bench.offer()
    bench.offer()
    bench.offer(peer=STRANGER)
    assert len(bench.told(Drained, STRANGER)) == 1
    bench.admit()
    bench.offer(peer="ffff000000000001")
    assert bench.told(Failed, "ffff000000000001")[0].code == "conflict"
    assert (bench.state(), bench.room().peer) == (PrefillState.SENDING, DECODE)


@pytest.mark.parametrize(("kind", "fields"), [(Intend, {}), (Offer, {"tables": ()})])
def test_whoever_comes_for_a_prompt_of_another_length_fails_the_room_on_both_sides(kind, fields):
    """An offer has its proof that nothing was written for it; behind a refused intent an offer may still be on its way."""
    bench = PrefillBench()
    bench.admit()
    bench.hear(kind(room=1, generation=1, prompt_tokens=TOKENS + 1, **fields))
    assert (bench.state(), bench.report().reason_code) == (PrefillState.FAILED, "invalid_input")
    assert [type(message) for _, message in bench.peers.messages] == [Failed, Drained][: 1 + (kind is Offer)]
    assert bench.free == 16


def test_a_call_that_does_not_fit_is_refused():
    bench = PrefillBench(ranks=(R0, R1))
    bench.admit()
    verbs = bench.verbs
    with pytest.raises(InvalidInputError, match="takes no page tables, and no computed_tokens"):
        verbs.begin(computed_tokens=PAGE)
    verbs.begin(ranks=(R0,))
    with pytest.raises(ConflictError, match=r"already begun on rank pp0\.tp0 by engine engine"):
        verbs.begin("other")
    with pytest.raises(ConflictError, match=r"not begun on rank pp0\.tp1 by this engine"):
        verbs.publish()
    with pytest.raises(InvalidInputError, match=r"\[9\]"):
        verbs.publish(ranks=(R0,), layers=(0, 9))
    with pytest.raises(InvalidInputError, match="begins it with"):
        verbs.begin(ranks=(R1,), prompt_tokens=5)
    with pytest.raises(UnknownRoomError):
        verbs.begin(room=5)


@pytest.mark.parametrize("followed", [True, False])
def test_pages_of_an_engine_whose_process_is_not_seen_to_end_are_quarantined(followed):
    bench = sending()
    assert bench.service.engine_gone("engine", "its connection has ended", followed=followed)
    assert bench.quarantined == (set() if followed else {"engine_process_alive"})
    bench.closed()
    bench.wait(1_000_000)
    assert (bench.quarantined, bench.free) == ({"engine_process_alive"}, 14)
    [reason] = bench.book.quarantine_reasons()
    assert ("(limit: timeouts.drain_s)" if followed else "restart this daemon to have the pages back") in reason
    bench.service.engine_ended("engine")
    assert (bench.free, bench.quarantined) == (16, set())


def test_a_transport_that_is_not_quiet_quarantines_at_once_and_says_which():
    bench = sending()
    bench.sent(error_code="transport_failed", error="cable", quiet=False, in_transit=True)
    bench.verbs.abort()
    bench.closed(quiet=False, reason="mooncake is loud")
    assert bench.state() is PrefillState.FAILING
    assert set(bench.book.quarantine_reasons()) == {"room 1 generation 1: rank pp0.tp0: mooncake is loud"}
    assert bench.told(Drained) == []
    bench.closed()
    assert bench.free == 16
    [drained] = bench.told(Drained)
    assert drained.in_transit


def test_an_engine_with_a_gpu_aborts_an_earlier_attempt_before_it_begins_anew():
    bench = PrefillBench()
    bench.admit()
    bench.verbs.begin(by_gpu=True)
    bench.stop()
    bench.admit(generation=2)
    with pytest.raises(ConflictError, match=r"generation 1\) may still be written by this engine's GPU; abort it"):
        bench.verbs.begin(by_gpu=True)
    assert bench.free == 12
    bench.verbs.abort()
    assert bench.free == 14
    bench.verbs.begin(by_gpu=True)


def test_pages_that_a_gpu_writes_are_free_when_all_is_sent_or_when_it_is_through():
    bench = sending()
    bench.verbs.publish()
    bench.verbs.finish(by_gpu=True)
    for order in bench.orders():
        bench.sent(order)
    assert (bench.state(), bench.free) == (PrefillState.COMPLETED, 16), "every point was reached before that was sent"
    bench.verbs.release(generation=1)
    failing = sending()
    with pytest.raises(ConflictError, match="room 1 is not finished by this engine"):
        failing.verbs.release(generation=1)
    failing.verbs.publish()
    failing.verbs.finish(by_gpu=True)
    failing.abort()
    failing.closed()
    assert (failing.state(), failing.free) == (PrefillState.ABORTED, 14)
    failing.verbs.release(generation=2)
    failing.verbs.release("somebody else", generation=1)
    assert failing.free == 14
    failing.verbs.release(generation=1)
    assert failing.free == 16


def test_adopted_pages_must_cover_what_is_published_and_be_nobody_elses():
    bench = PrefillBench(adopted=True)
    bench.admit()
    bench.admit(2)
    with pytest.raises(InvalidInputError, match="needs 2 pages"):
        bench.verbs.begin(tables=pages_table(3), computed_tokens=TOKENS - 1)
    bench.verbs.begin(tables=pages_table(3))
    with pytest.raises(InvalidInputError, match="a request of 512 tokens needs 2 pages"):
        bench.verbs.publish()
    bench.verbs.publish(tables=pages_table(4, first=1))
    with pytest.raises(ConflictError, match="still belongs to room 1"):
        bench.verbs.begin(room=2, tables=pages_table(4, 5))
    bench.verbs.begin(room=2, tables=pages_table(5, 6))
    check_book(bench.book)


def test_rooms_with_a_common_prefix_name_its_pages_at_once_and_nobody_writes_them():
    bench = PrefillBench(adopted=True)
    for room in (1, 2, 3):
        bench.admit(room)
    bench.verbs.begin(tables=pages_table(3, 4))
    with pytest.raises(ConflictError, match=r"page 3 .* still belongs to room 1"):
        bench.verbs.begin(room=2, tables=pages_table(3, 5))
    with pytest.raises(InvalidInputError, match="computed_tokens must be at most"):
        bench.verbs.begin(room=2, tables=pages_table(3, 5), computed_tokens=TOKENS + 1)
    with pytest.raises(ConflictError, match="page 3"):
        bench.verbs.begin(room=2, tables=pages_table(3, 5), computed_tokens=PAGE - 1)
    bench.verbs.begin(room=2, tables=pages_table(3, 5), computed_tokens=PAGE + 1)
    bench.offer()
    bench.verbs.publish()
    bench.verbs.finish()
    bench.sent()
    assert bench.state() is PrefillState.COMPLETED
    assert bench.book.counts()[IndexSpace.FULL][PageState.CACHED] == 1, "room 2 reads it still"
    with pytest.raises(ConflictError, match=r"page 3 .* still belongs to room 2"):
        bench.verbs.begin(room=3, tables=pages_table(3, 6))
    bench.verbs.begin(room=3, tables=pages_table(3, 6), computed_tokens=PAGE)
    check_book(bench.book)


def test_points_beyond_what_an_order_carries_drop_the_oldest(monkeypatch):
    monkeypatch.setattr(prefill_rooms, "MAX_POINTS", 2)
    points = [StreamPoint(ring="ring", handle=bytes([number]) * 64, device_uuid="0" * 32) for number in range(4)]
    bench = PrefillBench()
    bench.admit()
    bench.verbs.begin()
    for point in points:
        bench.verbs.publish(upto_token=PAGE, after={"pp0.tp0": point})
    bench.offer()
    assert bench.orders()[0].after == tuple(points[2:])


def test_an_order_is_a_fact_from_its_beginning_to_its_end_with_room_peer_rank_and_transport():
    bench = sending()
    bench.sent()
    who = {"room": 1, "generation": 1, "peer": DECODE, "rank": R0, "order": bench.orders()[-1].order}
    who |= {"transport": "local"}
    [began, ended] = [fact for fact in bench.events.facts if isinstance(fact, OrderBegan | OrderEnded)]
    assert began == OrderBegan(**who)
    assert ended == OrderEnded(**who, amounts=full_amounts(TOKENS), seconds={"move": 1.0})


@pytest.mark.parametrize("in_transit", [True, False])
def test_the_decode_node_hears_of_a_lost_path_by_which_something_may_arrive(in_transit):
    bench = sending()
    lost = {"lost": "local", "over": "nixl", "epoch": 2, "in_transit": in_transit, "error": "cable"}
    bench.service.hear_rank(Rerouted(room=1, generation=1, rank=R0, **lost))
    told = [PathLost(room=1, generation=1, writer=R0, transport="local", epoch=2)] * in_transit
    assert bench.told(PathLost, DECODE) == told
    [fact] = bench.events.of(RoomRerouted)
    assert (fact.lost, fact.over, fact.rank) == ("local", "nixl", R0)
    bench.abort()
    bench.sent(error_code="aborted")
    bench.closed()
    [drained] = bench.told(Drained, DECODE)
    assert (drained.in_transit, bench.told(PathLost, DECODE)) == (in_transit, told)


def early_offer(room: int = 1, **fields) -> Offer:
    fields = {"prompt_tokens": PAGE, "tables": to_wire(pages_table(3))} | fields
    return Offer(room=room, generation=1, **fields)


def wire(*ids: bytes, space: IndexSpace = IndexSpace.FULL) -> dict[str, object]:
    return {"tables": tuple(WireTable(space=space, ids=each) for each in ids)}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_tokens": PAGE + 1}, "prefill admitted"),
        ({"prefix_tokens": 3}, "must be a multiple"),
        ({"prefix_tokens": 2 * PAGE}, "at most"),
        (wire(b"abc"), "malformed"),
        (wire(bytes(4), bytes(4)), "twice"),
        (wire(b"\xff\xff\xff\xff"), "negative"),
        ({"prefix_tokens": PAGE}, "holds the first 1 pages .* begins with page 0"),
        (wire(bytes(4), space=IndexSpace.FULL_COPY), "offers pages of 'full_twin', which no peer writes"),
    ],
)
def test_an_offer_that_cannot_be_right_is_named(fields, complaint):
    check_offer(early_offer(), GEOMETRY, prompt_tokens=PAGE)
    with pytest.raises(InvalidInputError, match=complaint):
        check_offer(early_offer(**fields), GEOMETRY, prompt_tokens=PAGE)


def test_the_first_offer_of_an_attempt_counts_and_a_lost_peer_takes_its_offers_along():
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("a", early_offer())
    assert early.put("a", early_offer())
    assert not early.put("b", early_offer())
    early.take(1, 1, of="b")
    assert early.take(1, 1).peer == "a"
    assert early.take(1, 1) is None
    early.put("a", early_offer())
    early.put("b", early_offer(2))
    early.forget_peer("a")
    assert early.take(1, 1) is None
    assert early.take(2, 1) is not None


@pytest.mark.parametrize(
    ("bound", "most", "kept"),
    [
        ("MOST_PEER_BYTES", 20 * offers.OFFER_BYTES + 999, 20),
        ("MOST_BYTES", 20 * offers.OFFER_BYTES + 999, 19),
        ("MOST_OFFERS", 20, 19),
    ],
)
def test_nobody_crowds_the_others_out(monkeypatch, bound, most, kept):
    monkeypatch.setattr(offers, bound, most)
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("modest", early_offer(1))
    assert sum(early.put("greedy", early_offer(room)) for room in range(2, 100)) == kept
    assert early.take(1, 1) is not None
    for room in range(2, 2 + kept):
        early.take(room, 1, of="greedy")
    assert sum(early.put("greedy", early_offer(room)) for room in range(100, 200)) >= kept, "what has gone counts"
