"""The soak's verdict: what counts as growth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.soak import Course, Figures, Look, findings

CALM = Figures(rss_mib=100, uss_mib=80, fds=40, sockets=10, threads=8, mappings=3, log_bytes=1000)


def course(last: Figures, **changes) -> Course:
    looks = [
        Look(rooms=1000, at_s=10, rooms_s=100, processes={"prefill": CALM}),
        Look(rooms=100_000, at_s=900, rooms_s=100, processes={"prefill": last}),
    ]
    return replace(Course(looks=looks, done=100_000, checked=2000), **changes)


def test_nothing_grew():
    assert findings(course(CALM)) == []


def test_a_little_may_come_and_go():
    assert findings(course(replace(CALM, uss_mib=84, fds=42, sockets=12, threads=9, log_bytes=50_000))) == []


@pytest.mark.parametrize(
    ("figure", "value"),
    [("uss_mib", 84.1), ("rss_mib", 106), ("fds", 43), ("sockets", 13), ("threads", 10), ("mappings", 4)],
)
def test_growth_is_named(figure, value):
    (found,) = findings(course(replace(CALM, **{figure: value})))
    assert found.startswith(f"prefill: {figure} grew from {getattr(CALM, figure):g} to {value:g}")


def test_a_line_of_log_for_each_room_is_too_much():
    (found,) = findings(course(replace(CALM, log_bytes=1000 + 99_000 * 330)))
    assert found == "prefill: its log grew by 36708 bytes a second"


def test_ten_lines_a_second_are_not():
    assert findings(course(replace(CALM, log_bytes=1000 + 890 * 10 * 330))) == []


def test_lost_rooms_and_unchecked_bytes_are_red():
    assert findings(course(CALM, lost=["number 7: 3 wrong rows"])) == [
        "1 rooms were lost, the first: number 7: 3 wrong rows"
    ]
    assert findings(course(CALM, checked=0)) == ["no room's bytes were compared"]


def test_a_process_that_went_or_came_is_red():
    gone = course(CALM)
    gone.looks[1].processes.clear()
    gone.looks[1].processes["prefill worker 1"] = CALM
    assert findings(gone) == ["prefill is gone", "prefill worker 1 was not there at first"]


def test_one_look_says_nothing():
    assert "only one look" in findings(Course(looks=[course(CALM).looks[0]], checked=1))[0]
