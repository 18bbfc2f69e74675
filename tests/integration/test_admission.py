"""Admission under pressure on running daemons: waits, order, caps, callers that hang up, readiness, Retry-After.

Both roles admit in the same way, so most tests run on both. A room here is one request slot.
"""

from __future__ import annotations

import json
import math
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, all_free, http, live_cluster, metric, report, status

SLOTS = 4
UNREADY_S = 1.0
ADMISSION = {"unready_after_s": UNREADY_S, "max_waiting": 8, "clients": {"capped": {"max_rooms": 2}}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    pages = {"full": 16, "swa": 3 * SLOTS, "request": SLOTS}
    with live_cluster(
        pages=pages,
        host_pages=16,
        prefill={"admission": ADMISSION, "timeouts": {"early_offer_s": 60.0}},  # rooms that are on decode alone stay
        decode={"admission": ADMISSION},
    ) as running:
        yield running


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
    return http("POST", daemon, "/v1/requests", json=body(live, daemon, **more))


def body(live: LiveCluster, daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    prefill = [live.address] if daemon is live.decode else []
    return {"prompt_tokens": 1, "prefill": prefill, **more}


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


# ------------------------------------------------------------------------------------------- waiting


def test_who_waits_is_admitted_in_fair_order_as_rooms_end(
    live: LiveCluster, daemon: DaemonProcess, threads: ThreadPoolExecutor
) -> None:
    held = fill(live, daemon, client="greedy")
    asked: list[tuple[str, Future[httpx.Response]]] = []
    for number, client in enumerate(("greedy", "greedy", "modest")):
        asked.append((client, threads.submit(post, live, daemon, client=client, wait_s=15)))
        eventually("it waits", lambda count=number + 1: waiting(daemon) == count)
    clients = {shown["client"]: shown["waiting"] for shown in status(daemon)["admission"]["clients"]}
    assert clients == {"greedy": 2, "modest": 1}
    assert metric(daemon, "kvbridge_admission_waiting_requests") == 3
    assert status(daemon)["admission"]["oldest_wait_s"] > 0
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


def test_who_waits_in_vain_is_told_the_limit(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = fill(live, daemon)
    late = metric(daemon, "kvbridge_admissions_refused_total", code="wait_timeout")
    answer = post(live, daemon, wait_s=0.2)
    assert (answer.status_code, answer.json()["code"]) == (503, "capacity")
    assert "not there within 0.2 s (limit: the request's wait_s" in answer.json()["detail"]
    assert "Retry-After" in answer.headers
    assert metric(daemon, "kvbridge_admissions_refused_total", code="wait_timeout") == late + 1
    answer = post(live, daemon, wait_s=31)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_input")
    assert "admission.max_wait_s" in answer.json()["detail"]
    end(daemon, *held)


def test_nobody_passes_those_who_wait(live: LiveCluster, daemon: DaemonProcess, threads: ThreadPoolExecutor) -> None:
    """The waiting request needs more full pages than are free, though there are slots; one that does not wait needs few."""
    first = admit(live, daemon, prompt_tokens=10 * 256)
    large = threads.submit(post, live, daemon, prompt_tokens=16 * 256, client="large", wait_s=15)
    eventually("it waits", lambda: waiting(daemon) == 1)
    answer = post(live, daemon)
    assert (answer.status_code, answer.json()["code"]) == (503, "capacity")
    assert "1 requests wait for pages" in answer.json()["detail"]
    end(daemon, first)
    assert large.result(20).status_code == 201
    end(daemon, int(large.result().json()["room"]))


@contextmanager
def asked_by_somebody(daemon: DaemonProcess, request: dict[str, Any]) -> Iterator[None]:
    """A caller has sent a request, and hangs up at the end without having read an answer."""
    url = urlsplit(daemon.url)
    content = json.dumps(request).encode()
    head = f"POST /v1/requests HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
        connection.sendall(head.encode() + content)
        yield


def test_a_caller_that_hangs_up_leaves_nothing(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = fill(live, daemon)
    left = metric(daemon, "kvbridge_admission_wait_seconds_count", outcome="left")
    with asked_by_somebody(daemon, body(live, daemon, wait_s=15)):
        eventually("it waits", lambda: waiting(daemon) == 1)
    eventually("it waits no more", lambda: waiting(daemon) == 0)
    assert metric(daemon, "kvbridge_admission_wait_seconds_count", outcome="left") == left + 1
    end(daemon, *held)
    all_free(daemon)


def test_who_waits_at_bootstrap_waits_at_the_daemon_that_is_full(
    live: LiveCluster, daemon: DaemonProcess, threads: ThreadPoolExecutor
) -> None:
    held = fill(live, daemon)
    request = {"prompt_tokens": 1, "wait_s": 15}
    asked = threads.submit(http, "POST", live.cluster.bootstrap, "/v1/requests", json=request)
    eventually("it waits", lambda: waiting(daemon) == 1)
    end(daemon, held.pop())
    answer = asked.result(20)
    assert answer.status_code == 201, answer.text
    room = answer.json()["room"]
    assert answer.json()["expires_in_s"] >= 60
    with asked_by_somebody(live.cluster.bootstrap, request):
        eventually("another waits", lambda: waiting(daemon) == 1)
    eventually("it waits no more", lambda: waiting(daemon) == 0)
    http("DELETE", live.cluster.bootstrap, f"/v1/requests/{room}")
    end(daemon, *held)
    for each in (live.prefill, live.decode):
        all_free(each)


def test_rooms_are_listed_with_what_they_wait_for(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = fill(live, daemon, client="listed")

    def listing(**query: object) -> dict[str, Any]:
        return dict(http("GET", daemon, "/v1/requests", params={"client": "listed", **query}).json())

    eventually("offered", lambda: len(listing(state=["admitted", "offered"])["rooms"]) == SLOTS)
    first = listing(limit=3)
    rest = listing(after=first["next"])
    assert [room["room"] for room in first["rooms"] + rest["rooms"]] == held
    assert rest["next"] is None
    shown = first["rooms"][0]
    assert shown["waits_for"]
    assert shown["pages"]["request"] == 1
    assert 0 < shown["expires_in_s"] <= 600
    if daemon is live.decode:
        # Until the two nodes have met, a room knows its peer by address alone.
        eventually("its peer has a name", lambda: listing()["rooms"][0]["peers"] == ["prefill-0/node-0"])
        assert listing(peer="prefill-0")["rooms"]
    end(daemon, *held)
    eventually("all ended", lambda: len(listing(state="aborted")["rooms"]) == SLOTS)


@pytest.mark.parametrize("daemon", ["prefill"], indirect=True)
def test_a_daemon_that_shuts_down_keeps_nobody_waiting(
    live: LiveCluster, daemon: DaemonProcess, threads: ThreadPoolExecutor
) -> None:
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


# ------------------------------------------------------------------------------------------- caps


def test_a_client_at_its_cap_is_answered_429(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = [admit(live, daemon, client="capped") for _ in range(2)]
    answer = post(live, daemon, client="capped")
    assert (answer.status_code, answer.json()["code"]) == (429, "client_limit")
    assert "admission.clients.capped.max_rooms is 2" in answer.json()["detail"]
    assert int(answer.headers["Retry-After"]) >= answer.json()["retry_after_s"] > 0
    held.append(admit(live, daemon, client="other"))
    end(daemon, held[0])
    eventually("its cap has room again", lambda: _kept(held, post(live, daemon, client="capped")))
    end(daemon, *held[1:])


def test_of_more_requests_at_once_than_fit_the_others_are_refused_and_nothing_stays_behind(
    live: LiveCluster, daemon: DaemonProcess, threads: ThreadPoolExecutor
) -> None:
    asked = [threads.submit(post, live, daemon) for _ in range(4 * SLOTS)]
    answers = [answer.result(60) for answer in asked]
    held = [int(answer.json()["room"]) for answer in answers if answer.status_code == 201]
    assert len(held) == SLOTS
    refused = [answer for answer in answers if answer.status_code != 201]
    assert {(answer.status_code, answer.json()["code"]) for answer in refused} == {(503, "capacity")}
    for answer in refused:
        assert "space 'request' lacks 1 pages" in answer.json()["detail"]
        assert int(answer.headers["Retry-After"]) >= answer.json()["retry_after_s"] > 0
    end(daemon, held.pop())
    eventually("one more fits", lambda: _kept(held, post(live, daemon)))
    end(daemon, *held)
    all_free(daemon)
    open_rooms = http("GET", daemon, "/v1/requests", params={"state": ["admitted", "offered", "committed", "claimed"]})
    assert open_rooms.json()["rooms"] == []


def _kept(held: list[int], answer: httpx.Response) -> bool:
    if answer.is_success:
        held.append(int(answer.json()["room"]))
    return answer.is_success


# ------------------------------------------------------------------------------------------- readiness


def test_a_daemon_that_admits_nothing_turns_red_and_green_again(live: LiveCluster, daemon: DaemonProcess) -> None:
    held = [admit(live, daemon) for _ in range(SLOTS - 1)]
    before_s = time.monotonic()
    held.append(admit(live, daemon))
    red = eventually("red", lambda: http("GET", daemon, "/ready").status_code == 503 and http("GET", daemon, "/ready"))
    assert time.monotonic() - before_s >= UNREADY_S * 0.9
    assert not red.json()["ready"]
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


# ------------------------------------------------------------------------------------------- Retry-After


@pytest.mark.parametrize("daemon", ["prefill"], indirect=True)
def test_retry_after_is_close_to_when_slots_come_free(live: LiveCluster, daemon: DaemonProcess) -> None:
    """Rooms end one by one at a steady rate; a caller that asks for a slot meanwhile is told about one interval."""
    every_s, times = 0.25, 16
    assert daemon.stop() == 0  # what the tests before have released, and when, counts as well
    daemon.start()
    live.cluster.wait_ready()
    held = fill(live, daemon)
    begun_s = due_s = time.monotonic()
    for _ in range(times):
        due_s += every_s
        time.sleep(max(0.0, due_s - time.monotonic()))  # the rate is what is tested
        end(daemon, held.pop(0))
        held.append(int(eventually("a slot", lambda: _room(post(live, daemon)))))
    least_s = (time.monotonic() - begun_s) / times  # longer on a machine that does not keep up
    answer = post(live, daemon)
    assert answer.status_code == 503
    told_s = answer.json()["retry_after_s"]
    assert answer.headers["Retry-After"] == str(math.ceil(told_s))
    most_s = (time.monotonic() - begun_s) / times
    assert 0.5 * least_s < told_s < 2.5 * most_s, f"told {told_s} s, a slot comes free every {least_s} to {most_s} s"
    end(daemon, *held)


def _room(answer: httpx.Response) -> int | None:
    return int(answer.json()["room"]) if answer.is_success else None


# ------------------------------------------------------------------------------------------- reservations end


def test_a_reservation_that_is_not_used_ends_by_its_limit_and_gives_all_back() -> None:
    limits = {"offer_s": 4.0, "handshake_s": 4.0}
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,  # which says nothing
        live_cluster(prefill={"timeouts": limits}, decode={"timeouts": limits}) as live,
    ):
        silent = [{"endpoint": f"tcp://127.0.0.1:{listener.getsockname()[1]}"}]
        cases = ((live.prefill, {}, "timeouts.offer_s"), (live.decode, {"prefill": silent}, "timeouts.handshake_s"))
        rooms = [(daemon, admit(live, daemon, **more), limit) for daemon, more, limit in cases]
        for daemon, room, limit in rooms:
            shown = report(daemon, room)
            assert shown["limit"] == limit
            assert 0 < shown["expires_in_s"] <= limits["offer_s"]
        for daemon, room, limit in rooms:
            shown = eventually("it ends", lambda one=daemon, id_=room: _final(report(one, id_)))
            assert (shown["state"], shown["reason_code"]) == ("failed", "deadline")
            assert limit in shown["reason"]
            assert (shown["expires_in_s"], shown["limit"]) == (None, "")
            all_free(daemon)
        live.serves()


def _final(shown: dict[str, Any]) -> dict[str, Any] | None:
    return shown if shown["state"] == "failed" else None
