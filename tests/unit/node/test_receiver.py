from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import (
    CapacityError,
    ConflictError,
    FingerprintMismatchError,
    InvalidInputError,
    NotReadyError,
    RoomFailedError,
    UnknownRoomError,
)
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageTable, Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.engine_messages import Provide
from kvbridge.core.wire.messages import (
    MAX_METADATA_BYTES,
    Abort,
    Done,
    Drained,
    Failed,
    Intend,
    Offer,
    PathLost,
    to_wire,
)
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.receiver import withdrawals
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.telemetry.path_events import RoomRerouted
from tests.helpers.rooms import (
    ADDRESS,
    OTHER_ADDRESS,
    PAGE,
    PREFILL,
    R0,
    R1,
    ReceiverBench,
    full_amounts,
    pick,
)

TOKENS = 2 * PAGE
SECOND = "bbbb000000000001"
STRANGER = "eeee000000000001"
OWNER = Owner(1, 1)


def admit(bench: ReceiverBench, room: int = 1, generation: int = 1, **fields):
    fields = {"prompt_tokens": TOKENS, "prefill": (ADDRESS,)} | fields
    return bench.service.requests.admit(AdmissionRequest(room=room, generation=generation, **fields))


def state(bench: ReceiverBench, generation: int = 1) -> ReceiverState:
    found = bench.service.book.find(1, generation)
    assert found is not None
    return found.state


def done(bench: ReceiverBench, peer: str = PREFILL, rank=R0, generation: int = 1, **fields) -> None:
    fields = {"amounts": full_amounts(TOKENS), "phases_s": {"move": 1.0}, "metadata": b"meta"} | fields
    bench.service.peers.hear(peer, Done(room=1, generation=generation, writer=rank, **fields))


def failed(bench: ReceiverBench, peer: str = PREFILL, message: str = "cable") -> None:
    bench.service.peers.hear(peer, Failed(room=1, generation=1, code="transport_failed", message=message))


def drained(bench: ReceiverBench, peer: str = PREFILL, generation: int = 1, *, in_transit: bool = False) -> None:
    bench.service.peers.hear(peer, Drained(room=1, generation=generation, in_transit=in_transit))


def cancel(bench: ReceiverBench, room: int = 1) -> None:
    found = bench.service.book.get(room)
    bench.service.driver.stop(found, "by its client")


def offered(**fields) -> ReceiverBench:
    """A bench with room 1 offered to the node PREFILL."""
    bench = ReceiverBench(**fields)
    bench.nodes.know()
    admit(bench)
    return bench


def offered_to_two() -> ReceiverBench:
    """A bench with room 1 offered to PREFILL (rank 0) and SECOND (rank 1)."""
    bench = ReceiverBench()
    bench.nodes.know(tp_size=2)
    bench.nodes.know(OTHER_ADDRESS, SECOND, (R1,), tp_size=2)
    admit(bench, prefill=(ADDRESS, OTHER_ADDRESS))
    return bench


def committed(*engines: str) -> ReceiverBench:
    bench = offered()
    bench.engines.names = set(engines or ("engine",))
    done(bench)
    return bench


def claimed(*engines: str) -> ReceiverBench:
    bench = committed(*engines)
    for engine in engines or ("engine",):
        bench.verbs.claim(engine, 1)
    return bench


# ------------------------------------------------------------------------------------------- the good course


@pytest.mark.parametrize("factor", [0, 2])
def test_a_wrong_amount_fails_closed_and_waits_for_nobody_who_is_done(factor):
    bench = offered()
    wrong = {kind: Amount(lane_rows=amount.lane_rows * factor) for kind, amount in full_amounts(TOKENS).items()}
    done(bench, amounts=wrong)
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "integrity")
    assert "rank pp0.tp0 of prefill node prefill/aaaa is done, but mha_kv" in report.reason
    assert bench.free == 16
    with pytest.raises(RoomFailedError, match="is done, but"):
        bench.verbs.claim("engine", 1)


# ------------------------------------------------------------------------------------------- admission and handshake


def test_admission_is_all_or_nothing():
    bench = ReceiverBench(pages=3)
    bench.nodes.know()
    bench.ranks.lacking = "rank worker pp0.tp0 is starting"
    with pytest.raises(NotReadyError, match="is starting"):
        admit(bench)
    bench.ranks.lacking = ""
    with pytest.raises(InvalidInputError, match="needs `prefill`"):
        admit(bench, prefill=())
    admit(bench)
    with pytest.raises(ConflictError):
        admit(bench, generation=2)
    with pytest.raises(CapacityError):
        admit(bench, room=2)
    with pytest.raises(UnknownRoomError):
        bench.service.book.report(2)
    assert bench.free == 1


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ({"ranks": (R0,)}, "both hold rank pp0.tp0"),
        ({"ranks": ()}, "has no rank"),
        ({"tp_size": 4}, "prefill/aaaa (ranks pp0.tp0 of pp_size 1 x tp_size 2) and prefill/bbbb (ranks pp0.tp1 of"),
        ({"instance": "other"}, "are not of one instance"),
        ({"ranks": (Rank(pp=0, tp=2),)}, "prefill/bbbb (ranks pp0.tp2 of pp_size 1 x tp_size 2) has rank pp0.tp2"),
    ],
)
def test_nodes_that_cannot_be_one_instance_fail_the_room_before_anything_is_offered(second, complaint):
    bench = ReceiverBench()
    bench.nodes.know(tp_size=2)
    bench.nodes.know(OTHER_ADDRESS, SECOND, **({"ranks": (R1,), "tp_size": 2} | second))
    report = admit(bench, prefill=(ADDRESS, OTHER_ADDRESS))
    assert report.state is RoomState.FAILED
    assert complaint in report.reason
    assert pick(bench.nodes.messages, Offer) == []
    assert bench.free == 16


def test_stages_that_nodes_draw_differently_fail_the_room():
    """One node would send layer 1, the other too; had they drawn them the other way, neither would."""
    bench = ReceiverBench()
    bench.nodes.know(stage_boundaries=(2,))
    bench.nodes.know(OTHER_ADDRESS, SECOND, (Rank(pp=1, tp=0),), stage_boundaries=(1,))
    report = admit(bench, prefill=(ADDRESS, OTHER_ADDRESS))
    assert (report.state, report.reason_code) == (RoomState.FAILED, "invalid_input")
    assert "stages from layers (2,)) and prefill/bbbb" in report.reason


def test_a_part_of_an_instance_fails_the_room():
    bench = ReceiverBench()
    bench.nodes.know(tp_size=2)
    report = admit(bench)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "invalid_input")
    assert report.reason.startswith("rank pp0.tp1 of prefill instance prefill is on none of prefill/aaaa (ranks pp0")


def test_an_instance_of_endless_sizes_is_refused_at_once():
    bench = ReceiverBench()
    bench.nodes.know(tp_size=2**60)
    assert "rank pp0.tp1 of prefill instance" in admit(bench).reason


def test_amounts_that_add_up_do_not_count_unless_each_rank_reports_its_own():
    bench = offered_to_two()
    whole = full_amounts(TOKENS)
    more, less = (
        {kind: Amount(lane_rows=amount.lane_rows * part // 4) for kind, amount in whole.items()} for part in (3, 1)
    )
    done(bench, amounts=more)
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "integrity")
    assert "rank pp0.tp0 of prefill node prefill/aaaa is done, but mha_kv: " in report.reason
    done(bench, SECOND, R1, amounts=less)
    assert state(bench) is ReceiverState.FAILED
    assert bench.free == 16


# ------------------------------------------------------------------------------------------- aborts and failures


def test_drained_without_done_fails_the_room():
    bench = offered()
    drained(bench)
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "protocol")
    assert bench.free == 16


def test_strangers_and_stale_messages_are_harmless():
    bench = offered()
    for generation in (1, 2):
        done(bench, STRANGER, generation=generation)
        drained(bench, STRANGER, generation)
    failed(bench, STRANGER)
    done(bench, rank=R1)
    drained(bench, generation=7)
    bench.service.writers.peer_gone(STRANGER, "silent")
    assert state(bench) is ReceiverState.OFFERED
    refused = {"foreign_done": 2, "stale_done": 1, "foreign_drained": 1, "foreign_failed": 1}
    assert bench.events.refusals == refused


# ------------------------------------------------------------------------------------------- nodes that vanish


def test_device_memory_that_died_with_its_worker_takes_what_had_arrived_along():
    waiting, read = committed(), claimed()
    for bench in (waiting, read):
        bench.service.workers.gone(R0, "killed", memory_lost=True)
        assert bench.service.book.report(1).state is RoomState.FAILED
        assert bench.service.book.report(1).reason_code == "worker_gone"
    assert (state(waiting), waiting.free) == (ReceiverState.FAILED, 16)
    assert (state(read), read.free) == (ReceiverState.FAILING_CLAIMED, 14)
    assert read.engines.kinds[-1] == "cancel"
    read.verbs.release("engine", 1)
    assert (state(read), read.free) == (ReceiverState.FAILED, 16)


# ------------------------------------------------------------------------------------------- engines


def test_claims_are_refused_before_the_commit_after_the_end_and_twice():
    bench = offered()
    with pytest.raises(ConflictError, match="not committed yet"):
        bench.verbs.claim("engine", 1)
    done(bench)
    for verb in (bench.verbs.release, lambda engine, room: bench.verbs.extend(engine, room, TOKENS)):
        with pytest.raises(ConflictError, match="not claimed by this engine"):
            verb("engine", 1)
    bench.verbs.claim("engine", 1)
    with pytest.raises(ConflictError, match="already claimed"):
        bench.verbs.claim("engine", 1)
    bench.verbs.release("engine", 1)
    with pytest.raises(RoomFailedError, match="is over"):
        bench.verbs.claim("engine", 1)
    with pytest.raises(ConflictError, match="not claimed by this engine"):
        bench.verbs.release("engine", 1)


def test_an_engine_that_attaches_later_is_told_what_it_missed():
    bench = committed()
    assert [(event.room, event.kind) for event in bench.service.engines.open_events()] == [(1, "committed")]
    bench.verbs.claim("a", 1)
    assert bench.service.engines.open_events() == []


@pytest.mark.parametrize("followed", [True, False])
def test_pages_of_a_reader_whose_process_is_not_seen_to_end_are_quarantined(followed):
    bench = claimed()
    assert bench.service.engines.gone("engine", "its connection has ended", followed=followed)
    assert bench.service.book.quarantined()["engine_process_alive"] == (0 if followed else 1)
    bench.clock.advance(1_000)
    bench.tick()
    assert bench.service.book.quarantined()["engine_process_alive"] == 1
    assert bench.free == 14
    bench.service.engines.ended("engine")
    assert (bench.free, bench.service.book.quarantined()["engine_process_alive"]) == (16, 0)


def test_an_engine_that_keeps_a_cancelled_room_is_shown():
    bench = claimed()
    cancel(bench)
    bench.clock.advance(50)
    bench.tick()
    assert bench.book.state(OWNER) is PageState.QUARANTINED
    [reason] = bench.book.quarantine_reasons()
    assert "engines engine have not let go of it (limit: timeouts.drain_s)" in reason
    bench.verbs.release("engine", 1)
    assert bench.free == 16


def test_extending_reserves_what_is_missing_and_nothing_else():
    bench = claimed()
    before = bench.service.book.get(1).tables[IndexSpace.FULL].ids
    with pytest.raises(InvalidInputError, match="cannot shrink"):
        bench.verbs.extend("engine", 1, TOKENS - 1)
    assert len(bench.verbs.extend("engine", 1, TOKENS)[IndexSpace.FULL]) == 2
    tables = bench.verbs.extend("engine", 1, TOKENS + 1)
    assert tables[IndexSpace.FULL].ids[:2].tolist() == before.tolist()
    assert len(tables[IndexSpace.FULL]) == 3
    assert len(bench.verbs.extend("engine", 1, TOKENS + PAGE)[IndexSpace.FULL]) == 3
    admit(bench, room=2, prompt_tokens=13 * PAGE)
    with pytest.raises(CapacityError):
        bench.verbs.extend("engine", 1, 4 * PAGE)
    assert len(bench.verbs.extend("engine", 1, 3 * PAGE)[IndexSpace.FULL]) == 3
    bench.verbs.release("engine", 1)
    bench.book.check_integrity()


# ------------------------------------------------------------------------------------------- adopted pools


def tables(*ids: int, first: int = 0):
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


def test_adopted_pages_are_asked_for_and_then_offered():
    bench = ReceiverBench(adopted=True)
    bench.nodes.know()
    assert admit(bench).state is RoomState.ADMITTED
    assert bench.engines.kinds == ["wanted"]
    with pytest.raises(InvalidInputError, match="needs 2 pages"):
        bench.verbs.provide(1, tables(4))
    with pytest.raises(InvalidInputError, match="host pages belong to the daemon"):
        bench.verbs.provide(1, {IndexSpace.HOST: PageTable(IndexSpace.HOST, np.array([1], dtype=np.int32))})
    bench.verbs.provide(1, tables(4, 5))
    assert pick(bench.nodes.messages, Offer)[0].tables == to_wire(tables(4, 5))
    with pytest.raises(ConflictError, match="does not wait for pages"):
        bench.verbs.provide(1, tables(6, 7))
    assert bench.book.state(OWNER) is PageState.LEASED


def messages_about(bench: ReceiverBench, room: int = 1) -> list[tuple[object, type]]:
    return [(peer, type(message)) for peer, message in bench.nodes.messages if message.room == room]


def test_a_room_that_ends_for_one_prefill_node_is_given_up_at_the_others():
    bench = ReceiverBench()
    admit(bench, prefill=(ADDRESS, OTHER_ADDRESS))
    bench.nodes.know(OTHER_ADDRESS, SECOND, (R1,), tp_size=2)
    bench.nodes.answers[ADDRESS] = FingerprintMismatchError("layer_count is 3 here and 4 on the peer")
    bench.service.writers.nodes_changed()
    assert state(bench) is ReceiverState.FAILED
    assert messages_about(bench) == [(SECOND, Intend), (SECOND, Abort)]
    assert len(bench.service.writers.withdrawals) == 0


def test_what_nodes_that_never_answer_were_to_be_told_is_bounded(monkeypatch):
    monkeypatch.setattr(withdrawals, "MOST", 3)
    bench = ReceiverBench()
    for room in range(1, 6):
        admit(bench, room=room)
        cancel(bench, room)
    assert len(bench.service.writers.withdrawals) == 3
    bench.nodes.know()
    bench.service.writers.nodes_changed()
    assert [message.room for _, message in bench.nodes.messages] == [3, 3, 4, 4, 5, 5]


def test_an_engine_says_what_its_pages_hold_already():
    """Nobody else is believed: what a room's fresh pages hold is what an earlier room left there."""
    bench = ReceiverBench(adopted=True)
    bench.nodes.know()
    admit(bench)
    for prefix in (1, TOKENS + PAGE):
        with pytest.raises(
            InvalidInputError, match="prefix_tokens must be a multiple of 256 and at most prompt_tokens"
        ):
            bench.verbs.provide(1, tables(4, 5), prefix_tokens=prefix)
    bench.verbs.provide(1, tables(4, 5), prefix_tokens=PAGE)
    assert pick(bench.nodes.messages, Offer)[0].prefix_tokens == PAGE
    assert bench.service.book.report(1).prefix_tokens == PAGE
    done(bench, amounts=full_amounts(TOKENS, PAGE))
    assert state(bench) is ReceiverState.COMPLETED


def test_rooms_may_have_the_pages_of_a_common_prefix_and_only_the_rest_is_leased():
    bench = ReceiverBench(adopted=True)
    bench.nodes.know()
    for room in (1, 2, 3):
        admit(bench, room=room)
    bench.verbs.provide(1, tables(4, 5), prefix_tokens=PAGE)
    bench.verbs.provide(2, tables(4, 6), prefix_tokens=PAGE)
    with pytest.raises(ConflictError, match="are leased, a peer may still write them for room 1 generation 1"):
        bench.verbs.provide(3, tables(5, 7), prefix_tokens=PAGE)
    with pytest.raises(ConflictError, match=r"page 4 .* belongs to room 1 generation 1 and room 2 generation 1"):
        bench.verbs.provide(3, tables(4, 7))
    with pytest.raises(ConflictError, match=r"page 6 .* belongs to room 2 generation 1;"):
        bench.verbs.provide(3, tables(6, 7))
    counts = bench.book.counts()[IndexSpace.FULL]
    assert (counts[PageState.LEASED], counts[PageState.CACHED]) == (2, 1)
    bench.book.check_integrity()


def test_what_lies_in_the_nodes_host_pool_has_no_prefix():
    """The engine brings the device pages; those of the host pool are the daemon's, and fresh."""
    bench = ReceiverBench(adopted=True)
    bench.nodes.know()
    admit(bench)
    verbs = bench.service.calls[Provide].__self__
    settings = replace(verbs.pages.settings, host=frozenset({ComponentKind.MHA_KV}))
    verbs = replace(verbs, pages=replace(verbs.pages, settings=settings))
    with pytest.raises(InvalidInputError, match=r"mha_kv of the room lies in this node's host pool.*must be 0 here"):
        verbs.provide(AttachedEngine("engine", 0, ()), Provide(call=1, room=1, tables=(), prefix_tokens=PAGE))


def test_owned_pools_take_no_pages():
    bench = offered()
    with pytest.raises(ConflictError, match="owns its pools"):
        bench.verbs.provide(1, tables(1, 2), prefix_tokens=PAGE)


# ------------------------------------------------------------------------------------------- deadlines


# ------------------------------------------------------------------------------------------- generations


def test_an_engine_releases_the_attempt_that_it_has_claimed():
    bench = claimed("a", "b")
    bench.service.engines.gone("b", "killed")
    bench.service.engines.ended("b")
    admit(bench, generation=2)
    done(bench, generation=2)
    with pytest.raises(ConflictError, match="an earlier attempt at room 1 is still claimed"):
        bench.verbs.claim("a", 1)
    bench.verbs.release("a", 1)
    assert state(bench, 1) is ReceiverState.FAILED
    assert bench.verbs.claim("a", 1).generation == 2
    assert bench.free == 14


def test_metadata_beyond_what_the_answer_to_a_claim_holds_fails_the_room():
    ranks = tuple(Rank(pp=0, tp=tp) for tp in range(32))
    bench = ReceiverBench()
    bench.nodes.know(ranks=ranks, tp_size=len(ranks))
    admit(bench)
    shares = bench.service.book.get(1).writers[PREFILL].shares
    for rank in ranks:
        owed = shares[rank].rows(prompt_tokens=TOKENS, prefix_tokens=0)
        amounts = {kind: Amount(lane_rows=rows, bytes=rows) for kind, rows in owed.items() if rows}
        done(bench, rank=rank, amounts=amounts, metadata=bytes(MAX_METADATA_BYTES))
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "invalid_input")
    assert "1638400 bytes of metadata to `finish` on 25 ranks, a room carries at most 1572864" in report.reason


# ------------------------------------------------------------------------------------------- paths that are lost


def path_lost(bench: ReceiverBench, peer: str = PREFILL, rank=R0, epoch: int = 0, transport: str = "mooncake") -> None:
    message = PathLost(room=1, generation=1, writer=rank, transport=transport, epoch=epoch)
    bench.service.peers.hear(peer, message)


def test_a_room_whose_writer_has_lost_a_path_is_not_read_before_that_is_shut():
    bench = offered()
    path_lost(bench)
    assert bench.fence.paths == [(OWNER, "mooncake", 0)]
    assert state(bench) is ReceiverState.OFFERED
    assert bench.service.writers.open_offers() == {OWNER}
    done(bench)
    assert state(bench) is ReceiverState.OFFERED
    assert bench.book.state(OWNER) is PageState.LEASED
    assert bench.service.writers.open_offers() == set(), "no fence has to wait for it"
    assert "the endpoints of mooncake to be shut" in bench.service.book.get(1).waits_for
    bench.service.writers.shut({OWNER: frozenset({"mooncake"})})
    assert state(bench) is ReceiverState.COMMITTED
    assert bench.book.state(OWNER) is PageState.HELD
    assert [fact.lost for fact in bench.events.facts if isinstance(fact, RoomRerouted)] == ["mooncake"]


def test_a_writer_that_says_of_another_s_room_that_it_has_lost_a_path_is_refused():
    bench = offered()
    path_lost(bench, peer=STRANGER)
    path_lost(bench, rank=R1)
    assert bench.fence.paths == []
    done(bench)
    assert state(bench) is ReceiverState.COMMITTED


def test_a_room_whose_writer_has_lost_what_is_no_transport_fails():
    bench = offered()
    path_lost(bench, transport="pigeon")
    assert bench.fence.paths == []
    assert bench.service.book.report(1).reason_code == "protocol"


def test_an_engine_that_is_late_still_finds_the_room():
    bench = committed("a", "b")
    bench.verbs.claim("a", 1)
    bench.verbs.release("a", 1)
    assert bench.free == 14
    bench.verbs.claim("b", 1)
    bench.verbs.release("b", 1)
    assert bench.free == 16
