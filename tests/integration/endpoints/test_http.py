"""The HTTP APIs of running daemons: full pools, cancels in every state, waits, and what can never work.

The routes have their own tests over fakes; here pages are real, and both sides must get theirs back.
"""

from typing import Any

import pytest

from tests.helpers import live_rooms
from tests.helpers.cluster import DaemonProcess, eventually

TOKENS = 700


def body(live: live_rooms.LiveCluster, daemon: DaemonProcess, **more: Any) -> dict[str, Any]:
    """An admission that fits that daemon's role."""
    prefill = [{"endpoint": live.control}] if daemon is live.decode else []
    return {"prompt_tokens": TOKENS, "prefill": prefill, **more}


def admit(live: live_rooms.LiveCluster, daemon: DaemonProcess, **more: Any) -> int:
    answer = live_rooms.http("POST", daemon, "/v1/requests", json=body(live, daemon, **more))
    assert answer.status_code == 201, answer.text
    room = int(answer.json()["room"])
    assert answer.headers["Location"] == f"/v1/requests/{room}"
    return room


def delete(daemon: DaemonProcess, room: int) -> dict[str, Any]:
    answer = live_rooms.http("DELETE", daemon, f"/v1/requests/{room}?reason=enough")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("side", "space", "rooms", "tokens"),
    [("prefill", "full", 1, live_rooms.FULL_PAGES * 256), ("decode", "request", live_rooms.REQUEST_PAGES, 1)],
)
def test_a_full_pool_says_when_to_come_back(live, side, space, rooms, tokens):
    daemon: DaemonProcess = getattr(live, side)
    held = [admit(live, daemon, prompt_tokens=tokens) for _ in range(rooms)]

    def taken() -> dict[str, int]:
        # Without their states: on decode, pages that are held become leased when the room is offered.
        return {part: sum(states.values()) for part, states in live_rooms.busy_pages(daemon).items()}

    before = taken()
    refused = live_rooms.metric(daemon, "kvbridge_admissions_refused_total", code="capacity")
    answer = live_rooms.http("POST", daemon, "/v1/requests", json=body(live, daemon, prompt_tokens=129))
    assert (answer.status_code, answer.json()["code"]) == (503, "capacity")
    assert int(answer.headers["Retry-After"]) >= 1
    assert f"'{space}'" in answer.json()["detail"]
    assert taken() == before, "something was kept of what was refused"
    assert live_rooms.metric(daemon, "kvbridge_admissions_refused_total", code="capacity") == refused + 1
    assert live_rooms.http("GET", daemon, "/ready").status_code == 200
    delete(daemon, held[0])
    answer = eventually(
        "the refused request admitted",
        lambda: (
            (
                found := live_rooms.http("POST", daemon, "/v1/requests", json=body(live, daemon, prompt_tokens=129))
            ).is_success
            and found
        ),
    )
    for room in (*held[1:], answer.json()["room"]):
        delete(daemon, room)


def nothing(_live: live_rooms.LiveCluster, _room: int) -> None:
    """Reserved on both sides, not begun."""


def half(live: live_rooms.LiveCluster, room: int) -> None:
    live.write(room, TOKENS, 0, 400)


def whole(live: live_rooms.LiveCluster, room: int) -> None:
    live.write(room, TOKENS)


def committed(live: live_rooms.LiveCluster, room: int) -> None:
    whole(live, room)
    live.begun[room].finish()
    eventually("committed", lambda: live_rooms.report(live.decode, room)["state"] == "committed")


@pytest.mark.parametrize(
    ("cancelled", "stage"), [("prefill", nothing), ("decode", nothing), ("prefill", half), ("decode", whole)]
)
def test_a_cancel_on_either_side_ends_both(live, cancelled, stage):
    assert live.sender
    daemon: DaemonProcess = getattr(live, cancelled)
    room = live.pair(TOKENS)
    stage(live, room)
    delete(daemon, room)
    for side in (live.prefill, live.decode):
        answer = live_rooms.http("GET", side, f"/v1/requests/{room}?wait=15").json()
        # The side that did not ask is told of a failure or of an abort; the code and the reason are the first cause's.
        assert answer["state"] == "aborted" or (side is not daemon and answer["state"] == "failed"), answer
        assert answer["reason_code"] == "aborted"
        assert "enough" in answer["reason"]
    live_rooms.all_free(live.decode)
    if stage is nothing:
        live_rooms.all_free(live.prefill)
    else:
        assert live_rooms.busy_pages(live.prefill), "the engine writes them until it says that it does not"
        assert {(event.room, event.kind) for event in live.sender.events(20)} == {
            (room, live_rooms.report(live.prefill, room)["state"])
        }
        live.sender.abort(room, "told so")
    assert delete(daemon, room)["state"] == "aborted", "again: harmless"


def test_a_cancelled_room_that_was_claimed_is_the_engines_until_it_lets_go(live: live_rooms.LiveCluster) -> None:
    assert live.reader
    room = live.pair(TOKENS)
    committed(live, room)
    claimed = live.read(room, TOKENS)
    live.reader.events()
    assert delete(live.decode, room)["state"] == "aborting"
    assert [(event.room, event.kind, event.reason) for event in live.reader.events(20)] == [(room, "cancel", "enough")]
    assert live_rooms.busy_pages(live.decode)["host"] == {"held": len(claimed.tables["host"])}
    live.claimed[room].release()
    assert live_rooms.ends(live.decode, room, "aborted", "aborted") == "enough"


def test_a_ticket_leads_to_both_ends(live: live_rooms.LiveCluster) -> None:
    ticket = live.ticket(TOKENS, client="test")
    assert ticket["prefill"] == {"instance": "prefill-0", "http_urls": [live.prefill.url], "engine_urls": []}
    assert ticket["decode"] == {"instance": "decode-0", "http_urls": [live.decode.url], "engine_urls": []}
    room = ticket["room"]
    for side in (live.prefill, live.decode):
        assert live_rooms.report(side, room)["prompt_tokens"] == TOKENS
    both = live_rooms.http("GET", live.cluster.bootstrap, f"/v1/requests/{room}").json()
    assert [end["report"]["role"] for end in (*both["prefill"], *both["decode"])] == ["prefill", "decode"]
    again = live_rooms.http(
        "POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS, "room": room}
    )
    assert (again.status_code, again.json()["code"]) == (409, "conflict")
    assert live_rooms.http("GET", live.cluster.bootstrap, "/v1/requests/4711").status_code == 404
    live.cross(TOKENS, room)


def test_a_room_that_one_side_refuses_is_kept_by_neither(live: live_rooms.LiveCluster) -> None:
    """The directory has not heard yet that the host pool is full: prefill reserves, decode refuses, prefill gives back."""
    held = admit(live, live.decode, prompt_tokens=live_rooms.HOST_PAGES * 256)
    answer = live_rooms.http("POST", live.cluster.bootstrap, "/v1/requests", json={"prompt_tokens": TOKENS})
    assert (answer.status_code, answer.json()["code"]) == (503, "capacity")
    assert answer.headers["Retry-After"]
    live_rooms.all_free(live.prefill)
    delete(live.decode, held)
