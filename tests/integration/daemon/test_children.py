"""Child processes end when told, in a hurry when needed, and leave the reason behind."""

from __future__ import annotations

import signal
import sys

import pytest

from kvbridge.core.errors import DeadlineError, PeerError
from kvbridge.daemon.children import ChildProcess, stop_all, wait_for

READY = "print('ready', flush=True)"
STUBBORN = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}; time.sleep(60)"
SECOND_TIME = (
    "import signal, sys, time; seen = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5) if seen else seen.append(1))\n"
    f"{READY}\n"
    "while True: time.sleep(0.05)"
)


@pytest.fixture
def child(tmp_path):
    made: list[ChildProcess] = []

    def start(code: str, **more) -> ChildProcess:
        child = ChildProcess(f"child {len(made)}", tmp_path / f"{len(made)}.log", **more)
        made.append(child)
        child.launch([sys.executable, "-c", code])
        wait_for("ready", lambda: "ready" in child.log(), timeout_s=20)
        return child

    yield start
    for each in made:
        each.kill()


def test_stop_is_a_term_signal(child):
    assert child(f"import time; {READY}; time.sleep(60)").stop() == -signal.SIGTERM


def test_a_stubborn_one_is_killed(child):
    stubborn = child(STUBBORN)
    stop_all([stubborn], timeout_s=0.2)
    assert stubborn.process.returncode == -signal.SIGKILL


def test_hurry_sends_the_signal_again(child):
    asked_twice = child(SECOND_TIME)
    stop_all([asked_twice], timeout_s=20, hurry_after_s=2.0)  # two signals at once would be one
    assert asked_twice.process.returncode == 5


def test_waiting_notices_an_end_before_its_deadline(child):
    running = child(f"import time; {READY}; time.sleep(60)")
    with pytest.raises(DeadlineError, match=r"a miracle: not within 0\.05 s"):
        wait_for("a miracle", lambda: None, timeout_s=0.05, watched=[running])
    running.kill()
    with pytest.raises(PeerError, match="killed by SIGKILL"):
        wait_for("a miracle", lambda: None, timeout_s=20, watched=[running])
