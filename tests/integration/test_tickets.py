"""Tickets on running daemons: how long one is good for, what ends with it, and what those are told who are refused meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, live_cluster, raises_code, report

TICKET_S = 10.0
"""Long: all that is looked at before it has passed takes a while on a machine that is busy."""
SLOTS = 4
TOKENS = 1000
UNREADY_S = 0.4
WHY = "no prefill engine has begun it in time (limit: begin_within_s)"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    admission = {"admission": {"unready_after_s": UNREADY_S}}
    with live_cluster(
        pages={"full": 64, "swa": 16, "request": SLOTS},
        prefill=admission,
        decode=admission,
        bootstrap={"timeouts": {"ticket_s": TICKET_S}},
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _engines_let_go(live: LiveCluster) -> Iterator[None]:
    yield
    live.detach()


def ask(live: LiveCluster) -> tuple[int, dict[str, Any]]:
    """Ask bootstrap for a pair; returns status and body."""
    answer = http("POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS})
    return answer.status_code, answer.json() | {"header_s": int(answer.headers.get("Retry-After", 0))}


def left_s(live: LiveCluster, room: int) -> tuple[list[float], float]:
    """What bootstrap's ticket and both ends say is left, and within which time they have said so."""
    asked_s = time.monotonic()
    shown = http("GET", live.cluster.bootstrap, f"/v1/requests/{room}").json()
    (prefill,), (decode,) = shown["prefill"], shown["decode"]
    assert {prefill["report"]["limit"], decode["report"]["limit"]} == {"begin_within_s"}
    told = [each["expires_in_s"] for each in (shown["ticket"], prefill["report"], decode["report"])]
    return told, time.monotonic() - asked_s


def silent_s(live: LiveCluster) -> float:
    """When bootstrap heard of the prefill node last."""
    shown = http("GET", live.cluster.bootstrap, "/v1/instances").json()
    return float(next(each for each in shown if each["role"] == "prefill")["nodes"][0]["silent_s"])


def test_tickets_that_no_engine_uses_block_a_pair_for_as_long_as_they_say(live: LiveCluster) -> None:
    rooms = [live.ticket(TOKENS)["room"]]
    asked_s = time.monotonic()
    for _ in range(1, SLOTS):
        asked_s = time.monotonic()
        rooms.append(live.ticket(TOKENS)["room"])
    last_s = time.monotonic()
    apart_s = 0.5 + last_s - asked_s
    """Both ends of the last one were reserved, and the ticket written, within its call."""
    eventually("offered", lambda: report(live.decode, rooms[0])["state"] == "offered")
    first, took_s = left_s(live, rooms[-1])
    looked_s = time.monotonic()
    assert max(first) - min(first) < apart_s + took_s
    assert max(first) <= TICKET_S
    for moment in ("at once", "when the daemon has called itself unready"):
        status, body = ask(live)
        assert (status, body["code"]) == (503, "capacity"), moment
        assert "space 'request' lacks 1 pages" in body["detail"], moment
        assert body["header_s"] >= body["retry_after_s"] > 0, moment
        eventually("red", lambda: http("GET", live.prefill, "/ready").status_code == 503)
        red_s = time.monotonic()
        eventually("bootstrap has heard since", lambda at_s=red_s: silent_s(live) < time.monotonic() - at_s)
    eventually("time has passed", lambda: time.monotonic() > looked_s + 0.5)
    then, took_s = left_s(live, rooms[-1])
    assert max(then) - min(then) < apart_s + took_s
    assert max(then) < max(first) - 0.5
    assert ends(live.prefill, rooms[-1], "failed", "deadline") == WHY
    assert time.monotonic() - last_s < TICKET_S + 10
    for room in rooms:
        assert ends(live.prefill, room, "failed", "deadline") == WHY
        assert ends(live.decode, room, "failed", "deadline") == f"prefill node prefill-0/node-0: {WHY}"
    for daemon in (live.prefill, live.decode):
        all_free(daemon)
    shown = http("GET", live.cluster.bootstrap, f"/v1/requests/{rooms[0]}").json()
    assert (shown["ticket"]["expires_in_s"], shown["state"]) == (0.0, "failed")
    assert WHY in raises_code("conflict", lambda: live.sender.begin(rooms[0], prompt_tokens=TOKENS))
    live.cross(TOKENS, live.ticket(TOKENS)["room"])
    live.serves()


def test_a_ticket_that_an_engine_has_used_is_good_for_as_long_as_the_room_takes(live: LiveCluster) -> None:
    room = live.ticket(TOKENS)["room"]
    assert live.reader is not None
    live.write(room, TOKENS, 0, TOKENS // 2)
    ended_s = time.monotonic() + TICKET_S + 0.5
    eventually("its ticket has ended", lambda: time.monotonic() > ended_s)
    assert (report(live.prefill, room)["limit"], report(live.decode, room)["limit"]) == ("timeouts.room_s",) * 2
    live.write(room, TOKENS, TOKENS // 2)
    live.sender.finish(room, metadata=b"first token")
    live.read(room, TOKENS)
    live.reader.release(room)
    live.serves()


def test_a_room_that_was_admitted_directly_has_the_daemons_own_limit(live: LiveCluster) -> None:
    room = live.pair(TOKENS)
    assert report(live.prefill, room)["limit"] == "timeouts.begin_s"
    live.cross(TOKENS, room)
    live.serves()
