"""A command that runs for long says how far it is, in a log and on a terminal."""

from __future__ import annotations

import io
import time
from itertools import pairwise

import pytest
from rich.console import Console

from kvbridge.testbed.progress import ShownProgress
from tests.helpers.cluster import eventually


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120)


@pytest.mark.parametrize("terminal", [False, True])
def test_silence_is_broken_with_how_far_it_is(terminal):
    shown = console(terminal=terminal)
    with ShownProgress(shown, quiet_s=0.05) as progress:
        progress.stage("daemons are ready")
        progress.bars({"served (requests)": 4000})
        progress.advance("served (requests)", 1500)
        said = "nothing new for 0.05 s, last: daemons are ready; served (requests) 1,500 of 4,000"
        eventually("a word", lambda: shown.file.getvalue().count(said) > 1, 5.0)


def test_what_moves_on_a_terminal_needs_no_words():
    shown = console(terminal=True)
    with ShownProgress(shown, quiet_s=0.5) as progress:
        progress.bars({"served": 1 << 30})
        progress.stage("serving")
        moved_s = [time.monotonic()]
        while moved_s[-1] - moved_s[0] < 1.5:
            progress.advance("served", 1)
            moved_s.append(time.monotonic())
        progress.detail("1 of 2 served")
    stalled_s = max(later - before for before, later in pairwise(moved_s))
    assert "nothing new" not in shown.file.getvalue() or stalled_s > 0.25
    assert "1 of 2 served" not in shown.file.getvalue()


def test_a_log_has_every_line_and_no_bar():
    shown = console(terminal=False)
    with ShownProgress(shown) as progress:
        progress.bars({"served": 2})
        progress.stage("serving [both]")
        progress.detail("1 of 2 served")
    assert [line.split(" s  ")[1] for line in shown.file.getvalue().splitlines()] == ["serving [both]", "1 of 2 served"]
