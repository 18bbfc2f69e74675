"""What bootstrap checks of the nodes that announce themselves: that a name is one process's, and that a pair can meet."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbridge.control.keys import generate_keys, write_keys
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, http, live_cluster, metric
from tests.helpers.matrices import kept
from tests.helpers.redis_server import redis_server

TOKENS = 1000
EXPIRE_S = 40.0
"""`directory.expire_after_s`: as long as a name would be kept for a daemon that was killed, if nobody looked."""


@pytest.fixture(scope="module", params=["memory", kept("redis", False)])
def live(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    with ExitStack() as stack:
        directory: dict[str, Any] = {"store": request.param, "expire_after_s": EXPIRE_S}
        if request.param == "redis":
            directory["redis_url"] = stack.enter_context(redis_server()).url
        mine = [{"instance": f"{role}-{os.getpid()}"} for role in ("prefill", "decode")]
        yield stack.enter_context(live_cluster(prefill=mine[0], decode=mine[1], bootstrap={"directory": directory}))


def holder(live: LiveCluster, role: str) -> str:
    """Who has the name of that role's node; empty when nobody has."""
    shown = http("GET", live.cluster.bootstrap, "/v1/instances").json()
    return next((each["nodes"][0]["incarnation"] for each in shown if each["role"] == role), "")


def incarnation(daemon: DaemonProcess) -> str:
    return daemon.endpoint().incarnation


def ready(daemon: DaemonProcess) -> tuple[int, str]:
    answer = http("GET", daemon, "/ready")
    return answer.status_code, " ".join(answer.json()["reasons"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_second_process_of_a_name_is_refused_for_as_long_as_the_first_is_there(
    live: LiveCluster, role: str, tmp_path: Path
) -> None:
    first: DaemonProcess = getattr(live, role)
    folder = live.cluster.folder / f"second-{role}"
    second = DaemonProcess(role, "the second", folder, ends_with_us=True)
    second.config = {**first.config, "runtime_dir": str(second.runtime_dir)}
    try:
        second.start()
        told = eventually(
            "the second is told", lambda: "two processes use one name" in ready(second)[1] and ready(second)
        )
        assert (told[0], incarnation(first) in told[1], "bootstrap refuses this node" in told[1]) == (503, True, True)
        assert metric(second, "kvbridge_ready") == 0
        refusals = [line for line in second.log_path.read_text().splitlines() if '"bootstrap_refused"' in line]
        assert sum("two processes use one name" in line for line in refusals) == 1  # once, however often it asks
        assert ready(first) == (200, "")
        assert holder(live, role) == incarnation(first)
        live.cross(TOKENS, live.ticket(TOKENS)["room"])
        live.detach()
        begun_s = time.monotonic()
        first.kill()
        eventually("the second has the name", lambda: holder(live, role) == incarnation(second))
        eventually("the second is ready", lambda: ready(second) == (200, ""))
        assert time.monotonic() - begun_s < EXPIRE_S - 1
        first.start()
        eventually("now the first is told", lambda: "two processes use one name" in ready(first)[1])
    finally:
        second.stop()
    eventually("the first has its name back", lambda: ready(first) == (200, ""))
    assert holder(live, role) == incarnation(first)
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    live.serves()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_daemon_that_was_killed_has_its_name_again_at_once(live: LiveCluster, role: str) -> None:
    daemon: DaemonProcess = getattr(live, role)
    live.detach()
    former = incarnation(daemon)
    daemon.kill()
    daemon.start()
    daemon.endpoint()  # its endpoints are open
    begun_s = time.monotonic()
    eventually("it is listed", lambda: holder(live, role) == incarnation(daemon), pause_s=0.005)
    took_s = time.monotonic() - begun_s
    print(f"{role}: listed {took_s:.3f} s after its endpoints opened")
    assert took_s < EXPIRE_S / 4
    assert incarnation(daemon) != former
    eventually("everybody is ready", lambda: not ready(live.cluster.bootstrap)[1])
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    live.serves()


@pytest.mark.parametrize("keyed", ["prefill", kept("decode", False)])
def test_nodes_of_which_one_has_no_keys_are_not_paired(keyed: str, tmp_path: Path) -> None:
    write_keys(generate_keys(), tmp_path / "node.key")
    control = {"control": {"curve": {"secret_key_file": str(tmp_path / "node.key")}}}
    with live_cluster(**{keyed: control}, wait=False) as live:
        for daemon in (live.prefill, live.decode):
            daemon.wait_ready()

        def told() -> bool:
            """Bootstrap hears that both nodes are ready with a heartbeat; then their keys are the only reason."""
            cure = "give all of them keys (control.curve.secret_key_file), or none"
            shown = http("GET", live.cluster.bootstrap, "/v1/instances").json()
            return len(shown) == 2 and all(cure in " ".join(instance["reasons"][:1]) for instance in shown)

        eventually("both are known, and what is wrong with them", told)
        why = "by curve" if keyed == "prefill" else "by local"
        for instance in http("GET", live.cluster.bootstrap, "/v1/instances").json():
            assert (instance["ready"], instance["complete"]) == (False, True)
        eventually("bootstrap says so", lambda: why in ready(live.cluster.bootstrap)[1])
        answer = http("POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS})
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        assert f"'prefill-0' meets others {why}" in answer.json()["detail"]
        for daemon in (live.prefill, live.decode):
            assert http("GET", daemon, "/status").json()["rooms"] == {}
