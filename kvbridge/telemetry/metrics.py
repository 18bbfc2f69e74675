"""Every metric of kvbridge, declared once.

Owns: names, units, labels, help, the registry and its rendering. Must not know: what a daemon does with its day.

Names start with `kvbridge_` and end with a base unit; label values come from small closed sets. A room, a peer or an
address is never a label: those belong in logs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.process_collector import ProcessCollector

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.plan.operations import Amounts

MAX_LABEL_VALUES = 64
"""Distinct words that an open label of one metric may show; further ones count as "other"."""
TABLE_PATH = Path(__file__).with_name("METRICS.md")

_OPERATION_BUCKETS_BYTES = tuple(float(1 << power) for power in range(10, 27, 2))
_PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_WAIT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


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

METRICS: tuple[MetricSpec, ...] = (
    BUILD := MetricSpec("kvbridge_build_info", _GAUGE, ("version", "role"), "Always 1; what is running."),
    READY := MetricSpec("kvbridge_ready", _GAUGE, (), "1 while new rooms can be admitted."),
    TRANSFERRED := MetricSpec(
        "kvbridge_transferred_bytes_total",
        _COUNTER,
        ("component", "direction", "transport"),
        "KV cache moved, counted when it has arrived.",
    ),
    BUSY := MetricSpec(
        "kvbridge_transfer_busy_seconds_total",
        _COUNTER,
        ("direction", "transport"),
        "Wall time during which at least one transfer was under way; bytes over this is the honest rate.",
    ),
    OPERATION := MetricSpec(
        "kvbridge_operation_bytes",
        _HISTOGRAM,
        ("component", "direction", "transport"),
        "Sizes of copies, each room's at their mean; small ones are bound by their count.",
        _OPERATION_BUCKETS_BYTES,
    ),
    PHASE := MetricSpec(
        "kvbridge_phase_duration_seconds",
        _HISTOGRAM,
        ("phase",),
        "How long a room spent in each phase.",
        _PHASE_BUCKETS_S,
    ),
    ROOMS := MetricSpec("kvbridge_rooms", _GAUGE, ("state",), "Rooms that are known now, by state."),
    ROOMS_ENDED := MetricSpec(
        "kvbridge_rooms_ended_total", _COUNTER, ("state", "code"), "Rooms that ended, with the code of the first cause."
    ),
    DIGEST_MISMATCHES := MetricSpec(
        "kvbridge_digest_mismatches_total",
        _COUNTER,
        ("component",),
        "Pages that arrived with other bytes than were sent; each failed its room.",
    ),
    POOL := MetricSpec(
        "kvbridge_pool_pages",
        _GAUGE,
        ("space", "state"),
        "Pages of each index space; over all states they sum to the pool.",
    ),
    QUARANTINED := MetricSpec(
        "kvbridge_rooms_quarantined",
        _GAUGE,
        ("reason",),
        "Rooms whose pages nobody may use yet, by what is not proved: a transport of ours is quiet, a writer is shut out, "
        "an engine has let go, the process of an engine that left without letting go has ended.",
    ),
    EPOCH := MetricSpec(
        "kvbridge_endpoint_epoch",
        _GAUGE,
        (),
        "Epoch of the endpoints that rank workers give out; it rises each time that writers had to be shut out.",
    ),
    REFUSED := MetricSpec(
        "kvbridge_admissions_refused_total",
        _COUNTER,
        ("code",),
        "Requests that were not admitted, by stable error code; `wait_timeout` and `queue_full` are kinds of `capacity`.",
    ),
    WAIT := MetricSpec(
        "kvbridge_admission_wait_seconds",
        _HISTOGRAM,
        ("outcome",),
        "How long requests waited for pages: until admitted, refused, their timeout, or their client left.",
        _WAIT_BUCKETS_S,
    ),
    WAITING := MetricSpec("kvbridge_admission_waiting_requests", _GAUGE, (), "Requests that wait for pages now."),
    OLDEST_WAIT := MetricSpec(
        "kvbridge_admission_oldest_wait_seconds", _GAUGE, (), "How long the oldest of them waits."
    ),
    STARVED := MetricSpec(
        "kvbridge_admission_starved_seconds",
        _GAUGE,
        (),
        "For how long not even the smallest request fits; 0 if one does.",
    ),
    PEERS := MetricSpec("kvbridge_peers", _GAUGE, ("state",), "Peer daemons, by state."),
    FRAMES_REFUSED := MetricSpec(
        "kvbridge_control_frames_refused_total",
        _COUNTER,
        ("reason",),
        "Control frames and connections that were refused: malformed, stale, duplicate, unauthenticated and so on.",
    ),
    RESENT := MetricSpec("kvbridge_control_resends_total", _COUNTER, (), "Control messages that were sent again."),
    UNDELIVERED := MetricSpec(
        "kvbridge_control_undelivered_total", _COUNTER, (), "Control messages that were given up unacknowledged."
    ),
    WORKER_RESTARTS := MetricSpec(
        "kvbridge_worker_restarts_total", _COUNTER, ("reason",), "Rank workers started again."
    ),
    REGISTRATION := MetricSpec(
        "kvbridge_registration_progress_ratio", _GAUGE, (), "Pool memory registered with the transport: 1 when all is."
    ),
    STORE_REFUSED := MetricSpec(
        "kvbridge_store_values_refused_total",
        _COUNTER,
        ("reason",),
        "Values in the directory's store that were malformed and treated as absent: node or room.",
    ),
    STORE_FAILED := MetricSpec(
        "kvbridge_store_failures_total",
        _COUNTER,
        ("reason",),
        "Calls to the directory's store that failed: timeout, connection or refused.",
    ),
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


class _SizeHistogram:
    """A histogram that takes many observations of one size at once, which `prometheus_client.Histogram` does not."""

    def __init__(self, spec: MetricSpec) -> None:
        self._spec = spec
        self._counts: dict[tuple[str, ...], list[int]] = {}
        self._sums: dict[tuple[str, ...], float] = {}

    def observe(self, labels: tuple[str, ...], size: float, count: int) -> None:
        counts = self._counts.setdefault(labels, [0] * (len(self._spec.buckets) + 1))
        counts[bisect_left(self._spec.buckets, size)] += count
        self._sums[labels] = self._sums.get(labels, 0.0) + size * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._spec.name, self._spec.help, labels=self._spec.labels)
        bounds = [*(f"{bound:.1f}" for bound in self._spec.buckets), "+Inf"]
        for labels, counts in self._counts.items():
            buckets = list(zip(bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        yield family


class Metrics:
    """The metrics of one daemon, in a registry of its own. Used by one thread: that of the daemon's loop."""

    def __init__(self, *, role: str, version: str, clock: Clock = monotonic) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._clock = clock
        self._counters = {
            spec: Counter(spec.name, spec.help, spec.labels, registry=self.registry)
            for spec in METRICS
            if spec.kind is MetricKind.COUNTER
        }
        self._gauges = {
            spec: Gauge(spec.name, spec.help, spec.labels, registry=self.registry)
            for spec in METRICS
            if spec.kind is MetricKind.GAUGE
        }
        self._histograms = {
            spec: Histogram(spec.name, spec.help, spec.labels, buckets=spec.buckets, registry=self.registry)
            for spec in (PHASE, WAIT)
        }
        self._operations = _SizeHistogram(OPERATION)
        self.registry.register(self._operations)
        self._busy: dict[tuple[str, ...], BusyTime] = {}
        self._seen: dict[MetricSpec, set[str]] = {}
        self._gauges[BUILD].labels(version, role).set(1)

    def render(self) -> tuple[bytes, str]:
        """Return the scrape's body and its content type."""
        now_s = self._clock()
        for labels, busy in self._busy.items():
            self.count(BUSY, *labels, by=busy.take_s(now_s))
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def transferred(self, amounts: Amounts, direction: Direction, transport: str) -> None:
        """Count what has arrived: bytes by component, and its operations at their mean size."""
        for kind, amount in amounts.items():
            labels = self._bounded(TRANSFERRED, (kind.value, direction.value, transport))
            self.count(TRANSFERRED, *labels, by=amount.bytes)
            if amount.operations:
                self._operations.observe(labels, amount.bytes / amount.operations, amount.operations)

    def transfer_began(self, direction: Direction, transport: str) -> None:
        """A transfer is under way; `transfer_ended` with the same words follows, whatever becomes of it."""
        labels = self._bounded(BUSY, (direction.value, transport))
        self._busy.setdefault(labels, BusyTime()).begin(self._clock())

    def transfer_ended(self, direction: Direction, transport: str) -> None:
        """A transfer is over."""
        self._busy[self._bounded(BUSY, (direction.value, transport))].end(self._clock())

    def count(self, metric: MetricSpec, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        counter = self._counters[metric]
        (counter.labels(*self._bounded(metric, labels)) if labels else counter).inc(by)

    def set(self, metric: MetricSpec, value: float) -> None:
        """Set a gauge without labels."""
        self._gauges[metric].set(value)

    def replace(self, metric: MetricSpec, values: Mapping[str, float], *first_labels: str) -> None:
        """Set a gauge for values of its last label; those that are left out become 0."""
        known = {self._known(metric, label): value for label, value in values.items()}
        for label in self._seen.get(metric, set()):
            self._gauges[metric].labels(*first_labels, label).set(known.get(label, 0))

    def observe(self, metric: MetricSpec, seconds: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self._histograms[metric].labels(*self._bounded(metric, labels)).observe(seconds)

    def store_value_refused(self, reason: str) -> None:
        """See StoreObserver."""
        self.count(STORE_REFUSED, reason)

    def store_failed(self, reason: str) -> None:
        """See StoreObserver."""
        self.count(STORE_FAILED, reason)

    def _bounded(self, metric: MetricSpec, labels: tuple[str, ...]) -> tuple[str, ...]:
        """The last label may be a word from outside."""
        return *labels[:-1], self._known(metric, labels[-1])

    def _known(self, spec: MetricSpec, value: str) -> str:
        """Return a label value, or "other" once a metric has seen too many: some of these words come from peers."""
        seen = self._seen.setdefault(spec, set())
        if value not in seen and len(seen) >= MAX_LABEL_VALUES:
            return "other"
        seen.add(value)
        return value


def metrics_table() -> str:
    """Return the text of METRICS.md: every metric in a table."""
    rows = [
        f"| `{spec.name}` | {spec.kind} | {', '.join(f'`{label}`' for label in spec.labels) or '-'} | {spec.help} |"
        for spec in METRICS
    ]
    head = ["# Metrics", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
    tail = ["", "The usual `process_*` metrics are there as well.", ""]
    return "\n".join(head + rows + tail)
