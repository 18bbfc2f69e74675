"""What users are told of a room that waits: in which state, for what, with whom, and what is listed."""

from __future__ import annotations

import numpy as np

from kvbridge.api.rooms import AdmissionRequest, RoomQuery, RoomReport
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.wire.messages import Abort, Done, Offer, to_wire
from kvbridge.telemetry.events import RoomEntered
from tests.helpers.rooms import ADDRESS, DECODE, PAGE, PREFILL, R0, ReceiverBench, SenderBench, full_amounts

TOKENS = 2 * PAGE
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
    assert rooms(states={"admitted"}) == [2, 3]
    assert rooms(client="a") == [2]
    assert rooms(client="") == [1]
    assert rooms(peer=PEER) == rooms(peer="decode") == [1]
    assert rooms(peer="dec") == []
    page = bench.service.book.page(RoomQuery(limit=2))
    assert [report.room for report in bench.service.book.page(RoomQuery(after=page.next)).rooms] == [3]
