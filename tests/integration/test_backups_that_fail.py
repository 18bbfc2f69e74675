"""Backups through real daemons when something goes wrong: nothing is lost or leaked, nothing is wrong, and requests go on.

In every test copies are held in the rank worker of the prefill node, which is then killed, let go too late, or has no place.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.held_copies import hold, let_go, with_held_copies
from tests.helpers.live_rooms import LiveCluster, ends, http, live_cluster, metric, status
from tests.helpers.twin_pages import twins_of
from tests.integration.test_backups import FULL, POOL, Pages, adds_up, host_tier, tier
from tests.integration.test_prefixes_on_prefill import PAGE, Turn, idle

COPY_S = 12.0
"""`timeouts.copy_s`: long enough for a room to cross and to be looked at while a copy is held."""


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    limits = {"timeouts": {"copy_s": COPY_S}}
    with live_cluster(
        prefill=tier(checkpoint_pages=8) | limits, decode=tier() | limits, pages=POOL, change=with_held_copies
    ) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _all_is_well(live: LiveCluster) -> Iterator[None]:
    yield
    let_go(live.prefill)
    live.detach()
    for daemon in (live.prefill, live.decode):
        daemon.wait_ready()
        eventually("copied", lambda daemon=daemon: settled(daemon))
        adds_up(daemon)
        assert http("DELETE", daemon, "/v1/prefixes").status_code == 200


def settled(daemon: DaemonProcess) -> dict[str, Any] | None:
    """What is where, once nothing is to be copied and nothing is in quarantine."""
    found = host_tier(daemon)
    return None if found["waiting_prompts"] or found["in_flight_pages"] or status(daemon)["quarantine"] else found


def failures(daemon: DaemonProcess, code: str) -> float:
    return metric(daemon, "kvbridge_host_tier_copies_total", direction="backup", outcome=code)


def copies_held(live: LiveCluster, conversation: int, length: int) -> Turn:
    """A room that has crossed, of whose pages a copy is under way that does not end."""
    hold(live.prefill)
    turn = crosses(live, conversation, length)
    eventually("an order", lambda: host_tier(live.prefill)["in_flight_pages"])
    return turn


def crosses(live: LiveCluster, conversation: int, length: int) -> Turn:
    """A room that has crossed, and whose pages are the cache's, whatever becomes of twins."""
    turn = Turn(live, conversation, length)
    turn.compute()
    turn.check()
    ends(live.prefill, turn.room, "completed")
    eventually("let go", lambda: not any(status(live.prefill)["pools"][space]["leased"] for space in ("full", "swa")))
    return turn


def twins(daemon: DaemonProcess, state: str) -> int:
    return int(status(daemon)["pools"]["full_twin"][state])


def test_a_worker_that_is_killed_in_the_middle_of_a_backup(live: LiveCluster) -> None:
    before = failures(live.prefill, "worker_gone")
    copies_held(live, 1, 1000)
    assert twins(live.prefill, "leased") == 3
    os.kill(status(live.prefill)["ranks"][0]["pid"], signal.SIGKILL)
    eventually("rolled back", lambda: failures(live.prefill, "worker_gone") == before + 1)
    found = host_tier(live.prefill)
    assert "died" in found["last_failure"]
    assert (found["device_pages"], found["both_pages"]) == (3, 0), "the device's memory is the node's"
    shown = status(live.prefill)
    assert shown["quarantine"] == {}
    # A worker that is back already has been asked again.
    assert bool(shown["pools"]["full_twin"]["leased"]) == bool(shown["host_tier"]["in_flight_pages"])
    let_go(live.prefill)
    live.prefill.wait_ready()
    live.detach()
    assert live.sender
    assert live.reader
    eventually("tried again", lambda: host_tier(live.prefill)["both_pages"] == 3)
    assert crosses(live, 1, 1500).computed == 768, "what was not lost is of use"


def test_an_answer_that_comes_too_late(live: LiveCluster) -> None:
    before = failures(live.prefill, "deadline")
    copies_held(live, 2, 1000)
    eventually("given up", lambda: failures(live.prefill, "deadline") == before + 1)
    assert twins(live.prefill, "quarantined") == 3
    [why] = status(live.prefill)["quarantine"]
    assert "may still write" in why
    assert "timeouts.copy_s" in why
    assert crosses(live, 3, 700).computed == 0, "requests go on"
    assert crosses(live, 2, 1500).computed == 768
    assert host_tier(live.prefill)["in_flight_pages"] == 0, "nothing begins while the twins may still be written"
    let_go(live.prefill)
    found = eventually("settled", lambda: settled(live.prefill))
    assert (found["device_pages"], found["both_pages"]) == (0, 5 + 2)


def test_rooms_cross_while_a_backup_is_under_way_and_its_pages_stay(live: LiveCluster) -> None:
    """A copy that does not end keeps its pages on the device; others are evicted, and those that are new come in."""
    copies_held(live, 4, 1000)
    for conversation in (5, 6, 7):
        crosses(live, conversation, 5 * PAGE)
    let_go(live.prefill)
    eventually("settled", lambda: settled(live.prefill))
    assert crosses(live, 4, 1001).computed == 768


def test_what_is_forgotten_while_it_is_copied(live: LiveCluster) -> None:
    copies_held(live, 8, 1000)
    assert http("DELETE", live.prefill, "/v1/prefixes").json() == {"dropped_pages": 3, "read_pages": 3, "store": None}
    let_go(live.prefill)
    eventually("settled", lambda: settled(live.prefill))
    eventually("free", lambda: idle(live.prefill))
    assert twins(live.prefill, "cached") == 0
    assert crosses(live, 8, 1001).computed == 0


def test_a_host_without_place_refuses_and_rooms_go_on() -> None:
    with live_cluster(prefill=tier(pages=4, checkpoint_pages=1), decode=tier(pages=4), pages=POOL) as live:
        assert live.sender
        assert live.reader
        few = Pages(live, 1, 4 * PAGE)
        eventually("copied", lambda: host_tier(live.prefill)["both_pages"] == 4)
        twins_of(live.sender, FULL, few.sent)
        for conversation in (2, 3):
            crosses(live, conversation, 9 * PAGE)
        for daemon in (live.prefill, live.decode):
            found = eventually(
                "refused", lambda daemon=daemon: (now := settled(daemon)) and now["refused_prompts"] and now
            )
            assert found["both_pages"] + found["host_pages"] <= 4
            assert found["failed_orders"] == 0
            adds_up(daemon)
        assert crosses(live, 3, 10 * PAGE).computed == 9 * PAGE
        live.no_traceback()
