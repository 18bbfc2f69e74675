"""Reservations have limits: in each state a room says which and how long, and one that runs out gives all back.

Both services behind the admission, and the admission over both: what is reserved is what was asked about, and clients' accounts
are even in the end.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.errors import CapacityError, ConflictError, InvalidInputError, NotReadyError
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.operations import Amount
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.engine_messages import Admit, Attach, Claim, Extend, Refused
from kvbridge.core.wire.features import Features
from kvbridge.core.wire.messages import Done, Drained, Failed, Offer, to_wire
from kvbridge.core.wire.worker_messages import RoomClosed
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_api import EngineApi
from kvbridge.node.engines import AttachedEngines
from kvbridge.pool.accounts.page_states import PageState
from tests.helpers.rooms import ADDRESS, DECODE, PAGE, PREFILL, R0, R1, ReceiverBench, SenderBench

TOKENS = 2 * PAGE
TABLES = to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array([7, 8], dtype=np.int32))})


def request(**more: object) -> AdmissionRequest:
    return AdmissionRequest(**{"room": 1, "prompt_tokens": TOKENS, "client": "a", **more})  # type: ignore[arg-type]


def sender() -> SenderBench:
    bench = SenderBench()
    bench.service.requests.admit(request())
    return bench


def receiver(*, known: bool = True, adopted: bool = False) -> ReceiverBench:
    bench = ReceiverBench(adopted=adopted)
    if known:
        bench.nodes.know()
    bench.service.requests.admit(request(prefill=(ADDRESS,)))
    return bench


def limit(bench: SenderBench | ReceiverBench) -> tuple[str, float | None]:
    report = bench.service.book.report(1)
    return report.limit, report.expires_in_s


def run_out(bench: SenderBench | ReceiverBench) -> RoomReport:
    """Let exactly the time pass that the room says it has left."""
    left_s = bench.service.book.report(1).expires_in_s
    assert left_s is not None
    bench.clock.advance(left_s - 0.01)
    bench.tick()
    assert not bench.service.book.report(1).state.final
    bench.clock.advance(0.01)
    bench.tick()
    return bench.service.book.report(1)


def all_is_back(bench: SenderBench | ReceiverBench) -> None:
    assert bench.free == bench.pages
    assert not bench.service.book.in_use
    bench.book.check_integrity()


# ------------------------------------------------------------------------------------------- limits


def test_prefill_a_room_that_nobody_offers():
    bench = sender()
    bench.clock.advance(10)
    assert limit(bench) == ("timeouts.offer_s", 50)
    assert dict(bench.service.book.in_use) == {"a": 1}
    report = run_out(bench)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "deadline")
    assert "timeouts.offer_s" in report.reason
    assert (report.limit, report.expires_in_s) == ("", None)
    all_is_back(bench)


@pytest.mark.parametrize("offered", [False, True])
def test_prefill_a_ticket_that_no_engine_uses(offered):
    bench = SenderBench()
    bench.service.requests.admit(request(begin_within_s=20.0))
    bench.clock.advance(5)
    if offered:
        bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=TABLES))
    assert limit(bench) == ("begin_within_s", 15)
    assert [one.ends_in_s for one in bench.service.book.not_begun()] == [15]
    report = run_out(bench)
    why = "no prefill engine has begun it in time (limit: begin_within_s)"
    assert (report.state, report.reason_code, report.reason) == (RoomState.FAILED, "deadline", why)
    assert not bench.service.book.not_begun()
    with pytest.raises(ConflictError, match="no prefill engine has begun it in time"):
        bench.verbs.begin("engine", (R0,), 1, prompt_tokens=TOKENS, tables={})
    if offered:
        bench.service.workers.hear(RoomClosed(rank=R0, room=1, generation=1, quiet=True))
        failed, drained = [message for _, message in bench.peers.messages]
        assert (failed.type, failed.code, failed.message) == ("failed", "deadline", why)
        assert (drained.type, drained.in_transit) == ("drained", False)
    all_is_back(bench)


@pytest.mark.parametrize("offered", [False, True])
def test_prefill_a_ticket_that_an_engine_has_used_in_time_has_no_end(offered):
    bench = SenderBench()
    bench.service.requests.admit(request(begin_within_s=20.0))
    if offered:
        bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=TABLES))
    bench.clock.advance(19)
    bench.verbs.begin("engine", (R0,), 1, prompt_tokens=TOKENS, tables={})
    assert limit(bench) == (("timeouts.room_s", 581) if offered else ("timeouts.offer_s", 41))
    assert not bench.service.book.not_begun()
    bench.clock.advance(2)
    bench.tick()
    assert not bench.service.book.report(1).state.final


def test_a_ticket_does_not_outlast_the_limits_of_the_daemon():
    bench = SenderBench()
    bench.service.requests.admit(request(begin_within_s=1e300))
    assert limit(bench) == ("timeouts.offer_s", 60)


def test_prefill_a_room_that_no_engine_begins():
    bench = sender()
    bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=TABLES))
    assert limit(bench) == ("timeouts.begin_s", 80)
    assert run_out(bench).state is RoomState.FAILED
    assert bench.free < bench.pages, "the worker has been told of the pages"
    bench.service.workers.gone(R0, "it ended")
    all_is_back(bench)


def test_prefill_an_engine_that_stops_publishing_holds_its_pages_until_it_lets_go():
    bench = sender()
    bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=TABLES))
    bench.verbs.begin("engine", (R0,), 1, prompt_tokens=TOKENS, tables={})
    bench.verbs.publish("engine", (R0,), 1, upto_token=PAGE, layers=None)
    assert run_out(bench).state is RoomState.FAILED
    assert limit(bench) == ("timeouts.drain_s", 50)
    assert bench.book.pages_being_released()[IndexSpace.FULL] == 2
    bench.service.workers.gone(R0, "it ended")
    assert bench.free < bench.pages, "the engine may still write"
    assert dict(bench.service.book.in_use) == {"a": 1}
    bench.service.engines.gone("engine", "its connection has ended")
    assert bench.free < bench.pages, "its GPU may still write"
    bench.service.engines.ended("engine")
    all_is_back(bench)


def test_decode_a_room_whose_writers_are_never_met():
    bench = receiver(known=False)
    assert limit(bench) == ("timeouts.handshake_s", 20)
    assert run_out(bench).state is RoomState.FAILED
    all_is_back(bench)


@pytest.mark.parametrize("adopted", [False, True])
def test_decode_a_ticket_that_runs_out_before_the_offer(adopted):
    bench = ReceiverBench(adopted=adopted)
    bench.service.requests.admit(request(prefill=(ADDRESS,), begin_within_s=5.0))
    assert limit(bench) == ("begin_within_s", 5)
    assert run_out(bench).reason == "no prefill engine has begun it in time (limit: begin_within_s)"
    all_is_back(bench)


def test_decode_prefill_says_whether_a_ticket_was_used():
    """Decode counts the ticket down too, but only prefill knows what engines do: silence means that one has begun."""
    bench = ReceiverBench()
    bench.nodes.know()
    bench.service.requests.admit(request(prefill=(ADDRESS,), begin_within_s=5.0))
    assert limit(bench) == ("begin_within_s", 5)
    assert [one.ends_in_s for one in bench.service.book.not_begun()] == [5]
    bench.clock.advance(5)
    bench.tick()
    assert limit(bench) == ("timeouts.room_s", 595)
    assert not bench.service.book.not_begun()
    why = "no prefill engine has begun it in time (limit: begin_within_s)"
    bench.service.peers.hear(PREFILL, Failed(room=1, generation=1, code="deadline", message=why))
    bench.service.peers.hear(PREFILL, Drained(room=1, generation=1))
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "deadline")
    assert report.reason == f"prefill node prefill/{PREFILL[:4]}: {why}"
    all_is_back(bench)


def test_decode_a_done_of_one_rank_is_a_use_of_the_ticket():
    bench = ReceiverBench()
    bench.nodes.know(ranks=(R0, R1), tp_size=2)
    bench.service.requests.admit(request(prefill=(ADDRESS,), begin_within_s=5.0))
    rows = bench.service.book.get(1).writers[PREFILL].shares[R0].rows(prompt_tokens=TOKENS, prefix_tokens=0)
    amounts = {kind: Amount(lane_rows=count, bytes=count) for kind, count in rows.items()}
    bench.service.peers.hear(PREFILL, Done(room=1, generation=1, writer=R0, amounts=amounts, phases_s={}))
    assert limit(bench) == ("timeouts.room_s", 600)


def test_decode_adopted_pages_that_are_never_named():
    bench = receiver(adopted=True)
    assert limit(bench) == ("timeouts.pages_s", 10)
    assert run_out(bench).state is RoomState.FAILED
    all_is_back(bench)


def test_decode_a_room_that_is_being_stopped_counts_as_being_released():
    bench = receiver()
    assert limit(bench) == ("timeouts.room_s", 600)
    asyncio.run(bench.service.requests.cancel(1, "enough"))
    assert limit(bench) == ("timeouts.drain_s", 50)
    assert bench.book.pages_being_released()[IndexSpace.FULL] == 2
    bench.clock.advance(50)
    bench.tick()
    assert bench.book.pages_being_released()[IndexSpace.FULL] == 0
    assert bench.book.counts()[IndexSpace.FULL][PageState.QUARANTINED] == 2
    assert dict(bench.service.book.in_use) == {"a": 1}, "a client's quarantined rooms still count as its own"


# ------------------------------------------------------------------------------------------- what is asked about


@pytest.mark.parametrize("bench", [SenderBench(pages=3), ReceiverBench(pages=3)], ids=["prefill", "decode"])
def test_the_demand_is_what_is_reserved(bench):
    more = {} if isinstance(bench, SenderBench) else {"prefill": (ADDRESS,), "max_new_tokens": PAGE}
    asked = request(**more)
    demand = bench.service.requests.demand(asked)
    bench.service.requests.admit(asked)
    assert demand == {IndexSpace.FULL: bench.pages - bench.free}
    with pytest.raises(CapacityError) as caught:
        bench.service.requests.admit(request(room=2, prompt_tokens=3 * PAGE, **(more | {"max_new_tokens": 0})))
    assert caught.value.lacking == {IndexSpace.FULL: 3 - bench.free}
    with pytest.raises(InvalidInputError, match="the whole pool has 3"):
        bench.service.requests.demand(request(room=2, prompt_tokens=4 * PAGE, **more))


def test_adopted_prefill_pools_ask_for_nothing():
    bench = SenderBench(adopted=True)
    assert bench.service.requests.demand(request()) == {}
    admission = AdmissionController(
        bench.service.requests, bench.book, limits=AdmissionConfig(), events=bench.events, clock=bench.clock
    )
    admission.tick()
    assert admission.starved_s() == 0.0


def test_a_daemon_that_lacks_workers_says_so_before_all_else():
    bench = SenderBench()
    bench.workers.lacking = "rank worker pp0.tp0 is starting"
    with pytest.raises(NotReadyError, match="is starting"):
        bench.service.requests.demand(request())


# ------------------------------------------------------------------------------------------- engines


class Api:
    """An engine's api over a bench and its admission."""

    def __init__(self, bench: SenderBench | ReceiverBench, **limits: object) -> None:
        self.answers: list[object] = []
        self.bench = bench
        admission = AdmissionController(
            bench.service.requests,
            bench.book,
            limits=AdmissionConfig(**limits),  # type: ignore[arg-type]
            events=bench.events,
            clock=bench.clock,
            draw=lambda: 0.0,
        )
        engines = AttachedEngines(lambda engine, answer: self.answers.append(answer), (R0,), bench.events)
        self.api = EngineApi(
            bench.service,  # type: ignore[arg-type]
            admission,
            engines,
            pid=lambda engine: 7,
            attached=lambda call, ranks: SimpleNamespace(features=Features()),  # type: ignore[arg-type,return-value]
        )
        self.call(Attach(call=1, role=self.bench.service.book.role))

    def call(self, message: object) -> object:
        self.api.handle("engine", message)  # type: ignore[arg-type]
        return self.answers[-1]


def test_an_engine_is_told_when_to_come_back():
    api = Api(SenderBench(pages=2), client_max_rooms=2)
    api.call(Admit(call=2, room=1, prompt_tokens=TOKENS))
    first = api.call(Admit(call=3, room=2, prompt_tokens=PAGE))
    api.bench.clock.advance(7)
    refused = api.call(Admit(call=4, room=2, prompt_tokens=PAGE))
    assert isinstance(first, Refused)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == ("capacity", 7.0), "as long again as nothing has been released"
    assert api.bench.events.refusals == {"capacity": 2}


def test_engines_are_one_client_of_their_own():
    api = Api(SenderBench(), client_max_rooms=1)
    api.call(Admit(call=2, room=1, prompt_tokens=PAGE))
    refused = api.call(Admit(call=3, room=2, prompt_tokens=PAGE))
    assert isinstance(refused, Refused)
    assert refused.code == "client_limit"
    assert "client 'engine' has 1 rooms" in refused.message


def test_an_extension_that_lacks_pages_is_told_when_to_come_back():
    bench = ReceiverBench(pages=4)
    bench.nodes.know()
    api = Api(bench)
    for room in (1, 2):
        bench.service.requests.admit(request(room=room, prefill=(ADDRESS,)))
    bench.service.book.get(1).state = ReceiverState.COMMITTED
    api.call(Claim(call=2, room=1))
    for waited_s in (0.0, 9.0):
        bench.clock.advance(waited_s)
        refused = api.call(Extend(call=3, room=1, tokens=TOKENS + 1))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == ("capacity", 9.0)


def test_a_room_in_use_has_no_limit():
    bench = receiver()
    bench.service.book.get(1).state = ReceiverState.COMMITTED
    bench.verbs.claim("engine", 1)
    assert limit(bench) == ("", None)
