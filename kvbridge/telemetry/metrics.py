"""Every metric of kvbridge, declared once.

Owns: names, units, labels, help, the registry and its rendering. Must not know: what a daemon does with its day.

Names start with `kvbridge_` and end with a base unit; label values come from small closed sets. A room, a peer or an
address is never a label: those belong in logs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector

from kvbridge.core.plan.operations import Amounts

TABLE_PATH = Path(__file__).with_name("METRICS.md")

_OPERATION_BUCKETS_BYTES = tuple(float(1 << power) for power in range(10, 27, 2))
_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Direction(StrEnum):
    """Which way bytes went, seen from this daemon."""

    SENT = "sent"
    RECEIVED = "received"


class MetricKind(StrEnum):
    """The Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. `name` is the name that is scraped."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

BUILD = MetricSpec("kvbridge_build_info", _GAUGE, ("version", "role"), "Always 1; what is running.")
TRANSFERRED = MetricSpec(
    "kvbridge_transferred_bytes_total",
    _COUNTER,
    ("component", "direction", "transport"),
    "KV cache moved, counted when it has arrived.",
)
BUSY = MetricSpec(
    "kvbridge_transfer_busy_seconds_total",
    _COUNTER,
    ("direction", "transport"),
    "Wall time during which at least one transfer was under way; bytes over this is the honest rate.",
)
OPERATION = MetricSpec(
    "kvbridge_operation_bytes",
    _HISTOGRAM,
    ("component", "transport"),
    "Sizes of the copies that were submitted; small ones are bound by their count.",
    _OPERATION_BUCKETS_BYTES,
)
PHASE = MetricSpec(
    "kvbridge_phase_duration_seconds", _HISTOGRAM, ("phase",), "How long a room spent in each phase.", _PHASE_BUCKETS_S
)
ROOMS = MetricSpec("kvbridge_rooms", _GAUGE, ("state",), "Rooms that are known now, by state.")
ROOMS_ENDED = MetricSpec(
    "kvbridge_rooms_ended_total", _COUNTER, ("state", "code"), "Rooms that ended, with the code of the first cause."
)
POOL = MetricSpec(
    "kvbridge_pool_pages", _GAUGE, ("space", "state"), "Pages of each index space; over all states they sum to the pool."
)
REFUSED = MetricSpec(
    "kvbridge_admissions_refused_total", _COUNTER, ("code",), "Requests that were not admitted, by stable error code."
)
FRAMES_REFUSED = MetricSpec(
    "kvbridge_control_frames_refused_total",
    _COUNTER,
    ("reason",),
    "Control frames and connections that were refused: malformed, stale, duplicate, unauthenticated and so on.",
)
RESENT = MetricSpec("kvbridge_control_resends_total", _COUNTER, (), "Control messages that were sent again.")
UNDELIVERED = MetricSpec(
    "kvbridge_control_undelivered_total", _COUNTER, (), "Control messages that were given up unacknowledged."
)
PEERS = MetricSpec("kvbridge_peers", _GAUGE, ("state",), "Peer daemons, by state.")
WORKER_RESTARTS = MetricSpec("kvbridge_worker_restarts_total", _COUNTER, ("reason",), "Rank workers started again.")
REGISTRATION = MetricSpec(
    "kvbridge_registration_progress_ratio", _GAUGE, (), "Pool memory registered with the transport: 1 when all is."
)
READY = MetricSpec("kvbridge_ready", _GAUGE, (), "1 while new rooms can be admitted.")

METRICS: tuple[MetricSpec, ...] = (
    BUILD,
    READY,
    TRANSFERRED,
    BUSY,
    OPERATION,
    PHASE,
    ROOMS,
    ROOMS_ENDED,
    POOL,
    REFUSED,
    PEERS,
    FRAMES_REFUSED,
    RESENT,
    UNDELIVERED,
    WORKER_RESTARTS,
    REGISTRATION,
)


class BusyTime:
    """The union of overlapping intervals, as they happen: how long at least one thing was under way.

    `begin` and `end` come in pairs; time is the caller's clock, in seconds.
    """

    def __init__(self) -> None:
        self._under_way = 0
        self._since_s = 0.0
        self._total_s = 0.0

    def begin(self, now_s: float) -> None:
        """One more thing is under way."""
        if self._under_way == 0:
            self._since_s = now_s
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """One thing has ended."""
        if self._under_way == 0:
            raise ValueError("nothing is under way")
        self._under_way -= 1
        if self._under_way == 0:
            self._total_s += now_s - self._since_s

    def take_s(self, now_s: float) -> float:
        """Return the busy seconds since the last call, what is still under way included."""
        if self._under_way:
            self._total_s += now_s - self._since_s
            self._since_s = now_s
        taken, self._total_s = self._total_s, 0.0
        return taken


class Metrics:
    """The metrics of one daemon, in a registry of its own. Every method may be called from any thread."""

    def __init__(self, role: str, version: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        counters = {spec.name: self._counter(spec) for spec in METRICS if spec.kind is _COUNTER}
        gauges = {spec.name: self._gauge(spec) for spec in METRICS if spec.kind is _GAUGE}
        histograms = {spec.name: self._histogram(spec) for spec in METRICS if spec.kind is _HISTOGRAM}
        self._counters, self._gauges, self._histograms = counters, gauges, histograms
        self._busy: dict[tuple[str, str], BusyTime] = {}
        gauges[BUILD.name].labels(version=version, role=role).set(1)

    def render(self) -> tuple[bytes, str]:
        """Return the scrape body and its content type."""
        now_s = time.monotonic()
        for (direction, transport), busy in self._busy.items():
            seconds = busy.take_s(now_s)
            self._counters[BUSY.name].labels(direction=direction, transport=transport).inc(seconds)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def transferred(self, amounts: Amounts, direction: Direction, transport: str) -> None:
        """Count what has arrived."""
        for component, amount in amounts.items():
            labels = {"component": component.value, "direction": direction.value, "transport": transport}
            self._counters[TRANSFERRED.name].labels(**labels).inc(amount.bytes)

