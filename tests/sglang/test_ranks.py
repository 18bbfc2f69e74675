"""Servers with several ranks: tensor parallelism on both sides, pipeline stages of prefill, data-parallel replicas.

Two ranks take the memory of two servers, so the server that says what is right has ended before the others start.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.engines.fleet import CHUNK_TOKENS
from tests.engines.processes import frozen, send
from tests.engines.prompts import prompt
from tests.engines.servers import Setup, under_way, wait_until
from tests.sglang.fleet import Fleet
from tests.sglang.servers import PAGE_TOKENS, Pair, Plan
from tests.sglang.test_faults import KILLED_S, SLOW_S

PROMPTS = [prompt(tokens, "ranks") for tokens in (1, PAGE_TOKENS, 37, 60, 300, CHUNK_TOKENS + 1, 1500, 1501)]
"""Around a page and around what prefill computes at a time; the later ones are computed in chunks."""
SHARED = [[*prompt(30 * PAGE_TOKENS + 7, "shared"), *prompt(60 * (1 + number), f"own {number}")] for number in range(4)]
TP, PP, DP = ("--tp-size", "2"), ("--pp-size", "2"), ("--dp-size", "2")
GROUPS = (*TP, "--attn-dp-size", "2", "--no-enable-tp-lm-head-all-to-all")
"""DP attention. Gloo has no all-to-all on a processor."""
SHAPE = "groups"
SPLITS = {
    "tp 2 to 2": (TP, TP),
    "pp 2 to 1": (PP, ()),
    "dp 2 to 2": (DP, DP),
    "attention dp 2 to 2": (GROUPS, GROUPS),
    "attention dp 2 to 1": (GROUPS, ()),
    "dp 2 to 1, asked": ((*DP, "--load-balance-method", "round_robin"), ()),
    "tp 2 to 1": (TP, ()),
}
"""The arguments of prefill and of decode."""
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0-1|0-1"}
"""The cores of two ranks. SGLang refuses two on one node of memory unless it is told."""


@pytest.fixture(scope="module")
def alone(setup: Setup) -> Iterator[Fleet]:
    """The right answers to all prompts; the server that gave them has ended."""
    fleet = Fleet(setup, [Plan("single", shape=SHAPE)])
    try:
        for asked in (*PROMPTS, *SHARED):
            fleet.expected(asked)
        fleet.remove(["single"])
        yield fleet
    finally:
        fleet.end()


@pytest.fixture(scope="module")
def servers(alone: Fleet, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A prefill and a decode server, split in one way."""
    prefill, decode = SPLITS[request.param]
    sides = (("prefill", prefill), ("decode", decode))
    alone.add([Plan(name, mode=name, shape=SHAPE, arguments=arguments, variables=CORES) for name, arguments in sides])
    try:
        yield alone
    finally:
        alone.remove(["prefill", "decode"])


def assert_right(servers: Fleet) -> None:
    """Ask for short prompts at once, then for those of several chunks, and twice for those with a common beginning."""
    for asked in (PROMPTS[:5], PROMPTS[5:], SHARED, SHARED):
        servers.assert_right(asked, servers.pair("decode").ask_together(asked))


@pytest.mark.parametrize("servers", [name for name in SPLITS if name != "tp 2 to 1"], indirect=True)
def test_answers_are_those_of_a_server_alone(servers: Fleet) -> None:
    pair = servers.pair("decode")
    before = pair.decode.rooms_completed()
    assert_right(servers)
    assert pair.decode.rooms_completed() - before == len(PROMPTS) + 2 * len(SHARED)
    assert not (missing := servers.missing()), "\n".join(missing)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("servers", ["tp 2 to 2", "pp 2 to 1"], indirect=True)
def test_the_second_ranks_scheduler_is_killed(servers: Fleet, side: str, say: list[str]) -> None:
    pair: Pair = servers.pair("decode")
    victim = getattr(pair, side)
    if len(victim.ranks()) == 1:
        pytest.skip("decode has one rank here")
    told = pair.room()
    calls = [lambda one=one: one.ask(PROMPTS[-1], told=told, timeout_s=120.0) for one in (pair.prefill, pair.decode)]
    with under_way(calls) as results:
        with frozen([pair.prefill.ranks()[0]]):
            wait_until(lambda: sum(pair.decode.node_status()["rooms"].values()), "decode's room")
            struck_s = time.monotonic()
            send(signal.SIGKILL, [victim.ranks()[1]])
            failed = results[1].exception(60.0)
            took_s = time.monotonic() - struck_s
        results[0].exception(120.0)
    assert failed is not None or results[1].result().is_error
    say.append(f"{side}'s second scheduler is killed: decode's client had an answer after {took_s:.1f} s")
    assert took_s < KILLED_S + SLOW_S
    servers.restart(side)
    wait_until(lambda: not servers.wrong(PROMPTS[3], pair_of(servers).ask(PROMPTS[3])), "both serve each other", 90.0)
    assert not (missing := servers.missing()), "\n".join(missing)


def pair_of(servers: Fleet) -> Pair:
    """Return the servers of now: one of them may have been started again."""
    return servers.pair("decode")


@pytest.mark.parametrize("servers", ["tp 2 to 1"], indirect=True)
def test_another_split_of_heads_is_refused_by_name(servers: Fleet) -> None:
    pair = servers.pair("decode")
    answer = pair.ask(PROMPTS[3])
    assert answer.is_error
    for where in (answer.reason, pair.prefill.tail(400), pair.decode.tail(400)):
        assert "split over 2 ranks (--tp-size)" in where, where
