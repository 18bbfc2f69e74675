"""Killed workers, killed daemons and how they come back: names, a bootstrap that forgets.

Rooms in flight when something dies fail on both sides with the reason, and the next room crosses.
"""

import os
import signal

import pytest

from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, metric, raises_code, status
from tests.integration.life.conftest import (
    ONE_SIDE,
    TOKENS,
    gone,
    holder,
    in_flight,
    restarted,
    shared_files,
    worker_pid,
)


@ONE_SIDE
def test_a_killed_worker_fails_its_rooms_and_comes_back(live: LiveCluster, daemon: DaemonProcess) -> None:
    room = in_flight(live)
    before = worker_pid(daemon)
    restarts = metric(daemon, "kvbridge_worker_restarts_total", reason="signal")
    os.kill(before, signal.SIGKILL)
    answer = eventually("not ready", lambda: (found := http("GET", daemon, "/ready")).status_code == 503 and found)
    assert "rank worker pp0.tp0 is not there: killed by SIGKILL" in answer.json()["reasons"][0]
    refused = http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1})
    assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")

    sides = {
        side.role: http("GET", side, f"/v1/requests/{room}?wait=15").json() for side in (live.prefill, live.decode)
    }
    for told in sides.values():
        assert told["reason_code"] == "worker_gone", told
        assert f"rank worker pp0.tp0 of the {daemon.role} node died: killed by SIGKILL" in told["reason"]
    assert sides[daemon.role]["state"] == "failed"
    live.sender.abort(room, "told so")

    daemon.wait_ready()
    assert "worker_killed" not in daemon.log_path.read_text(), "the node says that it has done it"
    rank = status(daemon)["ranks"][0]
    assert rank["pid"] != before
    assert rank["restarts"] == restarts + 1
    assert metric(daemon, "kvbridge_worker_restarts_total", reason="signal") == restarts + 1
    live.serves()


@pytest.mark.usefixtures("executed")
def test_a_killed_prefill_daemon_is_noticed_and_shut_out_and_its_next_life_served(live: LiveCluster) -> None:
    """The decode side needs neither the dead process nor its next life to use the pages again."""
    room = in_flight(live)
    worker, files = worker_pid(live.prefill), shared_files(live.prefill)
    control, epoch = live.control, metric(live.decode, "kvbridge_endpoint_epoch")
    assert files
    live.prefill.kill()
    eventually("no worker without its node", lambda: gone(worker))
    raises_code("peer_failed", lambda: live.begun[room].publish(TOKENS))

    reason = ends(live.decode, room, "failed", "peer_failed")
    assert "its connection is gone" in reason
    assert "timeouts.control_heartbeat_s" in reason
    all_free(live.decode)
    assert metric(live.decode, "kvbridge_endpoint_epoch") == epoch + 1
    assert http("GET", live.decode, "/ready").status_code == 200

    live.prefill.config = live.prefill.config | {"control": {"bind": control}}
    restarted(live, live.prefill)
    eventually("it has its name again", lambda: holder(live, live.prefill) == live.prefill.endpoint().incarnation)
    assert shared_files(live.prefill).isdisjoint(files), "swept at the next start"
    live.cross()
    live.serves()


def test_a_killed_decode_daemon_fails_its_rooms_on_the_other_side(live: LiveCluster) -> None:
    room = in_flight(live)
    worker, files = worker_pid(live.decode), shared_files(live.decode)
    assert len(files) == 2
    live.decode.kill()
    eventually("no worker without its node", lambda: gone(worker))
    raises_code("peer_failed", lambda: live.reader.claim(room))
    reason = ends(live.prefill, room, "failed", "peer_failed")
    assert "its connection is gone" in reason
    assert [(event.room, event.kind) for event in live.sender.events(20)] == [(room, "failed")]
    assert not status(live.prefill)["peers"]
    live.sender.abort(room, "told so")
    all_free(live.prefill)
    restarted(live, live.decode)
    assert shared_files(live.decode).isdisjoint(files), "swept at the next start"
    live.serves()


def test_a_bootstrap_that_forgot_is_told_again(live: LiveCluster) -> None:
    bootstrap = live.cluster.bootstrap
    port = int(bootstrap.url.rpartition(":")[2])
    room = in_flight(live)
    bootstrap.kill()
    live.write(room, TOKENS, 500, TOKENS)
    live.begun[room].finish()
    live.read(room, TOKENS)
    live.claimed[room].release()
    eventually("the loss shown", lambda: status(live.prefill)["bootstrap"]["problem"])
    assert http("GET", live.prefill, "/ready").status_code == 200, "rooms cross without it"
    live.serves()

    bootstrap.config = bootstrap.config | {"http": {"port": port}}
    bootstrap.start()
    eventually("the directory filled", lambda: not http("GET", bootstrap, "/ready").json()["reasons"])
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    eventually("no problem shown", lambda: not status(live.prefill)["bootstrap"]["problem"])
    live.serves()
