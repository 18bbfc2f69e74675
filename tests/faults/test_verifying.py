"""A room of which everything has arrived and nothing has been looked at yet: the decode rank worker is held before its digests.

By then prefill is through with the room, so nothing that happens there matters any more; what happens to the decode side does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, ends, live_cluster, report, status

TOKENS = 1_000
SILENCE_S = 8.0
PATIENT = {
    "integrity": {"digest": "crc32c"},
    "timeouts": {"control_heartbeat_s": 0.25, "worker_silence_s": SILENCE_S, "verify_s": 30.0},
}


@contextmanager
def verifying() -> Iterator[tuple[LiveCluster, int, Callable[[], None]]]:
    """A cluster, a room that is to be verified, and what lets its verification begin."""
    with live_cluster(decode=PATIENT, prefill={"timeouts": {"control_heartbeat_s": 0.25}}) as live:
        assert live.reader is not None
        live.serves()
        room = live.pair(TOKENS)
        live.write(room, TOKENS, 0, 500)
        eventually("some of it arrived", lambda: report(live.prefill, room)["state"] == "transferring")
        worker = int(status(live.decode)["ranks"][0]["pid"])
        os.kill(worker, signal.SIGSTOP)
        live.write(room, TOKENS, 500, TOKENS)
        live.begun[room].finish()
        assert ends(live.prefill, room, "completed") == ""
        assert report(live.decode, room)["state"] == "transferring"
        yield live, room, lambda: os.kill(worker, signal.SIGCONT)


@pytest.mark.faults_short
def test_the_death_of_prefill_does_not_matter_any_more() -> None:
    with verifying() as (live, room, go_on):
        live.prefill.kill()
        eventually("prefill is missed", lambda: not status(live.decode)["peers"])
        go_on()
        live.read(room, TOKENS).release()
        all_free(live.decode)
        assert status(live.decode)["fence"]["epoch"] == 0, "nothing was left to be shut out"


@pytest.mark.parametrize("how", ["killed", "frozen for too long"])
def test_a_worker_that_is_lost_fails_the_room(how: str) -> None:
    with verifying() as (live, room, _):
        if how == "killed":
            os.kill(int(status(live.decode)["ranks"][0]["pid"]), signal.SIGKILL)
        assert "rank worker pp0.tp0 of the decode node died" in ends(live.decode, room, "failed", "worker_gone")
        all_free(live.decode)
        live.decode.wait_ready()
        live.serves()
