"""What users are told of a room that waits, and limits: one that runs out gives all back, and clients' accounts are even."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest, RoomQuery, RoomReport
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.errors import ConflictError, NotReadyError
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.engine_messages import Admit, Attach, Refused
from kvbridge.core.wire.features import Features
from kvbridge.core.wire.messages import Abort, Done, Drained, Failed, Offer, to_wire
from kvbridge.core.wire.worker_messages import RoomClosed
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_api import EngineApi
from kvbridge.node.engines import AttachedEngines
from kvbridge.telemetry.events import RoomEntered
from tests.helpers.rooms import ADDRESS, DECODE, PAGE, PREFILL, R0, ReceiverBench, SenderBench, full_amounts

TOKENS = 2 * PAGE
TABLES = to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array([7, 8], dtype=np.int32))})


def request(**more: object) -> AdmissionRequest:
    return AdmissionRequest(**{"room": 1, "prompt_tokens": TOKENS, "client": "a", **more})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("offered", [False, True])
def test_prefill_a_ticket_that_no_engine_uses(offered):
    bench = SenderBench()
    bench.service.requests.admit(request(begin_within_s=20.0))
    bench.clock.advance(5)
    if offered:
        bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=TABLES))
    assert limit(bench) == ("begin_within_s", 15)
    report = run_out(bench)
    why = "no prefill engine has begun it in time (limit: begin_within_s)"
    assert (report.state, report.reason_code, report.reason) == (RoomState.FAILED, "deadline", why)
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
    bench.clock.advance(2)
    bench.tick()
    assert not bench.service.book.report(1).state.final


def test_a_ticket_does_not_outlast_the_limits_of_the_daemon():
    bench = SenderBench()
    bench.service.requests.admit(request(begin_within_s=1e300))
    assert limit(bench) == ("timeouts.offer_s", 60)


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
    bench.clock.advance(5)
    bench.tick()
    assert limit(bench) == ("timeouts.room_s", 595)
    why = "no prefill engine has begun it in time (limit: begin_within_s)"
    bench.service.peers.hear(PREFILL, Failed(room=1, generation=1, code="deadline", message=why))
    bench.service.peers.hear(PREFILL, Drained(room=1, generation=1))
    report = bench.service.book.report(1)
    assert (report.state, report.reason_code) == (RoomState.FAILED, "deadline")
    assert report.reason == f"prefill node prefill/{PREFILL[:4]}: {why}"
    all_is_back(bench)


# ------------------------------------------------------------------------------------------- what is asked about


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
    refused = api.call(Admit(call=3, room=2, prompt_tokens=PAGE))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == ("capacity", 0.1), "nothing has been released yet: soon"
    assert api.bench.events.refusals == {"capacity": 1}


def test_engines_are_one_client_of_their_own():
    api = Api(SenderBench(), client_max_rooms=1)
    api.call(Admit(call=2, room=1, prompt_tokens=PAGE))
    refused = api.call(Admit(call=3, room=2, prompt_tokens=PAGE))
    assert isinstance(refused, Refused)
    assert refused.code == "client_limit"
    assert "client 'engine' has 1 rooms" in refused.message


def test_a_room_in_use_has_no_limit():
    bench = receiver()
    bench.service.book.get(1).state = ReceiverState.COMMITTED
    bench.verbs.claim("engine", 1)
    assert limit(bench) == ("", None)


# ------------------------------------------------------------------------------------------- what users are told

PEER = f"decode/{DECODE}"


def told(bench: SenderBench | ReceiverBench) -> tuple[str, str]:
    report = bench.service.book.report(1)
    return report.state.value, report.waits_for


def admit(bench: SenderBench | ReceiverBench, room: int = 1, **more: object) -> RoomReport:
    prefill = (ADDRESS,) if isinstance(bench, ReceiverBench) else ()
    return bench.service.requests.admit(AdmissionRequest(room=room, prompt_tokens=TOKENS, prefill=prefill, **more))


def offer(bench: SenderBench) -> None:
    tables = {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array([7, 8], dtype=np.int32))}
    bench.service.peers.hear(DECODE, Offer(room=1, generation=1, prompt_tokens=TOKENS, tables=to_wire(tables)))


def offered(bench: SenderBench) -> None:
    admit(bench)
    offer(bench)


def test_prefill_says_what_it_waits_for_from_its_admission_to_its_end() -> None:
    bench = SenderBench()
    admit(bench)
    assert told(bench) == ("admitted", "a prefill engine to begin it, and for the decode node to offer its pages")
    offer(bench)
    assert told(bench) == ("offered", "a prefill engine to begin it"), "nothing is transferred before there is anything"
    bench.verbs.begin("engine", bench.ranks, 1, prompt_tokens=TOKENS, tables={})
    bench.verbs.publish("engine", bench.ranks, 1, upto_token=PAGE, layers=None)
    progress = f"({PAGE} of {TOKENS} tokens are published)"
    assert told(bench) == ("transferring", f"the prefill engine to publish and finish it {progress}")
    bench.verbs.publish("engine", bench.ranks, 1, upto_token=TOKENS, layers=None)
    bench.verbs.finish("engine", bench.ranks, 1, metadata=b"")
    assert told(bench) == ("transferring", "rank workers pp0.tp0 to send it")
    report = bench.service.book.report(1)
    assert (report.peers, report.pages) == ((PEER,), {IndexSpace.FULL: 2})
    bench.service.peers.hear(DECODE, Abort(room=1, generation=1, code="aborted", message="no"))
    assert told(bench) == ("aborting", "rank workers pp0.tp0 to be quiet")
    states = [fact.state.value for fact in bench.events.of(RoomEntered)]
    assert states == ["admitted", "offered", "transferring", "aborting"]


def test_decode_says_what_it_waits_for_from_its_admission_to_its_end() -> None:
    bench = ReceiverBench()
    admit(bench)
    assert told(bench) == ("admitted", f"prefill nodes {ADDRESS.endpoint} to answer")
    bench.nodes.know()
    bench.service.writers.nodes_changed()
    (name,) = bench.service.book.report(1).peers
    assert told(bench) == ("offered", f"prefill ranks pp0.tp0 of {name} to send everything")
    bench.service.peers.hear(
        PREFILL, Done(room=1, generation=1, writer=R0, amounts=full_amounts(TOKENS), phases_s={}, metadata=b"")
    )
    assert told(bench) == ("committed", "a decode engine to claim it")
    bench.verbs.claim("engine", 1)
    assert told(bench) == ("claimed", "engines engine to release it")
    bench.verbs.release("engine", 1)
    assert told(bench) == ("completed", "")
    report = bench.service.book.report(1)
    assert (report.peers, report.pages) == ((name,), {}), "a receipt still says who it came from"


def test_the_present_wait_counts_down() -> None:
    bench = SenderBench()
    admit(bench, begin_within_s=30.0)
    before = bench.service.book.report(1)
    bench.clock.advance(10)
    after = bench.service.book.report(1)
    assert (before.expires_in_s, after.expires_in_s, after.limit) == (30.0, 20.0, "begin_within_s")


def test_rooms_are_listed_by_state_client_and_peer() -> None:
    bench = SenderBench()
    offered(bench)
    admit(bench, room=2, client="a")
    admit(bench, room=3, client="b")

    def rooms(**query: object) -> list[int]:
        return [report.room for report in bench.service.book.page(RoomQuery(**query)).rooms]

    assert rooms() == [1, 2, 3]
    assert rooms(state={"admitted"}) == [2, 3]
    assert rooms(client="a") == [2]
    assert rooms(client="") == [1]
    assert rooms(peer=PEER) == rooms(peer="decode") == [1]
    assert rooms(peer="dec") == []
    page = bench.service.book.page(RoomQuery(limit=2))
    assert [report.room for report in bench.service.book.page(RoomQuery(after=page.next)).rooms] == [3]


def test_decode_says_whose_proof_it_waits_for() -> None:
    bench = ReceiverBench()
    bench.nodes.know()
    admit(bench)
    (name,) = bench.service.book.report(1).peers
    bench.service.driver.stop(bench.service.book.get(1), "no")
    assert told(bench) == ("aborting", f"prefill nodes {name} to prove that they write nothing more")
    bench.service.peers.hear(PREFILL, Drained(room=1, generation=1, in_transit=True))
    assert told(bench) == ("aborting", "its writers to be shut out")
    assert bench.service.book.report(1).quarantine == "writer_being_shut_out"
