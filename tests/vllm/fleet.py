"""The servers of the suite: started together once, asked by all cases, and looked at after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.vllm.prompts import Answer, fresh, prompt
from tests.vllm.servers import HOLD, IDLE_S, Pair, Plan, Server, Setup, kvbridge, wait_until

BLOCKS = 48
"""Blocks of the KV cache of a server with a connector: four prompts of 1,500 tokens fill it, so that requests wait and are
preempted."""
OFFER_S = 12.0
"""Time for which prefill holds a room that decode never asks for."""
CHUNK_TOKENS = 512
"""A longer prompt is computed in chunks."""
RIGHT_GAP_NATS = 1e-3
"""Log-likelihoods from a transferred cache differ by far less; those from any other cache by far more."""
TIE_NATS = 5e-5
"""Float32 and another batch move likelihoods by 1e-5 nats."""
OVER = frozenset({"completed", "aborted", "failed"})
"""States of rooms that a node only remembers."""
_CANARY = prompt(200, "canary")


class Fleet:
    """A server alone, whose answers are the right ones, and servers with kvbridge by name."""

    def __init__(self, setup: Setup, plans: Sequence[Plan]) -> None:
        """Start all at once. In the main thread."""
        self._setup = setup
        self._plans: dict[str, Plan] = {}
        self.servers: dict[str, Server] = {}
        self._expected: dict[tuple[int, ...], Answer] = {}
        self.ties: list[str] = []
        """Answers that parted from the server alone at a tie."""
        self.largest_gap = 0.0
        """Between likelihoods of the same tokens, in nats."""
        self.starts_s: list[float] = []
        """Seconds from a start to the first answer, for each server."""
        try:
            self.add(plans)
        except BaseException:
            self.end()
            raise

    def add(self, plans: Sequence[Plan]) -> None:
        for plan in plans:
            self._plans[plan.name] = plan
            self._start(plan.name)
        for plan in plans:
            self._await(self.servers[plan.name])

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.servers.pop(name).end()

    def _start(self, name: str) -> None:
        self.servers[name] = Server(self._setup, self._plans[name], blocks=0 if name == "single" else BLOCKS)

    def _await(self, server: Server) -> None:
        server.wait_ready()
        server.ask(_CANARY, 4)  # the first answer compiles
        self.starts_s.append(server.started_s)

    def restart(self, name: str) -> None:
        """Start a server again that has been ended, or end it first."""
        self.servers[name].end(grace_s=0.0)
        self._start(name)
        self._await(self.servers[name])

    def wait_hand_over(self, decode: str) -> None:
        """Wait until prefill and decode serve each other: after one of them, or its node, was started again."""
        wait_until(lambda: self._is_served(decode), f"{decode} fetches what prefill holds")

    def _is_served(self, decode: str) -> bool:
        pair, asked = self.pair(decode), fresh(200)
        try:
            before = pair.decode.rooms_completed()
        except (AssertionError, OSError, httpx.HTTPError):  # its node is being started
            return False
        told = pair.prefill.ask(asked, 1, transfer=HOLD).transfer
        if not told:
            time.sleep(0.5)
            return False
        pair.decode.ask(asked, 1, transfer=told)
        return pair.decode.rooms_completed() > before

    def wait_settled(self, server: Server) -> None:
        """See that a server answers another request. Raises AssertionError when it has ended."""
        assert server.is_healthy(), f"{server.plan.name} is not healthy; its log ends:\n{server.tail()}"
        answer = server.ask(_CANARY, 1)
        assert not answer.is_error, f"{server.plan.name} answers nothing: {answer}"

    def pair(self, decode: str) -> Pair:
        return Pair(self.servers["prefill"], self.servers[decode])

    def expected(self, asked: Sequence[int], max_tokens: int = 16) -> Answer:
        key = (max_tokens, *asked)
        if key not in self._expected:
            answer = self._expected[key] = self.servers["single"].ask(asked, max_tokens)
            assert not answer.is_error, f"the server alone could not answer: {answer}"
        return self._expected[key]

    def wrong(self, asked: Sequence[int], got: Answer) -> str:
        """Return how an answer differs from that of the server alone; '' when it does not, or only by rounding (`ties`)."""
        expected = self.expected(asked, len(got.tokens) or 16)
        if got.is_error or len(got.tokens) != len(expected.tokens):
            return f"got {got}, expected {len(expected.tokens)} tokens"
        pairs = enumerate(zip(got.tokens, expected.tokens, strict=True))
        same = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        likelihoods = zip(got.logprobs[:same], expected.logprobs, strict=False)
        gap = max((abs(ours - theirs) for ours, theirs in likelihoods), default=0.0)
        if same is None:
            self.largest_gap = max(self.largest_gap, gap)
            return f"tokens are equal, and their likelihoods differ by {gap:g} nats" if gap > RIGHT_GAP_NATS else ""
        differs = (
            f"token {same} is {got.tokens[same]} instead of {expected.tokens[same]}; the best two of the server alone are "
            f"{expected.seconds_best[same]:.6f} nats apart there, and the likelihoods before differ by {gap:.6f}"
        )
        if expected.seconds_best[same] < TIE_NATS and gap < RIGHT_GAP_NATS:
            self.ties.append(differs)
            return ""
        return differs

    def assert_right(self, asked: Sequence[Sequence[int]], got: Sequence[Answer]) -> None:
        pairs = zip(asked, got, strict=True)
        wrong = [f"prompt of {len(one)}: {what}" for one, answer in pairs if (what := self.wrong(one, answer))]
        assert not wrong, "\n".join(wrong)

    # ------------------------------------------------------------------ after each case

    def missing(self) -> list[str]:
        """Return everything that is not as before the first request. Waits as long as it may take."""
        found = [f"{name}: {what}" for name, server in self.servers.items() for what in self._ills(server)]
        until_s = time.monotonic() + IDLE_S
        left = self._left()
        while left and time.monotonic() < until_s:
            time.sleep(0.1)
            left = self._left()
        return found + left

    def _ills(self, server: Server) -> list[str]:
        if not server.is_healthy():
            return [f"is not healthy; its log ends:\n{server.tail()}"]
        # Also a step, after which its metrics are of now.
        wrong = self.wrong(_CANARY, server.ask(_CANARY))
        return [f"answers another request wrongly: {wrong}"] if wrong else []

    def _left(self) -> list[str]:
        return [f"{name}: {what}" for name, server in self.servers.items() for what in _left_at(server)]

    def end(self) -> None:
        problems: list[BaseException] = []
        for server in self.servers.values():
            server.ask_to_end()
        for server in self.servers.values():
            try:
                server.end()
            except Exception as error:  # noqa: BLE001 - the others are to be ended, and it is raised after that
                problems.append(error)
        if problems:
            raise problems[0]


def _left_at(server: Server) -> list[str]:
    try:
        found = [f"{name} is {value:g}" for name, value in server.used().items()]
        if (server.plan.transfer or {}).get("kv_connector") == "KvbridgeConnector":
            found += _left_in(server.node_status())
    except (httpx.HTTPError, OSError, AssertionError) as error:
        return [f"cannot be looked at: {error!r}"]
    return found


def _left_in(status: dict[str, Any]) -> list[str]:
    under_way = {state: number for state, number in status["rooms"].items() if number and state not in OVER}
    found = [f"its node has {number} rooms {state}" for state, number in under_way.items()]
    found += [
        f"its node counts {number} pages of {space} as {state}"
        for space, states in status["pools"].items()
        for state, number in states.items()
        if number and state != "free"
    ]
    return found + [f"its node has {whose} in quarantine for {why}" for why, whose in status["quarantine"].items()]


PLANS: tuple[Callable[[], Plan], ...] = (
    lambda: Plan("single"),
    lambda: Plan(
        "prefill",
        kvbridge("producer", transports={"order": ["mooncake", "nixl"]}, timeouts={"offer_s": OFFER_S}),
        ("--max-num-batched-tokens", str(CHUNK_TOKENS)),
    ),
    lambda: Plan("mooncake", kvbridge("consumer", policy="recompute", transports={"order": ["mooncake"]})),
    lambda: Plan("nixl", kvbridge("consumer", policy="fail", transports={"order": ["nixl"]})),
)
"""The suite's servers: one decode server for each transport, each with another of vLLM's policies for loads that fail."""
DECODES = ("mooncake", "nixl")
