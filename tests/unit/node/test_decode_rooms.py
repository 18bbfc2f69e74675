"""Rooms of a decode node: when a room that has arrived is handed over, to whom, and when its pages are free."""

from dataclasses import replace

import numpy as np
import pytest

from kvbridge.core import errors
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageTable, Rank
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.engine_messages import Provide
from kvbridge.core.wire.messages import MAX_METADATA_BYTES, Abort, Intend, Offer, PathLost, to_wire
from kvbridge.node.decode import writers
from kvbridge.node.engines import AttachedEngine
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.telemetry.facts import RoomRerouted
from tests.helpers.accounts import check_book
from tests.helpers.node_bench import DecodeBench, offered
from tests.helpers.rooms import ADDRESS, OTHER_ADDRESS, PAGE, PREFILL, R0, R1, TOKENS, full_amounts, pages_table

SECOND = "bbbb000000000001"
STRANGER = "eeee000000000001"
OWNER = Owner(1, 1)


def committed(*engines: str) -> DecodeBench:
    bench = offered()
    bench.engines.names = set(engines or ("engine",))
    bench.done()
    return bench


def claimed(*engines: str) -> DecodeBench:
    bench = committed(*engines)
    for engine in engines or ("engine",):
        bench.verbs.claim(engine)
    return bench


STAGES = {"tp_size": 1, "ranks": (Rank(pp=1, tp=0),), "stage_boundaries": (1,)}


@pytest.mark.parametrize(
    ("first", "second", "complaint"),
    [
        ({}, {"ranks": (R0,)}, "both hold rank pp0.tp0"),
        ({}, {"ranks": ()}, "has no rank"),
        ({}, {"tp_size": 4}, "prefill/aaaa (ranks pp0.tp0 of pp_size 1 x tp_size 2) and prefill/bbbb (ranks pp0.tp1"),
        ({}, {"instance": "other"}, "are not of one instance"),
        ({}, {"ranks": (Rank(pp=0, tp=2),)}, "prefill/bbbb (ranks pp0.tp2 of pp_size 1 x tp_size 2) has rank pp0.tp2"),
        ({"tp_size": 1, "stage_boundaries": (2,)}, STAGES, "stages from layers (2,)) and prefill/bbbb"),
        ({}, None, "rank pp0.tp1 of prefill instance prefill is on none of prefill/aaaa (ranks pp0"),
        ({"tp_size": 2**60}, None, "rank pp0.tp1 of prefill instance"),
    ],
)
def test_nodes_that_cannot_be_one_instance_fail_the_room_before_anything_is_offered(first, second, complaint):
    """When stages are drawn differently, both nodes would send one layer, or neither would."""
    bench = DecodeBench()
    bench.nodes.know(**({"tp_size": 2} | first))
    if second is not None:
        bench.nodes.know(OTHER_ADDRESS, SECOND, **({"ranks": (R1,), "tp_size": 2} | second))
    report = bench.admit(prefill=(ADDRESS, OTHER_ADDRESS) if second is not None else (ADDRESS,))
    assert (report.state, report.reason_code) == (RoomState.FAILED, "invalid_input")
    assert complaint in report.reason
    assert bench.told(Offer) == []
    assert bench.free == 16


def messages_about(bench: DecodeBench, room: int = 1) -> list[tuple[object, type]]:
    return [(peer, type(message)) for peer, message in bench.nodes.messages if message.room == room]


def test_a_room_that_ends_for_one_prefill_node_is_given_up_at_the_others():
    bench = DecodeBench()
    bench.admit(prefill=(ADDRESS, OTHER_ADDRESS))
    bench.nodes.know(OTHER_ADDRESS, SECOND, (R1,), tp_size=2)
    bench.nodes.answers[ADDRESS] = errors.FingerprintMismatchError("layer_count is 3 here and 4 on the peer")
    bench.service.nodes_changed()
    assert bench.state() is DecodeState.FAILED
    assert messages_about(bench) == [(SECOND, Intend), (SECOND, Abort)]
    assert len(bench.service.withdrawn) == 0


def test_what_nodes_that_never_answer_were_to_be_told_is_bounded(monkeypatch):
    monkeypatch.setattr(writers, "MOST_WITHDRAWN", 3)
    bench = DecodeBench()
    for room in range(1, 6):
        bench.admit(room)
        bench.stop(room)
    assert len(bench.service.withdrawn) == 3
    bench.nodes.know()
    bench.service.nodes_changed()
    assert [message.room for _, message in bench.nodes.messages] == [3, 3, 4, 4, 5, 5]


@pytest.mark.parametrize("factor", [0, 2])
def test_a_wrong_amount_fails_closed_and_waits_for_nobody_who_is_done(factor):
    bench = offered()
    wrong = {kind: Amount(lane_rows=amount.lane_rows * factor) for kind, amount in full_amounts(TOKENS).items()}
    bench.done(amounts=wrong)
    report = bench.report()
    assert (report.state, report.reason_code) == (RoomState.FAILED, "integrity")
    assert "rank pp0.tp0 of prefill node prefill/aaaa is done, but mha_kv" in report.reason
    assert bench.free == 16
    with pytest.raises(errors.RoomFailedError, match="is done, but"):
        bench.verbs.claim()


def test_metadata_beyond_what_the_answer_to_a_claim_holds_fails_the_room():
    ranks = tuple(Rank(pp=0, tp=tp) for tp in range(32))
    bench = DecodeBench()
    bench.nodes.know(ranks=ranks, tp_size=len(ranks))
    bench.admit()
    shares = bench.room().writers[PREFILL].shares
    for rank in ranks:
        owed = shares[rank].rows(prompt_tokens=TOKENS, prefix_tokens=0)
        amounts = {kind: Amount(lane_rows=rows, bytes=rows) for kind, rows in owed.items() if rows}
        bench.done(rank=rank, amounts=amounts, metadata=bytes(MAX_METADATA_BYTES))
    report = bench.report()
    assert (report.state, report.reason_code) == (RoomState.FAILED, "invalid_input")
    assert "1638400 bytes of metadata to `finish` on 25 ranks, a room carries at most 1572864" in report.reason


def path_lost(bench: DecodeBench, peer: str = PREFILL, rank=R0, transport: str = "mooncake") -> None:
    bench.hear(PathLost(room=1, generation=1, writer=rank, transport=transport, epoch=0), peer)


def test_a_room_whose_writer_has_lost_a_path_is_not_read_before_that_is_shut():
    bench = offered()
    path_lost(bench)
    assert bench.fence.paths == [(OWNER, "mooncake", 0)]
    assert bench.service.open_offers() == {OWNER}
    bench.done()
    assert bench.state() is DecodeState.OFFERED
    assert bench.book.state(OWNER) is PageState.LEASED
    assert bench.service.open_offers() == set(), "no fence has to wait for it"
    assert "the endpoints of mooncake to be shut" in bench.room().waits_for
    bench.service.shut({OWNER: frozenset({"mooncake"})})
    assert bench.state() is DecodeState.COMMITTED
    assert bench.book.state(OWNER) is PageState.HELD
    assert [fact.lost for fact in bench.events.of(RoomRerouted)] == ["mooncake"]


def test_a_room_whose_writer_has_lost_what_is_no_transport_fails():
    bench = offered()
    path_lost(bench, transport="pigeon")
    assert (bench.fence.paths, bench.report().reason_code) == ([], "protocol")


def test_claims_are_refused_before_the_commit_after_the_end_and_twice():
    bench = offered()
    verbs = bench.verbs
    with pytest.raises(errors.ConflictError, match="not committed yet"):
        verbs.claim()
    bench.done()
    for verb in (verbs.release, lambda: verbs.extend("engine", 1, TOKENS)):
        with pytest.raises(errors.ConflictError, match="not claimed by this engine"):
            verb()
    verbs.claim()
    with pytest.raises(errors.ConflictError, match="already claimed"):
        verbs.claim()
    verbs.release()
    with pytest.raises(errors.RoomFailedError, match="is over"):
        verbs.claim()
    with pytest.raises(errors.ConflictError, match="not claimed by this engine"):
        verbs.release()


def test_an_engine_that_is_late_still_finds_the_room():
    bench = committed("a", "b")
    assert bench.room().state in bench.service.waits_for_engine
    bench.verbs.claim("a")
    assert bench.room().state not in bench.service.waits_for_engine
    bench.verbs.release("a")
    assert bench.free == 14
    bench.verbs.claim("b")
    bench.verbs.release("b")
    assert bench.free == 16


def test_a_process_that_never_claims_keeps_no_page_of_ranks_that_others_have_read():
    """An observer or a half-started engine: ranks are waited for, and not processes."""
    bench = committed("a", "observer")
    bench.engines.ranks["observer"] = bench.engines.ranks_of("a")
    bench.verbs.claim("a")
    bench.verbs.release("a")
    assert bench.free == 16


@pytest.mark.parametrize("followed", [True, False])
def test_pages_of_a_reader_whose_process_is_not_seen_to_end_are_quarantined(followed):
    bench = claimed()
    assert bench.service.engine_gone("engine", "its connection has ended", followed=followed)
    assert bench.quarantined == (set() if followed else {"engine_process_alive"})
    bench.wait(1_000)
    assert (bench.free, bench.quarantined) == (14, {"engine_process_alive"})
    bench.service.engine_ended("engine")
    assert (bench.free, bench.quarantined) == (16, set())


def test_device_memory_that_died_with_its_worker_takes_what_had_arrived_along():
    waiting, read = committed(), claimed()
    for bench in (waiting, read):
        bench.service.worker_gone(R0, "killed", memory_lost=True)
        assert (bench.report().state, bench.report().reason_code) == (RoomState.FAILED, "worker_gone")
    assert (waiting.state(), waiting.free) == (DecodeState.FAILED, 16)
    assert (read.state(), read.free, read.engines.kinds[-1]) == (DecodeState.FAILING_CLAIMED, 14, "cancel")
    read.verbs.release()
    assert (read.state(), read.free) == (DecodeState.FAILED, 16)


def test_extending_reserves_what_is_missing_and_nothing_else():
    bench = claimed()
    before = bench.room().tables[IndexSpace.FULL].ids

    def extend(tokens: int) -> list[int]:
        return bench.verbs.extend("engine", 1, tokens)[IndexSpace.FULL].ids.tolist()

    with pytest.raises(errors.InvalidInputError, match="cannot shrink"):
        extend(TOKENS - 1)
    assert extend(TOKENS) == before.tolist()
    more = extend(TOKENS + 1)
    assert (more[:2], len(more)) == (before.tolist(), 3)
    assert extend(TOKENS + PAGE) == more
    bench.admit(2, 13 * PAGE)
    with pytest.raises(errors.CapacityError):
        extend(4 * PAGE)
    assert extend(3 * PAGE) == more


def test_an_engine_releases_the_attempt_that_it_has_claimed():
    bench = claimed("a", "b")
    bench.service.engine_gone("b", "killed")
    bench.service.engine_ended("b")
    bench.admit(generation=2)
    bench.done(generation=2)
    with pytest.raises(errors.ConflictError, match="an earlier attempt at room 1 is still claimed"):
        bench.verbs.claim("a")
    bench.verbs.release("a")
    assert bench.state() is DecodeState.FAILED
    assert bench.verbs.claim("a").generation == 2
    assert bench.free == 14


def adopting(*rooms: int) -> DecodeBench:
    bench = DecodeBench(adopted=True)
    bench.nodes.know()
    for room in rooms or (1,):
        assert bench.admit(room).state is RoomState.ADMITTED
    return bench


def test_adopted_pages_are_asked_for_and_then_offered():
    bench = adopting()
    assert bench.engines.kinds == ["wanted"]
    with pytest.raises(errors.InvalidInputError, match="needs 2 pages"):
        bench.verbs.provide(1, pages_table(4))
    bench.verbs.provide(1, pages_table(4, 5))
    assert bench.told(Offer)[0].tables == to_wire(pages_table(4, 5))
    with pytest.raises(errors.ConflictError, match="does not wait for pages"):
        bench.verbs.provide(1, pages_table(6, 7))
    assert bench.book.state(OWNER) is PageState.LEASED


def test_an_engine_says_what_its_pages_hold_already():
    """Nobody else is believed: what a room's fresh pages hold is what an earlier room left there."""
    bench = adopting()
    for prefix in (1, TOKENS + PAGE):
        with pytest.raises(errors.InvalidInputError, match="must be a multiple of 256 and at most prompt_tokens"):
            bench.verbs.provide(1, pages_table(4, 5), prefix_tokens=prefix)
    bench.verbs.provide(1, pages_table(4, 5), prefix_tokens=PAGE)
    assert (bench.told(Offer)[0].prefix_tokens, bench.report().prefix_tokens) == (PAGE, PAGE)
    bench.done(amounts=full_amounts(TOKENS, PAGE))
    assert bench.state() is DecodeState.COMPLETED


def test_rooms_may_have_the_pages_of_a_common_prefix_and_only_the_rest_is_leased():
    bench = adopting(1, 2, 3)
    bench.verbs.provide(1, pages_table(4, 5), prefix_tokens=PAGE)
    bench.verbs.provide(2, pages_table(4, 6), prefix_tokens=PAGE)
    with pytest.raises(errors.ConflictError, match="are leased: a peer may still write them for room 1 generation 1"):
        bench.verbs.provide(3, pages_table(5, 7), prefix_tokens=PAGE)
    with pytest.raises(errors.ConflictError, match=r"page 4 .* belongs to room 1 generation 1 and room 2 generation 1"):
        bench.verbs.provide(3, pages_table(4, 7))
    counts = bench.book.counts()[IndexSpace.FULL]
    assert (counts[PageState.LEASED], counts[PageState.CACHED]) == (2, 1)
    check_book(bench.book)


def test_what_lies_in_the_nodes_host_pool_has_no_prefix():
    """The engine brings the device pages; those of the host pool are the daemon's, and fresh."""
    service = adopting().service
    service.settings = replace(service.settings, host=frozenset({ComponentKind.MHA_KV}))
    service.pages = replace(service.pages, book=PageBook({IndexSpace.HOST: 2}, adopted={IndexSpace.FULL: 16}))
    engine, host = AttachedEngine("engine", 0, ()), PageTable(IndexSpace.HOST, np.array([1], dtype=np.int32))
    with pytest.raises(errors.InvalidInputError, match=r"mha_kv of the room lies in host memory.*must be 0 here"):
        service.provide(engine, Provide(call=1, room=1, tables=(), prefix_tokens=PAGE))
    with pytest.raises(errors.InvalidInputError, match="host pages belong to the daemon"):
        service.provide(engine, Provide(call=1, room=1, tables=to_wire({IndexSpace.HOST: host})))


def test_amounts_that_add_up_do_not_count_unless_each_rank_reports_its_own():
    bench = DecodeBench()
    bench.nodes.know(tp_size=2)
    bench.nodes.know(OTHER_ADDRESS, SECOND, (R1,), tp_size=2)
    bench.admit(prefill=(ADDRESS, OTHER_ADDRESS))
    whole = full_amounts(TOKENS)
    more, less = ({kind: Amount(lane_rows=one.lane_rows * part // 4) for kind, one in whole.items()} for part in (3, 1))
    bench.done(amounts=more)
    assert bench.report().reason_code == "integrity"
    assert "rank pp0.tp0 of prefill node prefill/aaaa is done, but mha_kv: " in bench.report().reason
    bench.done(SECOND, R1, amounts=less)
    assert (bench.state(), bench.free) == (DecodeState.FAILED, 16)
