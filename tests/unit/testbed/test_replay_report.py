"""The report: percentiles, the verdict, the table, the picture."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.testbed import pictures
from kvbridge.testbed.replay import plot
from kvbridge.testbed.replay.report import Ending, PhaseSummary, ReplayReport, Unserved, percentile, print_report
from tests.unit.testbed.replays import report, wrong_row


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


@pytest.mark.parametrize("changes", [{}, {"phases": {}, "breakdown": {}, "occupancy": (), "amounts": {}}])
def test_the_picture_is_drawn(tmp_path, changes):
    pytest.importorskip("matplotlib")
    plot.draw(report(**changes), tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_without_the_extra_it_is_named(monkeypatch):
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvbridge\[plot\]'"):
        pictures.require_plots()
