"""Transfers that are slow, out of order, fail, never say so, or take the rank worker with them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.fault_cluster import TOKENS, FaultCluster
from tests.faults.stages import scene
from tests.helpers.cluster import eventually, live_rows_only
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, live_cluster, report, status

INNERS = ["local", "mooncake", "nixl"]
OPERATIONS = 30
"""One room needs fewer, two need more."""
TRANSFER_S = 1.0


@contextmanager
def faulty(inner: str, **faults: Any) -> Iterator[FaultCluster]:
    """A stage whose prefill rank workers use `inner` with faults."""
    exact = live_rows_only(inner)  # as many operations over each
    with scene(transport=inner, faults=faults, prefill=exact, timeouts={"transfer_s": TRANSFER_S}) as stage:
        yield stage


def begun(stage: FaultCluster) -> int:
    room = stage.pair()
    stage.sender.call("begin", room, TOKENS)
    stage.sender.call("write", room, TOKENS, 0, TOKENS)
    return room


def fails(stage: FaultCluster, letter: str) -> str:
    """The next room fails like that on both sides, and everything is given back; returns prefill's reason."""
    room = begun(stage)
    for daemon in stage.nodes:
        stage.letter(daemon, room, letter)
    stage.sender.call("abort", room)
    for daemon in stage.nodes:
        all_free(daemon)
        stage.accounted(daemon)
    return stage.end(stage.prefill, room)[2]


@pytest.mark.parametrize("inner", INNERS)
def test_transfers_that_fail(inner: str) -> None:
    """The transport stays broken until its worker is replaced; nobody but its rooms is harmed."""
    with faulty(inner, fail_after_operations=OPERATIONS) as stage:
        stage.cross()
        worker = stage.worker_pid(stage.prefill)
        for _ in range(2):
            assert f"failed after {OPERATIONS} operations" in fails(stage, "T")
        assert stage.worker_pid(stage.prefill) == worker
        assert http("GET", stage.prefill, "/ready").status_code == 200
        os.kill(worker, signal.SIGKILL)
        eventually("another worker", lambda: stage.worker_pid(stage.prefill) not in {0, worker})
        stage.cluster.wait_ready()
        stage.cross()


@pytest.mark.parametrize("inner", INNERS)
def test_transfers_that_take_the_worker_with_them(inner: str) -> None:
    with faulty(inner, die_after_operations=OPERATIONS) as stage:
        stage.cross()
        assert "exit code 86" in fails(stage, "W")
        stage.cluster.wait_ready()
        stage.cross()
        assert status(stage.prefill)["ranks"][0]["restarts"] == 1


@pytest.mark.parametrize("inner", INNERS)
def test_transfers_that_never_say_that_they_are_done(inner: str) -> None:
    """Nobody can know what they still do: the transport is replaced, and pages come back once it has been torn down."""
    with faulty(inner, drop_completion=True, quiet_timeout_s=0.3) as stage:
        workers = [stage.worker_pid(daemon) for daemon in stage.nodes]
        for _ in range(2):
            assert fails(stage, "T")
        assert [stage.worker_pid(daemon) for daemon in stage.nodes] == workers
        for daemon in stage.nodes:
            assert http("GET", daemon, "/ready").status_code == 200
            assert not status(daemon)["quarantine"]


VERIFIED_TOKENS = 1_000
SILENCE_S = 8.0
PATIENT = {
    "integrity": {"digest": "crc32c"},
    "timeouts": {"control_heartbeat_s": 0.25, "worker_silence_s": SILENCE_S, "verify_s": 30.0},
}


@contextmanager
def verifying() -> Iterator[tuple[LiveCluster, int, Callable[[], None]]]:
    with live_cluster(decode=PATIENT, prefill={"timeouts": {"control_heartbeat_s": 0.25}}) as live:
        assert live.reader is not None
        live.serves()
        room = live.pair(VERIFIED_TOKENS)
        live.write(room, VERIFIED_TOKENS, 0, 500)
        eventually("some of it arrived", lambda: report(live.prefill, room)["state"] == "transferring")
        worker = int(status(live.decode)["ranks"][0]["pid"])
        os.kill(worker, signal.SIGSTOP)
        live.write(room, VERIFIED_TOKENS, 500, VERIFIED_TOKENS)
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
        live.read(room, VERIFIED_TOKENS).release()
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
