"""Servers, nodes and workers killed or frozen: each request ends by vLLM's policy, and everybody else goes on.

The decode server with Mooncake computes again (`recompute`), the one with NIXL says an error (`fail`); both are asked in each case.
"""

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import psutil
import pytest

from tests.engines.fleet import DECODES
from tests.engines.processes import GONE_S, end, frozen, send
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import under_way, wait_until
from tests.vllm.fleet import Fleet

FAILS_S = 30.0
"""For a request whose prefill is gone or frozen to end by its policy."""
Asked = dict[str, list[int]]
Told = dict[str, dict]


def hand_over(fleet: Fleet, tokens: int = 1200) -> tuple[Asked, Told]:
    asked = {decode: fresh(tokens) for decode in DECODES}
    return asked, {decode: fleet.pair(decode).hand_over(one) for decode, one in asked.items()}


def asking(fleet: Fleet, asked: Asked, told: Told, max_tokens: int = 16) -> list[Callable[[], Answer]]:
    return [
        lambda decode=decode, one=one: fleet.servers[decode].ask(
            one, max_tokens, transfer=told[decode], timeout_s=2 * FAILS_S
        )
        for decode, one in asked.items()
    ]


def wait_loads(fleet: Fleet) -> None:
    loading = [fleet.servers[decode].loads for decode in DECODES]
    wait_until(lambda: all(loads() for loads in loading), "both decode servers wait for a transfer")


def assert_ended_by_policy(fleet: Fleet, asked: Asked, results: Sequence[Future[Answer]], since_s: float) -> str:
    """See what became of loads that cannot be finished. Returns how long that took."""
    got = dict(zip(asked, [result.result(FAILS_S + 60.0) for result in results], strict=True))
    took_s = time.monotonic() - since_s
    fleet.assert_right([asked["mooncake"]], [got["mooncake"]])
    assert got["nixl"].is_error, got["nixl"]
    assert took_s < FAILS_S
    return f"{took_s:.1f} s"


def test_prefill_is_killed_before_during_and_after_a_transfer(fleet: Fleet, say: list[str]) -> None:
    prefill = fleet.servers["prefill"]
    asked_after, told = hand_over(fleet, 700)
    with under_way(asking(fleet, asked_after, told, 500)) as after:
        wait_until(lambda: not prefill.used(), "both have fetched what prefill held")
        asked_before, told_before = hand_over(fleet, 900)
        asked_during, told_during = hand_over(fleet)
        asked_paired = {decode: fresh(1100) for decode in DECODES}
        paired = {decode: fleet.pair(decode).draw_room() for decode in DECODES}
        send(signal.SIGSTOP, prefill.engine())
        calls = [
            *asking(fleet, asked_during, told_during),
            *asking(fleet, asked_paired, {decode: to_decode for decode, (_, to_decode) in paired.items()}),
            *(
                (lambda decode=decode, to=to: prefill.ask(asked_paired[decode], 1, transfer=to))
                for decode, (to, _) in paired.items()
            ),
        ]
        with under_way(calls) as during:
            wait_loads(fleet)
            killed_s = time.monotonic()
            end(prefill.tree())
            said = assert_ended_by_policy(fleet, asked_during, during[:2], killed_s)
            assert_ended_by_policy(fleet, asked_paired, during[2:4], killed_s)
        asked_s = time.monotonic()
        with under_way(asking(fleet, asked_before, told_before)) as before:
            assert_ended_by_policy(fleet, asked_before, before, asked_s)
        fleet.assert_right(list(asked_after.values()), [result.result() for result in after])
    say.append(f"prefill killed: loads under way ended after {said}")
    fleet.restart("prefill")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


def strike_engine(fleet: Fleet, victim: str) -> None:
    """Kill one process of prefill: vLLM has its scheduler in one, and its worker in one below."""
    prefill = fleet.servers["prefill"]
    scheduler = prefill.scheduler()
    below = [one for one in prefill.engine() if one.parent() == scheduler]
    killed = [scheduler] if victim == "scheduler" else below
    assert len(killed) == 1, killed
    send(signal.SIGKILL, killed)


STRIKES: dict[str, Callable[[Fleet], object]] = {
    "the scheduler is killed": lambda fleet: strike_engine(fleet, "scheduler"),
    "the worker is killed": lambda fleet: strike_engine(fleet, "worker"),
    "the worker stays frozen": lambda _: None,
    "all of prefill is frozen": lambda fleet: send(signal.SIGSTOP, fleet.servers["prefill"].tree()),
    "prefill's node is killed": lambda fleet: send(signal.SIGKILL, [fleet.servers["prefill"].node()]),
    "decode's nodes are killed": lambda fleet: send(
        signal.SIGKILL, [fleet.servers[decode].node() for decode in DECODES]
    ),
}


@pytest.mark.parametrize("strike", STRIKES)
def test_something_strikes_in_the_middle_of_a_transfer(fleet: Fleet, strike: str, say: list[str]) -> None:
    prefill = fleet.servers["prefill"]
    known = prefill.tree()
    asked, told = hand_over(fleet)
    try:
        with frozen(prefill.engine()), under_way(asking(fleet, asked, told)) as results:
            wait_loads(fleet)
            struck_s = time.monotonic()
            STRIKES[strike](fleet)
            said = assert_ended_by_policy(fleet, asked, results, struck_s)
    finally:
        send(signal.SIGCONT, known)
    say.append(f"{strike}: loads ended after {said}")
    if strike in {"the scheduler is killed", "the worker is killed"}:
        left = psutil.wait_procs(known, timeout=GONE_S)[1]
        assert not left, f"still there {GONE_S:g} s later: {left}"
        fleet.restart("prefill")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


def test_a_decode_server_is_killed(fleet: Fleet, say: list[str]) -> None:
    prefill, decode = fleet.servers["prefill"], fleet.servers["mooncake"]
    asked, other = fresh(900), fresh(900)
    told = fleet.pair("mooncake").hand_over(asked)
    with under_way([lambda: decode.ask(asked, transfer=told, timeout_s=60.0)]) as results:
        with frozen(prefill.engine()):
            wait_until(lambda: decode.loads() or results[0].done(), "decode waits for a transfer")
            end(decode.tree())
            killed_s = time.monotonic()
        results[0].exception(60.0)
    wait_until(lambda: prefill.is_healthy() and not prefill.used(), "prefill has its blocks back", FAILS_S)
    say.append(f"decode killed: prefill had its blocks back after {time.monotonic() - killed_s:.1f} s")
    fleet.assert_right([other], [fleet.pair("nixl").ask(other)])
    fleet.restart("mooncake")
    fleet.wait_hand_over("mooncake")
