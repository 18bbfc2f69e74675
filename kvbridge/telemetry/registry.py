"""The values of a daemon's metrics, and the page that Prometheus scrapes."""

from __future__ import annotations

import math
import platform
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, chain, product
from types import SimpleNamespace
from typing import TypeVar, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.samples import Exemplar

from kvbridge import __version__
from kvbridge.telemetry.context import TRACE, exemplar
from kvbridge.telemetry.metrics import (
    BUILD,
    COUNTER,
    HISTOGRAM,
    HTTP_DURATION,
    HTTP_REQUESTS,
    LINES_LEFT_OUT,
    MAX_LABEL_VALUES,
    METHODS,
    METRICS,
    PEER_BUSY,
    MetricSpec,
)

OTHER = "other"
LIBRARIES = (
    ("torch",),
    ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13"),
    ("nixl", "nixl-cu12", "nixl-cu13"),
)
"""Libraries whose versions are shown, each with the names of its packages."""
KEPT_INTERVALS = 1_024
"""`BusyTime` keeps this many intervals apart, and does not count time from before the oldest one."""
Labels = tuple[str, ...]
LabelsT = TypeVar("LabelsT", bound=Labels)


class BusyTime:
    """The length of the union of time intervals, which come in any order. The caller's clock tells the times."""

    def __init__(self) -> None:
        self._begins_s: list[float] = []
        self._ends_s: list[float] = []
        """The intervals, disjoint and in order."""
        self._horizon_s = -math.inf

    def add(self, begin_s: float, end_s: float) -> float:
        """Add an interval. Return the seconds of it that no earlier interval covers."""
        begins_s, ends_s = self._begins_s, self._ends_s
        begin_s = max(begin_s, self._horizon_s)
        first, last = bisect_left(ends_s, begin_s), bisect_right(begins_s, end_s)  # the intervals that it touches
        touched_s = sum(ends_s[first:last]) - sum(begins_s[first:last]) if first < last else 0.0
        if first < last:
            begin_s, end_s = min(begin_s, begins_s[first]), max(end_s, ends_s[last - 1])
        if begin_s >= end_s:
            return 0.0
        begins_s[first:last], ends_s[first:last] = [begin_s], [end_s]
        if len(begins_s) > KEPT_INTERVALS:
            half = KEPT_INTERVALS // 2
            self._horizon_s = ends_s[half - 1]
            del begins_s[:half], ends_s[:half]
        return end_s - begin_s - touched_s


class _Distribution:
    """The counts of one series of a histogram."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, size: float, trace_id: str) -> None:
        bucket = bisect_left(self._bounds, size)
        self._counts[bucket] += 1
        self._sum += size
        if trace_id:
            self._exemplars[bucket] = Exemplar({"trace_id": trace_id}, size, time.time())

    def add_to(self, family: HistogramMetricFamily, labels: Labels, names: Sequence[str]) -> None:
        counts = accumulate(self._counts)
        buckets: list[tuple[str, float] | tuple[str, float, Exemplar]] = [
            (name, count, self._exemplars[at]) if at in self._exemplars else (name, count)
            for at, (name, count) in enumerate(zip(names, counts, strict=True))
        ]
        family.add_metric(labels, buckets, self._sum)


class Metrics:
    """The metrics of one daemon, in a registry of its own. For the thread of the daemon's loop only.

    A series whose labels all have closed sets of words exists from the start, so that a rate over it sees the first event.
    """

    def __init__(self, *, role: str, values: Mapping[str, Sequence[str]] | None = None) -> None:
        """`values`: by label, the closed sets of words that depend on the configuration and the model."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._busy: dict[Labels, BusyTime] = {}
        self._values: dict[MetricSpec, dict[Labels, float]] = {}
        self._distributions: dict[MetricSpec, dict[Labels, _Distribution]] = {}
        self._words: dict[tuple[MetricSpec, str], set[str]] = {}
        self._closed: dict[MetricSpec, tuple[Labels, ...]] = {}
        for spec in (spec for spec in METRICS if role in spec.roles):
            known, closed = {**(values or {}), **spec.values}, spec.series
            if not closed and all(label in known for label in spec.labels):
                closed = tuple(product(*(known[label] for label in spec.labels)))
            self._closed[spec] = closed
            self._open(spec)
            if spec.kind == HISTOGRAM:
                self._distributions[spec] = {labels: _Distribution(spec.buckets) for labels in closed}
        self.registry.register(self)

    def _open(self, spec: MetricSpec) -> dict[Labels, float]:
        """Start a metric with the series of closed labels alone, each 0, and return its series."""
        closed = self._closed[spec]
        for place, label in enumerate(spec.labels):
            self._words[spec, label] = {labels[place] for labels in closed}
        if spec.kind != HISTOGRAM:
            self._values[spec] = dict.fromkeys(closed, 0.0)
        return self._values.get(spec, {})

    def count(self, metric: MetricSpec, *labels: str, by: float = 1) -> None:
        """Add to a counter."""
        series = self._values[metric]
        key = labels if labels in series else self._bounded(metric, labels)
        series[key] = series.get(key, 0.0) + by

    def assign(self, metric: MetricSpec, value: float, *labels: str) -> None:
        """Set one series of a gauge."""
        self._values[metric][self._bounded(metric, labels)] = float(value)

    def replace(self, metric: MetricSpec, values: Mapping[LabelsT, float]) -> None:
        """Set all series of a gauge. The larger one of two values for "other" counts.

        A series that `values` lacks becomes 0 if its labels have closed sets of words; otherwise it disappears.
        """
        series = self._open(metric)
        for labels, value in values.items():
            key = self._bounded(metric, labels)
            series[key] = max(series.get(key, 0.0), value)

    def observe(self, metric: MetricSpec, size: float, *labels: str, trace_id: str = "") -> None:
        """Add an observation to a histogram, as a part of this trace (default: the present one)."""
        series = self._distributions[metric]
        found = series.get(labels)
        if found is None:
            found = series.setdefault(self._bounded(metric, labels), _Distribution(metric.buckets))
        found.observe(size, trace_id or exemplar(TRACE.get()))

    def busy(self, begin_s: float, end_s: float, direction: str, transport: str, peer: str) -> None:
        """Count the time of a transfer with a peer that has ended; overlapping transfers count once."""
        labels = peer, direction, transport
        busy = self._busy.get(labels) or self._busy.setdefault(self._bounded(PEER_BUSY, labels), BusyTime())
        self.count(PEER_BUSY, *labels, by=busy.add(begin_s, end_s))

    def serves(self, route: str, methods: Sequence[str], code: int) -> None:
        """Show the series of a route before its first request."""
        for method in methods:
            self.count(HTTP_REQUESTS, route, method, str(code), by=0)
            self._distributions[HTTP_DURATION][route, method] = _Distribution(HTTP_DURATION.buckets)

    def answered(self, route: str, method: str, code: int, seconds: float) -> None:
        """Count an HTTP request."""
        method = method if method in METHODS else OTHER
        self.count(HTTP_REQUESTS, route, method, str(code))
        self.observe(HTTP_DURATION, seconds, route, method)

    def line_left_out(self, event: str) -> None:
        """Count a line that was not written to the log."""
        self.count(LINES_LEFT_OUT, event)

    def built(self, role: str, name: str, model: str = "", fingerprint: str = "") -> None:
        """Set the metric of what runs, with the versions of its libraries."""
        libraries = (next(filter(None, map(_version, names)), "") for names in LIBRARIES)
        self.assign(BUILD, 1, __version__, role, name, model, fingerprint, platform.python_version(), *libraries)

    def _bounded(self, metric: MetricSpec, labels: Labels) -> Labels:
        """Return the labels with new words beyond the limit as "other": words come from outside, and peers choose some."""
        shown = []
        for label, word in zip(metric.labels, labels, strict=True):
            words = self._words[metric, label]
            if word in words or len(words) < MAX_LABEL_VALUES:
                words.add(word)
                shown.append(word)
            else:
                shown.append(OTHER)
        return tuple(shown)

    def render(self, accept: str = "") -> tuple[Iterator[bytes], str]:
        """Return the scrape's body, a piece for each metric, and its content type, in the form that an Accept header asks for.

        The whole body takes some milliseconds; the caller can let others run between two pieces. Only OpenMetrics has exemplars.
        """
        encode, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # Our names are plain, so escaping changes none of them; every other way looks at each letter of each name.
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]  # all encoders of OpenMetrics have it
        nothing = encode(CollectorRegistry())  # the end of a page of OpenMetrics
        families = (SimpleNamespace(collect=lambda family=family: [family]) for family in self.registry.collect())
        pieces = (encode(cast("CollectorRegistry", family)).removesuffix(nothing) for family in families)
        return chain(pieces, [nothing]), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family, for Prometheus's library."""
        for metric, series in self._values.items():
            kind = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in series.items():
                family.add_metric(labels, value)
            yield family
        for metric, distributions in self._distributions.items():
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            names = [*map(str, metric.buckets), "+Inf"]
            for labels, distribution in distributions.items():
                distribution.add_to(histogram, labels, names)
            yield histogram


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
