"""The servers of a suite: started together once, asked by all cases, and looked at after each."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from tests.engines.prompts import Answer, prompt
from tests.engines.servers import IDLE_S, Plan, Server, Setup

CHUNK_TOKENS = 512
"""A longer prompt is computed in chunks."""
OVER = frozenset({"completed", "aborted", "failed"})
"""States of rooms that a node only remembers."""
DECODES = ("mooncake", "nixl")
"""The suites' decode servers: one for each transport."""
CANARY = prompt(200, "canary")


class Fleet:
    """The server `single`, whose answers are the right ones, and servers with kvbridge by name."""

    start: Callable[[Setup, Any], Any]
    """The engine's `Server`."""
    of: Callable[[Any, Any], Any]
    """The engine's `Pair`."""
    RIGHT_GAP_NATS = 1e-3
    """Log-likelihoods from a transferred cache differ by far less; those from any other cache by far more."""
    TIE_NATS = 5e-5
    """Float32 and another batch move likelihoods by 1e-5 nats."""

    def __init__(self, setup: Setup, plans: Sequence[Plan]) -> None:
        self._setup = setup
        self.servers: dict[str, Any] = {}
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

    def add(self, plans: Sequence[Any]) -> None:
        for plan in plans:
            self.servers[plan.name] = self.start(self._setup, plan)
        for plan in plans:
            self.servers[plan.name].wait_ready()
            self.starts_s.append(self.servers[plan.name].started_s)

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.servers.pop(name).end()

    def restart(self, name: str) -> None:
        """Start a server again that has been ended, or end it first."""
        server = self.servers[name]
        server.end(grace_s=0.0)
        self.add([server.plan])

    def pair(self, decode: str) -> Any:
        return self.of(self.servers["prefill"], self.servers[decode])

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
            return (
                f"tokens are equal, and their likelihoods differ by {gap:g} nats" if gap > self.RIGHT_GAP_NATS else ""
            )
        differs = (
            f"token {same} is {got.tokens[same]} instead of {expected.tokens[same]}; the best two of the server alone are "
            f"{expected.seconds_best[same]:.6f} nats apart there, and the likelihoods before differ by {gap:.6f}"
        )
        if expected.seconds_best[same] < self.TIE_NATS and gap < self.RIGHT_GAP_NATS:
            self.ties.append(differs)
            return ""
        return differs

    def assert_right(self, asked: Sequence[Sequence[int]], got: Sequence[Answer]) -> None:
        pairs = zip(asked, got, strict=True)
        wrong = [f"prompt of {len(one)}: {what}" for one, answer in pairs if (what := self.wrong(one, answer))]
        assert not wrong, "\n".join(wrong)

    def missing(self) -> list[str]:
        """Return everything that is not as before the first request. Waits as long as it may take."""
        found = [f"{name}: {what}" for name, server in self.servers.items() for what in self._ills(server)]
        until_s = time.monotonic() + IDLE_S
        while (left := self._left()) and time.monotonic() < until_s:
            time.sleep(0.1)
        return found + left

    def _ills(self, server: Server) -> list[str]:
        return [] if server.is_healthy() else [f"is not healthy; its log ends:\n{server.tail()}"]

    def _left(self) -> list[str]:
        return [f"{name}: {what}" for name, server in self.servers.items() for what in self._try_left_at(server)]

    def _try_left_at(self, server: Server) -> list[str]:
        try:
            return self._left_at(server)
        except (httpx.HTTPError, OSError, AssertionError) as error:
            return [f"cannot be looked at: {error!r}"]

    def _left_at(self, server: Server) -> list[str]:
        return [what for one in server.statuses() for what in _left_in(one)] if server.has_node() else []

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
