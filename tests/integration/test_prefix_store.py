"""Prefixes in a store below host memory, through real daemons: they come back when device and host have nothing of them.

A store that hangs, dies or lies is in `tests/contract/test_stored_prefixes.py`, with the node's own parts above it.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.stores_harness import KINDS, settings_of
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.conversation import PAGE, Conversation
from tests.helpers.host_tiers import drop, host_tiers, on_host
from tests.helpers.live_rooms import LiveCluster, all_free, metric, status

PREFETCH_S, PUT_S = 4.0, 8.0
"""Long: nothing is missed for being slow on a machine that is busy."""
STORE_S = 120.0
"""For a store's process to be there, and to have written what waits."""

pytestmark = pytest.mark.timeout(3 * STORE_S)


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
            asked(running)
            yield running
            for daemon in running.nodes:
                all_free(daemon)
                assert not status(daemon)["quarantine"]


def store(daemon: DaemonProcess) -> dict[str, Any]:
    found = status(daemon)["store"]
    assert found is not None
    return dict(found)


def asked(live: LiveCluster) -> None:
    """Wait until both stores are asked."""
    eventually("asked", lambda: {store(daemon)["state"] for daemon in live.nodes} == {"closed"}, STORE_S)


def move_down(live: LiveCluster) -> None:
    """Wait until all that devices and hosts have is in the store, and have them forget everything."""
    on_host(*live.nodes)
    for daemon in live.nodes:

        def written(daemon: DaemonProcess = daemon) -> bool:
            found = store(daemon)
            return not (found["waiting_prompts"] or found["unsettled"] or status(daemon)["prefixes"]["readers"])

        eventually(f"{daemon.name} has written", written, STORE_S)
    drop(*live.nodes)
    for daemon in live.nodes:
        pools = status(daemon)["pools"]
        assert not pools["full"]["cached"] + pools["full_twin"]["cached"]


def test_a_conversation_goes_on_from_the_store(live: LiveCluster) -> None:
    talk = Conversation(live, 1)
    talk.cross(3 * PAGE + 40)
    move_down(live)
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
