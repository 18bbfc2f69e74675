from __future__ import annotations

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import (
    CapacityError,
    ConflictError,
    InvalidInputError,
    NotReadyError,
    UnknownRoomError,
)
from kvbridge.core.ids import IndexSpace, PageTable, Role
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.session.sender import SenderState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import (
    MAX_INTERVALS,
    Abort,
    Done,
    Drained,
    Failed,
    Intend,
    Offer,
    PathLost,
    WireTable,
    to_wire,
)
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.core.wire.worker_messages import CloseRoom, OpenRoom, Rerouted, RoomClosed, Send, Sent
from kvbridge.node.sender import room as sender
from kvbridge.node.sender.room import RankWork
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.telemetry.events import OrderBegan, OrderEnded, PhasesEnded
from kvbridge.telemetry.path_events import RoomRerouted
from kvbridge.telemetry.phases import PHASES
from tests.helpers.rooms import DECODE, PAGE, R0, R1, SenderBench, full_amounts, pick

TOKENS = 2 * PAGE
STRANGER = "eeee000000000001"


def tables(*ids: int, first: int = 0):
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


def offer(room: int = 1, generation: int = 1, **fields) -> Offer:
    fields = {"prompt_tokens": TOKENS, "tables": to_wire(tables(7, 8))} | fields
    return Offer(room=room, generation=generation, **fields)


def admit(bench: SenderBench, room: int = 1, generation: int = 1, tokens: int = TOKENS):
    return bench.service.requests.admit(AdmissionRequest(room=room, generation=generation, prompt_tokens=tokens))


def begin(bench: SenderBench, engine: str = "engine", ranks=None, room: int = 1, **fields):
    fields = {"prompt_tokens": TOKENS, "tables": {}} | fields
    return bench.verbs.begin(engine, ranks or bench.ranks, room, **fields)


def publish(bench: SenderBench, upto: int = TOKENS, engine: str = "engine", ranks=None, layers=None, **fields):
    bench.verbs.publish(engine, ranks or bench.ranks, 1, upto_token=upto, layers=layers, **fields)


def finish(bench: SenderBench, engine: str = "engine", ranks=None, metadata: bytes = b"meta", **fields):
    bench.verbs.finish(engine, ranks or bench.ranks, 1, metadata=metadata, **fields)


def orders(bench: SenderBench, rank=None) -> list[Send]:
    return pick(bench.workers.messages, Send, rank)


def answer(bench: SenderBench, rank=R0, order: Send | None = None, **fields) -> None:
    last = order or orders(bench, rank)[-1]
    fields = {"amounts": full_amounts(TOKENS), "seconds": {"move": 1.0}} | fields
    bench.service.workers.hear(Sent(room=1, generation=last.generation, rank=rank, order=last.order, **fields))


def close(bench: SenderBench, rank=R0, generation: int = 1, quiet: bool = True) -> None:
    bench.service.workers.hear(RoomClosed(room=1, generation=generation, rank=rank, quiet=quiet))


def abort(room: int = 1, generation: int = 1) -> Abort:
    return Abort(room=room, generation=generation, code="aborted", message="enough")


def state(bench: SenderBench, generation: int = 1) -> SenderState:
    found = bench.service.book.find(1, generation)
    assert found is not None
    return found.state


def sending(**fields) -> SenderBench:
    """A bench with room 1 offered, begun, and half of it published."""
    bench = SenderBench(**fields)
    admit(bench)
    bench.service.peers.hear(DECODE, offer())
    begin(bench)
    publish(bench, PAGE)
    return bench


# ------------------------------------------------------------------------------------------- the good course


def test_a_room_is_sent_while_it_is_computed():
    bench = SenderBench()
    assert admit(bench).state is RoomState.ADMITTED
    room = begin(bench)
    publish(bench, PAGE)
    assert not bench.workers.messages
    bench.clock.advance(2)
    bench.service.peers.hear(DECODE, offer())
    assert bench.service.book.report(1).state is RoomState.TRANSFERRING
    opening = pick(bench.workers.messages, OpenRoom)[0]
    assert opening.peer == DECODE
    assert opening.source == room.tables
    assert opening.destination == offer().tables
    assert bench.book.state(Owner(1, 1)) is PageState.LEASED
    publish(bench)
    finish(bench)
    first, second = orders(bench)
    assert (first.section.start_token, first.section.stop_token) == (0, PAGE)
    assert (second.section.start_token, second.section.stop_token) == (PAGE, TOKENS)
    bench.clock.advance(3)
    answer(bench, order=first, amounts={})
    assert not bench.peers.messages
    bench.clock.advance(1)
    answer(bench, order=second)
    [done] = pick(bench.peers.messages, Done, DECODE)
    assert done.amounts == full_amounts(TOKENS)
    assert done.metadata == b"meta"
    assert done.phases_s["move"] == 2.0
    assert (done.transport, done.under_way_ago_s) == ("local", ((4.0, 0.0),))
    assert [message.all_sent for message in pick(bench.workers.messages, CloseRoom)] == [True]
    assert bench.engines.kinds == ["completed"]
    assert bench.free == 16
    report = bench.service.book.report(1)
    assert report.state is RoomState.COMPLETED
    assert report.phases_s["admit_to_offer_received"] == 2.0
    assert bench.events.states == [RoomState.ADMITTED, RoomState.TRANSFERRING, RoomState.COMPLETED]
    [ended] = bench.events.of(PhasesEnded)
    assert ended.phases_s["offer_to_sent"] == 4.0
    assert set(ended.phases_s) <= set(PHASES[Role.PREFILL])
    close(bench)
    assert pick(bench.peers.messages, Drained) == []


def test_a_rank_tells_when_it_was_sending_in_a_bounded_number_of_stretches():
    work = RankWork(RankProgress((0,), prompt_tokens=1))
    for order in range(MAX_INTERVALS + 2):
        work.order_began(order, "local", 10.0 * order)
        assert work.order_ended(order, 10.0 * order + 1) == "local"
    assert work.order_ended(0, 999.0) is None
    told = work.under_way_ago_s(1_000.0)
    assert len(told) == MAX_INTERVALS
    assert told[:2] == ((1_000.0, 979.0), (970.0, 969.0)), "the first three as one"
    assert told[-1] == (1_000.0 - 10 * (MAX_INTERVALS + 1), 1_000.0 - 10 * (MAX_INTERVALS + 1) - 1)


def test_a_layer_at_a_time():
    bench = SenderBench()
    admit(bench)
    bench.service.peers.hear(DECODE, offer())
    begin(bench)
    publish(bench, PAGE, layers=(1,))
    assert orders(bench)[-1].section.layers == (1,)
    with pytest.raises(InvalidInputError, match=r"\[9\]"):
        publish(bench, PAGE, layers=(0, 9))
    assert len(orders(bench)) == 1


# ------------------------------------------------------------------------------------------- admission


def test_admission_is_refused_with_the_reason_and_keeps_nothing():
    bench = SenderBench(pages=3)
    bench.workers.lacking = "rank worker pp0.tp0 is starting"
    with pytest.raises(NotReadyError, match="is starting"):
        admit(bench)
    bench.workers.lacking = ""
    admit(bench)
    with pytest.raises(ConflictError, match="in flight"):
        admit(bench, generation=2)
    with pytest.raises(CapacityError):
        admit(bench, room=2)
    with pytest.raises(InvalidInputError, match="is for the decode daemon"):
        bench.service.requests.admit(
            AdmissionRequest(room=3, prompt_tokens=1, prefill=(PeerAddress(endpoint="tcp://x:1"),))
        )
    with pytest.raises(UnknownRoomError):
        bench.service.book.report(3)
    assert bench.free == 1
    bench.book.check_integrity()


def test_a_room_without_an_id_gets_one():
    bench = SenderBench()
    report = bench.service.requests.admit(AdmissionRequest(prompt_tokens=1))
    assert bench.service.book.report(report.room).state is RoomState.ADMITTED


# ------------------------------------------------------------------------------------------- offers


def test_an_early_offer_waits_for_its_room():
    bench = SenderBench()
    bench.service.peers.hear(DECODE, offer())
    bench.service.peers.hear(DECODE, offer())
    assert not bench.peers.messages
    admit(bench)
    assert state(bench) is SenderState.SENDING
    assert len(pick(bench.workers.messages, OpenRoom)) == 1


def test_a_second_offerer_is_turned_away():
    bench = SenderBench()
    bench.service.peers.hear(DECODE, offer())
    bench.service.peers.hear(STRANGER, offer())
    assert len(pick(bench.peers.messages, Drained, STRANGER)) == 1
    admit(bench)
    bench.service.peers.hear("ffff000000000001", offer())
    assert pick(bench.peers.messages, Failed, "ffff000000000001")[0].code == "conflict"
    assert state(bench) is SenderState.SENDING
    assert bench.service.book.get(1).peer == DECODE


# ------------------------------------------------------------------------------------------- decode will come


def intend(bench: SenderBench, peer: str = DECODE, **fields) -> None:
    bench.service.peers.hear(peer, Intend(room=1, generation=1, **({"prompt_tokens": TOKENS} | fields)))


def awaited() -> SenderBench:
    """A bench with room 1 begun, for which DECODE has said that it will come."""
    bench = SenderBench()
    admit(bench)
    begin(bench)
    intend(bench)
    return bench


def test_a_room_is_held_for_the_one_who_said_it_would_come():
    bench = awaited()
    bench.service.peers.hear(STRANGER, offer())
    intend(bench, STRANGER)
    assert [type(message) for message in pick(bench.peers.messages, object, STRANGER)] == [Failed, Drained] * 2
    assert "for decode/" in pick(bench.peers.messages, Failed, STRANGER)[0].message
    bench.service.peers.hear(STRANGER, abort())
    intend(bench)
    assert bench.events.refusals == {"conflict": 2}, "an intent that is sent again is no attack"
    assert state(bench) is SenderState.AWAITED


def test_an_intent_of_another_length_fails_the_room_on_both_sides():
    bench = SenderBench()
    admit(bench)
    intend(bench, prompt_tokens=TOKENS + 1)
    assert state(bench) is SenderState.FAILED
    assert [type(message) for _, message in bench.peers.messages] == [Failed, Drained]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_tokens": TOKENS + 1},
        {"prefix_tokens": 1},
        {"tables": (WireTable(space=IndexSpace.FULL, ids=b"abc"),)},
    ],
)
def test_an_offer_that_cannot_be_right_fails_the_room_on_both_sides(fields):
    bench = SenderBench()
    admit(bench)
    bench.service.peers.hear(DECODE, offer(**fields))
    assert state(bench) is SenderState.FAILED
    assert bench.service.book.report(1).reason_code == "invalid_input"
    assert [type(message) for _, message in bench.peers.messages] == [Failed, Drained]
    assert bench.free == 16


# ------------------------------------------------------------------------------------------- aborts


# ------------------------------------------------------------------------------------------- engines


def test_a_second_begin_or_a_foreign_call_is_refused():
    bench = SenderBench(ranks=(R0, R1))
    admit(bench)
    begin(bench, ranks=(R0,))
    with pytest.raises(ConflictError, match=r"already begun on rank pp0\.tp0 by engine engine"):
        begin(bench, "other")
    with pytest.raises(ConflictError, match=r"not begun on rank pp0\.tp1 by this engine"):
        publish(bench, PAGE)
    with pytest.raises(InvalidInputError, match="begins it with"):
        begin(bench, ranks=(R1,), prompt_tokens=5)
    with pytest.raises(InvalidInputError, match="owns its pools"):
        begin(bench, ranks=(R1,), tables=tables(1, 2))
    with pytest.raises(UnknownRoomError):
        begin(bench, room=5)


def test_pages_of_an_engine_whose_process_does_not_end_are_quarantined_and_come_back_with_its_end():
    bench = sending()
    assert bench.service.engines.gone("engine", "its connection has ended")
    close(bench)
    assert bench.service.book.quarantined()["engine_process_alive"] == 0
    bench.clock.advance(1_000)
    bench.tick()
    assert bench.service.book.quarantined()["engine_process_alive"] == 1
    [reason] = bench.book.quarantine_reasons()
    assert "engines engine have left, and their processes have not ended (limit: timeouts.drain_s)" in reason
    bench.service.engines.ended("engine")
    assert bench.free == 16
    assert bench.service.book.quarantined()["engine_process_alive"] == 0


def test_pages_of_an_engine_whose_process_cannot_be_followed_are_quarantined_at_once():
    bench = sending()
    assert bench.service.engines.gone("engine", "its connection has ended", followed=False)
    assert bench.service.book.quarantined()["engine_process_alive"] == 1
    [reason] = bench.book.quarantine_reasons()
    assert "restart this daemon to have the pages back" in reason
    close(bench)
    bench.clock.advance(1_000_000)
    bench.tick()
    assert bench.free == 14


# ------------------------------------------------------------------------------------------- workers


def test_answers_count_once_and_only_for_orders_that_were_given():
    bench = sending()
    [order] = orders(bench)
    publish(bench)
    finish(bench)
    answer(bench, order=order)
    answer(bench, order=order)
    answer(bench, rank=R1, order=order)
    bench.service.workers.hear(Sent(room=1, generation=1, rank=R0, order=999, amounts=full_amounts(TOKENS)))
    bench.service.workers.hear(Sent(room=5, generation=1, rank=R0, order=1, error_code="x", error="y"))
    bench.service.workers.hear(RoomClosed(room=5, generation=1, rank=R0, quiet=True))
    assert state(bench) is SenderState.SENDING
    answer(bench, amounts={})
    assert pick(bench.peers.messages, Done)[0].amounts == full_amounts(TOKENS)


# ------------------------------------------------------------------------------------------- peers that vanish


def test_a_lost_peer_fails_its_rooms_and_takes_its_early_offers_along():
    bench = sending()
    admit(bench, room=2)
    bench.service.peers.hear(DECODE, offer(room=3))
    bench.service.peers.peer_gone(DECODE, "silent for 10 s")
    assert state(bench) is SenderState.FAILING
    assert bench.service.book.report(2).state is RoomState.ADMITTED
    admit(bench, room=3)
    assert bench.service.book.report(3).state is RoomState.ADMITTED
    close(bench)
    bench.service.peers.peer_gone(DECODE, "again")
    assert state(bench) is SenderState.FAILED


# ------------------------------------------------------------------------------------------- deadlines


def test_a_transport_that_is_not_quiet_quarantines_at_once_and_says_which():
    bench = sending()
    answer(bench, error_code="transport_failed", error="cable", quiet=False, in_transit=True)
    bench.verbs.abort("engine", 1, "ok")
    bench.service.workers.hear(RoomClosed(room=1, generation=1, rank=R0, quiet=False, reason="mooncake is loud"))
    assert state(bench) is SenderState.FAILING
    [reason] = bench.book.quarantine_reasons()
    assert reason == "room 1 generation 1: rank pp0.tp0: mooncake is loud"
    assert pick(bench.peers.messages, Drained) == []
    close(bench)
    assert bench.free == 16
    [drained] = pick(bench.peers.messages, Drained)
    assert drained.in_transit


# ------------------------------------------------------------------------------------------- generations


def test_an_engine_with_a_gpu_aborts_an_earlier_attempt_before_it_begins_anew():
    bench = SenderBench()
    admit(bench)
    begin(bench, by_gpu=True)
    bench.service.driver.stop(bench.service.book.get(1), "by its client")
    admit(bench, generation=2)
    with pytest.raises(
        ConflictError, match=r"generation 1\) may still be written by this engine's GPU; abort it first"
    ):
        begin(bench, by_gpu=True)
    assert bench.free == 12
    bench.verbs.abort("engine", 1, "its GPU is through")
    assert bench.free == 14
    begin(bench, by_gpu=True)


def test_pages_that_a_gpu_writes_are_free_when_all_is_sent_or_when_it_is_through():
    bench = sending()
    publish(bench)
    finish(bench, by_gpu=True)
    for order in orders(bench):
        answer(bench, order=order)
    assert (state(bench), bench.free) == (SenderState.COMPLETED, 16), "every point was reached before that was sent"
    bench.verbs.release("engine", 1, 1)
    failing = sending()
    with pytest.raises(ConflictError, match="room 1 is not finished by this engine"):
        failing.verbs.release("engine", 1, 1)
    publish(failing)
    finish(failing, by_gpu=True)
    failing.service.peers.hear(DECODE, abort())
    close(failing)
    assert (state(failing), failing.free) == (SenderState.ABORTED, 14)
    failing.verbs.release("engine", 1, 2)
    failing.verbs.release("somebody else", 1, 1)
    assert failing.free == 14
    failing.verbs.release("engine", 1, 1)
    assert failing.free == 16


def test_finish_of_a_room_that_is_over_does_not_let_go_of_what_a_gpu_writes():
    bench = sending()
    publish(bench)
    bench.service.peers.hear(DECODE, abort())
    close(bench)
    with pytest.raises(ConflictError, match="is over: by the decode side"):
        finish(bench, by_gpu=True)
    assert bench.free == 14
    bench.verbs.release("engine", 1, 1)
    assert bench.free == 16


# ------------------------------------------------------------------------------------------- adopted pools


def test_adopted_pages_must_cover_what_is_published_and_be_nobody_elses():
    bench = SenderBench(adopted=True)
    admit(bench)
    admit(bench, room=2)
    with pytest.raises(InvalidInputError, match="needs 2 pages"):
        begin(bench, tables=tables(3), computed_tokens=TOKENS - 1)
    begin(bench, tables=tables(3))
    with pytest.raises(InvalidInputError, match="a request of 512 tokens needs 2 pages"):
        publish(bench)
    publish(bench, tables=tables(4, first=1))
    with pytest.raises(ConflictError, match="still belongs to room 1"):
        begin(bench, room=2, tables=tables(4, 5))
    begin(bench, room=2, tables=tables(5, 6))
    bench.book.check_integrity()


def test_rooms_with_a_common_prefix_name_its_pages_at_once_and_nobody_writes_them():
    bench = SenderBench(adopted=True)
    for room in (1, 2, 3):
        admit(bench, room=room)
    begin(bench, tables=tables(3, 4))
    with pytest.raises(ConflictError, match=r"page 3 .* still belongs to room 1"):
        begin(bench, room=2, tables=tables(3, 5))
    with pytest.raises(InvalidInputError, match="computed_tokens must be at most"):
        begin(bench, room=2, tables=tables(3, 5), computed_tokens=TOKENS + 1)
    with pytest.raises(ConflictError, match="page 3"):
        begin(bench, room=2, tables=tables(3, 5), computed_tokens=PAGE - 1)
    begin(bench, room=2, tables=tables(3, 5), computed_tokens=PAGE + 1)
    bench.service.peers.hear(DECODE, offer())
    publish(bench)
    finish(bench)
    answer(bench)
    assert state(bench) is SenderState.COMPLETED
    assert bench.book.counts()[IndexSpace.FULL][PageState.CACHED] == 1, "room 2 reads it still"
    with pytest.raises(ConflictError, match=r"page 3 .* still belongs to room 2"):
        begin(bench, room=3, tables=tables(3, 6))
    begin(bench, room=3, tables=tables(3, 6), computed_tokens=PAGE)
    bench.book.check_integrity()


def test_all_ranks_read_and_write_the_same_pages_of_a_room():
    bench = SenderBench(ranks=(R0, R1), adopted=True)
    admit(bench)
    begin(bench, "engine0", (R0,), tables=tables(3, 4), computed_tokens=PAGE)
    with pytest.raises(ConflictError, match="read and write the same"):
        begin(bench, "engine1", (R1,), tables=tables(3, 4))
    begin(bench, "engine1", (R1,), tables=tables(3, 4), computed_tokens=PAGE)


def test_what_is_computed_already_is_the_nodes_to_say_where_it_owns_the_pools():
    bench = SenderBench()
    admit(bench)
    with pytest.raises(InvalidInputError, match="takes no page tables, and no computed_tokens"):
        begin(bench, computed_tokens=PAGE)


# ------------------------------------------------------------------------------------------- points of an engine's GPU


def point(number: int) -> StreamPoint:
    return StreamPoint(ring="ring", handle=bytes([number]) * 64, device_uuid="0" * 32)


def publish_at(bench: SenderBench, upto: int, **points: StreamPoint) -> None:
    named = {name.replace("_", "."): one for name, one in points.items()}
    bench.verbs.publish("engine", bench.ranks, 1, upto_token=upto, layers=None, after=named)


def test_points_beyond_what_an_order_carries_drop_the_oldest(monkeypatch):
    monkeypatch.setattr(sender, "MAX_POINTS", 2)
    bench = SenderBench()
    admit(bench)
    begin(bench)
    for number in range(4):
        publish_at(bench, PAGE, pp0_tp0=point(number))
    bench.service.peers.hear(DECODE, offer())
    assert orders(bench)[0].after == (point(2), point(3))


def order_facts(bench: SenderBench) -> list[object]:
    return [fact for fact in bench.events.facts if isinstance(fact, OrderBegan | OrderEnded)]


def test_an_order_is_a_fact_from_its_beginning_to_its_end_with_room_peer_rank_and_transport():
    bench = sending()
    order = orders(bench)[-1].order
    answer(bench)
    who = {"room": 1, "generation": 1, "peer": DECODE, "rank": R0, "order": order, "transport": "local"}
    [began, ended] = order_facts(bench)
    assert began == OrderBegan(**who)
    assert ended == OrderEnded(**who, amounts=full_amounts(TOKENS), seconds={"move": 1.0})


def rerouted(bench: SenderBench, *, in_transit: bool = True) -> None:
    bench.service.workers.hear(
        Rerouted(
            room=1, generation=1, rank=R0, lost="local", over="nixl", epoch=2, in_transit=in_transit, error="cable"
        )
    )


@pytest.mark.parametrize("in_transit", [True, False])
def test_the_decode_node_hears_of_a_lost_path_by_which_something_may_arrive(in_transit):
    bench = sending()
    rerouted(bench, in_transit=in_transit)
    told = pick(bench.peers.messages, PathLost, DECODE)
    assert told == [PathLost(room=1, generation=1, writer=R0, transport="local", epoch=2)] * in_transit
    [fact] = [fact for fact in bench.events.facts if isinstance(fact, RoomRerouted)]
    assert (fact.lost, fact.over, fact.rank) == ("local", "nixl", R0)
    bench.service.peers.hear(DECODE, abort())
    answer(bench, error_code="aborted")
    close(bench)
    [drained] = pick(bench.peers.messages, Drained, DECODE)
    assert drained.in_transit is in_transit
    assert not pick(bench.peers.messages, PathLost, DECODE)[in_transit:]
