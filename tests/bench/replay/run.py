"""One replay from its first process to its report.

The replay plays the router: it asks bootstrap for a pair for each request that is due, obeys Retry-After, and hands the room to the
engines. At most `max_in_flight` requests are in play; one that was sent away keeps its place there, as in a router's queue, so that
a long one is not overtaken for ever.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from kvbridge import __version__
from kvbridge.api.directory import PairRequest
from kvbridge.cli.trace import TraceRequest
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, InvalidInputError, PeerError
from kvbridge.core.plan.operations import Amounts, add_amounts
from tests.bench.replay.engines import Arrived, Compared, Finished, Released, Serve
from tests.bench.replay.plan import ReplayOptions, ReplayPlan
from tests.bench.replay.processes import ClusterRun, EngineProcess, RoomEnded

LOOK_S = 0.1
RETRY_S = 1.0
"""After an answer that does not say when to come again."""
DETAIL_S = 5.0
MOST_NAMED = 50
"""Requests and rows that a report names; all are counted."""
SENT_AWAY = (CapacityError, PeerError, DeadlineError)
"""Answers after which the same request may be let in; every other one is about the request itself."""
STEPS = ("admission", "engine_queue", "prefill", "after_prefill", "commit_to_claim", "check", "hold")
"""Phases that follow one another without a gap: they add up to `total`."""
LIBRARIES = ("numpy", "torch", "pyzmq", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "nixl-cu12")


@dataclass
class Request:
    """One request of the trace. Times are seconds since the replay began."""

    number: int
    facts: TraceRequest
    due_s: float
    ask_s: float
    """When to ask (again)."""
    room: int = 0
    """0: not admitted."""
    refused_s: float | None = None
    """When it was sent away for the first time."""
    admitted_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)


class Replay(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: ReplayOptions, say: Callable[[str], None]) -> None:
        """Raises InvalidInputError for a trace or options that cannot be replayed."""
        self._plan = plan = ReplayPlan.of(options)
        super().__init__(
            "replay", plan.cluster_spec, keep_logs=options.keep_logs, say=say, silence_s=options.patience_s
        )
        due_s = [plan.due_s(index) for index in range(len(plan.requests))]
        numbered = zip(plan.requests, due_s, strict=True)
        self._requests = [Request(number, facts, due, due) for number, (facts, due) in enumerate(numbered, start=1)]
        self._next = 0
        """Index of the first request that has not come into play."""
        self._in_play: dict[int, Request] = {}
        self._counts: Counter[str] = Counter()
        """Sums of what the report says."""
        self._refusals: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._amounts: Amounts = {}
        self._served: list[dict[str, float]] = []
        """Phases of each completed request, in seconds."""
        self._wrong_rows: list[str] = []
        self._unserved: list[dict[str, Any]] = []
        self._begun_s = self._told_detail_s = 0.0

    def run(self) -> None:
        """Run everything. Raises PeerError or DeadlineError with what a reader needs to find the cause."""
        plan = self._plan
        with self.causes_named():
            with self.timed("start"):
                self._counts["pool_bytes"] = plan.check_memory(self.cluster)
                self.say(f"{len(plan.requests)} requests of {plan.geometry.name} over {plan.options.transport}")
                self.cluster.start()
                self.wait_ready()
                for part in ("prefill", "decode"):
                    job = plan.job(self.cluster)
                    self.start_engine(part, f"the {part} engine", f"tests.bench.replay.engines:{part}", job)
                self.wait_attached()
            with self.timed("replay"):
                self._serve()
            self._counts["pages_left"] = self.wait_free()
        self.completed = True

    def _serve(self) -> None:
        self._begun_s = time.monotonic()
        while self._next < len(self._requests) or self._in_play:
            for request in self._due(time.monotonic() - self._begun_s):
                self._admit(request)
            if not self._in_flight():
                self.waited_s = 0.0  # the engines have nothing to say
            self.next_report(min(LOOK_S, max(0.0, self._begun_s + self._next_due_s() - time.monotonic())))

    def _due(self, now_s: float) -> list[Request]:
        """The requests to ask for now."""
        options = self._plan.options
        while self._may_enter() and self._requests[self._next].due_s <= now_s:
            request = self._requests[self._next]
            if not options.speed:
                request.due_s = now_s
            self._in_play[request.number] = request
            self._next += 1
        return [each for each in self._in_play.values() if not each.room and each.ask_s <= now_s]

    def _next_due_s(self) -> float:
        """When there is something to do again, if nothing is reported before."""
        times = [each.ask_s for each in self._in_play.values() if not each.room]
        return min([*times, self._requests[self._next].due_s if self._may_enter() else math.inf])

    def _may_enter(self) -> bool:
        return self._next < len(self._requests) and len(self._in_play) < self._plan.options.max_in_flight

    def _in_flight(self) -> int:
        return sum(bool(each.room) for each in self._in_play.values())

    def _admit(self, request: Request) -> None:
        """Ask for a pair and hand the room to the engines, or note when to ask again."""
        facts, limit_s = request.facts, self._plan.options.retry_for_s
        keys = self._plan.keys(request.number).data
        asked = PairRequest(
            prompt_tokens=facts.input_length, max_new_tokens=facts.output_length, client="replay", page_hashes=keys
        )
        asked_s = time.monotonic() - self._begun_s
        try:
            room = int(self.cluster.ticket(asked).room)
        except SENT_AWAY as error:
            self._refusals[error.code] += 1
            request.refused_s = asked_s if request.refused_s is None else request.refused_s
            request.ask_s = asked_s + (error.retry_after_s if isinstance(error, CapacityError) else RETRY_S)
            if asked_s - request.refused_s > limit_s:
                self._end(request, "refused", f"refused for more than {limit_s:g} s (--retry-for): {error}")
            return
        except BridgeError as error:
            self._end(request, "refused", str(error))
            return
        request.room, request.admitted_s = room, time.monotonic() - self._begun_s
        request.phases_s = {"ticket": request.admitted_s - asked_s, "admission": request.admitted_s - request.due_s}
        self._counts["most_in_flight"] = max(self._counts["most_in_flight"], self._in_flight())
        for side in ("decode", "prefill"):  # decode knows a room before prefill can have written it
            self.engines[side].order(Serve(request.number, room, facts))

    def handle(self, engine: EngineProcess, event: object) -> None:
        match event:
            case Finished():
                request = self._requests[event.number - 1]
                begun_s, finished_s = event.begun_s - self._begun_s, event.finished_s - self._begun_s
                request.phases_s |= {"engine_queue": begun_s - request.admitted_s, "prefill": finished_s - begun_s}
            case Compared():
                self._counts["checked_bytes"] += event.checked_bytes
                self._counts["mismatched_bytes"] += event.wrong_bytes
                self._wrong_rows += event.wrong_rows[: MOST_NAMED - len(self._wrong_rows)]
            case Arrived():
                request, plan = self._requests[event.number - 1], self._plan
                request.phases_s |= event.phases_s
                self._amounts = add_amounts(self._amounts, event.amounts)
                self._found.update(event.found_tokens | {"endless": plan.endless_tokens[event.number - 1]})
                self._counts["arrived_tokens"] += request.facts.input_length
                self._counts["whole_bytes"] += plan.whole_bytes(request.facts.input_length)
            case Released():
                self._released(self._requests[event.number - 1], event.released_s - self._begun_s)
            case RoomEnded():
                for request in [each for each in self._in_play.values() if each.room == event.room]:
                    self._end(request, "failed", event.reason)

    def _released(self, request: Request, now_s: float) -> None:
        total_s = now_s - request.due_s
        known_s = sum(request.phases_s.get(step, 0.0) for step in STEPS)
        self._served.append({**request.phases_s, "hold": max(0.0, total_s - known_s), "total": total_s})
        self._counts["prompt_tokens"] += request.facts.input_length
        self._end(request, "completed", "")
        if time.monotonic() - self._told_detail_s > DETAIL_S:
            self._told_detail_s = time.monotonic()
            self.say(f"{len(self._served)} of {len(self._requests)} served, {self._in_flight()} in flight")

    def _end(self, request: Request, outcome: str, reason: str) -> None:
        self._counts[outcome] += 1
        self._in_play.pop(request.number, None)
        if reason and len(self._unserved) < MOST_NAMED:
            self._unserved.append({"number": request.number, "room": request.room, "reason": reason})

    def report(self, ending: str, problem: str) -> dict[str, Any]:
        """What is known so far."""
        plan, counts = self._plan, self._counts
        left_out = {"trace", "report_file", "as_json", "keep_logs", "patience_s"}
        names = {phase: None for each in self._served for phase in each}
        good = (
            ending == "completed"
            and counts["completed"] == len(self._requests)
            and not counts["mismatched_bytes"]
            and not counts["pages_left"]
        )
        outcome = (
            f"{counts['completed']} of {len(self._requests)} requests served, {counts['failed']} failed, "
            f"{counts['refused']} refused, {counts['checked_bytes']:,} bytes compared, "
            f"{counts['mismatched_bytes']:,} of them wrong, {counts['pages_left']} pages not free again"
        )
        part = "" if ending == "completed" else f"{ending.upper()}, this report is of a part: "
        wanted = (
            "completed",
            "failed",
            "refused",
            "whole_bytes",
            "arrived_tokens",
            "checked_bytes",
            "mismatched_bytes",
        )
        also = ("prompt_tokens", "pool_bytes", "most_in_flight", "pages_left")
        return {
            "verdict": part + ("GOOD: " if good else "BAD: ") + outcome,
            "good": good,
            "ending": ending,
            "problem": problem,
            "trace": plan.options.trace.name,
            "settings": {name: value for name, value in vars(plan.options).items() if name not in left_out},
            "environment": environment(),
            "requests": len(self._requests),
            **{name: counts[name] for name in (*wanted, *also)},
            "refusals": dict(self._refusals),
            "amounts": {kind.value: amount.model_dump() for kind, amount in self._amounts.items()},
            "found_tokens": {
                name: self._found[name] for name in ("prefill", "decode", "endless", "prefill_host", "decode_host")
            },
            "wrong_rows": self._wrong_rows,
            "pool_pages": {"prefill": plan.prefill_pages(), "decode": plan.decode_pages()},
            "phases": {phase: summary([each[phase] for each in self._served if phase in each]) for phase in names},
            "unserved": self._unserved,
            "seconds": self.seconds,
        }


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """How long one phase took, in seconds, over all rooms that came through it. Percentiles are nearest-rank."""
    ordered = sorted(seconds)
    found = {f"p{percent}_s": round(percentile(ordered, percent), 6) for percent in (50, 90, 99)}
    return {"count": len(ordered), "mean_s": round(sum(ordered) / len(ordered), 6), **found, "max_s": ordered[-1]}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile of ascending values: the least value that `percent` of them do not exceed."""
    if not ordered or not 0 <= percent <= 100:
        raise InvalidInputError(f"need a percentage of at least one value, got {percent} of {len(ordered)}")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def environment() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    installed = {each.name: each.version for each in metadata.distributions()}
    return {
        "kvbridge": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "libraries": {name: installed[name] for name in LIBRARIES if name in installed},
    }
