"""Prefixes in a store below host memory, through real daemons: they come back when device and host have nothing of them any more.

Bytes follow from a conversation and the place of a row, and all are looked at, windows and states included.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import BackupPolicy, CopyBackend
from tests.contract.stores_harness import KINDS, settings_of
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import all_free, http, live_cluster, metric, status
from tests.helpers.stopping import stop
from tests.integration.test_load_back import PAGE, Conversation, Setting, Tiers

SETTING = Setting(HostLayout.PAGE_FIRST, DeviceLayout.LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH)
PREFETCH_S = 2.0
BUSY_S = 10.0
"""What a request may take besides on a machine that is busy."""


@pytest.fixture(scope="module", params=KINDS)
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of(request.param, Path(path)) as (store, _),
    ):
        tier: dict[str, Any] = {
            "enabled": True,
            "model_name": "tiny",
            "model_revision": "1",
            "store": store.model_dump(mode="json"),
            "prefetch_s": PREFETCH_S,
            "store_limits": {"failures": 2, "remember_s": 0.0, "settle_s": 1.0},
        }
        host = {"pages": 64, "layout": SETTING.host.value, "backend": SETTING.backend.value}
        with live_cluster(
            prefill={"tier": tier | {"host": host | {"checkpoint_pages": 16}}},
            decode={"tier": tier | {"host": host}},
            pages={"full": 24, "swa": 12, "request": 6},
            host_pages=96,
        ) as running:
            assert running.sender
            assert running.reader
            yield Tiers(running, SETTING)
            running.no_traceback()


@pytest.fixture(autouse=True)
def _stores_work(tiers: Tiers) -> Iterator[None]:
    for daemon in tiers.both:
        eventually("its store is asked", lambda daemon=daemon: store(daemon)["state"] == "closed")
    yield
    for daemon in tiers.both:
        all_free(daemon)
        eventually("no page is kept from others", lambda daemon=daemon: not status(daemon)["quarantine"])


def store(daemon: DaemonProcess) -> dict[str, Any]:
    found = status(daemon)["store"]
    assert found is not None
    return dict(found)


def stored(tiers: Tiers) -> None:
    """Wait until all that the devices have is on the host, and all of that in the store."""
    tiers.on_host()
    for daemon in tiers.both:

        def settled(daemon: DaemonProcess = daemon) -> bool:
            found = store(daemon)
            return not (found["waiting_prompts"] or found["unsettled"] or status(daemon)["prefixes"]["readers"])

        eventually(f"{daemon.name} has written", settled)


def forget(tiers: Tiers) -> None:
    """Device and host forget everything."""
    for daemon in tiers.both:
        all_free(daemon)
        assert http("DELETE", daemon, "/v1/prefixes").status_code == 200
        counts = status(daemon)["pools"]
        assert not counts["full"]["cached"] + counts["full_twin"]["cached"]


def test_a_conversation_goes_on_from_the_store(tiers: Tiers) -> None:
    talk = Conversation(tiers, 1)
    talk.cross(3 * PAGE + 40)
    stored(tiers)
    forget(tiers)
    before = [store(daemon)["fetched_pages"] for daemon in tiers.both]
    begun, claimed = talk.cross(5 * PAGE + 7)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)
    assert [store(daemon)["fetched_pages"] for daemon in tiers.both] == [pages + 3 for pages in before]
    for daemon in tiers.both:
        assert metric(daemon, "kvbridge_prefix_store_objects_total", verb="get", outcome="hit") >= 3
        assert metric(daemon, "kvbridge_prefix_store_bytes_total", verb="get") > 0
        assert metric(daemon, "kvbridge_prefix_store_prefetches_total", outcome="found") >= 1
        assert metric(daemon, "kvbridge_prefix_store_state", state="closed") == 1


def test_every_turn_of_several_conversations_comes_from_the_store(tiers: Tiers) -> None:
    talks = [Conversation(tiers, 10 + number) for number in range(3)]
    for turn in range(3):
        for talk in talks:
            talk.begun = None
            begun, claimed = talk.cross(2 * PAGE + turn * PAGE + 30)
            expected = (1 + turn) * PAGE if turn else 0
            assert (begun.computed_tokens, claimed.prefix_tokens) == (expected, expected)
        stored(tiers)
        forget(tiers)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_a_store_that_hangs_or_dies_costs_a_request_its_deadline_at_most(tiers: Tiers, number: signal.Signals) -> None:
    talk = Conversation(tiers, 20 + number)
    talk.cross(3 * PAGE)
    stored(tiers)
    forget(tiers)
    pids = [store(daemon)["pid"] for daemon in tiers.both]
    for pid in pids:
        if number is signal.SIGSTOP:
            stop(pid)
        else:
            os.kill(pid, number)
    talk.begun = None
    begun_s = time.monotonic()
    talk.admit(4 * PAGE)
    waited_s = time.monotonic() - begun_s
    assert waited_s < (2 * PREFETCH_S if number is signal.SIGSTOP else 0.0) + BUSY_S
    assert talk.begin().computed_tokens in ({0} if number is signal.SIGSTOP else {0, 3 * PAGE}), (
        "unless it came back at once"
    )
    talk.compute()
    talk.check()
    talk.end()
    for daemon, pid in zip(tiers.both, pids, strict=True):
        eventually("there is another process", lambda daemon=daemon, pid=pid: store(daemon)["pid"] not in {0, pid})
        eventually("it is asked", lambda daemon=daemon: store(daemon)["state"] == "closed")
    stored(tiers)
    forget(tiers)
    talk.begun = None
    begun, claimed = talk.cross(5 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (4 * PAGE, 4 * PAGE), "nothing is lost with a process"


def test_daemons_that_are_killed_find_their_prefixes_in_the_store_again(tiers: Tiers) -> None:
    talk = Conversation(tiers, 60)
    talk.cross(3 * PAGE)
    stored(tiers)
    tiers.live.detach()
    for daemon in tiers.both:
        daemon.kill()
        daemon.start()
    tiers.live.cluster.wait_ready()
    for daemon in tiers.both:
        eventually("its store is asked", lambda daemon=daemon: store(daemon)["state"] == "closed")
    talk.begun = None
    begun, claimed = talk.cross(4 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)
