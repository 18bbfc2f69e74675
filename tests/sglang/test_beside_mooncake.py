"""SGLang with kvbridge beside SGLang with its own Mooncake backend, in one run: the same tokens, and a router's mistakes.

After a mistake kvbridge answers the right tokens or an error. The other column of docs/false-hand-offs.md is not asserted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from tests.engines.hand_offs import is_harmless, judge, table
from tests.engines.prompts import Answer, fresh
from tests.engines.servers import Setup, together
from tests.sglang.fleet import Fleet
from tests.sglang.servers import PAGE_TOKENS, Pair, Plan, Server

LIMIT_S = 90.0
"""A request that has no answer after it hangs. Prefill of kvbridge waits for decode for 60 s."""
OWN = "mooncake_tcp"
PAIRS = {"kvbridge": ("prefill", "mooncake"), "SGLang's Mooncake": ("own-prefill", "own-decode")}
"""Names of a prefill and a decode server."""
CASES = {
    "short": [37] * 8,
    "chunks": [1500, 600, 1500, 513],
    "long": [3600],
    "pages": [1, PAGE_TOKENS, PAGE_TOKENS + 1],
}


@pytest.fixture(scope="module")
def both(fleet: Fleet) -> Iterator[Fleet]:
    """The suite's servers and a pair with SGLang's own backend, which is gone after this file."""
    fleet.add([Plan("own-prefill", "prefill", OWN), Plan("own-decode", "decode", OWN)])
    yield fleet
    fleet.remove(["own-prefill", "own-decode"])


@pytest.mark.parametrize("case", CASES)
def test_both_answer_as_the_server_alone(both: Fleet, case: str) -> None:
    asked = [fresh(tokens) for tokens in CASES[case]]
    for prefill, decode in PAIRS.values():
        pair = Pair(both.servers[prefill], both.servers[decode])
        for _ in range(2):  # the second time prefill has all of it
            both.assert_right(asked, pair.ask_together(asked))


@dataclass
class Trial:
    """One backend's pair, and a router that makes mistakes."""

    fleet: Fleet
    prefill: str
    decode: str

    @property
    def pair(self) -> Pair:
        return Pair(self.fleet.servers[self.prefill], self.fleet.servers[self.decode])

    def outcome(self, asked: Sequence[int], answers: Sequence[Answer | None], other: Sequence[int] = ()) -> str:
        """Return what decode's client got, and whether prefill's got nothing."""
        prefilled, answer = answers
        hangs = "; **prefill hangs**" if prefilled is None else ""
        if answer is None:
            return f"**hangs** ({LIMIT_S:g} s){hangs}"
        after = f" after {answer.seconds:.1f} s" if answer.is_error else ""
        return judge(self.fleet, asked, answer, other) + after + hangs

    def two_prompts(self, tokens: int) -> str:
        """Prefill is asked for one prompt and decode for another one."""
        pair, asked, other = self.pair, fresh(700), fresh(tokens)
        told = pair.room()
        calls = [lambda: get(pair.prefill, other, told), lambda: get(pair.decode, asked, told)]
        return self.outcome(asked, together(calls), other)

    def room_zero(self) -> str:
        asked = fresh(100)
        return self.outcome(asked, both_asked(self.pair, asked, self.pair.room(0)))

    def room_twice(self) -> str:
        pair, told, prompts = self.pair, self.pair.room(), (fresh(300), fresh(300))
        got = together([lambda one=one: both_asked(pair, one, told) for one in prompts])
        cells = [self.outcome(prompts[at], got[at], prompts[1 - at]) for at in (0, 1)]
        return f"one: {cells[0]}; other: {cells[1]}"

    def room_again(self) -> str:
        pair, told, first, second = self.pair, self.pair.room(), fresh(300), fresh(300)
        self.fleet.assert_right([first], [pair.ask_both(first, told=told)[1]])
        return self.outcome(second, both_asked(pair, second, told), first)

    def another_model(self) -> str:
        """Decode runs another model of the same form meanwhile."""
        plan, asked = self.pair.decode.plan, fresh(300)
        self.fleet.remove([self.decode])
        try:
            self.fleet.add([replace(plan, shape="stranger")])
            return self.outcome(asked, both_asked(self.pair, asked, self.pair.room()))
        finally:
            self.fleet.remove([self.decode])
            self.fleet.add([plan])

    def settle(self) -> str:
        """Return whether the pair still serves others; start it again where it does not."""
        asked = fresh(200)
        _, answer = both_asked(self.pair, asked, self.pair.room())
        if answer is not None and not self.fleet.wrong(asked, answer):
            return ""
        for name in (self.prefill, self.decode):
            self.fleet.restart(name)
        return "; **the pair serves nobody afterwards**"


def get(server: Server, asked: Sequence[int], told: Mapping[str, Any]) -> Answer | None:
    """Return an answer; None when there is none within the limit."""
    try:
        return server.ask(asked, told=told, timeout_s=LIMIT_S)
    except httpx.TimeoutException:
        return None
    except httpx.HTTPError as error:
        return Answer(0, reason=str(error))


def both_asked(pair: Pair, asked: Sequence[int], told: Mapping[str, Any]) -> list[Answer | None]:
    """Return the answers of prefill and decode."""
    return together([lambda server=server: get(server, asked, told) for server in (pair.prefill, pair.decode)])


MISTAKES: dict[str, Callable[[Trial], str]] = {
    "prefill one prompt, decode another one of that length, in one room": lambda trial: trial.two_prompts(700),
    "prefill one prompt, decode a longer one, in one room": lambda trial: trial.two_prompts(300),
    "room 0": Trial.room_zero,
    "two requests at once with one room": Trial.room_twice,
    "another prompt of that length with a room that is over": Trial.room_again,
    "the request, and decode runs another model of that form": Trial.another_model,
}


def test_false_hand_offs(both: Fleet, setup: Setup, say: list[str]) -> None:
    columns: dict[str, list[str]] = {}
    for title, names in PAIRS.items():
        trial, cells = Trial(both, *names), columns.setdefault(title, [])
        for mistake, make in MISTAKES.items():
            cells.append(make(trial) + trial.settle())
            say.append(f"{title}, {mistake}: {cells[-1]}")
    page = table(("servers are asked for",), [(one,) for one in MISTAKES], columns)
    (setup.directory / "false-hand-offs.md").write_text(page)
    ours = [one.removeprefix("one: ").split("; other: ") for one in columns["kvbridge"]]
    assert all(is_harmless(cell) for cells in ours for cell in cells), columns
