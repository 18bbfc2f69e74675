"""Transfers that are slow, out of order, fail, never say so, or take the rank worker with them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.fault_cluster import TOKENS, FaultCluster
from tests.faults.stages import scene
from tests.helpers.cluster import eventually, live_rows_only
from tests.helpers.live_rooms import all_free, http, status

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
        stage.wait_ready()
        stage.cross()


@pytest.mark.parametrize("inner", INNERS)
def test_transfers_that_take_the_worker_with_them(inner: str) -> None:
    with faulty(inner, die_after_operations=OPERATIONS) as stage:
        stage.cross()
        assert "exit code 86" in fails(stage, "W")
        stage.wait_ready()
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
