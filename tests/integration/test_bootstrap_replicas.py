"""Bootstrap as it is shared: two replicas over one Redis, one of them killed, Redis away; real daemons."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.errors import PeerError
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, http, live_cluster, metric, status
from tests.helpers.redis_server import redis_server

TOKENS = 1000
HEARTBEAT_S = 0.5
PAIRED_AGAIN_S = 4 * HEARTBEAT_S + 20.0
"""Some heartbeats, and what a busy machine takes to start what is to hear them."""


def pair(bootstrap: DaemonProcess, **body: Any) -> httpx.Response:
    return http("POST", bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS, **body})


def paired(bootstrap: DaemonProcess, **body: Any) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        answer = pair(bootstrap, **body)
        assert answer.status_code in {201, 503}, answer.text
        return answer.json() if answer.is_success else None

    return dict(eventually("a ticket", look))


def cancel(bootstrap: DaemonProcess, room: int) -> None:
    answer = http("DELETE", bootstrap, f"/v1/requests/{room}")
    assert answer.status_code in {200, 404}, answer.text


def reasons(bootstrap: DaemonProcess) -> tuple[int, str]:
    answer = http("GET", bootstrap, "/ready")
    return answer.status_code, " ".join(answer.json()["reasons"])


@contextmanager
def replicated(server, *, expire_after_s=8.0, **settings):
    """A cluster whose bootstrap is joined by a second one over the same Redis."""
    directory = {"store": "redis", "redis_url": server.url, "namespace": "test", "expire_after_s": expire_after_s}
    section = {"directory": directory, "timeouts": {"store_s": 1.0, "reserve_s": 3.0, "pair_s": 8.0}}
    with live_cluster(bootstrap=section, **settings) as live:
        folder = live.cluster.folder / "b2"
        second = DaemonProcess("bootstrap", "the second bootstrap", folder)
        second.config = dict(live.cluster.bootstrap.config)
        second.arguments = ("--endpoint-dir", str(second.runtime_dir))
        live.cluster.others.append(second)
        second.start()
        second.wait_ready()
        yield live, [live.cluster.bootstrap, second]


def test_two_replicas_serve_one_directory_while_pages_are_scarce() -> None:
    """Same and different ids at once on both; one replica is killed in the middle; no double ticket, no leaked page."""
    pages = {"full": 16, "swa": 8, "request": 4}
    with redis_server() as server, replicated(server, pages=pages, host_pages=16) as (live, replicas):
        room = paired(replicas[0])["room"]
        assert http("GET", replicas[1], f"/v1/requests/{room}").json()["ticket"]["room"] == room
        clash = pair(replicas[1], room=room)
        assert (clash.status_code, clash.json()["code"]) == (409, "conflict")
        cancel(replicas[1], room)
        assert pair(replicas[0], room=room).json()["generation"] == 2
        cancel(replicas[0], room)

        tickets: dict[int, list[int]] = {}

        def caller(number: int) -> str:
            room = number // 2  # each id goes to both replicas at once
            try:
                answer = pair(replicas[number % 2], room=room)
            except (httpx.HTTPError, PeerError):
                return "gone"
            if answer.status_code != 201:
                assert answer.json()["code"] in {"capacity", "conflict", "stale", "not_ready"}, answer.text
                return str(answer.json()["code"])
            tickets.setdefault(room, []).append(answer.json()["generation"])
            return "ticket"

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(caller, range(40)))
        assert all(len(generations) == 1 for generations in tickets.values()), tickets
        assert 1 <= len(tickets) <= 4, outcomes  # as many as there are request slots
        for room in tickets:
            cancel(replicas[room % 2], room)
        for daemon in (live.prefill, live.decode):
            all_free(daemon)

        tickets.clear()
        with ThreadPoolExecutor(8) as pool:
            calls = [pool.submit(caller, number) for number in range(200, 230)]
            calls[4].result()
            replicas[1].kill()
            calls += [pool.submit(caller, number) for number in range(230, 240)]  # the others may have been quick
            outcomes = [call.result() for call in calls]
        assert "gone" in outcomes, outcomes
        assert all(len(generations) == 1 for generations in tickets.values()), tickets
        # Also rooms whose ticket was lost with the replica can be ended by the other one, or end by themselves.
        for room in range(100, 120):
            cancel(replicas[0], room)
        live.cluster.others.remove(replicas[1])
        eventually("the lost reservations end", lambda: _give_back(live, range(100, 120)))
        for daemon in (live.prefill, live.decode):
            all_free(daemon)
        live.cross(TOKENS, paired(replicas[0])["room"])


def _give_back(live: LiveCluster, rooms: range) -> bool:
    """End what a killed replica had reserved, as `timeouts.offer_s` would later; true when all pages are free."""
    for daemon in (live.decode, live.prefill):
        for room in rooms:
            http("DELETE", daemon, f"/v1/requests/{room}")
    return all(
        not any(status(daemon)["rooms"].get(state, 0) for state in ("admitted", "offered", "transferring"))
        for daemon in (live.prefill, live.decode)
    )


@pytest.mark.thorough
def test_a_redis_that_is_away_stops_new_pairings_only_and_comes_back_filled() -> None:
    with redis_server() as server, replicated(server) as (live, replicas):
        room = paired(replicas[0])["room"]
        assert live.reader is not None
        live.write(room, TOKENS, 0, 512)
        server.kill()
        for replica in replicas:
            answer = pair(replica)
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready"), answer.text
            assert "Retry-After" in answer.headers
            eventually("not ready, with the reason", lambda replica=replica: "redis.sock" in reasons(replica)[1])
            assert reasons(replica)[0] == 503
            assert "redis.sock" in status(replica)["store"]["problem"]
            assert metric(replica, "kvbridge_store_failures_total", reason="connection") > 0
        eventually("the nodes say so", lambda: "redis" in status(live.decode)["bootstrap"]["problem"])
        live.write(room, TOKENS, 512, TOKENS)
        live.begun[room].finish(metadata=b"x")
        live.read(room, TOKENS)
        live.claimed[room].release()
        server.start()
        for replica in replicas:
            eventually("a pair", lambda replica=replica: replica.is_ready(), PAIRED_AGAIN_S)
        live.cross(TOKENS, paired(replicas[1])["room"])
        live.serves()
