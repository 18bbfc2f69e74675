"""No byte of a page that was used again was written by an old room.

Each test makes a writer that will write late, lets its room end, gives every page that becomes free to rooms with bytes of their own,
lets the late writer go, and looks at every byte. That the looking can see a violation is proved with daemons that free pages too soon.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.faults.canary_scene import LATE_TOKENS, CanaryScene, canary_scene
from tests.faults.mutations import BELIEVE_QUIET, FREE_BY_TIMER
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import http, status

TRANSPORTS = ["local", "mooncake", "nixl"]
LIBRARIES = TRANSPORTS[1:]
AWAKE_S = 0.6
"""What a late writer is given to do its worst; it writes 24 MiB in a tenth of that."""
MUCH_BYTES = 50_000
"""More than connecting and acknowledging leave in a socket."""
QUIET = {
    "mooncake": {"mooncake": {"quiet_timeout_s": 1.0, "progress_timeout_s": 60, "transfer_timeout_s": 60}},
    "nixl": {"nixl": {"quiet_timeout_s": 1.0, "ucx_tls": "tcp", "ucx_net_devices": "lo"}},
}
"""How long a transfer that has failed may stay loud before its transport is torn down."""


def publish(stage: CanaryScene, room: int) -> None:
    """Tell the daemon that all of the room can be sent; what has been filled is not touched."""
    stage.sender.call("publish", room, LATE_TOKENS)


def frozen_node(stage: CanaryScene) -> int:
    """A prefill node that is frozen with an order in its worker's hands, long enough to be given up by decode.

    The worker wakes first, and knows nothing of all that: it writes.
    """
    room = stage.begin_late()
    worker, node = stage.worker_pid(stage.prefill), stage.pid(stage.prefill)
    stage.freeze(worker)
    publish(stage, room)
    stage.freeze(node)
    state, code, reason = stage.end(stage.decode, room)
    assert (state, code) == ("failed", "peer_failed"), reason
    assert stage.fill_free_pages() >= 2
    stage.resume(worker)
    time.sleep(AWAKE_S)
    landed = stage.rows_landed(room)
    stage.check_filled()
    stage.resume(node)
    state, code, reason = stage.end(stage.prefill, room)
    assert state == "failed", reason
    stage.sender.call("abort", room)
    return landed


@pytest.mark.parametrize("transport", [pytest.param("local", marks=pytest.mark.faults_short), *LIBRARIES])
def test_a_frozen_prefill_node_whose_worker_wakes(transport: str) -> None:
    with canary_scene(transport) as stage:
        landed = frozen_node(stage)
        if transport == "local":
            assert landed, "the late writer did not write: this test has looked at nothing"
        stage.check_filled()
        stage.everything_given_back()
        stage.meet()


@pytest.mark.faults_short
def test_the_canaries_see_pages_that_a_timer_freed() -> None:
    with canary_scene("local", daemon_mistake=FREE_BY_TIMER) as stage, pytest.raises(AssertionError, match="wrong bytes"):
        frozen_node(stage)


ENDINGS: dict[str, Callable[[CanaryScene, int], None]] = {
    "cancelled on decode": lambda stage, room: stage.cancel(stage.decode, room),
    "cancelled on prefill": lambda stage, room: stage.cancel(stage.prefill, room),
    "aborted by its engine": lambda stage, room: stage.sender.call("abort", room),
    "its engine dies": lambda stage, room: stage.detach(stage.sender.role),
    "expired": lambda stage, room: None,
}


@pytest.mark.parametrize("ending", list(ENDINGS))
@pytest.mark.parametrize("transport", LIBRARIES)
def test_a_worker_frozen_in_mid_transfer(transport: str, ending: str) -> None:
    """It has handed over more than the network took: the rest goes out when it wakes, whatever became of the room."""
    limits = {"transfer_s": 4.0, "room_s": 5.0} if ending == "expired" else {}
    with canary_scene(transport, prefill=limits, decode=limits) as stage:
        room = stage.begin_late()
        writer, reader = stage.worker_pid(stage.prefill), stage.worker_pid(stage.decode)
        stage.freeze(reader)
        publish(stage, room)
        eventually("the transfer begun", lambda: stage.unread_bytes(reader) > MUCH_BYTES)
        stage.freeze(writer)
        stage.resume(reader)
        ENDINGS[ending](stage, room)
        for daemon in stage.nodes:
            eventually("ended", lambda daemon=daemon: stage.state(daemon, room) in {"aborting", "aborted", "failed"})
        eventually("quarantined", lambda: quarantined(stage))
        assert stage.fill_free_pages() >= 2
        before = stage.rows_landed(room)
        stage.resume(writer)
        eventually("over", lambda: stage.state(stage.prefill, room) in {"aborted", "failed"})
        time.sleep(AWAKE_S)
        print(f"{transport}, {ending}: {before} rows had landed before the writer woke, {stage.rows_landed(room)} after")
        stage.check_filled()
        if "engine" not in ending:
            stage.sender.call("abort", room)
        stage.everything_given_back()
        stage.meet()


def quarantined(stage: CanaryScene) -> bool:
    """Pages of the decode daemon are kept from everybody, and it says why."""
    shown = status(stage.decode)
    return bool(shown["quarantine"]) and bool(shown["pools"]["full"].get("quarantined"))
