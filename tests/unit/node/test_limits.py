"""Reports about rooms that wait, and limits: a room whose limit runs out gives all back, and clients' accounts are even."""

import pytest

from kvbridge.api.rooms import RoomQuery, RoomReport
from kvbridge.core.errors import ConflictError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Drained, Failed
from kvbridge.telemetry.facts import RoomEntered
from tests.helpers.node_bench import DecodeBench, NodeBench, PrefillBench, offered
from tests.helpers.rooms import ADDRESS, DECODE, PAGE, PREFILL, TOKENS

WHY = "no prefill engine has begun it in time (limit: begin_within_s)"
PEER = f"decode/{DECODE}"


def limit(bench: NodeBench) -> tuple[str, float | None]:
    return bench.report().limit, bench.report().expires_in_s


def run_out(bench: NodeBench) -> RoomReport:
    """Let exactly the time pass that the room says it has left."""
    left_s = bench.report().expires_in_s
    assert left_s is not None
    bench.wait(left_s - 0.01)
    assert not bench.report().state.final
    bench.wait(0.01)
    return bench.report()


@pytest.mark.parametrize("is_offered", [False, True])
def test_prefill_a_ticket_that_no_engine_uses(is_offered):
    bench = PrefillBench()
    bench.admit(begin_within_s=20.0, client="a")
    bench.clock.advance(5)
    if is_offered:
        bench.offer()
    assert limit(bench) == ("begin_within_s", 15)
    report = run_out(bench)
    assert (report.state, report.reason_code, report.reason) == (RoomState.FAILED, "deadline", WHY)
    with pytest.raises(ConflictError, match="no prefill engine has begun it in time"):
        bench.verbs.begin()
    if is_offered:
        bench.closed()
        [failed], [drained] = bench.told(Failed), bench.told(Drained)
        assert (failed.code, failed.message, drained.in_transit) == ("deadline", WHY, False)
    bench.all_is_back()


@pytest.mark.parametrize("adopted", [False, True])
def test_decode_a_ticket_that_runs_out_before_the_offer(adopted):
    bench = DecodeBench(adopted=adopted)
    bench.admit(begin_within_s=5.0, client="a")
    assert limit(bench) == ("begin_within_s", 5)
    assert run_out(bench).reason == WHY
    bench.all_is_back()


def test_decode_prefill_says_whether_a_ticket_was_used():
    """Decode counts the ticket down too, but only prefill knows what engines do: silence means that one has begun."""
    bench = DecodeBench()
    bench.nodes.know()
    bench.admit(begin_within_s=5.0, client="a")
    assert limit(bench) == ("begin_within_s", 5)
    bench.wait(5)
    assert limit(bench) == ("timeouts.room_s", 595)
    bench.hear(Failed(room=1, generation=1, code="deadline", message=WHY))
    bench.drained()
    report = bench.report()
    assert (report.state, report.reason_code) == (RoomState.FAILED, "deadline")
    assert report.reason == f"prefill node prefill/{PREFILL[:4]}: {WHY}"
    bench.all_is_back()


def test_a_room_in_use_has_no_limit():
    bench = offered()
    bench.room().state = DecodeState.COMMITTED
    bench.verbs.claim()
    assert limit(bench) == ("", None)


def told(bench: NodeBench) -> tuple[str, str]:
    report = bench.report()
    return report.state.value, report.waits_for


def test_prefill_says_what_it_waits_for_from_its_admission_to_its_end():
    bench = PrefillBench()
    bench.admit()
    assert told(bench) == ("admitted", "a prefill engine to begin it, and for the decode node to offer its pages")
    bench.offer()
    assert told(bench) == ("offered", "a prefill engine to begin it"), "nothing is transferred before there is anything"
    bench.verbs.begin()
    bench.verbs.publish(upto_token=PAGE)
    progress = f"({PAGE} of {TOKENS} tokens are published)"
    assert told(bench) == ("transferring", f"the prefill engine to publish and finish it {progress}")
    bench.verbs.publish()
    bench.verbs.finish()
    assert told(bench) == ("transferring", "rank workers pp0.tp0 to send it")
    assert (bench.report().peers, bench.report().pages) == ((PEER,), {IndexSpace.FULL: 2})
    bench.abort()
    assert told(bench) == ("aborting", "rank workers pp0.tp0 to be quiet")
    states = [fact.state.value for fact in bench.events.of(RoomEntered)]
    assert states == ["admitted", "offered", "transferring", "aborting"]


def test_decode_says_what_it_waits_for_from_its_admission_to_its_end():
    bench = DecodeBench()
    bench.admit()
    assert told(bench) == ("admitted", f"prefill nodes {ADDRESS.endpoint} to answer")
    bench.nodes.know()
    bench.service.nodes_changed()
    (name,) = bench.report().peers
    assert told(bench) == ("offered", f"prefill ranks pp0.tp0 of {name} to send everything")
    bench.done()
    assert told(bench) == ("committed", "a decode engine to claim it")
    bench.verbs.claim()
    assert told(bench) == ("claimed", "engines engine to release it")
    bench.verbs.release()
    assert told(bench) == ("completed", "")
    assert (bench.report().peers, bench.report().pages) == ((name,), {}), "a receipt still says who it came from"


def test_decode_says_whose_proof_it_waits_for():
    bench = offered()
    (name,) = bench.report().peers
    bench.stop()
    assert told(bench) == ("aborting", f"prefill nodes {name} to prove that they write nothing more")
    bench.drained(in_transit=True)
    assert told(bench) == ("aborting", "its writers to be shut out")
    assert bench.report().quarantine == "writer_being_shut_out"


def test_rooms_are_listed_by_state_client_and_peer():
    bench = PrefillBench()
    bench.admit()
    bench.offer()
    bench.admit(2, client="a")
    bench.admit(3, client="b")

    def rooms(**query: object) -> list[int]:
        return [report.room for report in bench.service.book.page(RoomQuery(**query)).rooms]

    assert rooms() == [1, 2, 3]
    assert rooms(state={"admitted"}) == [2, 3]
    assert rooms(client="a") == [2]
    assert rooms(client="") == [1]
    assert rooms(peer=PEER) == rooms(peer="decode") == [1]
    assert rooms(peer="dec") == []
