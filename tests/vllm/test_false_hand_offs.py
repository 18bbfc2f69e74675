"""The right tokens or an error, when decode is told something wrong about where its prompt's KV cache is: vLLM's issue 52234.

Both connectors run under vLLM's default policy, `fail`; NixlConnector's column of docs/false-hand-offs.md is not asserted.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.engines.fleet import DECODES
from tests.engines.hand_offs import RIGHT, is_harmless, judge, table
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import Setup
from tests.vllm.fleet import BLOCKS, OFFER_S, Fleet
from tests.vllm.servers import BLOCK_TOKENS, Pair, Server, nixl_plan

TOKENS = 8 * BLOCK_TOKENS - 24
LATE_S = OFFER_S + 8.0
"""Later than a hold, or vLLM's lease of the same length, ends."""
Transfer = dict[str, Any]


@dataclass(frozen=True)
class Connector:
    """One of the two: the names of its servers, and how a reference of it is falsified."""

    title: str
    prefill: str
    decode: str
    unknown: Callable[[Transfer], Transfer]
    """A reference of something that was never held."""
    out_of_range: Callable[[Transfer], Transfer]
    """A reference of blocks that do not exist."""


def kvbridge_connector(decode: str) -> Connector:
    return Connector(
        "kvbridge",
        "prefill",
        decode,
        unknown=lambda told: told | {"kvbridge": told["kvbridge"] | {"room": "4503599627370496"}},
        # A reference names no blocks; the nearest is a number that no room can have.
        out_of_range=lambda told: told | {"kvbridge": told["kvbridge"] | {"room": str(2**63)}},
    )


NIXL_CONNECTOR = Connector(
    "NixlConnector",
    "nixl-connector-prefill",
    "nixl-connector-decode",
    unknown=lambda told: told | {"remote_request_id": "cmpl-0000000000000000-0-00000000"},
    out_of_range=lambda told: (
        told | {"remote_block_ids": [[1_000_000 + block for block in group] for group in told["remote_block_ids"]]}
    ),
)


@dataclass
class FalseHandOff:
    """A question that decode is asked with a false reference, and the prompt that the reference was of."""

    asked: list[int]
    told: Transfer
    previous: list[int] = field(default_factory=list)


class Trial:
    """One connector's servers, and what leads to a false reference."""

    def __init__(self, fleet: Fleet, connector: Connector) -> None:
        self.fleet = fleet
        self.connector = connector

    @property
    def pair(self) -> Pair:
        return Pair(self.fleet.servers[self.connector.prefill], self.fleet.servers[self.connector.decode])

    def held(self) -> FalseHandOff:
        asked = fresh(TOKENS)
        return FalseHandOff(asked, self.pair.hand_over(asked))

    def used(self) -> FalseHandOff:
        """A prompt, and the reference by which decode has fetched it. Decode has forgotten the prompt."""
        used = self.held()
        self.fleet.assert_right([used.asked], [self.ask(used)])
        self.refill(self.pair.decode)
        return used

    def other(self, of: FalseHandOff) -> FalseHandOff:
        """Another prompt that ends in the same token."""
        return FalseHandOff([*fresh(len(of.asked) - 1), of.asked[-1]], of.told, of.asked)

    def longer(self) -> FalseHandOff:
        of = self.held()
        return FalseHandOff([*of.asked, *fresh(3 * BLOCK_TOKENS)], of.told, of.asked)

    def reused(self, of: FalseHandOff) -> FalseHandOff:
        """Prefill has written other prompts to all its blocks that are free."""
        self.refill(self.pair.prefill)
        return of

    def late(self) -> FalseHandOff:
        of = self.held()
        time.sleep(LATE_S)
        return of

    def refill(self, server: Server) -> None:
        for _ in range(BLOCKS * BLOCK_TOKENS // 1500 + 1):
            server.ask(fresh(1500), 1)

    def falsified(self, how: Callable[[Transfer], Transfer]) -> FalseHandOff:
        of = self.held()
        return FalseHandOff(of.asked, how(of.told))

    def ask(self, question: FalseHandOff) -> Answer:
        try:
            return self.pair.decode.ask(question.asked, transfer=question.told)
        except httpx.HTTPError as error:
            return Answer(0, reason=str(error))

    def restart_ended(self) -> str:
        """Return which server has ended by that, and start it again."""
        for role, name in (("prefill", self.connector.prefill), ("decode", self.connector.decode)):
            try:
                self.fleet.wait_settled(self.fleet.servers[name])
            except AssertionError:
                self.fleet.restart(name)
                return f"; **its {role} server ends**"
        return ""


SAME, AGAIN, OTHER = "the same prompt", "the same prompt again", "another prompt of that length"
CASES: tuple[tuple[str, str, Callable[[Trial], FalseHandOff]], ...] = (
    ("an id that prefill never gave", SAME, lambda trial: trial.falsified(trial.connector.unknown)),
    ("blocks that prefill does not have", SAME, lambda trial: trial.falsified(trial.connector.out_of_range)),
    ("a held prompt", "a longer prompt that begins with it", Trial.longer),
    ("a reference that was used before", AGAIN, Trial.used),
    ("a reference that was used before", OTHER, lambda trial: trial.other(trial.used())),
    ("a held prompt", OTHER, lambda trial: trial.other(trial.held())),
    ("a used reference whose blocks hold other prompts now", AGAIN, lambda trial: trial.reused(trial.used())),
    ("a reference that comes too late", SAME, Trial.late),
    (
        "a reference that comes too late, and its blocks hold other prompts now",
        SAME,
        lambda trial: trial.reused(trial.late()),
    ),
)
"""Decode is told of, it is asked for, and how that comes about."""


def try_all(fleet: Fleet, connector: Connector) -> list[str]:
    trial, found = Trial(fleet, connector), []
    for _, _, make in CASES:
        question = make(trial)
        judged = judge(fleet, question.asked, trial.ask(question), question.previous)
        found.append(judged + trial.restart_ended())
    return found


@pytest.fixture
def both(fleet: Fleet) -> Iterator[Fleet]:
    """The suite's servers and two with NixlConnector, which are gone after it."""
    prefill, decode = NIXL_CONNECTOR.prefill, NIXL_CONNECTOR.decode
    fleet.add(
        [
            nixl_plan(prefill, "producer", policy="fail", kv_lease_duration=int(OFFER_S)),
            nixl_plan(decode, "consumer", policy="fail"),
        ]
    )
    yield fleet
    fleet.remove([prefill, decode])


def test_false_hand_offs(both: Fleet, setup: Setup) -> None:
    connectors = (kvbridge_connector("nixl"), NIXL_CONNECTOR)
    columns = {connector.title: try_all(both, connector) for connector in connectors}
    cases = [case[:2] for case in CASES]
    (setup.directory / "false-hand-offs.md").write_text(table(("decode is told of", "and asked for"), cases, columns))
    assert all(map(is_harmless, columns["kvbridge"])), columns


def test_false_hand_offs_where_decode_computes_again(fleet: Fleet) -> None:
    assert set(try_all(fleet, kvbridge_connector("mooncake"))) == {RIGHT}


FORGED: dict[str, dict[str, Any]] = {
    "no endpoint": {"prefill": [{"endpoint": "x"}]},
    "no prefill node, and what the room is of": {"prefill": [], "prompt_tokens": 256},
}
TOO_LONG = 3_000
"""Tokens of a prompt that the API refuses; the scheduler hears of the room all the same."""


@pytest.mark.parametrize("ours", FORGED.values(), ids=FORGED)
@pytest.mark.parametrize("decode", DECODES)
def test_a_decode_server_computes_what_forged_params_are_about(decode: str, ours: dict[str, Any], fleet: Fleet) -> None:
    server, asked = fleet.servers[decode], fresh(300)
    told = {"do_remote_prefill": True, "kvbridge": {"room": "42", **ours}}
    fleet.assert_right([asked], [server.ask(asked, transfer=told)])
    assert server.ask(fresh(TOO_LONG), 1, transfer=told).is_error
    fleet.wait_settled(server)
    assert server.metric("vllm:kvbridge_failures_total", code="invalid_input")


@pytest.mark.parametrize("params", ["x", ["do_remote_prefill"]])
def test_a_server_goes_on_after_params_that_are_no_object(params: object, fleet: Fleet) -> None:
    """They come past the API's own checks. vLLM decides about the answer to their sender."""
    server = fleet.servers[DECODES[0]]
    server.ask(fresh(300), further={"vllm_xargs": {"kv_transfer_params": params}})
    fleet.wait_settled(server)
