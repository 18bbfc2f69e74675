"""Admission under pressure on running daemons: waits, order, caps, readiness, tickets that nobody uses.

Both roles admit in the same way, so most tests run on both. A room here is one request slot.
"""

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import (
    LiveCluster,
    all_free,
    ends,
    http,
    live_cluster,
    metric,
    raises_code,
    report,
    status,
)

SLOTS = 4
UNREADY_S = 1.0
TICKET_S = 6.0
TOKENS = 1000
ADMISSION = {"unready_after_s": UNREADY_S, "max_waiting": 8, "clients": {"capped": {"max_rooms": 2}}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    with live_cluster(
        pages={"full": 16, "swa": 3 * SLOTS, "request": SLOTS},
        host_pages=16,
        prefill={"admission": ADMISSION, "timeouts": {"early_offer_s": 60.0}},  # rooms that are on decode alone stay
        decode={"admission": ADMISSION},
        bootstrap={"timeouts": {"ticket_s": TICKET_S}},
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _engines_let_go(live: LiveCluster) -> Iterator[None]:
    yield
    live.detach()


@pytest.fixture(params=["prefill", "decode"])
def daemon(live: LiveCluster, request: pytest.FixtureRequest) -> Iterator[DaemonProcess]:
    found: DaemonProcess = getattr(live, request.param)
    yield found
    if request.session.testsfailed:
        # What a failed test has left behind is not another test's failure.
        for room in http("GET", found, "/v1/requests", params={"state": ["admitted", "offered"]}).json()["rooms"]:
            http("DELETE", found, f"/v1/requests/{room['room']}")
    all_free(found)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def post(live: LiveCluster, daemon: DaemonProcess, **more: Any) -> httpx.Response:
    prefill = [live.address] if daemon is live.decode else []
    return http("POST", daemon, "/v1/requests", json={"prompt_tokens": 1, "prefill": prefill, **more})


def admit(live: LiveCluster, daemon: DaemonProcess, **more: Any) -> int:
    answer = post(live, daemon, **more)
    assert answer.status_code == 201, answer.text
    return int(answer.json()["room"])


def fill(live: LiveCluster, daemon: DaemonProcess, client: str = "") -> list[int]:
    return [admit(live, daemon, client=client) for _ in range(SLOTS)]


def end(daemon: DaemonProcess, *rooms: int) -> None:
    for room in rooms:
        assert http("DELETE", daemon, f"/v1/requests/{room}").status_code == 200


def waiting(daemon: DaemonProcess) -> int:
    return int(status(daemon)["admission"]["waiting"])


def test_who_waits_is_admitted_in_fair_order_as_rooms_end(live, daemon, threads):
    held = fill(live, daemon, client="greedy")
    asked: list[tuple[str, Future[httpx.Response]]] = []
    for number, client in enumerate(("greedy", "greedy", "modest")):
        asked.append((client, threads.submit(post, live, daemon, client=client, wait_s=15)))
        eventually("it waits", lambda count=number + 1: waiting(daemon) == count)
    refused = post(live, daemon)
    assert (refused.status_code, refused.json()["code"]) == (503, "capacity"), "nobody passes those who wait"
    clients = {shown["client"]: shown["waiting"] for shown in status(daemon)["admission"]["clients"]}
    assert clients == {"greedy": 2, "modest": 1}
    assert metric(daemon, "kvbridge_admission_waiting_requests") == 3
    found = status(daemon)
    assert found["started_at"] < found["admission"]["oldest_since"] < found["at"]
    order = []
    for room in held[:3]:
        end(daemon, room)
        client, answer = eventually("one is admitted", lambda: next((one for one in asked if one[1].done()), None))
        asked.remove((client, answer))
        assert answer.result().status_code == 201, answer.result().text
        order.append((client, int(answer.result().json()["room"])))
    assert [client for client, _ in order] == ["modest", "greedy", "greedy"]
    assert metric(daemon, "kvbridge_admission_wait_seconds_count", outcome="admitted") >= 3
    end(daemon, held[3], *(room for _, room in order))


def test_who_waits_at_bootstrap_waits_at_the_daemon_that_is_full(live, daemon, threads):
    held = fill(live, daemon)
    asked = threads.submit(
        http, "POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": 1, "wait_s": 15}
    )
    eventually("it waits", lambda: waiting(daemon) == 1)
    end(daemon, held.pop())
    answer = asked.result(20)
    assert answer.status_code == 201, answer.text
    http("DELETE", live.cluster.bootstrap, f"/v1/requests/{answer.json()['room']}")
    end(daemon, *held)
    for each in live.nodes:
        all_free(each)


@pytest.mark.parametrize("daemon", ["prefill"], indirect=True)
def test_a_daemon_that_shuts_down_keeps_nobody_waiting(live, daemon, threads):
    held = fill(live, daemon)
    asked = threads.submit(post, live, daemon, wait_s=15)
    eventually("it waits", lambda: waiting(daemon) == 1)
    daemon.kill(signal.SIGTERM)
    answer = asked.result(20)
    assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
    assert "shutting down" in answer.json()["detail"]
    end(daemon, *held)
    assert daemon.stop() == 0
    daemon.start()
    live.cluster.wait_ready()


def test_a_daemon_that_admits_nothing_turns_red_and_green_again(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = fill(live, daemon)
    red = eventually("red", lambda: http("GET", daemon, "/ready").status_code == 503 and http("GET", daemon, "/ready"))
    (reason,) = red.json()["reasons"]
    assert "admission.unready_after_s" in reason
    assert f"space 'request' has no available page of {SLOTS} ({SLOTS} " in reason
    assert metric(daemon, "kvbridge_ready") == 0
    assert metric(daemon, "kvbridge_admission_starved_seconds") >= UNREADY_S * 0.9
    refused = http("POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": 1})
    assert (refused.status_code, refused.json()["code"]) == (503, "capacity"), "who is full is asked, and says what is"
    assert "space 'request' lacks 1 pages" in refused.json()["detail"]
    end(daemon, held[0])
    eventually("green", lambda: http("GET", daemon, "/ready").status_code == 200)
    assert metric(daemon, "kvbridge_admission_starved_seconds") == 0
    end(daemon, *held[1:])


def test_a_ticket_that_no_engine_uses_ends_on_both_sides_when_it_says(live: LiveCluster) -> None:
    why = "no prefill engine has begun it in time (limit: begin_within_s)"
    room = live.ticket(TOKENS)["room"]
    shown = http("GET", live.cluster.bootstrap, f"/v1/requests/{room}").json()
    (prefill,), (decode,) = shown["prefill"], shown["decode"]
    for told in (shown["ticket"], prefill["report"], decode["report"]):
        assert 0 < told["expires_in_s"] <= TICKET_S
    assert {prefill["report"]["limit"], decode["report"]["limit"]} == {"begin_within_s"}
    eventually("offered", lambda: report(live.decode, room)["state"] == "offered")
    assert ends(live.prefill, room, "failed", "deadline") == why
    assert ends(live.decode, room, "failed", "deadline") == f"prefill node prefill-0/node-0: {why}"
    for daemon in live.nodes:
        all_free(daemon)
    shown = http("GET", live.cluster.bootstrap, f"/v1/requests/{room}").json()
    assert shown["state"] == "failed"
    assert why in raises_code("conflict", lambda: live.sender.begin(room, prompt_tokens=TOKENS))
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    live.serves()
