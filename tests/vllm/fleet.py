"""vLLM's servers, and how they are watched."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import httpx

from tests.engines import fleet
from tests.engines.fleet import CANARY, CHUNK_TOKENS
from tests.engines.prompts import fresh
from tests.engines.servers import wait_until
from tests.vllm.servers import HOLD, Pair, Plan, Server, kvbridge

BLOCKS = 48
"""Blocks of the KV cache of a server with a connector: four prompts of 1,500 tokens fill it, so that requests wait and are
preempted."""
OFFER_S = 12.0
"""Time for which prefill holds a room that decode never asks for."""
# Four servers that wait keep some processes busy. On two cores a first meeting has taken 14 s; kvbridge gives up after 10 s.
MEET_S = 25.0
NIXL = {"nixl": {"check_timeout_s": MEET_S}}
PATIENT = {"timeouts": {"handshake_s": MEET_S}}


class Served(fleet.Fleet):
    of = Pair

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

    def _left_at(self, server: Any) -> list[str]:
        return [*(f"{name} is {value:g}" for name, value in server.used().items()), *super()._left_at(server)]


class Fleet(Served):
    start = Server

    def add(self, plans: Sequence[Plan]) -> None:
        super().add([replace(plan, blocks=0 if plan.name == "single" else BLOCKS) for plan in plans])
        for plan in plans:
            self.servers[plan.name].ask(CANARY, 4)  # the first answer compiles

    def wait_settled(self, server: Server) -> None:
        """See that a server answers another request. Raises AssertionError when it has ended."""
        assert server.is_healthy(), f"{server.plan.name} is not healthy; its log ends:\n{server.tail()}"
        answer = server.ask(CANARY, 1)
        assert not answer.is_error, f"{server.plan.name} answers nothing: {answer}"

    def _ills(self, server: Server) -> list[str]:
        if ills := super()._ills(server):
            return ills
        # Also a step, after which its metrics are of now.
        wrong = self.wrong(CANARY, server.ask(CANARY))
        return [f"answers another request wrongly: {wrong}"] if wrong else []


PLANS: tuple[Callable[[], Plan], ...] = (
    lambda: Plan("single"),
    lambda: Plan(
        "prefill",
        kvbridge("producer", transports={"order": ["mooncake", "nixl"], **NIXL}, timeouts={"offer_s": OFFER_S}),
        arguments=("--max-num-batched-tokens", str(CHUNK_TOKENS)),
    ),
    lambda: Plan("mooncake", kvbridge("consumer", policy="recompute", transports={"order": ["mooncake"]}, **PATIENT)),
    lambda: Plan("nixl", kvbridge("consumer", policy="fail", transports={"order": ["nixl"], **NIXL}, **PATIENT)),
)
"""The suite's servers: one decode server for each transport, each with another of vLLM's policies for loads that fail."""
