"""What is known of every request of a replay, and what it adds up to.

Owns: each request's stage and times, the counts, the samples of the pools, which request is to be asked for next. Must not
know: processes, HTTP, the clock (it is told the seconds since the replay began).

At most `max_in_flight` requests are in play: asked for, or admitted and not ended. A request that was sent away keeps its
place there, as in a router's queue, so that a long one is not overtaken for ever.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from kvbridge import __version__
from kvbridge.cli.trace import TraceRequest
from kvbridge.core.plan.operations import Amounts, add_amounts
from kvbridge.testbed.replay.job import MOST_WRONG_ROWS, Arrived, Compared, WrongRow
from kvbridge.testbed.replay.plan import ReplayPlan
from kvbridge.testbed.replay.report import (
    FOUND,
    FROM_HOST,
    STEPS,
    Ending,
    PhaseSummary,
    ReplayReport,
    Sample,
    Unserved,
    breakdown,
)

SAMPLE_S = 1.0
"""How often the pools are looked at."""
MOST_SAMPLES = 600
"""A longer replay is sampled less often."""
MOST_UNSERVED = 50
LIBRARIES = ("numpy", "torch", "pyzmq", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "nixl-cu12")


class Stage(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    IN_FLIGHT = "in_flight"
    COMPLETED = "completed"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass
class Request:
    """One request of the trace. Times are seconds since the replay began."""

    number: int
    facts: TraceRequest
    due_s: float
    ask_s: float
    """When to ask (again)."""
    stage: Stage = Stage.WAITING
    room: int = 0
    refused_s: float | None = None
    """When it was sent away for the first time."""
    admitted_s: float = 0.0
    reason: str = ""
    phases_s: dict[str, float] = field(default_factory=dict)


class Ledger:
    """All requests of one replay."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self._requests = [
            Request(number, facts, due_s=plan.due_s(number - 1), ask_s=plan.due_s(number - 1))
            for number, facts in enumerate(plan.requests, start=1)
        ]
        self._in_play: dict[int, Request] = {}
        """By number."""
        self._next = 0
        """Index of the first request that has not come into play."""
        self._refusals: Counter[str] = Counter()
        self._amounts: Amounts = {}
        self._checked_bytes = 0
        self._wrong_bytes = 0
        self._wrong_rows: list[WrongRow] = []
        self._found_tokens = dict.fromkeys((*FOUND, *FROM_HOST), 0)
        self._arrived_tokens = 0
        self._whole_bytes = 0
        self._most_in_flight = 0
        self._served: list[dict[str, float]] = []
        """Phases of each completed request, in seconds."""
        self._samples: list[Sample] = []
        self._sample_every_s = SAMPLE_S
        self._next_sample_s = 0.0

    # ------------------------------------------------------------------ what is to be done

    @property
    def all_ended(self) -> bool:
        """Whether nothing more will come of any request."""
        return self._next == len(self._requests) and not self._in_play

    @property
    def in_flight(self) -> int:
        """Admitted and not ended."""
        return sum(each.stage is Stage.IN_FLIGHT for each in self._in_play.values())

    def due(self, now_s: float) -> list[Request]:
        """Return the requests to ask for now."""
        while (
            self._next < len(self._requests)
            and len(self._in_play) < self._plan.options.max_in_flight
            and self._requests[self._next].due_s <= now_s
        ):
            request = self._requests[self._next]
            if not self._plan.options.speed:
                request.due_s = now_s
            self._in_play[request.number] = request
            self._next += 1
        return [each for each in self._in_play.values() if each.stage is Stage.WAITING and each.ask_s <= now_s]

    def next_due_s(self) -> float:
        """When there is something to do again, if nothing is reported before; infinite when only reports can help."""
        times = [each.ask_s for each in self._in_play.values() if each.stage is Stage.WAITING]
        if self._next < len(self._requests) and len(self._in_play) < self._plan.options.max_in_flight:
            times.append(self._requests[self._next].due_s)
        return min([*times, self._next_sample_s])

    def sample_due(self, now_s: float) -> bool:
        """Whether the pools are to be looked at now."""
        return now_s >= self._next_sample_s

    # ------------------------------------------------------------------ what has happened

    def sent_away(self, request: Request, code: str, reason: str, *, now_s: float, retry_s: float) -> None:
        """It does not fit now; it is given up when that has lasted too long."""
        self._refusals[code] += 1
        request.refused_s = now_s if request.refused_s is None else request.refused_s
        request.ask_s = now_s + retry_s
        if now_s - request.refused_s > self._plan.options.retry_for_s:
            limit_s = self._plan.options.retry_for_s
            self._end(request, Stage.REFUSED, f"refused for more than {limit_s:g} s (--retry-for): {reason}")

    def turned_down(self, request: Request, reason: str) -> None:
        """It will never be let in."""
        self._end(request, Stage.REFUSED, reason)

    def admitted(self, request: Request, room: int, *, asked_s: float, now_s: float) -> None:
        """Both ends are reserved; `asked_s` is when the granted call began."""
        request.room, request.admitted_s = room, now_s
        request.phases_s |= {"ticket": now_s - asked_s, "admission": now_s - request.due_s}
        request.stage = Stage.IN_FLIGHT
        self._most_in_flight = max(self._most_in_flight, self.in_flight)

    def finished(self, number: int, *, begun_s: float, finished_s: float) -> None:
        """The prefill engine is through with a request."""
        request = self._requests[number - 1]
        request.phases_s |= {"engine_queue": begun_s - request.admitted_s, "prefill": finished_s - begun_s}

    def arrived(self, event: Arrived) -> None:
        """The decode engine has compared every byte."""
        request = self._requests[event.number - 1]
        request.phases_s |= {**event.phases_s, "after_prefill": event.after_prefill_s, "check": event.check_s}
        self._amounts = add_amounts(self._amounts, event.amounts)
        found = (event.computed_tokens, event.prefix_tokens, self._plan.endless_tokens[event.number - 1])
        from_host = event.computed_host_tokens, event.prefix_host_tokens
        for where, tokens in zip((*FOUND, *FROM_HOST), (*found, *from_host), strict=True):
            self._found_tokens[where] += tokens
        self._arrived_tokens += request.facts.input_length
        self._whole_bytes += self._plan.whole_bytes(request.facts.input_length)
        self.compared(event)

    def compared(self, event: Compared) -> None:
        """An engine has looked at bytes."""
        self._checked_bytes += event.checked_bytes
        self._wrong_bytes += event.wrong_bytes
        self._wrong_rows += event.wrong_rows[: MOST_WRONG_ROWS - len(self._wrong_rows)]

    def released(self, number: int, now_s: float) -> None:
        """The decode engine has given a request back."""
        request = self._requests[number - 1]
        total_s = now_s - request.due_s
        known_s = sum(request.phases_s.get(step, 0.0) for step in STEPS)
        self._served.append({**request.phases_s, "hold": max(0.0, total_s - known_s), "total": total_s})
        self._end(request, Stage.COMPLETED, "")

    def failed(self, room: int, reason: str) -> None:
        """A room ended before its time; of rooms that have ended already, and of foreign ones, nothing is noted."""
        for request in [each for each in self._in_play.values() if each.room == room]:
            self._end(request, Stage.FAILED, reason)

    def sample(self, at_s: float, used_pages: dict[str, dict[str, int]]) -> None:
        """Keep how far it is and how full the pools are."""
        self._samples.append(
            Sample(
                at_s=at_s,
                in_flight=self.in_flight,
                completed=len(self._served),
                arrived_bytes=self._arrived_bytes,
                whole_bytes=self._whole_bytes,
                arrived_tokens=self._arrived_tokens,
                found_tokens=dict(self._found_tokens),
                used_pages=used_pages,
            )
        )
        if len(self._samples) > MOST_SAMPLES:
            self._samples = self._samples[::2]
            self._sample_every_s *= 2
        self._next_sample_s = at_s + self._sample_every_s

    def _end(self, request: Request, stage: Stage, reason: str) -> None:
        request.stage, request.reason = stage, reason
        self._in_play.pop(request.number, None)
        request.phases_s = {}  # summed up, or of no use

    @property
    def _arrived_bytes(self) -> int:
        return sum(amount.bytes for amount in self._amounts.values())

    def _count(self, stage: Stage) -> int:
        return sum(each.stage is stage for each in self._requests)

    # ------------------------------------------------------------------ what it adds up to

    def in_words(self) -> str:
        """Say how far it is."""
        return (
            f"{self._count(Stage.COMPLETED)} of {len(self._requests)} served, {self.in_flight} in flight, "
            f"{self._count(Stage.FAILED)} failed, {self._refusals.total()} times sent away, {self._arrived_bytes / 1e9:.2f} GB, "
            f"{self._wrong_bytes} wrong bytes"
        )

    def report(
        self, ending: Ending, problem: str, *, pool_bytes: int, pages_left: int, seconds: dict[str, float]
    ) -> ReplayReport:
        """Return the report of what has happened so far."""
        unserved = [each for each in self._requests if each.stage in {Stage.FAILED, Stage.REFUSED}]
        return ReplayReport(
            ending=ending,
            problem=problem,
            trace=self._plan.options.trace.name,
            settings=self._settings(),
            environment=environment(),
            requests=len(self._requests),
            completed=self._count(Stage.COMPLETED),
            failed=self._count(Stage.FAILED),
            refused=self._count(Stage.REFUSED),
            refusals=dict(self._refusals),
            amounts=self._amounts,
            whole_bytes=self._whole_bytes,
            arrived_tokens=self._arrived_tokens,
            found_tokens=self._found_tokens,
            checked_bytes=self._checked_bytes,
            mismatched_bytes=self._wrong_bytes,
            wrong_rows=tuple(self._wrong_rows),
            prompt_tokens=sum(each.facts.input_length for each in self._requests if each.stage is Stage.COMPLETED),
            pool_bytes=pool_bytes,
            pool_pages={"prefill": self._plan.prefill_pages(), "decode": self._plan.decode_pages()},
            most_in_flight=self._most_in_flight,
            phases={
                phase: PhaseSummary.of([each[phase] for each in self._served if phase in each])
                for phase in {phase: None for each in self._served for phase in each}
            },
            breakdown=breakdown(self._served),
            occupancy=tuple(self._samples),
            unserved=tuple(
                Unserved(number=each.number, room=each.room, reason=each.reason) for each in unserved[:MOST_UNSERVED]
            ),
            pages_left=pages_left,
            seconds=seconds,
        )

    def _settings(self) -> dict[str, object]:
        """The options that the figures depend on, without paths of this machine."""
        options = self._plan.options
        left_out = {"trace", "report_file", "plot_file", "as_json", "keep_logs", "patience_s"}
        return {name: value for name, value in vars(options).items() if name not in left_out}


def environment() -> dict[str, object]:
    """What the figures were measured on."""
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    versions = {name: found for name in LIBRARIES if (found := _version(name))}
    return {
        "kvbridge": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "libraries": versions,
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
