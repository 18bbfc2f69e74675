"""Prefixes in a store below host memory, through real daemons: they come back when device and host have nothing of them."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.contract.stores_harness import KINDS, settings_of
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.conversation import PAGE, Conversation
from tests.helpers.host_tiers import drop, host_tiers, on_host
from tests.helpers.live_rooms import LiveCluster, all_free, metric, status
from tests.helpers.stopping import stop

PREFETCH_S, PUT_S = 4.0, 8.0
"""Long: nothing is missed for being slow on a machine that is busy."""
REVIVED_S = 120.0
"""For a store's process to be there again, and to be asked."""

pytestmark = pytest.mark.timeout(3 * REVIVED_S)


@pytest.fixture(scope="module", params=KINDS)
def live(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    """A pair over a store of its own."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of(request.param, Path(path)) as (settings, _),
    ):
        tier: dict[str, Any] = {
            "store": settings.model_dump(mode="json"),
            "prefetch_s": PREFETCH_S,
            "store_limits": {"failures": 2, "remember_s": 0.0, "settle_s": 1.0, "put_s": PUT_S},
        }
        with host_tiers(host={"pages": 64, "layout": "page_first"}, checkpoint_pages=16, tier=tier) as running:
            yield running


@pytest.fixture(autouse=True)
def stores_work(live: LiveCluster) -> Iterator[None]:
    revive(live)
    yield
    for daemon in live.nodes:
        all_free(daemon)
        eventually("no page is kept from others", lambda daemon=daemon: not status(daemon)["quarantine"])


def store(daemon: DaemonProcess) -> dict[str, Any]:
    found = status(daemon)["store"]
    assert found is not None
    return dict(found)


def move_down(live: LiveCluster) -> None:
    """Wait until all that devices and hosts have is in the store, and have them forget everything."""
    on_host(*live.nodes)
    for daemon in live.nodes:

        def written(daemon: DaemonProcess = daemon) -> bool:
            found = store(daemon)
            return not (found["waiting_prompts"] or found["unsettled"] or status(daemon)["prefixes"]["readers"])

        eventually(f"{daemon.name} has written", written, REVIVED_S)
    drop(*live.nodes)
    for daemon in live.nodes:
        pools = status(daemon)["pools"]
        assert not pools["full"]["cached"] + pools["full_twin"]["cached"]


def stored(live: LiveCluster, number: int, tokens: int = 3 * PAGE) -> Conversation:
    """Return a conversation whose prompt is in the store alone."""
    talk = Conversation(live, number)
    talk.cross(tokens)
    move_down(live)
    return talk


_tries = count(1_000)
"""Conversations of which no store has anything."""


def revive(live: LiveCluster) -> None:
    """Wait until both stores are asked; those that have failed are tried again with a request."""

    def look() -> bool:
        states = {store(daemon)["state"] for daemon in live.nodes}
        if not states <= {"closed", "starting"}:
            for daemon in live.nodes:
                all_free(daemon)
            Conversation(live, next(_tries)).cross(2 * PAGE)
        return states == {"closed"}

    eventually("both stores are asked", look, REVIVED_S)


def test_a_conversation_goes_on_from_the_store(live: LiveCluster) -> None:
    talk = stored(live, 1, 3 * PAGE + 40)
    before = [store(daemon)["fetched_pages"] for daemon in live.nodes]
    turn = talk.cross(5 * PAGE + 7)
    assert turn.reused == turn.from_host == (3 * PAGE, 3 * PAGE)
    assert [store(daemon)["fetched_pages"] for daemon in live.nodes] == [pages + 3 for pages in before]
    for daemon in live.nodes:
        assert metric(daemon, "kvbridge_prefix_store_objects_total", verb="get", outcome="hit") >= 3
        assert metric(daemon, "kvbridge_prefix_store_bytes_total", verb="get") > 0
        assert metric(daemon, "kvbridge_prefix_store_prefetches_total", outcome="found") >= 1
        assert metric(daemon, "kvbridge_prefix_store_state", state="closed") == 1
    move_down(live)
    turn = talk.cross(6 * PAGE)
    assert turn.reused == turn.from_host == (5 * PAGE, 5 * PAGE), "and from there again"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_requests_go_on_without_a_store_that_hangs_or_dies(live: LiveCluster, number: signal.Signals) -> None:
    """The request is computed, and the store's next process finds what was kept."""
    talk = stored(live, 20 + number)
    pids = [store(daemon)["pid"] for daemon in live.nodes]
    starts = [metric(daemon, "kvbridge_store_process_starts_total") for daemon in live.nodes]
    for pid in pids:
        if number is signal.SIGSTOP:
            stop(pid)
        else:
            os.kill(pid, number)
    # A process that has died may be back at once.
    assert talk.cross(4 * PAGE).reused[0] in ({0} if number is signal.SIGSTOP else {0, 3 * PAGE})
    for daemon, pid in zip(live.nodes, pids, strict=True):
        eventually("there is another process", lambda daemon=daemon, pid=pid: store(daemon)["pid"] not in {0, pid})
    revive(live)
    for daemon, before in zip(live.nodes, starts, strict=True):
        assert metric(daemon, "kvbridge_store_process_starts_total") > before
    move_down(live)
    assert talk.cross(5 * PAGE).reused == (4 * PAGE, 4 * PAGE), "nothing is lost with a process"


@pytest.mark.thorough
def test_daemons_that_are_killed_find_their_prefixes_in_the_store_again(live: LiveCluster) -> None:
    talk = stored(live, 60)
    live.detach()
    for daemon in live.nodes:
        daemon.kill()
        daemon.start()
    live.cluster.wait_ready()
    revive(live)
    turn = talk.cross(4 * PAGE)
    assert turn.reused == turn.from_host == (3 * PAGE, 3 * PAGE)
