"""What a replay found out, as data, as a table and as JSON.

Owns: the report, how latencies are summed up, and its forms. Must not know: how it came about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import reduce
from typing import Any

from pydantic import computed_field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import FrozenModel, NonNegative, RoomId
from kvbridge.core.plan.operations import Amount, Amounts
from kvbridge.testbed.replay.job import WrongRow

PHASES = {
    "admission": "from due (at speed 0: from first asking) until both ends are reserved, with refusals and --max-in-flight",
    "ticket": "the one call to bootstrap that was granted",
    "engine_queue": "from the reservation until the prefill engine begins",
    "prefill": "the prefill engine writes and publishes the prompt, chunk by chunk",
    "after_prefill": "from the end of the prompt until decode could claim it: what the bridge added",
    "admit_to_offer": "decode: from admission until prefill has the page tables on their way",
    "offer_to_order": "prefill: from the offer until the first order to a rank",
    "plan": "prefill: planning, all chunks of the slowest rank",
    "first_byte": "prefill: from an order until its first bytes were submitted, planning included, all chunks of the slowest rank",
    "move": "prefill: bytes under way, all chunks of the slowest rank",
    "digest": "prefill: checksums of what was sent, all chunks of the slowest rank",
    "verify": "decode: from the order to compare checksums until all are compared, the slowest rank",
    "verify_busy": "decode: the part of that in which checksums were computed",
    "offer_to_commit": "decode: from the offer until every row is accounted for",
    "admit_to_commit": "decode: from admission until then",
    "commit_to_claim": "decode: a committed room waits for the engine",
    "check": "the decode engine compares every byte",
    "hold": "the decode engine claims and keeps the pages, as long as it would write an answer, and gives them back",
    "total": "from due until released",
}
"""Phases in the order of a request's life, and what each of them is; a daemon may report others."""
STEPS = ("admission", "engine_queue", "prefill", "after_prefill", "commit_to_claim", "check", "hold")
"""Phases that follow one another without a gap: they add up to `total`."""
FOUND = {"prefill": "held by prefill", "decode": "held by decode", "endless": "endless cache"}
"""Where tokens of prompts were found: what prefill did not have to compute, what decode did not have to be sent, and what a cache
would hold that forgets nothing, if requests came one after another."""
FROM_HOST = {"prefill_host": "of prefill's from the host", "decode_host": "of decode's from the host"}
"""Of the first two, what was in host memory alone (`--host-tokens`)."""
NEIGHBOURS = 0.025
"""Requests on each side of a percentile that show what it is made of: this part of all."""


class Ending(StrEnum):
    """How a replay ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    BROKEN = "broken"


class PhaseSummary(FrozenModel):
    """How long one phase took, in seconds, over all rooms that came through it. Percentiles are nearest-rank."""

    count: NonNegative
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> PhaseSummary:
        """Sum up at least one duration."""
        ordered = sorted(seconds)
        return cls(
            count=len(ordered),
            mean_s=_rounded(sum(ordered) / len(ordered)),
            p50_s=_rounded(percentile(ordered, 50)),
            p90_s=_rounded(percentile(ordered, 90)),
            p99_s=_rounded(percentile(ordered, 99)),
            max_s=_rounded(ordered[-1]),
        )


class Sample(FrozenModel):
    """How far the replay was, and how full the pools were, at one moment."""

    at_s: float
    """Since the replay began."""
    in_flight: NonNegative
    completed: NonNegative
    arrived_bytes: NonNegative
    """Of all requests so far whose bytes have been compared."""
    whole_bytes: NonNegative
    """Bytes that these requests would have been sent if decode had held nothing."""
    arrived_tokens: NonNegative
    """Of their prompts."""
    found_tokens: dict[str, NonNegative]
    """Of these, by FOUND and FROM_HOST."""
    used_pages: dict[str, dict[str, NonNegative]]
    """Pages that are not free, by role and index space."""


class Unserved(FrozenModel):
    """One request that did not come through, and why."""

    number: NonNegative
    room: RoomId
    """0 when it was never admitted."""
    reason: str


class ReplayReport(FrozenModel):
    """A whole replay, or the part of it that was run."""

    ending: Ending
    problem: str = ""
    """What broke it."""
    trace: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    requests: NonNegative
    """Asked for."""
    completed: NonNegative
    failed: NonNegative
    """Admitted, and ended without having been served."""
    refused: NonNegative
    """Given up after refusals for --retry-for."""
    refusals: dict[str, NonNegative]
    """Answers that sent a request away for a while, by code."""
    amounts: Amounts
    """What arrived, by component."""
    whole_bytes: NonNegative
    """What would have arrived if decode had held nothing."""
    arrived_tokens: NonNegative
    """Of the prompts of what arrived."""
    found_tokens: dict[str, NonNegative]
    """Of these, by FOUND and FROM_HOST; `endless` is what `hash_ids` allow."""
    checked_bytes: NonNegative
    mismatched_bytes: NonNegative
    wrong_rows: tuple[WrongRow, ...]
    """The first ones."""
    prompt_tokens: NonNegative
    """Of the completed requests."""
    pool_bytes: NonNegative
    pool_pages: dict[str, dict[str, NonNegative]]
    """All pages, by role and index space."""
    most_in_flight: NonNegative
    phases: dict[str, PhaseSummary]
    breakdown: dict[str, dict[str, float]]
    """By percentile of the whole (p50, p90, p99): the seconds of each of STEPS, which add up to it; see `breakdown`."""
    occupancy: tuple[Sample, ...]
    unserved: tuple[Unserved, ...]
    """The first ones."""
    pages_left: NonNegative
    """Pages that were not free again at the end; 0 unless there is a defect."""
    seconds: dict[str, float]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verdict(self) -> str:
        """The one line that says how it ended."""
        outcome = (
            f"{self.completed} of {self.requests} requests served, {self.failed} failed, {self.refused} refused, "
            f"{self.checked_bytes:,} bytes compared, {self.mismatched_bytes:,} of them wrong"
        )
        if self.pages_left:
            outcome += f", {self.pages_left} pages not free again"
        if self.ending is not Ending.COMPLETED:
            return f"{self.ending.upper()}, this report is of a part: {outcome}"
        return f"{'GOOD' if self.good else 'BAD'}: {outcome}"

    @property
    def good(self) -> bool:
        """Whether every request came through with every byte right, and every page came back."""
        return (
            self.ending is Ending.COMPLETED
            and self.completed == self.requests
            and not self.mismatched_bytes
            and not self.pages_left
        )

    @property
    def total(self) -> Amount:
        """All components together."""
        return reduce(Amount.__add__, self.amounts.values(), Amount())


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of ascending values: the least value that `percent` of them do not exceed."""
    if not ordered or not 0 <= percent <= 100:
        raise InvalidInputError(f"need a percentage of at least one value, got {percent} of {len(ordered)}")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def breakdown(served: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return what p50, p90 and p99 of the whole are made of, given each request's phases in seconds.

    Percentiles of steps do not add up to a percentile of the whole. So each is divided as the time of the requests around it was.
    """
    ordered = sorted(served, key=lambda phases: phases["total"])
    found = {}
    for percent in (50, 90, 99) if ordered else ():
        at = max(0, math.ceil(len(ordered) * percent / 100) - 1)
        aside = round(len(ordered) * NEIGHBOURS)
        near = ordered[max(0, at - aside) : at + aside + 1]
        scale = ordered[at]["total"] / (sum(phases["total"] for phases in near) or 1.0)
        found[f"p{percent}"] = {step: _rounded(scale * sum(phases.get(step, 0.0) for phases in near)) for step in STEPS}
    return found


def _rounded(seconds: float) -> float:
    """To the microsecond: a report is to be read, too."""
    return round(seconds, 6)


# ---------------------------------------------------------------------------------------------- the table


def print_report(report: ReplayReport, console: Console) -> None:
    """Print what arrived, how long each phase took, what went wrong; the last line is the verdict."""
    tables = [_bytes_table(report), _phases_table(report)]
    if report.settings["prefixes"]:
        tables.append(_found_table(report))
    for table in tables:
        console.print(table)
        console.print()
    for line, style in _lines(report):
        console.print(Text(line, style), soft_wrap=True)


def _lines(report: ReplayReport) -> Iterator[tuple[str, str]]:
    """Yield lines and their styles."""
    replay_s = report.seconds.get("replay", 0.0)
    if replay_s:
        yield (
            (
                f"{replay_s:.1f} s: {report.completed / replay_s:.2f} requests/s, {report.total.bytes / replay_s / 1e9:.3f} GB/s, "
                f"{report.prompt_tokens / replay_s:,.0f} tokens/s; at most {report.most_in_flight} in flight; "
                f"pools of {report.pool_bytes / 1e9:.2f} GB"
            ),
            "",
        )
    if report.settings["prefixes"] and report.whole_bytes:
        yield (
            (
                f"sent {report.total.bytes / 1e9:.3f} GB of {report.whole_bytes / 1e9:.3f} GB without prefixes "
                f"({report.total.bytes / report.whole_bytes:.3f})"
            ),
            "",
        )
    if report.refusals:
        refusals = ", ".join(f"{count} {code}" for code, count in sorted(report.refusals.items()))
        yield f"sent away for a while: {refusals}", ""
    for row in report.wrong_rows:
        yield f"WRONG {row}", "bold red"
    for each in report.unserved:
        where = f"room {each.room}" if each.room else "never admitted"
        yield f"request {each.number} ({where}): {each.reason}", "red"
    if report.problem:
        yield report.problem, "bold red"
    yield report.verdict, "bold green" if report.good else "bold red"


def _bytes_table(report: ReplayReport) -> Table:
    table = _table("component", "bytes", "share", "operations", "bytes/operation")
    total = report.total
    named = [(kind.value, amount) for kind, amount in sorted(report.amounts.items())]
    for name, amount in [*named, ("all", total)]:
        each = amount.bytes // amount.operations if amount.operations else 0
        share = amount.bytes / total.bytes if total.bytes else 0.0
        table.add_row(name, f"{amount.bytes:,}", f"{share:.1%}", f"{amount.operations:,}", f"{each:,}")
    return table


def _found_table(report: ReplayReport) -> Table:
    table = _table("prefixes", "tokens", "of prompts", "of endless")
    endless = report.found_tokens.get("endless", 0)
    for where, words in (FOUND | (FROM_HOST if report.settings.get("host_tokens") else {})).items():
        tokens = report.found_tokens.get(where, 0)
        share = tokens / report.arrived_tokens if report.arrived_tokens else 0.0
        table.add_row(words, f"{tokens:,}", f"{share:.1%}", f"{tokens / endless:.1%}" if endless else "-")
    return table


def _phases_table(report: ReplayReport) -> Table:
    table = _table("phase (ms)", "rooms", "p50", "p90", "p99", "max")
    known = [name for name in PHASES if name in report.phases]
    for name in [*known, *sorted(report.phases.keys() - set(known))]:
        phase = report.phases[name]
        values = (phase.p50_s, phase.p90_s, phase.p99_s, phase.max_s)
        table.add_row(name, str(phase.count), *(f"{seconds * 1e3:,.1f}" for seconds in values))
    table.caption = "plan, first_byte and move are summed over a request's chunks, whose moves overlap"
    table.caption_justify = "left"
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for title in others:
        table.add_column(title, justify="right", no_wrap=True)
    return table
