"""The report: percentiles, the verdict, the table, the picture."""

from __future__ import annotations

import json
from io import StringIO
from itertools import pairwise
from operator import mul

import pytest
from rich.console import Console

from kvbridge.cli import pictures
from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.ids import IndexSpace
from kvbridge.testbed.replay import plot
from kvbridge.testbed.replay.report import (
    PHASES,
    STEPS,
    Ending,
    PhaseSummary,
    ReplayReport,
    Unserved,
    breakdown,
    percentile,
    print_report,
)
from tests.unit.testbed import simulated
from tests.unit.testbed.replays import report, sample, wrong_row

ADDED_UP = {"verify_busy", "admit_to_commit"}
"""Phases of the table that are parts or sums of others that are drawn."""


def printed(given: ReplayReport) -> str:
    text = StringIO()
    print_report(given, Console(file=text, width=200))
    return text.getvalue()


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (1, 1), (50, 5), (51, 6), (90, 9), (99, 10), (100, 10)])
def test_percentiles_are_values_that_occurred(percent, value):
    assert percentile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], percent) == value


def test_percentiles_of_nothing_are_refused():
    with pytest.raises(InvalidInputError):
        percentile([], 50)


def test_a_phase_is_summed_up():
    phase = PhaseSummary.of([0.4, 0.1, 0.2, 0.3])
    assert (phase.count, phase.mean_s, phase.p50_s, phase.p99_s, phase.max_s) == (4, 0.25, 0.2, 0.4, 0.4)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "GOOD: 2 of 2 requests served, 0 failed, 0 refused, 4,000 bytes compared, 0 of them wrong"),
        ({"mismatched_bytes": 1}, "BAD"),
        ({"completed": 1, "failed": 1}, "BAD"),
        ({"completed": 1, "refused": 1}, "BAD"),
        ({"pages_left": 3}, "BAD"),
        ({"ending": Ending.INTERRUPTED}, "INTERRUPTED, this report is of a part"),
        ({"ending": Ending.BROKEN, "problem": "the decode daemon ended"}, "BROKEN, this report is of a part"),
    ],
)
def test_the_verdict(changes, verdict):
    given = report(**changes)
    assert given.verdict.startswith(verdict)
    assert given.good is (changes == {})
    assert printed(given).rstrip().splitlines()[-1].startswith(verdict)


def test_json_holds_all_of_it():
    found = json.loads(report().model_dump_json())
    assert found["verdict"].startswith("GOOD")
    assert found["phases"]["total"]["p99_s"] == 0.2
    del found["verdict"]
    assert ReplayReport.model_validate(found) == report()


def test_the_table_shows_what_went_wrong():
    shown = printed(
        report(
            mismatched_bytes=1,
            wrong_rows=(wrong_row(),),
            failed=1,
            completed=1,
            unserved=(Unserved(number=2, room=78, reason="the node is gone"),),
        )
    )
    assert "c4_kv layer 4 lane 0 row 100, page 3 slot 36" in shown
    assert "request 2 (room 78): the node is gone" in shown
    assert "3 capacity" in shown
    assert "brewing" in shown  # a phase that nobody here knows is shown all the same


def test_nothing_at_all_can_be_shown():
    shown = printed(report(amounts={}, phases={}, occupancy=(), seconds={}, ending=Ending.INTERRUPTED))
    assert "INTERRUPTED" in shown


def request(total: float, **steps: float) -> dict[str, float]:
    return {"total": total, **steps}


def test_steps_add_up_to_the_percentiles_of_the_whole():
    found = breakdown([request(each, prefill=0.25 * each, check=0.75 * each) for each in (0.4, 0.1, 0.3, 0.2)])
    assert list(found) == ["p50", "p90", "p99"]
    assert all(list(steps) == list(STEPS) for steps in found.values())
    assert [sum(steps.values()) for steps in found.values()] == pytest.approx([0.2, 0.4, 0.4])
    assert found["p99"]["check"] == pytest.approx(0.3)


def test_a_percentile_is_divided_as_the_requests_around_it_were():
    """Of 100 requests, two on each side count: one that is unlike its neighbours does not stand for all."""
    served = [request(float(number), prefill=float(number)) for number in range(1, 101)]
    served[49] = request(50.0, check=50.0)
    p50 = breakdown(served)["p50"]
    assert p50["prefill"] + p50["check"] == pytest.approx(50.0)
    assert p50["check"] == pytest.approx(10.0)


@pytest.mark.parametrize("served", [[], [request(0.0)]])
def test_what_took_no_time_can_be_divided(served):
    assert all(not sum(steps.values()) for steps in breakdown(served).values())


def test_the_steps_of_a_whole_replay_leave_no_gap(tmp_path):
    made = simulated.report(tmp_path)
    for percentile_, steps in made.breakdown.items():
        assert sum(steps.values()) == pytest.approx(getattr(made.phases["total"], f"{percentile_}_s"), abs=1e-5)
    assert sum(made.phases[step].mean_s for step in STEPS) == pytest.approx(made.phases["total"].mean_s, abs=1e-5)
    begun, bytes_per_s, requests_per_s = plot.rates(made.occupancy)
    widths = [end - start for start, end in pairwise([*begun, made.occupancy[-1].at_s])]
    assert sum(map(mul, bytes_per_s, widths)) == pytest.approx(made.total.bytes)
    assert sum(map(mul, requests_per_s, widths)) == pytest.approx(made.completed)


def test_rates_are_those_between_two_looks():
    looks = [(0.0, 0, 0), (0.0, 0, 0), (2.0, 1, 4000), (2.5, 3, 4000)]
    samples = [sample(at_s, completed, arrived) for at_s, completed, arrived in looks]
    assert plot.rates(tuple(samples)) == ([0.0, 2.0], [2000.0, 0.0], [0.5, 4.0])
    assert plot.rates(()) == ([], [], [])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0.00 µs"),
        (0.000049, "49.0 µs"),
        (0.001, "1.00 ms"),
        (0.0124, "12.4 ms"),
        (0.486, "486 ms"),
        (2.218, "2.22 s"),
    ],
)
def test_durations_are_short(seconds, words):
    assert plot.duration(seconds) == words


def test_the_picture_says_what_one_sees():
    assert plot.headline(report()) == (
        "Half of the requests took at most 100 ms, 99 % at most 200 ms;\n"
        "the largest part of that: prefill engine writes the prompt (100 %)"
    )
    assert plot.headline(report(breakdown={})).startswith("No request was served")
    assert plot.title(report()).startswith("2 of 2 requests of trace.jsonl served\ntiny-v4 over local, ")


def test_every_phase_and_pool_has_plain_words():
    assert tuple(plot.STEPS) == STEPS
    assert plot.STEPS.keys() | plot.INSIDE.keys() | {"total"} >= PHASES.keys() - ADDED_UP
    assert plot.INSIDE.keys() <= PHASES.keys()
    assert plot.SPACES.keys() == {space.value for space in IndexSpace}
    assert len({colour for _, colour in plot.STEPS.values()}) == len(STEPS)


@pytest.mark.parametrize("changes", [{}, {"phases": {}, "breakdown": {}, "occupancy": (), "amounts": {}}])
def test_the_picture_is_drawn(tmp_path, changes):
    pytest.importorskip("matplotlib")
    plot.draw(report(**changes), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvbridge\[plot\]'"):
        pictures.require_plots()
