"""Probing a mooncake peer from several transports of one process at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvbridge.config.transports import MooncakeSettings
from kvbridge.transport import mooncake_library

LIMIT_S = 5.0


class SlowLibrary:
    """Answers a probe when it is let."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answer = threading.Event()
        self.probes = 0

    def send_probe(self, session: str) -> int:
        self.probes += 1
        self.asked.release()
        assert self.answer.wait(LIMIT_S)
        return 0 if session == "there:1" else -1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SlowLibrary:
    made = SlowLibrary()
    monkeypatch.setattr(mooncake_library, "create_library", lambda _: made)
    return made


def test_transports_that_meet_one_peer_at_a_time_share_its_answer(library: SlowLibrary) -> None:
    prober = mooncake_library._Prober(MooncakeSettings())
    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(prober.probe, "there:1", LIMIT_S)
        assert library.asked.acquire(timeout=LIMIT_S)
        assert prober.probe("there:1", 0.01) is None  # the one that is under way has no answer yet
        second = ranks.submit(prober.probe, "there:1", LIMIT_S)
        library.answer.set()
        assert (first.result(LIMIT_S), second.result(LIMIT_S)) == (0, 0)


def test_a_peer_is_asked_anew_after_its_answer(library: SlowLibrary) -> None:
    prober = mooncake_library._Prober(MooncakeSettings())
    library.answer.set()
    assert [prober.probe(session, LIMIT_S) for session in ("there:1", "gone:1", "there:1")] == [0, -1, 0]
    assert library.probes == 3
