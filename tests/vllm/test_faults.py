"""Servers, nodes and workers killed or frozen: each request ends by vLLM's policy, and everybody else goes on.

The decode server with Mooncake computes again what could not be loaded (`recompute`), the one with NIXL says an error (`fail`).
Both are asked in each case. A transfer is caught in the middle by freezing prefill's worker, which moves the bytes, before decode
asks.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import psutil
import pytest

from tests.vllm.fleet import DECODES, Fleet
from tests.vllm.processes import GONE_S, end, send
from tests.vllm.prompts import Answer, fresh
from tests.vllm.servers import Server, under_way, wait_until
from tests.vllm.test_answers import assert_right

FAILS_S = 30.0
"""For a request whose prefill is gone or frozen to end by its policy."""
Asked = dict[str, list[int]]


def hand_over(fleet: Fleet, tokens: int = 1200) -> tuple[Asked, dict[str, dict]]:
    """Have a prompt computed for each decode server."""
    asked = {decode: fresh(tokens) for decode in DECODES}
    return asked, {decode: fleet.pair(decode).hand_over(one) for decode, one in asked.items()}


def asking(fleet: Fleet, asked: Asked, told: dict[str, dict], max_tokens: int = 16) -> list[Callable[[], Answer]]:
    """Return the calls by which each decode server is asked."""
    return [
        lambda decode=decode, one=one: fleet.servers[decode].ask(
            one, max_tokens, transfer=told[decode], timeout_s=2 * FAILS_S
        )
        for decode, one in asked.items()
    ]


def wait_loads(fleet: Fleet) -> None:
    wait_until(
        lambda: all(fleet.servers[decode].loads() for decode in DECODES), "both decode servers wait for a transfer"
    )


def assert_ended_by_policy(fleet: Fleet, asked: Asked, results: Sequence[Future[Answer]], since_s: float) -> str:
    """See what became of loads that cannot be finished. Returns how long that took."""
    got = dict(zip(asked, [result.result(FAILS_S + 60.0) for result in results], strict=True))
    took_s = time.monotonic() - since_s
    assert_right(fleet, [asked["mooncake"]], [got["mooncake"]])
    assert got["nixl"].is_error, got["nixl"]
    assert took_s < FAILS_S
    return f"{took_s:.1f} s"


def workers(server: Server) -> list[psutil.Process]:
    """Return the processes that compute and move bytes."""
    return server.engine()


def test_prefill_is_killed_before_during_and_after_a_transfer(fleet: Fleet, say: list[str]) -> None:
    prefill = fleet.servers["prefill"]
    asked_after, told = hand_over(fleet, 700)
    with under_way(asking(fleet, asked_after, told, 500)) as after:
        wait_until(lambda: not prefill.used(), "both have fetched what prefill held")
        asked_before, told_before = hand_over(fleet, 900)
        asked_during, told_during = hand_over(fleet, 1200)
        asked_paired = {decode: fresh(1100) for decode in DECODES}
        paired = {decode: fleet.pair(decode).draw_room() for decode in DECODES}
        send(signal.SIGSTOP, workers(prefill))
        calls = [
            *asking(fleet, asked_during, told_during),
            *asking(fleet, asked_paired, {decode: each for decode, (_, each) in paired.items()}),
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
            said_paired = assert_ended_by_policy(fleet, asked_paired, during[2:4], killed_s)
        asked_s = time.monotonic()
        with under_way(asking(fleet, asked_before, told_before)) as before:
            said_before = assert_ended_by_policy(fleet, asked_before, before, asked_s)
        for one, result in zip(asked_after.values(), after, strict=True):
            assert_right(fleet, [one], [result.result()])
    say.append(
        f"prefill killed: loads under way ended after {said}, in paired order after {said_paired}; "
        f"those asked for later after {said_before}"
    )
    fleet.restart("prefill")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


@pytest.mark.parametrize("victim", ["scheduler", "worker"])
def test_one_process_of_prefill_is_killed_and_the_others_end_with_it(fleet: Fleet, victim: str, say: list[str]) -> None:
    prefill = fleet.servers["prefill"]
    known, engine = prefill.tree(), workers(prefill)
    scheduler = prefill.node().parent()
    killed = [scheduler] if victim == "scheduler" else [one for one in engine if one.parent() == scheduler]
    assert len(killed) == 1, f"vLLM has its scheduler in one process, and its worker in one below: {engine}"
    asked, told = hand_over(fleet)
    send(signal.SIGSTOP, engine)
    try:
        with under_way(asking(fleet, asked, told)) as results:
            wait_loads(fleet)
            killed_s = time.monotonic()
            send(signal.SIGKILL, killed)
            said = assert_ended_by_policy(fleet, asked, results, killed_s)
    finally:
        send(signal.SIGCONT, engine)
    continued_s = time.monotonic()
    left = psutil.wait_procs(known, timeout=GONE_S)[1]
    assert not left, f"still there {GONE_S:g} s after {victim} of the server was killed: {left}"
    say.append(
        f"{victim} of prefill killed: loads ended after {said}, all of the server after {time.monotonic() - continued_s:.1f} s more"
    )
    fleet.restart("prefill")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


@pytest.mark.parametrize("what", ["engine", "all"])
def test_prefill_is_frozen_in_the_middle_of_a_transfer(fleet: Fleet, what: str, say: list[str]) -> None:
    prefill = fleet.servers["prefill"]
    asked, told = hand_over(fleet)
    stopped = workers(prefill) if what == "engine" else prefill.tree()
    send(signal.SIGSTOP, stopped)
    try:
        begun_s = time.monotonic()
        with under_way(asking(fleet, asked, told)) as results:
            said = assert_ended_by_policy(fleet, asked, results, begun_s)
    finally:
        send(signal.SIGCONT, stopped)
    say.append(f"prefill ({what}) frozen: loads ended after {said}")
    for decode in DECODES:
        fleet.wait_hand_over(decode)


def test_a_decode_server_is_killed(fleet: Fleet, say: list[str]) -> None:
    prefill, decode = fleet.servers["prefill"], fleet.servers["mooncake"]
    asked = fresh(900)
    told = fleet.pair("mooncake").hand_over(asked)
    other = fresh(900)
    stopped = workers(prefill)
    with under_way([lambda: decode.ask(asked, transfer=told, timeout_s=60.0)]) as results:
        send(signal.SIGSTOP, stopped)
        try:
            wait_until(lambda: decode.loads() or results[0].done(), "decode waits for a transfer")
            end(decode.tree())
            killed_s = time.monotonic()
        finally:
            send(signal.SIGCONT, stopped)
        results[0].exception(60.0)
    wait_until(lambda: prefill.is_healthy() and not prefill.used(), "prefill has its blocks back", FAILS_S)
    say.append(f"decode killed: prefill had its blocks back after {time.monotonic() - killed_s:.1f} s")
    assert_right(fleet, [other], [fleet.pair("nixl").ask(other)])
    fleet.restart("mooncake")
    fleet.wait_hand_over("mooncake")


@pytest.mark.parametrize("beside", [("prefill",), DECODES], ids=["prefill", "decode"])
def test_nodes_are_killed_in_the_middle_of_a_transfer(fleet: Fleet, beside: tuple[str, ...], say: list[str]) -> None:
    asked, told = hand_over(fleet)
    stopped = workers(fleet.servers["prefill"])
    send(signal.SIGSTOP, stopped)
    try:
        with under_way(asking(fleet, asked, told)) as results:
            wait_loads(fleet)
            killed_s = time.monotonic()
            send(signal.SIGKILL, [fleet.servers[name].node() for name in beside])
            said = assert_ended_by_policy(fleet, asked, results, killed_s)
    finally:
        send(signal.SIGCONT, stopped)
    for decode in DECODES:
        fleet.wait_hand_over(decode)
    said_again = f"{time.monotonic() - killed_s:.1f} s"
    say.append(f"nodes beside {', '.join(beside)} killed: loads ended after {said}, hand-offs again after {said_again}")
