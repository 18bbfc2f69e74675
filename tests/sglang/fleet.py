"""The servers of the suite: started together once, asked by all cases, and looked at after each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.sglang.servers import Pair, Plan, Server, Setup
from tests.vllm.fleet import OVER, RIGHT_GAP_NATS, TIE_NATS
from tests.vllm.prompts import Answer, prompt
from tests.vllm.servers import IDLE_S

_CANARY = prompt(200, "canary")
PLANS: tuple[Callable[[], Plan], ...] = (
    lambda: Plan("single"),
    lambda: Plan("prefill", "prefill", settings={"transports": {"order": ["mooncake", "nixl"]}}),
    lambda: Plan("mooncake", "decode", settings={"transports": {"order": ["mooncake"]}}),
    lambda: Plan("nixl", "decode", settings={"transports": {"order": ["nixl"]}}),
)
"""The suite's servers: one decode server for each transport."""
DECODES = ("mooncake", "nixl")


class Fleet:
    """A server alone, which says what is right, and those with kvbridge by name."""

    def __init__(self, setup: Setup, plans: Sequence[Plan]) -> None:
        """Start all at once. In the main thread."""
        self._setup = setup
        self.servers: dict[str, Server] = {}
        self._expected: dict[tuple[int, ...], Answer] = {}
        self.ties: list[str] = []
        self.largest_gap = 0.0
        """Between likelihoods of the same tokens, in nats."""
        try:
            self.add(plans)
        except BaseException:
            self.end()
            raise

    def add(self, plans: Sequence[Plan]) -> None:
        """Start more servers, all at once. In the main thread."""
        for plan in plans:
            self.servers[plan.name] = Server(self._setup, plan)
        for plan in plans:
            self.servers[plan.name].wait_ready()

    def remove(self, names: Sequence[str]) -> None:
        """End some servers."""
        for name in names:
            self.servers.pop(name).end()

    def restart(self, name: str) -> None:
        """Start a server again that has been ended, or end it first."""
        server = self.servers[name]
        server.end(grace_s=0.0)
        self.add([server.plan])

    def pair(self, decode: str) -> Pair:
        """Return the prefill server with one of the decode servers."""
        return Pair(self.servers["prefill"], self.servers[decode])

    def expected(self, asked: Sequence[int], max_tokens: int = 16) -> Answer:
        """Return what the server alone answers."""
        key = (max_tokens, *asked)
        if key not in self._expected:
            answer = self._expected[key] = self.servers["single"].ask(asked, max_tokens)
            assert not answer.is_error, f"the server alone could not answer: {answer}"
        return self._expected[key]

    def wrong(self, asked: Sequence[int], got: Answer) -> str:
        """Return how an answer differs from the server's alone; '' when it does not, or only where rounding decides (`ties`)."""
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
        differs = f"token {same} is {got.tokens[same]} instead of {expected.tokens[same]}, after a gap of {gap:g} nats"
        if expected.seconds_best[same] < TIE_NATS and gap < RIGHT_GAP_NATS:
            self.ties.append(differs)
            return ""
        return differs

    def assert_right(self, asked: Sequence[Sequence[int]], got: Sequence[Answer]) -> None:
        """See that all answers are those of the server alone."""
        pairs = zip(asked, got, strict=True)
        wrong = [f"prompt of {len(one)}: {what}" for one, answer in pairs if (what := self.wrong(one, answer))]
        assert not wrong, "\n".join(wrong)

    def missing(self) -> list[str]:
        """Return what is not as it was before the first request: waits as long as it may take."""
        found = []
        for name, server in self.servers.items():
            if not server.is_healthy():
                found.append(f"{name} is not healthy; its log ends:\n{server.tail()}")
        until_s = time.monotonic() + IDLE_S
        while left := [f"{name}: {what}" for name, server in self.servers.items() for what in _left_at(server)]:
            if time.monotonic() > until_s:
                return found + left
            time.sleep(0.1)
        return found

    def end(self) -> None:
        """End all servers, whatever happens to one of them."""
        problems: list[BaseException] = []
        for server in self.servers.values():
            try:
                server.end()
            except Exception as error:  # noqa: BLE001 - the others are to be ended, and it is raised after that
                problems.append(error)
        if problems:
            raise problems[0]


def _left_at(server: Server) -> list[str]:
    if not server.plan.mode or server.plan.backend != "kvbridge":
        return []
    try:
        status: dict[str, Any] = server.node_status()
    except (httpx.HTTPError, OSError, AssertionError) as error:
        return [f"cannot be looked at: {error!r}"]
    found = [f"{number} rooms {state}" for state, number in status["rooms"].items() if number and state not in OVER]
    found += [
        f"{number} pages of {space} are {state}"
        for space, states in status["pools"].items()
        for state, number in states.items()
        if number and state != "free"
    ]
    return found + [f"{whose} in quarantine for {why}" for why, whose in status["quarantine"].items()]
