"""What traces cost: processor time of a small room (both nodes and bootstrap), off and on.

- `off_us`: what is there of them in a daemon whose `telemetry.traces.endpoint` is empty: a header that is looked for in three
  requests, and the facts that only spans are made of, through all readers of a node. Against the same run without both
  (`off_ratio`).
- `on_us`: what they add to that when every request is traced and a collector takes the spans: the reader, the library, the encoding
  and the sending, in all threads of the process; the collector is another process. `spans` of one room.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

from kvbridge.http.middleware import Observed
from kvbridge.telemetry.context import TraceContext, begin_with
from kvbridge.telemetry.events import (
    EndReserved,
    Fact,
    OrderBegan,
    OrderEnded,
    PairingEnded,
    RequestAnswered,
    RoomBegun,
    RoomEntered,
    RoomFinished,
    RoomOffered,
)
from kvbridge.telemetry.logs import LINES
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.service_metrics import SPANS
from kvbridge.telemetry.spans import PARTS, SpanReader
from kvbridge.telemetry.stream import EventStream
from kvbridge.telemetry.tracing import SpanExport
from tests.bench.bench_telemetry import ROOM_CPU_MS, facts_of_a_room, request_us, stream
from tests.helpers.span_collector import span_collector

ROOMS, REPEATS = 400, 5
ONLY_FOR_SPANS = RequestAnswered | RoomOffered | RoomBegun | RoomFinished | EndReserved | PairingEnded
STEPS_S = {"plan": 0.001, "submit": 0.001, "first_byte": 0.003, "move": 0.01}
Facts = dict[str, list[Fact]]


def traced_facts(number: int, trace: TraceContext | None) -> Facts:
    """What happens to one small room, by daemon, with all that spans are made of."""
    room: Any = {"room": number, "generation": 1}
    below: Callable[[str], TraceContext | None] = lambda name: trace and trace.part(name)  # noqa: E731
    roots = {role: below(role) for role in ("prefill", "decode")}
    offered = roots["decode"] and roots["decode"].part("commit")
    made = facts_of_a_room(number)
    for role, facts in made.items():
        facts[:] = [replace(fact, trace=roots[role]) if isinstance(fact, RoomEntered) else fact for fact in facts]
        facts[:] = [replace(fact, seconds=STEPS_S) if isinstance(fact, OrderEnded) else fact for fact in facts]
        facts.insert(1, RequestAnswered(**room, seconds=0.001, code="", trace=roots[role]))
    prefill = made["prefill"]
    order = next(index for index, fact in enumerate(prefill) if isinstance(fact, OrderBegan))
    peer = {"peer": f"peer-{number % 200}"}
    prefill[order - 1 : order - 1] = [RoomBegun(**room, engine="e"), RoomOffered(**room, **peer, trace=offered)]
    prefill.insert(order + 3, RoomFinished(**room, **peer, engine="e"))
    reserved = [
        EndReserved(**room, role=role, url="http://d:1", seconds=0.001, code="", trace=below(f"reserve {role}"))
        for role in roots
    ]
    made["bootstrap"] = [*reserved, PairingEnded(**room, seconds=0.01, outcome="paired", trace=trace)]
    return made


def rooms_us(rooms: list[Facts], streams: dict[str, EventStream]) -> float:
    """Microseconds of processor time a room, of all threads."""
    begun_s = time.process_time()
    for facts in rooms:
        for role, made in streams.items():
            for fact in facts[role]:
                made.emit(fact)
    return (time.process_time() - begun_s) / len(rooms) * 1e6


def daemons() -> dict[str, EventStream]:
    """The streams of three daemons with their readers."""
    return {
        **{role: stream(role, lines=LINES) for role in ("prefill", "decode")},
        "bootstrap": EventStream(),
    }


def no_trace(_self: Observed, _headers: object) -> None:
    """Stand where the header is looked for; no Mock, which costs more than what it would replace."""


def off() -> tuple[float, float]:
    """Microseconds a room without what traces need, and with it; the best of some runs, one after the other."""
    with_hooks = [traced_facts(number, None) for number in range(ROOMS)]
    without = [
        {role: [fact for fact in facts if not isinstance(fact, ONLY_FOR_SPANS)] for role, facts in room.items()}
        for room in with_hooks
    ]
    facts_us: tuple[list[float], list[float]] = ([], [])
    requests_us: tuple[list[float], list[float]] = ([], [])
    for _ in range(5 * REPEATS):
        for which, rooms in enumerate((without, with_hooks)):
            facts_us[which].append(rooms_us(rooms, daemons()))
    for _ in range(REPEATS):
        with mock.patch.object(Observed, "_trace", no_trace):
            requests_us[0].append(request_us(repeats=1))
        requests_us[1].append(request_us(repeats=1))
    bare_us, hooked_us = (min(facts_us[which]) + 3 * min(requests_us[which]) for which in (0, 1))
    return bare_us, hooked_us


def collect(told: Connection) -> None:
    """Be the collector, until told to end."""
    with span_collector() as collector:
        told.send(collector.url)
        told.recv()


def on(url: str) -> tuple[float, float]:
    """Microseconds a room with all of its spans sent, the best of some runs; and how many spans that are."""
    begin = begin_with(1.0)
    best_us, spans = float("inf"), 0.0
    for _ in range(REPEATS):
        rooms = [traced_facts(number, begin(None)) for number in range(ROOMS)]
        streams, exports, metrics = daemons(), [], Metrics(role="decode")
        for role, made in streams.items():
            names = {"role": role, "incarnation": role}
            export = SpanExport(f"{url}/v1/traces", timeout_s=10.0, names=names, metrics=metrics)
            made.add_reader(SpanReader(export.record, parts=PARTS.get(role, {})).table)  # type: ignore[call-overload]
            exports.append(export)
        begun_s = time.process_time()
        # In portions, as a daemon has pauses: what no queue can hold would be dropped, which costs less than sending it.
        for start in range(0, ROOMS, 100):
            rooms_us(rooms[start : start + 100], streams)
            for export in exports:
                export._queue.force_flush()
        for export in exports:
            export.close(60.0)
        best_us = min(best_us, (time.process_time() - begun_s) / ROOMS * 1e6)
        sent = metrics._values[SPANS]
        assert not sent["dropped",], "not all were sent"
        assert not sent["failed",], "not all were sent"
        spans = sent["exported",] / ROOMS
    return best_us, spans


def run() -> dict[str, Any]:
    """Return what `table` shows."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    collector = context.Process(target=collect, args=(theirs,), daemon=True)
    collector.start()
    url = ours.recv()
    bare_us, off_us = off()
    readers_us = min(
        rooms_us([traced_facts(number, None) for number in range(ROOMS)], daemons()) for _ in range(REPEATS)
    )
    on_us, spans = on(url)
    ours.send(None)
    collector.join(10)
    return {
        "bare_us": bare_us,
        "off_us": off_us,
        "off_ratio": off_us / bare_us,
        "on_us": on_us - readers_us,
        "spans": spans,
        "room_cpu_us": ROOM_CPU_MS * 1e3,
    }


def table(found: dict[str, Any]) -> str:
    """Return the figures as text."""
    added = found["off_us"] - found["bare_us"]
    off_line = (
        f"  off: {added:+.1f} on metrics and logs of {found['bare_us']:.0f} (x {found['off_ratio']:.3f}), "
        f"{added / found['room_cpu_us']:.2%} of a room without payload"
    )
    on_line = (
        f"  on, every request, {found['spans']:.0f} spans: {found['on_us']:+.0f}, "
        f"{found['on_us'] / found['room_cpu_us']:.1%} of a room without payload, {found['on_us'] / found['spans']:.0f} a span"
    )
    heading = "traces, microseconds of processor time a room (bootstrap, both nodes, three requests):"
    return f"{heading}\n{off_line}\n{on_line}"
