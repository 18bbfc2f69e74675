"""Which request is asked for when, and what becomes of each."""

from __future__ import annotations

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.testbed.replay.job import Arrived
from kvbridge.testbed.replay.ledger import MOST_SAMPLES
from kvbridge.testbed.replay.report import Ending, ReplayReport
from tests.unit.testbed.replays import ledger, wrong_row


def numbers(requests) -> list[int]:
    return [request.number for request in requests]


def reported(book) -> ReplayReport:
    return book.report(Ending.COMPLETED, "", pool_bytes=0, pages_left=0, seconds={})


def arrive(book, number: int, *, wrong: int = 0) -> None:
    book.arrived(
        Arrived(
            number=number,
            amounts={ComponentKind.C4_KV: Amount(lane_rows=1, bytes=10, operations=1)},
            phases_s={"move": 0.5},
            after_prefill_s=0.1,
            computed_tokens=0,
            prefix_tokens=0,
            check_s=0.2,
            checked_bytes=9,
            wrong_bytes=wrong,
            wrong_rows=(wrong_row(),) if wrong else (),
        )
    )


def serve(book, number: int, room: int) -> None:
    request = book._requests[number - 1]
    book.admitted(request, room, asked_s=1.0, now_s=1.25)
    book.finished(number, begun_s=1.5, finished_s=2.0)
    arrive(book, number)
    book.released(number, 3.0)


def test_requests_come_when_they_are_due(tmp_path):
    book = ledger(tmp_path, 4, speed=1.0, max_in_flight=8)
    assert numbers(book.due(0.0)) == [1]
    book.sample(10.0, {})
    book.admitted(book._requests[0], 7, asked_s=0.0, now_s=0.01)
    assert book.next_due_s() == 0.05
    assert numbers(book.due(0.11)) == [2, 3]


def test_no_more_are_in_play_than_may_be(tmp_path):
    book = ledger(tmp_path, 4, speed=0.0, max_in_flight=2)
    assert numbers(book.due(0.0)) == [1, 2]
    serve(book, 1, room=11)
    assert numbers(book.due(5.0)) == [2, 3]


def test_a_request_that_was_sent_away_keeps_its_place(tmp_path):
    book = ledger(tmp_path, 4, speed=0.0, max_in_flight=2)
    first = book.due(0.0)[0]
    book.sent_away(first, "capacity", "full", now_s=0.0, retry_s=1.5)
    assert numbers(book.due(1.0)) == [2]
    book.sample(100.0, {})
    book.admitted(book._requests[1], 5, asked_s=0.0, now_s=0.0)
    assert book.next_due_s() == 1.5
    assert numbers(book.due(1.5)) == [1]


def test_it_is_given_up_in_the_end(tmp_path):
    book = ledger(tmp_path, 1, retry_for_s=10.0)
    request = book.due(0.0)[0]
    for now_s in (0.0, 5.0, 10.0, 10.5):
        assert not book.all_ended
        book.sent_away(request, "capacity", "no pages", now_s=now_s, retry_s=1.0)
    assert book.all_ended
    found = reported(book)
    assert (found.refused, found.refusals) == (1, {"capacity": 4})
    assert found.unserved[0].reason == "refused for more than 10 s (--retry-for): no pages"
    assert not found.good


def test_a_request_that_never_fits_is_not_asked_for_again(tmp_path):
    book = ledger(tmp_path, 1)
    book.turned_down(book.due(0.0)[0], "too long")
    assert book.all_ended
    assert reported(book).refused == 1


def test_a_served_request_is_summed_up(tmp_path):
    book = ledger(tmp_path, 1)
    book.due(0.0)
    serve(book, 1, room=11)
    assert book.all_ended
    found = reported(book)
    assert found.good
    assert (found.completed, found.prompt_tokens, found.checked_bytes, found.most_in_flight) == (1, 1, 9, 1)
    assert {name: phase.p50_s for name, phase in found.phases.items()} == {
        "ticket": 0.25,
        "admission": 1.25,
        "engine_queue": 0.25,
        "prefill": 0.5,
        "move": 0.5,
        "after_prefill": 0.1,
        "check": 0.2,
        "hold": 0.7,
        "total": 3.0,
    }


def test_one_wrong_byte_makes_it_bad(tmp_path):
    book = ledger(tmp_path, 1)
    book.admitted(book.due(0.0)[0], 77, asked_s=0.0, now_s=0.0)
    arrive(book, 1, wrong=1)
    book.released(1, 1.0)
    found = reported(book)
    assert (found.mismatched_bytes, found.good) == (1, False)
    assert "c4_kv layer 4 lane 0 row 100, page 3 slot 36" in str(found.wrong_rows[0])


def test_a_room_that_ended_early_counts_once(tmp_path):
    book = ledger(tmp_path, 2, speed=0.0)
    for request in book.due(0.0):
        book.admitted(request, 10 + request.number, asked_s=0.0, now_s=0.0)
    book.failed(11, "the node is gone")
    book.failed(11, "and again")
    book.failed(999, "of somebody else")
    assert book.in_flight == 1
    found = reported(book)
    assert (found.failed, found.completed) == (1, 0)
    assert [(each.number, each.room, each.reason) for each in found.unserved] == [(1, 11, "the node is gone")]


def test_long_replays_are_sampled_less_often(tmp_path):
    book = ledger(tmp_path, 1)
    book.admitted(book.due(0.0)[0], 5, asked_s=0.0, now_s=0.0)  # so that nothing but a sample is due
    for _ in range(2 * MOST_SAMPLES):
        at_s = book.next_due_s() if book._samples else 0.0
        assert book.sample_due(at_s)
        book.sample(at_s, {})
        assert not book.sample_due(at_s + 0.5)
    assert len(reported(book).occupancy) <= MOST_SAMPLES
    assert at_s > 2 * MOST_SAMPLES


def test_paths_of_this_machine_stay_out_of_the_report(tmp_path):
    here = {name: tmp_path / name for name in ("report_file", "plot_file", "keep_logs")}
    assert str(tmp_path) not in reported(ledger(tmp_path, 1, **here)).model_dump_json()
