"""What engine processes report, and how their silence and their end are noticed."""

from __future__ import annotations

import sys
import time

import pytest

from kvbridge.core.errors import DeadlineError, PeerError
from kvbridge.testbed.demo.job import EVENTS, Attach
from kvbridge.testbed.engines.messages import Attached
from kvbridge.testbed.engines.processes import EngineProcess, Reports


@pytest.fixture
def started(tmp_path):
    """Start an 'engine' that is a few lines of Python."""
    engines: list[EngineProcess] = []

    def start(code: str, *, silence_s: float = 60.0) -> tuple[EngineProcess, Reports]:
        reports = Reports(silence_s=silence_s)
        engine = EngineProcess(
            "kvbridge.testbed.demo", "decode", "the decode engine", tmp_path, events=EVENTS, reports=reports.queue
        )
        engines.append(engine)
        engine.launch([sys.executable, "-c", code], piped=True)
        engine._reader.start()
        return engine, reports

    yield start
    for engine in engines:
        engine.kill()
        engine.dismiss()
        engine.process.stdout.close()


def nothing() -> None:
    """No further check."""


def test_an_event_arrives(started):
    engine, reports = started("""print('{"type": "attached"}', flush=True); input()""")
    assert reports.next([engine], check=nothing) == (engine, Attached())


def test_orders_are_lines(started):
    engine, reports = started("""import sys; print(sys.stdin.readline(), end="", flush=True); input()""")
    engine.order(Attach())
    with pytest.raises(PeerError, match="is no event"):  # an order is no event, which shows that it came back
        reports.next([engine], check=nothing)


def test_a_failure_is_told_in_its_words(started):
    engine, reports = started("""print('{"type": "failed", "message": "no luck"}', flush=True)""")
    with pytest.raises(PeerError, match="the decode engine failed: no luck"):
        reports.next([engine], check=nothing)


def test_last_words_come_before_the_end(started):
    code = """print('{"type": "attached"}', flush=True); raise SystemExit(7)"""
    engine, reports = started(code)
    assert reports.next([engine], check=nothing)[1] == Attached()
    with pytest.raises(PeerError, match=r"ended \(exit code 7\); its log is empty"):
        reports.next([engine], check=nothing)


def test_the_log_of_a_dead_engine_is_shown(started):
    engine, reports = started("raise RuntimeError('out of luck')")
    with pytest.raises(PeerError, match="RuntimeError: out of luck"):
        reports.next([engine], check=nothing)


def test_killed_is_noticed_at_once(started):
    engine, reports = started("input()")
    engine.kill()
    begun_s = time.monotonic()
    with pytest.raises(PeerError, match="killed by SIGKILL"):
        reports.next([engine], check=nothing)
    assert time.monotonic() - begun_s < 30, "it was told by its end, not by its silence"


def test_silence_ends(started):
    engine, reports = started("input()", silence_s=0.3)
    with pytest.raises(DeadlineError, match=r"0\.3 s \(--patience\)"):
        reports.next([engine], check=nothing)


def test_a_dead_daemon_ends_the_wait(started):
    engine, reports = started("input()")

    def check() -> None:
        raise PeerError("bootstrap ended")

    with pytest.raises(PeerError, match="bootstrap ended"):
        reports.next([engine], check=check)


def test_an_ended_engine_takes_no_orders(started):
    engine, _ = started("pass")
    engine.process.wait(20)
    with pytest.raises(PeerError, match="takes no orders any more"):
        engine.order(Attach())
