"""Schedulers and nodes killed or stopped in the middle of a request: each client gets an answer, and everybody else goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.engines.fleet import DECODES
from tests.engines.processes import GONE_S, end, frozen, send
from tests.engines.prompts import fresh
from tests.engines.servers import under_way, wait_until
from tests.sglang.fleet import Fleet

KILLED_S, STOPPED_S = 5.0, 20.0
"""For the clients of decode to have an answer."""
SHORT = pytest.mark.sglang_short
SLOW_S = 10.0
"""Added on a machine that does other things."""
Strike = Callable[[Fleet], object]
STRIKES: dict[str, tuple[float, Strike]] = {
    "prefill's scheduler is killed": (
        KILLED_S,
        lambda fleet: send(signal.SIGKILL, [fleet.servers["prefill"].scheduler()]),
    ),
    "prefill's scheduler stays stopped": (STOPPED_S, lambda _: None),
    "prefill's node is killed": (KILLED_S, lambda fleet: send(signal.SIGKILL, [fleet.servers["prefill"].node()])),
    "decode's nodes are killed": (
        KILLED_S,
        lambda fleet: send(signal.SIGKILL, [fleet.servers[decode].node() for decode in DECODES]),
    ),
}


@pytest.mark.parametrize(
    "strike", [pytest.param(each, marks=SHORT if "scheduler is killed" in each else ()) for each in STRIKES]
)
def test_something_strikes_in_the_middle_of_a_request(fleet: Fleet, strike: str, say: list[str]) -> None:
    limit_s, hit = STRIKES[strike]
    prefill = fleet.servers["prefill"]
    known, scheduler = prefill.tree(), prefill.scheduler()
    calls, told = [], {}
    for decode in DECODES:
        told[decode] = fleet.pair(decode).room()
        asked = fresh(1200)
        calls += [
            lambda server=server, asked=asked, at=told[decode]: server.ask(asked, told=at, timeout_s=120.0)
            for server in (prefill, fleet.servers[decode])
        ]
    with under_way(calls) as results:
        try:
            with frozen([scheduler]):
                waiting = [fleet.servers[decode] for decode in DECODES]
                wait_until(lambda: all(sum(one.node_status()["rooms"].values()) for one in waiting), "decode's rooms")
                struck_s = time.monotonic()
                hit(fleet)
                got = [result.result(120.0) for result in results[1::2]]
                took_s = time.monotonic() - struck_s
        finally:
            send(signal.SIGCONT, known)
        for result in results[::2]:
            result.exception(120.0)
    assert all(one.is_error for one in got), got
    say.append(f"{strike}: decode's clients had an answer after {took_s:.1f} s")
    assert took_s < limit_s + SLOW_S
    if "scheduler is killed" in strike:
        left = psutil.wait_procs(known, timeout=GONE_S)[1]
        end(left)
        fleet.restart("prefill")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_client_leaves(fleet: Fleet, side: str) -> None:
    """One of a router's two requests is given up; nothing is left of either, and the next ones are right."""
    pair, asked = fleet.pair("mooncake"), fresh(3000)
    told = pair.room()
    leaves, stays = (pair.prefill, pair.decode) if side == "prefill" else (pair.decode, pair.prefill)
    calls = [
        lambda: leaves.ask(asked, 4, told=told, timeout_s=0.3),
        lambda: stays.ask(asked, 4, told=told, timeout_s=60.0),
    ]
    with under_way(calls) as results:
        for result in results:
            result.exception(90.0)
    other = fresh(300)
    fleet.assert_right([other], [pair.ask(other)])


def test_a_decode_server_is_killed(fleet: Fleet) -> None:
    prefill, decode = fleet.servers["prefill"], fleet.servers["mooncake"]
    asked, other = fresh(900), fresh(900)
    told = fleet.pair("mooncake").room()
    calls = [lambda server=server: server.ask(asked, told=told, timeout_s=60.0) for server in (prefill, decode)]
    with under_way(calls) as results:
        wait_until(lambda: sum(decode.node_status()["rooms"].values()), "decode's room")
        end(decode.tree())
        for result in results:
            result.exception(90.0)
    fleet.assert_right([other], [fleet.pair("nixl").ask(other)])
    fleet.restart("mooncake")
    fleet.wait_hand_over("mooncake")
