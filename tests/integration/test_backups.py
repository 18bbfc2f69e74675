"""Cached pages that move down to host memory, through real daemons: their twins hold what the device pages hold, byte for byte.

Which bytes these are follows from a conversation and the place of a row, so no two pages of the tests have the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvbridge.core.ids import IndexSpace
from kvbridge.engine.base import Engine
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, all_free, busy_pages, http, live_cluster, metric, status
from tests.helpers.twin_pages import PageBytes, device_page, twin_page, twins_of
from tests.integration.test_prefixes_on_prefill import PAGE, Turn

FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
POOL = {"full": 16, "swa": 8, "request": 4}
MODEL = {"enabled": True, "model_name": "tiny", "model_revision": "1"}


def tier(**host: Any) -> dict[str, Any]:
    return {"tier": {**MODEL, "host": {"pages": 32, **host}}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    """Device pools that hold two or three prompts. Every test has conversations of its own."""
    with live_cluster(prefill=tier(checkpoint_pages=8), decode=tier(), pages=POOL) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _nothing_is_cached(request: pytest.FixtureRequest) -> None:
    """Whatever test came before."""
    if "live" in request.fixturenames:
        running: LiveCluster = request.getfixturevalue("live")
        for daemon in (running.prefill, running.decode):
            backed_up(daemon)
            assert http("DELETE", daemon, "/v1/prefixes").status_code == 200


def host_tier(daemon: DaemonProcess) -> dict[str, Any]:
    found = status(daemon)["host_tier"]
    assert found is not None
    return dict(found)


def backed_up(daemon: DaemonProcess) -> dict[str, Any]:
    """Wait until nothing is to be copied any more; returns what is where."""

    def look() -> dict[str, Any] | None:
        found = host_tier(daemon)
        return None if found["waiting_prompts"] or found["in_flight_pages"] else found

    found = eventually(f"backups of {daemon.name}", look)
    assert found["failed_orders"] == 0, found["last_failure"]
    return dict(found)


def adds_up(daemon: DaemonProcess) -> None:
    """Nobody has a page but the cache, and the twins of the cache are as many as it says."""
    all_free(daemon)
    found, where = status(daemon), host_tier(daemon)
    assert found["pools"]["full"]["cached"] == where["device_pages"] + where["both_pages"]
    assert found["pools"]["full_twin"]["cached"] == where["both_pages"] + where["host_pages"]


class Pages:
    """The device pages of a room's prompt on both sides, as they are when it has crossed."""

    def __init__(self, live: LiveCluster, conversation: int, length: int) -> None:
        turn = Turn(live, conversation, length)
        begun = turn.begin()
        turn.compute()
        claimed = live.reader.wait_claim(turn.room, 30, page_hashes=turn.keys)
        whole = range(length // PAGE)
        self.sent = [device_page(live.sender, FULL, int(begun.tables[FULL].ids[page])) for page in whole]
        self.received = [device_page(live.reader, FULL, int(claimed.tables[FULL].ids[page])) for page in whole]
        self.checkpoints = [
            device_page(live.sender, SWA, int(page))
            for tables in begun.checkpoints.values()
            for page in tables[SWA].ids
        ]
        live.reader.release(turn.room)


def test_whole_pages_and_checkpoints_of_a_room_that_has_ended_are_on_the_host(live: LiveCluster) -> None:
    pages = Pages(live, 1, 1000)
    assert (len(pages.sent), len(pages.checkpoints)) == (3, 1)
    for daemon in (live.prefill, live.decode):
        eventually("copied", lambda daemon=daemon: backed_up(daemon)["both_pages"] == 3)
        adds_up(daemon)
    twins_of(live.sender, FULL, pages.sent)
    twins_of(live.reader, FULL, pages.received)
    twins_of(live.sender, SWA, pages.checkpoints)
    assert status(live.prefill)["pools"]["swa_twin"]["cached"] == 1


def test_what_it_cost_is_counted(live: LiveCluster) -> None:
    before = host_tier(live.prefill)
    Turn(live, 2, 600).cross()
    after = eventually(
        "copied", lambda: (now := backed_up(live.prefill))["backed_up_pages"] >= before["backed_up_pages"] + 2 and now
    )
    assert after["backed_up_pages"] - before["backed_up_pages"] == 2
    labels = {"direction": "backup"}
    copied = metric(live.prefill, "kvbridge_host_tier_copied_bytes_total", **labels)
    one = sum(map(len, twin_page(live.sender, FULL, 0).values()))
    assert copied == after["backed_up_bytes"] >= after["backed_up_pages"] * one
    assert metric(live.prefill, "kvbridge_host_tier_copy_seconds_total", **labels) > 0
    assert metric(live.prefill, "kvbridge_host_tier_copies_total", **labels, outcome="done") >= 1
    assert metric(live.prefill, "kvbridge_host_tier_pages", residency="both") == after["both_pages"]
    assert metric(live.prefill, "kvbridge_pool_pages", space="full_twin", state="cached") > 0


def test_the_device_evicts_and_the_host_keeps(live: LiveCluster) -> None:
    """A device that holds no two of these conversations."""
    pages = {}
    for conversation in (10, 11, 12):
        pages[conversation] = Pages(live, conversation, 9 * PAGE)
        for daemon in (live.prefill, live.decode):
            eventually("let go", lambda daemon=daemon: not busy_pages(daemon))
            backed_up(daemon)
    for daemon in (live.prefill, live.decode):
        found = eventually("copied", lambda daemon=daemon: (now := backed_up(daemon))["host_pages"] and now)
        assert found["both_pages"] + found["host_pages"] >= 3 * 9
        adds_up(daemon)
    for engine, which in ((live.sender, "sent"), (live.reader, "received")):
        held = [page for of in pages.values() for page in getattr(of, which)]
        assert len(twins_of(engine, FULL, held)) == 3 * 9


def test_requests_without_keys_leave_nothing(live: LiveCluster) -> None:
    before = [backed_up(daemon)["backed_up_pages"] for daemon in (live.prefill, live.decode)]
    live.cross(700)
    assert [backed_up(daemon)["backed_up_pages"] for daemon in (live.prefill, live.decode)] == before


def test_forgetting_everything_frees_both(live: LiveCluster) -> None:
    Turn(live, 30, 700).cross()
    for daemon in (live.prefill, live.decode):
        eventually("copied", lambda daemon=daemon: backed_up(daemon)["both_pages"] == 2)
        assert http("DELETE", daemon, "/v1/prefixes").status_code == 200
        found = status(daemon)["pools"]
        assert (found["full"]["cached"], found["full_twin"]["cached"]) == (0, 0)
        adds_up(daemon)


@pytest.mark.parametrize(
    ("model", "ranks", "host"),
    [
        pytest.param("tiny-v4", {"prefill_tp": 2, "decode_tp": 2}, {"layout": "page_first"}, id="shared-out"),
        pytest.param("tiny-gqa", {"prefill_tp": 2, "decode_pp": 2}, {}, id="split-by-heads"),
    ],
)
def test_ranks_copy_what_is_theirs(model: str, ranks: dict[str, int], host: dict[str, str]) -> None:
    windows = {"checkpoint_pages": 8} if model == "tiny-v4" else {}
    few = {"order_pages": 5}
    with live_cluster(
        model=model,
        prefill=tier(**windows, **host, backup=few),
        decode=tier(**host, backup=few) | ({} if windows else {"pools": {"device": POOL, "host": {"components": []}}}),
        pages=POOL,
        **ranks,
    ) as live:
        assert live.sender
        assert live.reader
        pages = Pages(live, 1, 12 * PAGE)
        for daemon in (live.prefill, live.decode):
            eventually("copied", lambda daemon=daemon: backed_up(daemon)["both_pages"] == 12)
            adds_up(daemon)
        sides: list[tuple[Engine, list[PageBytes]]] = [(live.sender, pages.sent), (live.reader, pages.received)]
        for engine, held in sides:
            twins_of(engine, FULL, held)
        live.no_traceback()


@pytest.mark.thorough
def test_policies_by_what_is_on_the_host_after_which_step() -> None:
    """Selective on prefill, from the second use on; on decode the oldest, when fewer than half of 16 pages could be given away."""
    few = {"policy": "write_back", "low_share": 0.5}
    with live_cluster(
        prefill=tier(checkpoint_pages=8, backup={"policy": "write_through_selective", "uses": 2}),
        decode=tier(backup=few),
        pages=POOL,
    ) as live:
        assert live.sender
        assert live.reader
        pages = Pages(live, 1, 1000)
        for daemon in (live.prefill, live.decode):
            eventually("let go", lambda daemon=daemon: not busy_pages(daemon))
            assert backed_up(daemon)["backed_up_pages"] == 0
        Turn(live, 1, 1001).cross()
        eventually("used again", lambda: backed_up(live.prefill)["both_pages"] == 3)
        twins_of(live.sender, FULL, pages.sent)
        assert backed_up(live.decode)["backed_up_pages"] == 0, "13 of its pages are free"
        Turn(live, 2, 9 * PAGE).cross()
        found = eventually("ahead of need", lambda: (now := backed_up(live.decode))["both_pages"] >= 4 and now)
        assert found["device_pages"] + found["both_pages"] == 12
        twins_of(live.reader, FULL, pages.received)
        for daemon in (live.prefill, live.decode):
            adds_up(daemon)
        live.no_traceback()
