"""The soak's verdict: what counts as growth."""

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


GREW = {"uss_mib": 84.1, "rss_mib": 106, "fds": 43, "sockets": 13, "threads": 10, "mappings": 4}


@pytest.mark.parametrize(
    ("last", "changes", "told"),
    [
        ({}, {}, ""),
        ({"uss_mib": 84, "fds": 42, "sockets": 12, "threads": 9, "log_bytes": 50_000}, {}, ""),
        ({"log_bytes": 1000 + 890 * 10 * 330}, {}, ""),
        ({"log_bytes": 1000 + 99_000 * 330}, {}, "prefill: its log grew by 36708 bytes a second"),
        *(
            ({name: value}, {}, f"prefill: {name} grew from {getattr(CALM, name):g} to {value:g}")
            for name, value in GREW.items()
        ),
        ({}, {"lost": ["number 7: 3 wrong rows"]}, "1 rooms were lost, the first: number 7: 3 wrong rows"),
        ({}, {"checked": 0}, "no room's bytes were compared"),
    ],
)
def test_what_grew_was_lost_or_was_not_compared_is_named(last: dict, changes: dict, told: str) -> None:
    found = findings(course(replace(CALM, **last), **changes))
    assert len(found) == bool(told)
    assert all(each.startswith(told) for each in found)


def test_a_process_that_went_or_came_is_red() -> None:
    gone = course(CALM)
    gone.looks[1].processes.clear()
    gone.looks[1].processes["prefill worker 1"] = CALM
    assert findings(gone) == ["prefill is gone", "prefill worker 1 was not there at first"]


def test_one_look_says_nothing() -> None:
    assert "only one look" in findings(Course(looks=[course(CALM).looks[0]], checked=1))[0]
